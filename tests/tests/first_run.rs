//! A task is defined, fires on time, a raw worker executes it, the history shows it: with Postgres and with SQLite.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ax_tests::ledger::{Ledger, millis};
use ax_tests::worker::{Hands, Trigger, consumers};
use ax_tests::world::{Database, World, task};
use ax_tests::{Deadline, ax, eventually, lasts, worker};
use serde_json::{Value, json};

#[tokio::test]
async fn a_task_fires_and_its_history_shows_it_with_postgres() -> Result<()> {
    a_task_fires_and_its_history_shows_it(Database::Postgres).await
}

#[tokio::test]
async fn a_task_fires_and_its_history_shows_it_with_sqlite() -> Result<()> {
    a_task_fires_and_its_history_shows_it(Database::Sqlite).await
}

async fn a_task_fires_and_its_history_shows_it(database: Database) -> Result<()> {
    let world = World::start(database).await?;
    let (mut node, api) = world.leader("n1").await?;
    let answer = api.apply(&task("first.run", json!({"cron_expr": "EVERY 1s", "payload": {"a": 1}}))).await?;
    ensure!(answer["created"] == json!(["first.run"]), "{answer}");
    ensure!(answer["warnings"] == json!([]) || only_consumers(&answer), "{answer}");
    let _worker = worker::python(&world.nats.url(), "test")?;

    let runs = api.runs_reach("first.run", "succeeded", 3, Deadline::seconds(30)).await?;
    for run in &runs {
        ensure!(run["kind"] == "every" && run["group"] == "test" && run["queue"] == "default", "{run}");
        ensure!(run["handler"] == "first.run" && run["attempt"] == 1 && run["max_attempts"] == 1, "{run}");
        ensure!(run["priority"] == 5 && run["flow_id"] == run["run_id"], "{run}");
        ensure!(run["trace_id"].as_str().is_some_and(|trace| trace.len() == 32), "{run}");
        ensure!(millis(&run["published_at"])? >= millis(&run["trigger_time"])?, "published before it was due: {run}");
        ensure!(millis(&run["finished_at"])? >= millis(&run["published_at"])?, "{run}");
    }
    let run = api.run(runs[0]["run_id"].as_str().context("no run_id")?).await?;
    ensure!(run["attempts"][0]["attempt"] == 1 && run["attempts"][0]["outcome"] == "succeeded", "{run}");
    ensure!(run["timeline"].as_array().is_some_and(|timeline| timeline.len() >= 3), "{run}");

    // The log tells the same story, line by line.
    let (run_id, trace_id) = (text(&run, "run_id")?, text(&run, "trace_id")?);
    let log = node.process().output().text();
    for word in ["planned", "published", "finished", "settled"] {
        let told = log.lines().any(|line| line.contains(word) && line.contains(run_id) && line.contains("first.run"));
        ensure!(told, "no line says that {run_id} was {word}");
    }
    ensure!(log.contains(trace_id), "no line names the trace {trace_id}");

    // Once nothing fires any more the stream is empty: an executed run leaves no message behind.
    api.post("/tasks/first.run/pause", &json!({})).await?.ok()?;
    let stream = world.jetstream().await?.get_stream("AX_TRIGGERS").await?;
    eventually(Deadline::seconds(20), "AX_TRIGGERS is empty", || async {
        Ok((stream.get_info().await?.state.messages == 0).then_some(()))
    })
    .await?;
    Ok(())
}

/// Whether all warnings only tell about the consumers that an apply adds.
fn only_consumers(answer: &Value) -> bool {
    answer["warnings"]
        .as_array()
        .is_some_and(|warnings| warnings.iter().all(|warning| warning.to_string().contains("consumer")))
}

fn text<'a>(run: &'a Value, field: &str) -> Result<&'a str> {
    run[field].as_str().with_context(|| format!("no {field}: {run}"))
}

