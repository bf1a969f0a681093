//! What is wrong is refused by name, changes nothing, and takes nobody down.

use anyhow::{Context, Result, ensure};
use ax_tests::api::{Answer, Api, encode};
use ax_tests::ax::{self, Node, ServerOptions};
use ax_tests::nats::{Nats, NatsOptions, free_ports};
use ax_tests::world::{Database, World, task};
use ax_tests::{Deadline, Scratch, dev, postgres, worker};
use reqwest::Method;
use serde_json::{Value, json};

/// Checks that `answer` refuses an invalid document, says `words`, and names `field` if there is one to name.
fn invalid(answer: Answer, field: &str, words: &str) -> Result<()> {
    let body = answer.body.clone();
    let text = answer.refused(422)?;
    let named = body["errors"].as_array().is_some_and(|errors| {
        errors.iter().any(|error| {
            error["field"].as_str().is_some_and(|name| name.ends_with(field))
                && error["rule"].is_string()
                && error["message"].as_str().is_some_and(|message| !message.is_empty())
        })
    });
    ensure!(named, "no error names the field {field:?}: {text}");
    ensure!(text.to_lowercase().contains(&words.to_lowercase()), "nothing says {words:?}: {text}");
    Ok(())
}

async fn no_tasks(api: &Api) -> Result<()> {
    let tasks = api.all("/tasks", "tasks", "").await?;
    ensure!(tasks.is_empty(), "half of a refused document was applied: {tasks:?}");
    Ok(())
}

#[tokio::test]
async fn malformed_json_is_a_400() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let (_node, api) = world.leader("n1").await?;
    let deep = "[".repeat(100_000);
    for body in ["", "{", "{\"task_id\": \"a\",}", "\u{0}", "nul", deep.as_str()] {
        for (method, path) in
            [(Method::POST, "/api/v1/apply"), (Method::PUT, "/api/v1/tasks/a"), (Method::POST, "/api/v1/enqueue")]
        {
            let what = format!("{method} {path} {body:.40}");
            let answer = api.send(method, path, Some(body.as_bytes().to_vec())).await?;
            answer.refused(400).context(what)?;
        }
    }
    let latin1 = api.send(Method::POST, "/api/v1/apply", Some(vec![b'"', 0xe4, b'"'])).await?;
    latin1.refused(400)?;
    no_tasks(&api).await
}

#[tokio::test]
async fn invalid_definitions_name_field_and_rule() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let (_node, api) = world.leader("n1").await?;
    let cases = [
        (json!({"crom_expr": "* * * * *"}), "crom_expr", "unknown"),
        (json!({"timeout_ms": "60"}), "timeout_ms", ""),
        (json!({"timeout_ms": 0}), "timeout_ms", ""),
        (json!({"timeout_ms": 604_800_001}), "timeout_ms", "604800000"),
        (json!({"max_retry": 101}), "max_retry", "100"),
        (json!({"max_retry": -1}), "max_retry", ""),
        (json!({"priority": 11}), "priority", "10"),
        (json!({"status": "off"}), "status", ""),
        (json!({"executor_group": "a b"}), "executor_group", ""),
        (json!({"queue_label": "a-b"}), "queue_label", ""),
        (json!({"handler": "a b"}), "handler", ""),
        (json!({"name": "n".repeat(129)}), "name", "128"),
        (json!({"cron_expr": "* * * * *", "delay_seconds": 5}), "", ""),
        (json!({"delay_seconds": -1}), "delay_seconds", ""),
        (json!({"delay_seconds": 4_000_000_000_u64}), "delay_seconds", ""),
        (json!({"retry_backoff": {"max_ms": 2_592_000_001_u64}}), "retry_backoff.max_ms", ""),
        (json!({"retry_backoff": {"speed": 1}}), "retry_backoff.speed", "unknown"),
        (json!({"cron_expr": "60 * * * *"}), "cron_expr", "60"),
        (json!({"cron_expr": "* * * *"}), "cron_expr", "5"),
        (json!({"cron_expr": "EVERY 50ms"}), "cron_expr", "100"),
        (json!({"cron_expr": "0 0 30 2 *"}), "cron_expr", "never fires"),
        (json!({"cron_expr": "0 0 31 2,4,6 *"}), "cron_expr", "never fires"),
        (json!({"cron_expr": "0 0 0 1 1 ? 2019"}), "cron_expr", "no fire after now"),
        (json!({"cron_expr": "@reboot"}), "cron_expr", ""),
        (json!({"cron_expr": "* * * * *", "timezone": "Europe/Budapesst"}), "timezone", "Europe/Budapesst"),
        (json!({"cron_expr": "* * * * *", "timezone": "+05:30"}), "timezone", "+05:30"),
        (json!({"cron_expr": "* * * * *", "timezone": "PST"}), "timezone", "PST"),
        (json!({"cron_expr": "* * * * *", "timezone": ""}), "timezone", ""),
        // What this version does not do yet is refused, not ignored.
        (json!({"misfire_policy": "catch_up"}), "misfire_policy", ""),
        (json!({"overlap_policy": "queue"}), "overlap_policy", ""),
        (json!({"start_deadline_ms": 1000}), "start_deadline_ms", ""),
        (json!({"upstream_task_ids": ["b"]}), "upstream_task_ids", ""),
        (json!({"when": "true"}), "when", ""),
        (json!({"breaker": {"failures": 5, "cooldown_ms": 1000}}), "breaker", ""),
        (json!({"jitter_ms": 5}), "jitter_ms", ""),
        (json!({"protected": true}), "protected", ""),
        (json!({"retention_days": 5}), "retention_days", ""),
    ];
    for (fields, field, words) in cases {
        let definition = task("a", fields.clone());
        // A good neighbour does not get in either.
        let document = json!({"tasks": [task("good", json!({})), definition]});
        invalid(api.post("/apply", &document).await?, field, words).with_context(|| fields.to_string())?;
        invalid(api.put_task("a", &definition).await?, field, words).with_context(|| fields.to_string())?;
    }
    for missing in ["executor_group", "task_id"] {
        let mut definition = task("a", json!({}));
        definition.as_object_mut().context("an object")?.remove(missing);
        invalid(api.post("/apply", &definition).await?, missing, "required")?;
    }
    let twice = json!([task("a", json!({})), task("a", json!({"priority": 6}))]);
    ensure!(api.post("/apply", &twice).await?.status == 422);
    no_tasks(&api).await?;
    for path in ["/tasks/a/trigger", "/tasks/a/pause"] {
        api.post(path, &json!({})).await?.refused(404)?;
    }
    api.post("/preview", &json!({"cron_expr": "0 0 30 2 *"})).await?.refused(422)?;
    Ok(())
}

