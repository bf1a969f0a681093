//! The API over NATS: the same operations as over HTTP, as a micro service that any node answers.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use async_nats::{Client, HeaderMap, Message};
use ax_tests::ax::finish;
use ax_tests::nats::NatsOptions;
use ax_tests::world::{Database, World, task};
use ax_tests::{Deadline, eventually, worker};
use futures::StreamExt as _;
use serde_json::{Value, json};

const SOON: Deadline = Deadline::seconds(30);

/// Asks an operation.
async fn ask(client: &Client, operation: &str, body: &Value) -> Result<Message> {
    Ok(client.request(format!("ax.api.v1.{operation}"), body.to_string().into()).await?)
}

fn body(message: &Message) -> Result<Value> {
    serde_json::from_slice(&message.payload).with_context(|| String::from_utf8_lossy(&message.payload).into_owned())
}

/// The answer of a request that has to be done.
async fn done(client: &Client, operation: &str, request: &Value) -> Result<Value> {
    let message = ask(client, operation, request).await?;
    ensure!(message.headers.as_ref().is_none_or(|h| h.get("Nats-Service-Error").is_none()), "{:?}", body(&message)?);
    body(&message)
}

/// The problem of a request that has to be refused; its headers say the same.
async fn refused(client: &Client, operation: &str, request: &Value, status: u16) -> Result<Value> {
    let message = ask(client, operation, request).await?;
    let problem = body(&message)?["error"].clone();
    ensure!(problem["status"] == status, "expected {status}: {}", body(&message)?);
    let headers = message.headers.as_ref().context("no headers")?;
    ensure!(headers.get("Nats-Service-Error-Code").context("no code")?.as_str() == status.to_string());
    ensure!(headers.get("Nats-Service-Error").is_some_and(|text| !text.as_str().is_empty()));
    Ok(problem)
}

#[tokio::test]
async fn every_operation_answers_as_over_http_on_postgres() -> Result<()> {
    every_operation_answers_as_over_http(Database::Postgres).await
}

#[tokio::test]
async fn every_operation_answers_as_over_http_on_sqlite() -> Result<()> {
    every_operation_answers_as_over_http(Database::Sqlite).await
}

