//! What the HTTP door itself does: addresses, methods, bodies, hosts.

use std::time::Duration;

use anyhow::Result;
use ax_scheduler::api::http::{self, BindError};
use ax_scheduler::ports::Bus as _;
use reqwest::Method;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::world::{World, task};

#[tokio::test]
async fn an_address_that_is_taken_is_told() -> Result<()> {
    let taken = http::bind("127.0.0.1:0".parse()?).await?;
    let again = http::bind(taken.local_addr()?).await.err();
    assert!(matches!(again, Some(BindError::Listen { .. })), "{again:?}");
    Ok(())
}

#[tokio::test]
async fn every_refusal_is_a_problem_document() -> Result<()> {
    let world = World::start().await?;
    world.get("/nothing").await?.refused(404);
    world.call(Method::PATCH, "/tasks/a", None).await?.refused(405);
    world.call(Method::GET, "/apply", None).await?.refused(405);
    for body in ["{", "{\"a\": 1,}", "\u{feff}{}", "nul", "{\"executor_group\": \"g\"} x"] {
        let refused = world.send(Method::PUT, "/tasks/a", Some(body.into()), &[]).await?.refused(400);
        assert!(refused.body["detail"].as_str().unwrap().contains("line 1"), "{}", refused.body);
    }
    world.send(Method::PUT, "/tasks/a", Some(vec![b'"', 0xff, b'"']), &[]).await?.refused(400);
    let deep = "[".repeat(100_000).into_bytes();
    world.send(Method::POST, "/apply", Some(deep), &[]).await?.refused(400);
    let typo = world.put("a", json!({"executor_group": "g", "cron_exp": "* * * * *"})).await?.refused(422);
    assert!(typo.body["detail"].as_str().unwrap().contains("cron_expr"), "{}", typo.body);
    world.get("/tasks/a").await?.refused(404);
    Ok(())
}

#[tokio::test]
async fn payloads_and_bodies_have_limits() -> Result<()> {
    let world = World::start().await?;
    let text = |bytes: usize| "x".repeat(bytes - 2);
    world.put("a", task("a", json!({"payload": text(512 * 1024)}))).await?.is(201);
    world.post("/tasks/a/trigger", json!({"payload": text(512 * 1024)})).await?.is(201);
    for bytes in [512 * 1024 + 1, 1_000_000, 2_000_000, 8_000_000] {
        let put = world.put("b", task("b", json!({"payload": text(bytes)}))).await?.refused(413);
        assert!(put.body["detail"].as_str().unwrap().contains("512 KiB"), "{}", put.body);
        world.post("/tasks/a/trigger", json!({"payload": text(bytes)})).await?.refused(413);
        let runs = json!({"runs": [{"task_id": "a", "payload": text(bytes)}]});
        assert_eq!(world.post("/enqueue", runs).await?.refused(413).rules(), [("runs[0].payload", "size")]);
    }
    let refused = world.put("b", task("b", json!({"payload": text(17_000_000)}))).await?.refused(413);
    assert!(refused.body["detail"].as_str().unwrap().contains("16 MiB"), "{}", refused.body);
    world.get("/tasks/b").await?.refused(404);
    Ok(())
}

/// Either refused with the rule, or usable everywhere.
#[tokio::test]
async fn ids_of_every_kind_are_refused_by_rule_or_fully_usable() -> Result<()> {
    let world = World::start().await?;
    let long = "x".repeat(300);
    for bad in [
        "a%20b",
        "a*",
        "a%3E",
        "a%2Fb",
        "a:b",
        "%C3%84-%E4%BB%BB%E5%8A%A1-%F0%9F%99%82",
        "%252F",
        "a.",
        "%20a",
        ".a",
        "a..b",
        "%00",
        "e%CC%81",
        "%C3%A9",
        "..",
        "%2e%2e",
        &long,
    ] {
        let (status, body) = world.raw_get(&format!("/api/v1/tasks/{bad}")).await?;
        assert_eq!(status, 422, "{bad}: {body}");
        assert!(body.contains("\"field\":\"task_id\"") && body.contains("\"rule\":\"format\""), "{bad}: {body}");
        let (status, page) = world.raw_get(&format!("/tasks/{bad}")).await?;
        assert_eq!(status, 404, "{bad}: {page}");
    }
    assert_eq!(world.raw_get("/api/v1/tasks/%ff").await?.0, 400);
    assert_eq!(world.raw_get("/api/v1/tasks?q=%ff").await?.0, 400);
    assert_eq!(world.raw_get("/api/v1/tasks/").await?.0, 404);
    for good in ["a.b", "123", "job", "Job", "a-b.c_d", &"x".repeat(128)] {
        world.put(good, task(good, json!({"description": format!("text of {good}")}))).await?.is(201);
        assert_eq!(world.get(&format!("/tasks/{good}")).await?.is(200)["description"], format!("text of {good}"));
        let run = world.post(&format!("/tasks/{good}/trigger"), json!({"idempotency_key": "a b*>/"})).await?.is(201);
        let runs = world.get(&format!("/runs?task_id={good}")).await?.is(200);
        assert_eq!(runs["runs"][0]["run_id"], run["run_id"]);
        assert_eq!(runs["runs"].as_array().unwrap().len(), 1);
        assert_eq!(world.page(&format!("/tasks/{good}")).await?.0, 200);
    }
    Ok(())
}