#[tokio::test]
async fn a_trigger_is_as_the_wire_format_says() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let (_node, api) = world.leader("n1").await?;
    let definition = task(
        "wire",
        json!({"handler": "shared.handler", "payload": {"n": 9_007_199_254_740_993_u64}, "timeout_ms": 20_000,
               "max_retry": 2, "priority": 9, "retry_backoff": {"initial_ms": 100, "multiplier": 2, "max_ms": 1000, "jitter_ms": 0}}),
    );
    api.apply(&definition).await?;
    let run_id = api.trigger("wire", &json!({})).await?.ok()?["run_id"].as_str().context("no run_id")?.to_owned();
    let context = world.jetstream().await?;
    let hands = Hands::on(&context, "test-default-t30r2").await?;
    let message = hands.next().await?;

    ensure!(message.subject.as_str() == format!("ax.trigger.test.default.t30r2.wire.{run_id}"), "{}", message.subject);
    let headers = message.headers.clone().context("no headers")?;
    let expected = [
        ("Ax-Version", "1"),
        ("Ax-Run-Id", run_id.as_str()),
        ("Ax-Task-Id", "wire"),
        ("Ax-Handler", "shared.handler"),
        ("Ax-Group", "test"),
        ("Ax-Timeout-Ms", "20000"),
        ("Ax-Max-Attempts", "3"),
        ("Ax-Attempt-Base", "0"),
        ("Ax-Retry-Backoff", "100,2,1000,0"),
        ("Ax-Priority", "9"),
        ("Ax-Weight", "1"),
        ("Ax-Flow-Id", run_id.as_str()),
        ("Nats-Msg-Id", &format!("{run_id}:1")),
    ];
    for (name, value) in expected {
        let found = headers.get(name).map(ToString::to_string);
        ensure!(found.as_deref() == Some(value), "{name} is {found:?}, not {value}");
    }
    ensure!(headers.get("Ax-Epoch").is_some_and(|epoch| epoch.as_str().parse::<u64>().is_ok()));
    let trace = headers.get("traceparent").context("no traceparent")?.to_string();
    ensure!(trace.starts_with("00-") && trace.len() == 55, "{trace}");

    let trigger = Trigger::of(&message)?;
    ensure!(trigger.attempt == 1);
    ensure!(trigger.body["run_id"] == run_id && trigger.body["kind"] == "manual", "{}", trigger.body);
    ensure!(trigger.body["payload"]["n"] == 9_007_199_254_740_993_u64, "{}", trigger.body);
    ensure!(trigger.body["attempt_base"] == 0 && trigger.body["task_id"] == "wire", "{}", trigger.body);
    let time = headers.get("Ax-Trigger-Time").context("no trigger time")?.to_string();
    ensure!(trigger.body["trigger_time"] == time, "{} and {time}", trigger.body);
    message.ack().await.map_err(|error| anyhow::anyhow!(error))?;
    api.run_reaches(&run_id, &["succeeded"], Deadline::seconds(20)).await?;

    // What a raw worker follows, and what an operator sees.
    ensure!(consumers(&context, "test").await? == ["test-default-t30r2"]);
    for stream in ["AX_TRIGGERS", "AX_EVENTS"] {
        let config = context.get_stream(stream).await?.cached_info().config.clone();
        ensure!(config.description.is_some_and(|text| !text.is_empty()), "{stream} has no description");
    }
    Ok(())
}