#[tokio::test]
async fn zones_may_be_written_in_any_case_and_by_old_names() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let (_node, api) = world.leader("n1").await?;
    for (n, zone) in ["us/eastern", "Asia/Calcutta", "Europe/Kiev", "Europe/Kyiv"].iter().enumerate() {
        let id = format!("zone{n}");
        let answer = api.put_task(&id, &task(&id, json!({"cron_expr": "0 2 * * *", "timezone": zone}))).await?;
        ensure!(answer.status == 201, "{zone}: {}", answer.body);
    }
    Ok(())
}

/// An id is refused with its rule, or it is usable everywhere: API, command line, subjects.
#[tokio::test]
async fn ids_are_refused_or_usable_everywhere() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let (node, api) = world.leader("n1").await?;
    let long = "x".repeat(300);
    let refused = [
        "",
        "a b",
        " a",
        "a*",
        "*",
        "a>",
        ">",
        "a/b",
        "a:b",
        "Ä-任务-🙂",
        "..",
        "a..b",
        ".a",
        "a.",
        "%2F",
        "a\n",
        "caf\u{e9}",
        "cafe\u{301}",
        "a.b.c.d.e.f.g.h.i",
        long.as_str(),
    ];
    for id in refused {
        let definition = task(id, json!({}));
        invalid(api.post("/apply", &definition).await?, "task_id", "").with_context(|| format!("{id:?}"))?;
        if !id.is_empty() && !matches!(id, "..") {
            let answer = api.put_task(id, &definition).await?;
            ensure!(answer.status.is_client_error(), "{id:?}: {}", answer.status);
            let answer = api.task(id).await?;
            ensure!(answer.status.is_client_error(), "{id:?}: {}", answer.status);
        }
    }
    no_tasks(&api).await?;

    let _worker = worker::python(&world.nats.url(), "test")?;
    let longest = "y".repeat(128);
    for id in ["a.b", "123", "job", "Job", "-", "_._", "a.b.c.d.e.f.g.h", longest.as_str()] {
        let answer = api.put_task(id, &task(id, json!({}))).await?;
        ensure!(answer.status == 201, "{id}: {}", answer.body);
        let triggered =
            ax::run(node.url(), &["task", "trigger", "--json", "--", id]).await?.ok().context(id.to_owned())?;
        let triggered = triggered.json()?;
        let run_id = triggered["run_id"].as_str().context("no run_id")?;
        let run = api.run_reaches(run_id, &["succeeded"], Deadline::seconds(30)).await?;
        ensure!(run["task_id"] == id, "{run}");
        let runs = api.runs(&format!("task_id={}", encode(id))).await?;
        ensure!(runs.len() == 1, "{id} has {} runs", runs.len());
    }
    for id in ["job", "Job"] {
        ensure!(api.task(id).await?.ok()?["task_id"] == id);
    }
    Ok(())
}