async fn every_operation_answers_as_over_http(database: Database) -> Result<()> {
    let world = World::start(database).await?;
    let (_node, api) = world.leader("n1").await?;
    let client = world.nats.client().await?;

    // A bare document, an array, an envelope with options.
    let report = done(&client, "apply", &task("a", json!({"cron_expr": "0 2 * * *"}))).await?;
    ensure!(report["created"] == json!(["a"]), "{report}");
    let envelope = |options: Value| {
        let mut all = json!({"document": [task("b", json!({})), {"task_id": "c", "executor_group": "test"}]});
        all.as_object_mut().into_iter().for_each(|o| o.extend(options.as_object().cloned().unwrap_or_default()));
        all
    };
    let dry = done(&client, "apply", &envelope(json!({"dry_run": true}))).await?;
    ensure!(dry["created"] == json!(["b", "c"]), "{dry}");
    refused(&client, "task.get", &json!({"task_id": "b"}), 404).await?;
    let strict = refused(&client, "apply", &envelope(json!({"strict": true})), 422).await?;
    ensure!(strict["errors"][0]["field"] == "[1].timeout_ms" && strict["errors"][0]["rule"] == "required", "{strict}");
    let odd = refused(&client, "apply", &envelope(json!({"dry": true})), 422).await?;
    ensure!(odd["errors"][0]["rule"] == "unknown_field", "{odd}");
    ensure!(done(&client, "apply", &envelope(json!({}))).await?["created"] == json!(["b", "c"]));

    // What is read is the same at both doors.
    for (operation, request, path) in [
        ("task.get", json!({"task_id": "a"}), "/tasks/a"),
        ("task.list", json!({"limit": 2}), "/tasks?limit=2"),
        ("task.list", json!({"q": "a", "status": "enabled", "group": "test"}), "/tasks?q=a&status=enabled&group=test"),
        ("task.next", json!({"task_id": "a", "count": 3}), "/tasks/a/next?count=3"),
        ("upcoming", json!({"limit": 3}), "/upcoming?limit=3"),
        (
            "run.list",
            json!({"state": ["failed", "skipped"], "task_id": "a"}),
            "/runs?state=failed&state=skipped&task_id=a",
        ),
    ] {
        let (over_nats, over_http) = (done(&client, operation, &request).await?, api.get(path).await?.ok()?);
        ensure!(over_nats == over_http, "{operation}: {over_nats} {over_http}");
    }
    ensure!(done(&client, "nodes", &Value::Null).await?["nodes"][0]["node_id"] == "n1");
    let preview = json!({"cron_expr": "@daily", "after": "2026-01-01T00:00:00Z", "count": 1});
    ensure!(done(&client, "preview", &preview).await? == json!({"fires": ["2026-01-02T00:00:00.000Z"]}));
    for empty in ["", " ", "{}", "null"] {
        let listed = client.request("ax.api.v1.task.list", empty.into()).await?;
        ensure!(body(&listed)?["tasks"].as_array().map(Vec::len) == Some(3), "{empty:?}");
    }

    // Changes, with the version that is expected as a header.
    let put = done(&client, "task.put", &task("d", json!({"priority": 7}))).await?;
    ensure!(put["version"] == 1 && put["priority"] == 7, "{put}");
    let conditional = |version: &str| {
        let mut headers = HeaderMap::new();
        headers.insert("If-Match", version);
        client.request_with_headers("ax.api.v1.task.put", headers, task("d", json!({"priority": 8})).to_string().into())
    };
    ensure!(body(&conditional("9").await?)?["error"]["status"] == 409);
    ensure!(body(&conditional("\"1\"").await?)?["version"] == 2);
    ensure!(done(&client, "task.pause", &json!({"task_id": "d"})).await?["status"] == "paused");
    refused(&client, "task.trigger", &json!({"task_id": "d"}), 409).await?;
    ensure!(done(&client, "task.resume", &json!({"task_id": "d"})).await?["status"] == "enabled");
    refused(&client, "task.backfill", &json!({"task_id": "d", "from": "2026-01-01T00:00:00Z"}), 422).await?;
    let once = json!({"task_id": "d", "payload": {"x": 1}, "idempotency_key": "k", "reason": "by hand"});
    let first = done(&client, "task.trigger", &once).await?;
    let second = done(&client, "task.trigger", &once).await?;
    ensure!(first["created"] == true && second["created"] == false && first["run_id"] == second["run_id"]);
    let run_id = first["run_id"].as_str().context("no run_id")?;
    let _worker = worker::python(&world.nats.url(), "test")?;
    api.run_reaches(run_id, &["succeeded"], SOON).await?;
    let run = done(&client, "run.get", &json!({"run_id": run_id})).await?;
    ensure!(run == api.run(run_id).await? && run["payload"] == json!({"x": 1}), "{run}");
    let runs = json!({"runs": [{"task_id": "a"}, {"task_id": "b", "delay_ms": 1}]});
    ensure!(done(&client, "enqueue", &runs).await?["runs"].as_array().map(Vec::len) == Some(2));
    ensure!(done(&client, "task.delete", &json!({"task_id": "d"})).await? == json!({}));
    refused(&client, "task.get", &json!({"task_id": "d"}), 404).await?;

    // Refusals of every kind.
    for (operation, request, status, field) in [
        ("task.get", json!({}), 422, "task_id"),
        ("task.get", json!({"task_id": 1}), 422, "task_id"),
        ("task.get", json!({"task_id": "a b"}), 422, "task_id"),
        ("task.get", json!({"task_id": "a", "zzz": 1}), 422, "zzz"),
        ("task.list", json!({"limit": 501}), 422, "limit"),
        ("task.list", json!([]), 422, ""),
        ("run.get", json!({"run_id": "x"}), 422, "run_id"),
        ("enqueue", json!({"runs": [{"task_id": "none"}]}), 422, "runs[0].task_id"),
        ("task.put", json!({"task_id": "e"}), 422, "executor_group"),
        ("preview", json!({"cron_expr": "x"}), 422, "cron_expr"),
    ] {
        let problem = refused(&client, operation, &request, status).await?;
        ensure!(problem["errors"][0]["field"] == field, "{operation} {request}: {problem}");
    }
    let nonsense = client.request("ax.api.v1.apply", "{\"a\": ".into()).await?;
    ensure!(body(&nonsense)?["error"]["status"] == 400);
    Ok(())
}