#[tokio::test]
async fn the_command_line_does_the_same() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let (node, api) = world.leader("n1").await?;
    let document = task("by.hand", json!({"name": "从命令行", "labels": {"team": "data"}})).to_string();
    let applied = ax::run_with(node.url(), &["apply", "-f", "-", "--json"], document.as_bytes()).await?.ok()?.json()?;
    ensure!(applied["created"] == json!(["by.hand"]), "{applied}");
    let again = ax::run_with(node.url(), &["apply", "-f", "-", "--json"], document.as_bytes()).await?.ok()?.json()?;
    ensure!(again["unchanged"] == json!(["by.hand"]) && again["updated"] == json!([]), "{again}");

    let listed = ax::run(node.url(), &["task", "ls"]).await?.ok()?;
    ensure!(listed.stdout.contains("by.hand"), "{}", listed.stdout);
    let shown = ax::run(node.url(), &["task", "get", "by.hand", "--json"]).await?.ok()?.json()?;
    ensure!(shown["name"] == "从命令行" && shown["version"] == 1, "{shown}");
    let triggered = ax::run(node.url(), &["task", "trigger", "by.hand", "--json"]).await?.ok()?.json()?;
    ensure!(triggered["created"] == true, "{triggered}");
    let run_id = text(&triggered, "run_id")?;
    let _second = worker::python(&world.nats.url(), "test")?;
    api.run_reaches(run_id, &["succeeded"], Deadline::seconds(30)).await?;
    let run = ax::run(node.url(), &["run", "get", run_id, "--json"]).await?.ok()?.json()?;
    ensure!(run["state"] == "succeeded", "{run}");
    let runs = ax::run(node.url(), &["run", "ls", "--json"]).await?.ok()?.json()?;
    ensure!(runs["runs"][0]["run_id"] == run_id, "{runs}");
    let nodes = ax::run(node.url(), &["nodes"]).await?.ok()?;
    ensure!(nodes.stdout.contains("n1"), "{}", nodes.stdout);
    ax::run(node.url(), &["task", "pause", "by.hand"]).await?.ok()?;
    ax::run(node.url(), &["task", "resume", "by.hand"]).await?.ok()?;
    ax::run(node.url(), &["task", "rm", "by.hand"]).await?.ok()?;
    ensure!(api.task("by.hand").await?.status == 404);

    // A refusal is 1, a wrong call 2, nobody there 3.
    ensure!(ax::run(node.url(), &["task", "get", "by.hand"]).await?.code == Some(1));
    ensure!(ax::run(node.url(), &["task", "fry"]).await?.code == Some(2));
    ensure!(ax::run("http://127.0.0.1:1", &["task", "ls"]).await?.code == Some(3));
    Ok(())
}

#[tokio::test]
async fn next_fires_are_shown_without_a_server_and_with_one() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let (node, api) = world.leader("n1").await?;
    let shown = ax::run("http://127.0.0.1:1", &["next", "0 2 * * *"]).await?.ok()?;
    ensure!(shown.stdout.lines().filter(|line| line.contains(":00")).count() >= 5, "{}", shown.stdout);
    let preview =
        json!({"cron_expr": "0 2 * * *", "timezone": "Europe/Berlin", "after": "2026-10-24T12:00:00Z", "count": 2});
    let fires = api.post("/preview", &preview).await?.ok()?;
    ensure!(fires["fires"] == json!(["2026-10-25T00:00:00.000Z", "2026-10-26T01:00:00.000Z"]), "{fires}");
    api.apply(&task("nightly", json!({"cron_expr": "0 2 * * *", "timezone": "Asia/Shanghai"}))).await?;
    let fires = api.get("/tasks/nightly/next?count=3").await?.ok()?;
    ensure!(fires["fires"].as_array().is_some_and(|fires| fires.len() == 3), "{fires}");
    ensure!(fires["fires"][0].as_str().is_some_and(|fire| fire.ends_with("T18:00:00.000Z")), "{fires}");
    let upcoming = ax::run(node.url(), &["upcoming", "--json"]).await?.ok()?.json()?;
    ensure!(upcoming["fires"].is_array(), "{upcoming}");
    Ok(())
}

#[tokio::test]
async fn a_restart_keeps_history_and_phase_with_sqlite() -> Result<()> {
    a_restart_keeps_history_and_phase(Database::Sqlite).await
}

#[tokio::test]
async fn a_restart_keeps_history_and_phase_with_postgres() -> Result<()> {
    a_restart_keeps_history_and_phase(Database::Postgres).await
}