#[tokio::test]
async fn payloads_over_the_limit_are_refused_before_anything_is_stored() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let (_node, api) = world.leader("n1").await?;
    for size in [512 * 1024 + 1, 2 << 20, 8 << 20] {
        let large = task("large", json!({"payload": "x".repeat(size)}));
        for answer in [api.post("/apply", &large).await?, api.put_task("large", &large).await?] {
            ensure!([413, 422].contains(&answer.status.as_u16()), "{size}: {}", answer.status);
            let limit = answer.body.to_string();
            ensure!(limit.contains("524288") || limit.contains("512 KiB"), "the limit is not named: {limit}");
        }
    }
    no_tasks(&api).await?;
    let body = vec![b' '; 17 << 20];
    api.send(Method::POST, "/api/v1/apply", Some(body)).await?.refused(413)?;

    // The largest payload that is allowed travels whole, and the neighbour's schedule goes on.
    api.apply(&task("large", json!({"payload": "x".repeat(512 * 1024 - 2)}))).await?;
    api.apply(&task("neighbour", json!({"cron_expr": "EVERY 1s"}))).await?;
    let _worker = worker::python(&world.nats.url(), "test")?;
    let too_large = json!({"payload": "x".repeat(2 << 20)});
    let answer = api.trigger("large", &too_large).await?;
    ensure!([413, 422].contains(&answer.status.as_u16()), "{}", answer.status);
    let run = api.trigger("large", &json!({})).await?.ok()?;
    let run_id = run["run_id"].as_str().context("no run_id")?;
    api.run_reaches(run_id, &["succeeded"], Deadline::seconds(30)).await?;
    api.runs_reach("neighbour", "succeeded", 3, Deadline::seconds(30)).await?;
    ensure!(api.runs("task_id=large").await?.len() == 1);
    Ok(())
}

#[tokio::test]
async fn an_enqueue_is_all_or_nothing() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let (_node, api) = world.leader("n1").await?;
    api.apply(&task("a", json!({}))).await?;
    for bad in [
        json!({"task_id": "nobody"}),
        json!({"task_id": "a b"}),
        json!({"task_id": "a", "delay_ms": -1}),
        json!({"task_id": "a", "delay_ms": 3_155_760_000_001_u64}),
        json!({"task_id": "a", "dealy_ms": 1}),
        json!({"payload": 1}),
    ] {
        let answer = api.post("/enqueue", &json!({"runs": [{"task_id": "a"}, bad]})).await?;
        ensure!(answer.status.is_client_error(), "{bad}: {}", answer.status);
        ensure!(api.runs("task_id=a").await?.is_empty(), "half of it was enqueued with {bad}");
    }
    let many: Vec<Value> = (0..10_001).map(|_| json!({"task_id": "a"})).collect();
    let answer = api.post("/enqueue", &json!({ "runs": many })).await?;
    ensure!(answer.status.is_client_error(), "{}", answer.status);
    ensure!(api.runs("task_id=a").await?.is_empty());
    Ok(())
}

/// Checks that a start was refused in words, without a panic.
fn refused(outcome: (Option<i32>, String), words: &[&str]) -> Result<()> {
    let (code, output) = outcome;
    ensure!(matches!(code, Some(1..=3)), "exit code {code:?}: {output}");
    ensure!(!output.contains("panicked"), "{output}");
    ensure!(!output.contains("listening on"), "it served: {output}");
    let lower = output.to_lowercase();
    ensure!(words.iter().any(|word| lower.contains(&word.to_lowercase())), "says none of {words:?}: {output}");
    Ok(())
}

fn sqlite(folder: &Scratch, name: &str) -> String {
    format!("sqlite://{}", folder.join(name).display())
}

#[tokio::test]
async fn an_unfit_nats_server_is_refused_by_name() -> Result<()> {
    let folder = Scratch::new("db")?;
    let old = Nats::start_with(NatsOptions { program: Some(dev::old_nats_server()?), ..Default::default() }).await?;
    let plain = Nats::start_with(NatsOptions { without_jetstream: true, ..Default::default() }).await?;
    for (url, words) in [(old.url(), "2.9.10"), (plain.url(), "JetStream")] {
        let options = ServerOptions {
            nats_url: url,
            database_url: sqlite(&folder, "a.db"),
            node_id: "n1".into(),
            ..Default::default()
        };
        refused(Node::refused(&options).await?, &[words])?;
    }
    Ok(())
}