#[tokio::test]
async fn a_publish_without_a_reply_is_done_and_its_refusal_is_told() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let (_node, api) = world.leader("n1").await?;
    let client = world.nats.client().await?;
    let mut alerts = client.subscribe("ax.alert.>").await?;
    client.flush().await?;
    client.publish("ax.api.v1.apply", task("a", json!({})).to_string().into()).await?;
    eventually(SOON, "the task is there", || async { Ok(api.task("a").await?.ok().ok()) }).await?;
    let mut headers = HeaderMap::new();
    headers.insert("Ax-Actor", "nightly");
    client.publish_with_headers("ax.api.v1.task.pause", headers, json!({"task_id": "a"}).to_string().into()).await?;
    eventually(SOON, "the task is paused", || async {
        Ok((api.task("a").await?.ok()?["status"] == "paused").then_some(()))
    })
    .await?;
    // What was done is not told; the first event is that of the refusal.
    client.publish("ax.api.v1.task.trigger", json!({"task_id": "a"}).to_string().into()).await?;
    let alert = tokio::time::timeout(Duration::from_secs(20), alerts.next()).await?.context("no event")?;
    let told = body(&alert)?;
    ensure!(alert.subject.as_str() == "ax.alert.rejected" && told["subject"] == "ax.api.v1.task.trigger", "{told}");
    ensure!(
        told["problem"]["status"] == 409 && told["problem"]["detail"].as_str().is_some_and(|d| d.contains("paused"))
    );
    Ok(())
}

/// The `nats` program knows the service, and counts.
#[tokio::test]
async fn the_nats_program_lists_and_counts_the_service() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let mut options = world.options("n1");
    options.env.push(("AX_PREFIX".into(), "prod".into()));
    let node = ax_tests::ax::Node::start(&options).await?;
    let url = world.nats.url();
    let nats = async |arguments: &[&str]| -> Result<String> {
        let done = finish(worker::nats_cli(&url, arguments)?, b"").await?.ok()?;
        Ok(done.stdout + &done.stderr)
    };
    let applied = nats(&["req", "prod.api.v1.apply", &task("a", json!({})).to_string()]).await?;
    ensure!(applied.contains("\"created\":[\"a\"]"), "{applied}");
    let refused = nats(&["req", "prod.api.v1.task.get", "{\"task_id\": \"b\"}"]).await?;
    ensure!(refused.contains("Nats-Service-Error-Code: 404") && refused.contains("there is no task"), "{refused}");
    let listed = nats(&["micro", "ls"]).await?;
    ensure!(listed.contains(" prod ") && listed.contains("The ax scheduler"), "{listed}");
    let info = nats(&["micro", "info", "prod"]).await?;
    for part in ["prod.api.v1.apply", "prod.api.v1.task.get", "node_id: n1", "PUT /api/v1/tasks/{id}"] {
        ensure!(info.contains(part), "{part}: {info}");
    }
    let stats: Value = {
        let done = finish(worker::nats_cli(&url, &["micro", "stats", "prod", "--json"])?, b"").await?.ok()?;
        done.json()?
    };
    let stats = if stats.is_array() { stats[0].clone() } else { stats };
    let endpoints = stats["endpoints"].as_array().context("no endpoints")?;
    let of = |name: &str| endpoints.iter().find(|e| e["name"] == name).cloned().unwrap_or_default();
    ensure!(of("apply")["num_requests"] == 1 && of("apply")["num_errors"] == 0, "{stats}");
    ensure!(of("task-get")["num_requests"] == 1 && of("task-get")["num_errors"] == 1, "{stats}");
    ensure!(of("task-get")["last_error"].as_str().is_some_and(|e| e.starts_with("404:")), "{stats}");
    drop(node);
    Ok(())
}

/// Any node answers; one that stops answers what is under way and then no more; with none left, nobody does.
#[tokio::test]
async fn any_node_answers_and_one_that_stops_leaves_no_request_behind() -> Result<()> {
    let world = World::start(Database::Postgres).await?;
    let mut first = world.node("n1").await?;
    let mut second = world.node("n2").await?;
    let client = world.nats.client().await?;
    done(&client, "apply", &task("a", json!({}))).await?;
    let services = async || -> Result<BTreeSet<String>> {
        let inbox = client.new_inbox();
        let mut answers = client.subscribe(inbox.clone()).await?;
        client.publish_with_reply("$SRV.STATS.ax", inbox, "".into()).await?;
        let mut found = BTreeSet::new();
        while let Ok(Some(answer)) = tokio::time::timeout(Duration::from_millis(500), answers.next()).await {
            let told = body(&answer)?;
            let asked = told["endpoints"].as_array().into_iter().flatten();
            let requests: u64 = asked.filter_map(|endpoint| endpoint["num_requests"].as_u64()).sum();
            if requests > 0 {
                found.insert(told["metadata"]["node_id"].to_string());
            }
        }
        Ok(found)
    };
    eventually(SOON, "both nodes have answered something", || async {
        for _ in 0..20 {
            done(&client, "task.get", &json!({"task_id": "a"})).await?;
        }
        Ok((services().await?.len() == 2).then_some(()))
    })
    .await?;

    // Requests go on while a node stops: each of them is answered.
    let request = json!({"task_id": "a"});
    let asking = async {
        let mut answered = 0;
        while answered < 400 {
            let batch = (0..8).map(|_| done(&client, "task.get", &request));
            answered += futures::future::try_join_all(batch).await?.len();
        }
        Ok(answered)
    };
    let (asked, stopped) = tokio::join!(asking, first.terminate());
    ensure!(stopped?.success());
    let asked: Result<usize> = asked;
    asked.context("while a node stopped")?;
    done(&client, "task.get", &json!({"task_id": "a"})).await?;
    ensure!(second.terminate().await?.success());
    let nobody = client.request("ax.api.v1.task.get", "{}".into()).await.err().context("somebody answers")?;
    ensure!(nobody.kind() == async_nats::RequestErrorKind::NoResponders, "{nobody}");
    Ok(())
}