/// Within its grace a fire is merely late: a short stop loses nothing, and the interval does not begin anew.
async fn a_restart_keeps_history_and_phase(database: Database) -> Result<()> {
    let world = World::start(database).await?;
    let (mut node, api) = world.leader("n1").await?;
    api.apply(&task("kept", json!({"cron_expr": "EVERY 1s", "overlap_policy": "allow"}))).await?;
    let _worker = worker::python(&world.nats.url(), "test")?;
    let before = api.runs_reach("kept", "succeeded", 2, Deadline::seconds(30)).await?;
    let anchor = api.task("kept").await?.ok()?["anchor_at"].clone();
    ensure!(node.terminate().await?.success(), "SIGTERM is no failure");
    lasts(Duration::from_secs(3)).await;

    let (_node, api) = world.leader("n1").await?;
    let to = millis(&before[0]["trigger_time"])? + 8_000;
    eventually(Deadline::seconds(40), "it fires again", || async {
        let runs = Ledger::of(&api.runs("task_id=kept&state=succeeded").await?)?.instants("kept");
        Ok(runs.last().is_some_and(|last| *last >= to).then_some(()))
    })
    .await?;
    ensure!(api.task("kept").await?.ok()?["anchor_at"] == anchor);
    let ledger = Ledger::of(&api.runs("task_id=kept").await?)?;
    ledger.check_every(1000, millis(&anchor)?, to)?;
    ensure!(ledger.in_stretches() == 0, "a fire within its grace is late, not missed");
    Ok(())
}

/// A longer stop becomes one row, and the newest of its instants is fired.
#[tokio::test]
async fn a_missed_stretch_is_one_row_and_its_newest_instant_fires() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let (mut node, api) = world.leader("n1").await?;
    let definition =
        task("missed", json!({"cron_expr": "EVERY 500ms", "misfire_grace_ms": 1000, "overlap_policy": "allow"}));
    api.apply(&definition).await?;
    let _worker = worker::python(&world.nats.url(), "test")?;
    api.runs_reach("missed", "succeeded", 2, Deadline::seconds(30)).await?;
    node.terminate().await?;
    lasts(Duration::from_secs(6)).await;

    let (_node, api) = world.leader("n1").await?;
    let stretch = eventually(Deadline::seconds(30), "a row for the missed stretch", || async {
        Ok(api.runs("task_id=missed").await?.into_iter().find(|run| run["kind"] == "missed"))
    })
    .await?;
    ensure!(stretch["count"].as_i64().is_some_and(|count| count >= 6), "{stretch}");
    ensure!(stretch["reason"].as_str().is_some_and(|reason| !reason.is_empty()), "{stretch}");
    let newest = millis(&stretch["to"])? + 500;
    eventually(Deadline::seconds(30), "the newest missed instant has run", || async {
        let runs = api.runs("task_id=missed&state=succeeded").await?;
        Ok(Ledger::of(&runs)?.instants("missed").contains(&newest).then_some(()))
    })
    .await?;
    let ledger = Ledger::of(&api.runs("task_id=missed").await?)?;
    let from = millis(&api.task("missed").await?.ok()?["anchor_at"])?;
    ledger.check_every(500, from, newest)?;
    Ok(())
}

#[tokio::test]
async fn health_readiness_and_metrics_are_there() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let (_node, api) = world.leader("n1").await?;
    for path in ["/healthz", "/readyz"] {
        api.send(reqwest::Method::GET, path, None).await?.ok().with_context(|| path.to_owned())?;
    }
    let metrics = api.metrics().await?;
    ensure!(metrics.contains("# HELP") && metrics.contains("# TYPE") && metrics.contains("ax_"), "{metrics}");
    let page = api.send(reqwest::Method::GET, "/", None).await?;
    ensure!(page.content_type.starts_with("text/html"), "{page:?}");
    let missing = api.get("/runs/01936b4c-0000-7000-8000-000000000000").await?;
    missing.refused(404)?;
    Ok(())
}