#[tokio::test]
async fn a_wrong_database_url_is_refused_by_name() -> Result<()> {
    let nats = Nats::start().await?;
    let real = postgres::database().await?;
    let nobody = free_ports(1)?[0];
    let missing = real.replace("/ax_", "/no_such_database_");
    let cases = [
        ("mysql://localhost/ax".to_owned(), vec!["mysql", "postgres://"]),
        ("not a url".to_owned(), vec!["not a url", "postgres://"]),
        ("sqlite:///no/such/folder/ax.db".to_owned(), vec!["/no/such/folder"]),
        (missing, vec!["no_such_database_"]),
        (format!("postgres://ax@127.0.0.1:{nobody}/ax"), vec!["refused", "reach", "not available"]),
    ];
    for (database_url, words) in cases {
        let options = ServerOptions {
            nats_url: nats.url(),
            database_url: database_url.clone(),
            node_id: "n1".into(),
            ..Default::default()
        };
        refused(Node::refused(&options).await.context(database_url.clone())?, &words).context(database_url)?;
    }
    Ok(())
}

#[tokio::test]
async fn a_port_that_is_taken_is_refused_by_name() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
    let address = taken.local_addr()?.to_string();
    let mut options = world.options("n1");
    options.http_addr = Some(address.clone());
    refused(Node::refused(&options).await?, &[&address])
}

#[tokio::test]
async fn only_the_loopback_may_bind() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let mut options = world.options("n1");
    options.http_addr = Some("0.0.0.0:0".into());
    refused(Node::refused(&options).await?, &["loopback"])
}

#[tokio::test]
async fn a_second_node_on_the_same_sqlite_is_refused() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let (mut node, api) = world.leader("n1").await?;
    refused(Node::refused(&world.options("n2")).await?, &["sqlite", "another node", "in use"])?;
    // Also with a nats-server of its own, where the first is not to be seen.
    let elsewhere = Nats::start().await?;
    let options = ServerOptions { nats_url: elsewhere.url(), ..world.options("n2") };
    refused(Node::refused(&options).await?, &["sqlite", "another node", "in use"])?;
    api.apply(&task("still.here", json!({}))).await?;
    // Killed without warning, it leaves nothing behind that would bar its successor.
    node.kill9()?;
    let (_node, api) = world.leader("n2").await?;
    ensure!(api.task("still.here").await?.status == 200);
    Ok(())
}

#[tokio::test]
async fn a_node_with_another_database_is_refused() -> Result<()> {
    let world = World::start(Database::Postgres).await?;
    let (mut node, _api) = world.leader("n1").await?;
    let folder = Scratch::new("db")?;
    for database_url in [postgres::database().await?, sqlite(&folder, "other.db")] {
        let options = ServerOptions { database_url, ..world.options("n2") };
        refused(Node::refused(&options).await?, &["database"])?;
    }
    // The binding outlives the first node.
    node.terminate().await?;
    let options = ServerOptions { database_url: postgres::database().await?, ..world.options("n2") };
    refused(Node::refused(&options).await?, &["database"])
}

#[tokio::test]
async fn a_wrong_setting_is_refused_by_name() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    for (name, value) in [("AX_LEASE_TTL", "soon"), ("AX_HTTP_ADDR", "nowhere"), ("AX_NATS_URL", "http://localhost")] {
        let mut options = world.options("n1");
        options.env.push((name.into(), value.into()));
        refused(Node::refused(&options).await?, &[value]).context(name)?;
    }
    Ok(())
}

#[tokio::test]
async fn apply_from_the_command_line_names_the_file() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let (node, api) = world.leader("n1").await?;
    let folder = Scratch::new("documents")?;
    std::fs::write(folder.join("good.json"), task("good", json!({})).to_string())?;
    std::fs::write(folder.join("broken.json"), "{\"task_id\": ")?;
    let path = folder.path().display().to_string();
    let finished = ax::run(node.url(), &["apply", "-f", &path]).await?;
    ensure!(finished.code == Some(1), "{finished:?}");
    ensure!(finished.stderr.contains("broken.json"), "{finished:?}");
    let finished = ax::run(node.url(), &["apply", "-f", "no-such-file.json"]).await?;
    ensure!(matches!(finished.code, Some(1 | 2)) && finished.stderr.contains("no-such-file.json"), "{finished:?}");
    no_tasks(&api).await
}