#[tokio::test]
async fn the_service_is_back_after_a_restart_of_nats() -> Result<()> {
    let mut world = World::start(Database::Sqlite).await?;
    let (_node, api) = world.leader("n1").await?;
    done(&world.nats.client().await?, "apply", &task("a", json!({}))).await?;
    for _ in 0..2 {
        world.nats.kill9()?;
        world.nats.start_again().await?;
        let client = world.nats.client().await?;
        let found = eventually(SOON, "the service answers", || async {
            done(&client, "task.get", &json!({"task_id": "a"})).await.map(Some)
        })
        .await?;
        ensure!(found["task_id"] == "a" && api.task("a").await?.ok()?["version"] == found["version"]);
        let listed = finish(worker::nats_cli(&world.nats.url(), &["micro", "ls"])?, b"").await?.ok()?;
        ensure!(listed.stdout.contains(" ax "), "{}", listed.stdout);
    }
    Ok(())
}

/// An operation that waits for the database does not hold up those that do not need it.
#[tokio::test]
async fn a_slow_operation_holds_up_no_other() -> Result<()> {
    let mut postgres = ax_tests::postgres::Postgres::start().await?;
    let world = World::start(Database::Sqlite).await?;
    let mut options = world.options("n1");
    options.database_url = postgres.create_database().await?;
    let _node = ax_tests::ax::Node::start(&options).await?;
    let client = world.nats.client().await?;
    done(&client, "apply", &task("a", json!({}))).await?;
    postgres.process()?.freeze()?;
    // More than are worked on at once; nobody waits for them.
    for _ in 0..100 {
        client.publish("ax.api.v1.task.list", "".into()).await?;
    }
    client.flush().await?;
    let begun = Instant::now();
    let fires = done(&client, "preview", &json!({"cron_expr": "@hourly", "count": 2})).await?;
    ensure!(fires["fires"].as_array().map(Vec::len) == Some(2));
    ensure!(begun.elapsed() < Duration::from_secs(3), "it took {:?}", begun.elapsed());
    postgres.process()?.thaw()?;
    eventually(SOON, "the operation answers again", || async {
        done(&client, "task.list", &json!({})).await.map(Some)
    })
    .await?;
    Ok(())
}

/// What NATS cannot carry is refused in words: a request by the client, an answer by ax.
#[tokio::test]
async fn large_bodies_have_the_limits_of_the_server() -> Result<()> {
    let config = "max_payload: 300KB".to_owned();
    let world = World::start_with(Database::Sqlite, NatsOptions { config, ..NatsOptions::default() }).await?;
    let (_node, api) = world.leader("n1").await?;
    let client = world.nats.client().await?;
    let text = |kib: usize| "x".repeat(kib * 1024);
    done(&client, "task.put", &task("a", json!({"payload": text(250)}))).await?;
    let large = ask(&client, "task.put", &task("b", json!({"payload": text(310)}))).await;
    ensure!(large.is_err(), "the client does not send what the server refuses");
    api.put_task("b", &task("b", json!({"payload": text(310)}))).await?.ok()?;
    for (operation, request) in [("task.get", json!({"task_id": "b"})), ("task.list", json!({}))] {
        let problem = refused(&client, operation, &request, 413).await?;
        ensure!(problem["detail"].as_str().is_some_and(|d| d.contains("max_payload")), "{problem}");
    }
    ensure!(
        done(&client, "task.get", &json!({"task_id": "a"})).await?["payload"].as_str().map(str::len)
            == Some(250 * 1024)
    );
    Ok(())
}