/// One of the two would be dropped, and nobody told which.
#[tokio::test]
async fn a_key_that_a_document_has_twice_is_refused_by_name() -> Result<()> {
    let world = World::start().await?;
    let body = br#"{"executor_group": "g", "timeout_ms": 1000, "timeout_ms": 2000}"#.to_vec();
    let answer = world.send(Method::PUT, "/tasks/a", Some(body), &[]).await?.refused(400);
    assert!(answer.body.to_string().contains("`timeout_ms` is there twice"), "{}", answer.body);
    world.get("/tasks/a").await?.refused(404);
    Ok(())
}

#[tokio::test]
async fn a_page_of_another_site_cannot_use_the_browser_of_a_local_user() -> Result<()> {
    let world = World::start().await?;
    let body = || Some(task("a", json!({})).to_string().into_bytes());
    world.send(Method::PUT, "/tasks/a", body(), &[("Origin", "https://evil.example")]).await?.refused(403);
    world.send(Method::PUT, "/tasks/a", body(), &[("Host", "evil.example")]).await?.refused(403);
    let own = format!("http://{}", world.addr);
    world.send(Method::PUT, "/tasks/a", body(), &[("Origin", &own)]).await?.is(201);
    Ok(())
}

#[tokio::test]
async fn state_changes_are_told_live() -> Result<()> {
    let world = World::start().await?;
    let mut stream = tokio::net::TcpStream::connect(world.addr).await?;
    stream.write_all(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n").await?;
    // What is told before somebody listens is not told again, so tell it until it is heard.
    let telling = async {
        loop {
            let subject = "ax.notice.succeeded.g.a.01a0c450-6c00-87fd-80a1-7d7022967b9c".to_owned();
            world.bus.tell(subject, "{\"state\": \"succeeded\"}".into()).await;
            ax_tests::lasts(Duration::from_millis(20)).await;
        }
    };
    let hearing = async {
        let mut heard = String::new();
        while !heard.contains("event: succeeded\ndata: {\"state\": \"succeeded\"}\n\n") {
            let mut buffer = [0; 4096];
            let read = stream.read(&mut buffer).await?;
            anyhow::ensure!(read > 0, "the stream ended: {heard}");
            heard.push_str(&String::from_utf8_lossy(&buffer[..read]));
        }
        Ok(heard)
    };
    let heard = tokio::select! {
        heard = tokio::time::timeout(Duration::from_secs(10), hearing) => heard??,
        () = telling => unreachable!("telling has no end"),
    };
    assert!(heard.to_ascii_lowercase().contains("content-type: text/event-stream"), "{heard}");
    drop(world);
    // The stream ends with the node instead of holding it up.
    let mut rest = Vec::new();
    tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut rest)).await??;
    Ok(())
}

#[tokio::test]
async fn nodes_are_those_that_answer() -> Result<()> {
    let world = World::start().await?;
    assert_eq!(world.get("/nodes").await?.is(200), json!({"nodes": []}));
    Ok(())
}

#[tokio::test]
async fn metrics_say_what_they_mean() -> Result<()> {
    let world = World::start().await?;
    world.get("/tasks/none").await?.refused(404);
    let (status, text) = world.page("/metrics").await?;
    assert_eq!(status, 200);
    assert!(text.contains("# HELP ax_http_requests_total HTTP requests, by route and status."), "{text}");
    assert!(text.contains("ax_http_requests_total{route=\"/api/v1/tasks/{id}\",status=\"404\"}"), "{text}");
    Ok(())
}
