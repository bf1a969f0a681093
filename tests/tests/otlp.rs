//! Every run is one trace in an OTLP receiver, and no receiver can hold up a run.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use async_nats::jetstream::{AckKind, Message};
use ax_tests::api::Api;
use ax_tests::ax::{Node, ServerOptions};
use ax_tests::ledger::millis;
use ax_tests::nats::free_ports;
use ax_tests::otlp::Receiver;
use ax_tests::worker::{self, Hands};
use ax_tests::world::{Database, World, task};
use ax_tests::{Deadline, eventually};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use serde_json::{Value, json};

const SOON: Deadline = Deadline::seconds(30);

/// Starts a node that exports to `endpoint`, soon after there is something to export.
async fn node(world: &World, name: &str, endpoint: &str, more: &[(&str, &str)]) -> Result<Node> {
    let env = [("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint), ("OTEL_BSP_SCHEDULE_DELAY", "200")];
    let env = env.iter().chain(more).map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let options = ServerOptions { env, ..world.options(name) };
    let node = Node::start(&options).await?;
    node.api().has_leader(SOON).await?;
    Ok(node)
}

async fn trigger(api: &Api, id: &str) -> Result<String> {
    let answer = api.trigger(id, &json!({})).await?.ok()?;
    Ok(answer["run_id"].as_str().context("no run_id")?.to_owned())
}

async fn answer(message: &Message, kind: AckKind) -> Result<()> {
    message.ack_with(kind).await.map_err(|error| anyhow!(error))?;
    Ok(message.context.client().flush().await?)
}

fn traceparent(message: &Message) -> Result<String> {
    let headers = message.headers.as_ref().context("no headers")?;
    Ok(headers.get("traceparent").context("no traceparent")?.to_string())
}

/// The present as workers write it, in events.
fn now() -> String {
    jiff::Timestamp::now().to_string()
}

#[tokio::test]
async fn a_run_with_a_retry_is_one_trace_with_the_right_parents_kinds_and_times() -> Result<()> {
    let (world, receiver) = (World::start(Database::Sqlite).await?, Receiver::start().await?);
    let more = [
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=team%20a"),
        ("OTEL_SERVICE_NAME", "scheduler-of-the-test"),
        ("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=ci"),
    ];
    let node = node(&world, "n1", &receiver.endpoint(), &more).await?;
    let api = node.api();
    let backoff = json!({"initial_ms": 100, "multiplier": 1, "max_ms": 100, "jitter_ms": 0});
    api.apply(&task("job", json!({"max_retry": 1, "retry_backoff": backoff}))).await?;
    let hands = Hands::on(&world.jetstream().await?, "test-default-t60r1").await?;

    let run_id = trigger(&api, "job").await?;
    let first = hands.next().await?;
    hands.event(&first, "started", json!({"worker_id": "w1", "at": now()})).await?;
    hands.event(&first, "failed", json!({"error": "no such table", "finished_at": now()})).await?;
    answer(&first, AckKind::Nak(Some(Duration::from_millis(100)))).await?;
    let second = hands.next().await?;
    ensure!(traceparent(&first)? == traceparent(&second)?, "a redelivery is the same message");
    hands.event(&second, "started", json!({"worker_id": "w2", "at": now()})).await?;
    hands.event(&second, "succeeded", json!({"worker_id": "w2", "finished_at": now()})).await?;
    answer(&second, AckKind::Ack).await?;

    let run = api.run_reaches(&run_id, &["succeeded"], SOON).await?;
    let trace = receiver.run(&run_id, SOON).await?;
    trace.check()?;
    ensure!(trace.names() == ["attempt", "attempt", "plan", "publish", "run"], "{:?}", trace.names());
    let root = trace.one("run")?;
    ensure!(root.error().is_none() && root.times().1 == millis(&run["finished_at"])?, "{root:?} {run}");
    for (key, value) in [
        ("ax.run_id", run_id.as_str()),
        ("ax.task_id", "job"),
        ("ax.group", "test"),
        ("ax.kind", "manual"),
        ("ax.state", "succeeded"),
        ("ax.attempt", "2"),
        ("ax.worker_id", "w2"),
        ("ax.lateness_ms", &run["lateness_ms"].to_string()),
    ] {
        ensure!(root.attribute(key).as_deref() == Some(value), "{key}: {:?}", root.attribute(key));
    }
    ensure!(root.resource("service.name").as_deref() == Some("scheduler-of-the-test"), "{:?}", root.resource);
    ensure!(root.resource("service.instance.id").as_deref() == Some("n1"), "{:?}", root.resource);
    ensure!(root.resource("deployment.environment.name").as_deref() == Some("ci"), "{:?}", root.resource);
    ensure!(receiver.tenants().iter().all(|tenant| tenant == "team a"), "{:?}", receiver.tenants());

    // What the worker got as its parent is the publish.
    let publish = trace.one("publish")?;
    let told = format!("00-{}-{}-01", publish.trace_id(), publish.span_id());
    ensure!(traceparent(&first)? == told && publish.trace_id() == run["trace_id"], "{told}");
    ensure!(publish.times().1 == millis(&run["published_at"])?, "{publish:?} {run}");
    ensure!(publish.attribute("messaging.message.id") == Some(format!("{run_id}:1")), "{publish:?}");
    let subject = format!("ax.trigger.test.default.t60r1.job.{run_id}");
    ensure!(publish.attribute("messaging.destination.name") == Some(subject), "{publish:?}");

    let attempts = trace.all("attempt");
    for (n, (attempt, outcome, error)) in
        [(attempts[0], "failed", Some("no such table".to_owned())), (attempts[1], "succeeded", None)]
            .into_iter()
            .enumerate()
    {
        let row = &run["attempts"][n];
        ensure!(attempt.times() == (millis(&row["started_at"])?, millis(&row["finished_at"])?), "{attempt:?} {row}");
        ensure!(attempt.attribute("ax.attempt") == Some((n + 1).to_string()), "{attempt:?}");
        ensure!(attempt.attribute("ax.outcome").as_deref() == Some(outcome) && attempt.error() == error, "{attempt:?}");
    }

    // A request joins the trace that it comes with, and begins its own otherwise.
    let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let client = reqwest::Client::new();
    client.get(format!("{}/api/v1/tasks/job", node.url())).header("traceparent", parent).send().await?;
    let span = eventually(SOON, "the request's span", || async {
        Ok(receiver.trace("4bf92f3577b34da6a3ce929d0e0e4736").first().cloned())
    })
    .await?;
    ensure!(span.span.name == "GET /api/v1/tasks/{id}" && span.span.kind() == SpanKind::Server, "{span:?}");
    ensure!(span.parent_id() == "00f067aa0ba902b7", "{span:?}");
    ensure!(span.attribute("http.response.status_code").as_deref() == Some("200"), "{span:?}");
    ensure!(span.attribute("url.path").as_deref() == Some("/api/v1/tasks/job"), "{span:?}");
    ensure!(receiver.spans().iter().any(|got| got.span.name == "POST /api/v1/tasks/{id}/trigger"), "no root request");
    Ok(())
}

#[tokio::test]
async fn ends_without_success_and_without_execution_are_told_as_what_they_are() -> Result<()> {
    let (world, receiver) = (World::start(Database::Sqlite).await?, Receiver::start().await?);
    let mut node = node(&world, "n1", &receiver.endpoint(), &[]).await?;
    let api = node.api();
    api.apply(&json!({"tasks": [task("bad", json!({})), task("gone", json!({}))]})).await?;
    let hands = Hands::on(&world.jetstream().await?, "test-default-t60r0").await?;

    let bad = trigger(&api, "bad").await?;
    answer(&hands.next().await?, AckKind::Term).await?;
    api.run_reaches(&bad, &["failed"], SOON).await?;
    let trace = receiver.run(&bad, SOON).await?;
    trace.check()?;
    ensure!(trace.names() == ["attempt", "plan", "publish", "run"], "{:?}", trace.names());
    ensure!(trace.one("run")?.error().is_some_and(|why| why.contains("terminated")), "{:?}", trace.one("run")?);

    // A run whose task is deleted before its instant.
    let skipped = api.trigger("gone", &json!({"delay_ms": 1500})).await?.ok()?;
    let skipped = skipped["run_id"].as_str().context("no run_id")?;
    api.delete_task("gone").await?.ok()?;
    api.run_reaches(skipped, &["skipped"], SOON).await?;
    let trace = receiver.run(skipped, SOON).await?;
    trace.check()?;
    ensure!(trace.names() == ["plan", "run"], "{:?}", trace.names());
    let root = trace.one("run")?;
    ensure!(root.error().is_none() && root.attribute("ax.reason").as_deref() == Some("task_deleted"), "{root:?}");
    ensure!(trace.one("plan")?.times().1 - trace.one("plan")?.times().0 >= 1000, "plan lasts until the instant");

    // The log's lines about a run name its trace and the span that they belong to.
    let lines: Vec<Value> =
        node.process().output().lines().iter().filter_map(|l| serde_json::from_str(l).ok()).collect();
    let trace = receiver.run(&bad, SOON).await?;
    for (message, span) in [("planned", "plan"), ("published", "publish"), ("finished", "attempt"), ("settled", "run")]
    {
        let line = lines.iter().find(|line| line["message"] == message && line["run_id"] == bad.as_str());
        let line = line.with_context(|| format!("no line {message}"))?;
        let span = trace.one(span)?;
        ensure!(line["trace_id"] == span.trace_id() && line["span_id"] == span.span_id(), "{line} {span:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_receiver_that_comes_up_late_gets_what_waited_and_what_follows() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let port = free_ports(1)?[0];
    let endpoint = format!("http://127.0.0.1:{port}");
    let mut node = node(&world, "n1", &endpoint, &[("OTEL_EXPORTER_OTLP_TIMEOUT", "1000")]).await?;
    let api = node.api();
    api.apply(&task("job", json!({}))).await?;
    let _worker = worker::python(&world.nats.url(), "test")?;
    let before = trigger(&api, "job").await?;
    api.run_reaches(&before, &["succeeded"], SOON).await?;
    node.process().ready(Duration::from_secs(20), |output| output.text().contains("takes none").then_some(())).await?;
    let receiver = Receiver::start_on(port).await?;
    receiver.run(&before, SOON).await?.check()?;
    let after = trigger(&api, "job").await?;
    receiver.run(&after, SOON).await?.check()?;
    ensure!(
        node.process().output().text().contains("taken again"),
        "the log does not tell that traces are taken again"
    );
    ensure!(node.process().output().text().matches("takes none").count() == 1, "the log is full of warnings");
    Ok(())
}

/// It accepts connections and never says a word.
#[tokio::test]
async fn a_frozen_receiver_delays_neither_firing_nor_stopping() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let frozen = std::net::TcpListener::bind(("127.0.0.1", 0))?;
    let endpoint = format!("http://{}", frozen.local_addr()?);
    let small = [("OTEL_BSP_MAX_QUEUE_SIZE", "64"), ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")];
    let mut node = node(&world, "n1", &endpoint, &small).await?;
    let api = node.api();
    let tasks: Vec<Value> = (0..10)
        .map(|n| task(&format!("load.{n}"), json!({"cron_expr": "EVERY 1s", "overlap_policy": "allow"})))
        .collect();
    api.apply(&json!({ "tasks": tasks })).await?;
    let _worker = worker::python(&world.nats.url(), "test")?;
    eventually(Deadline::seconds(60), "spans are dropped, and nothing else", || async {
        let metrics = api.metrics().await?;
        let dropped = metrics.lines().find(|line| line.starts_with("ax_spans_dropped_total{reason=\"queue_full\"}"));
        ensure!(api.runs("state=succeeded").await?.len() > 60);
        Ok(dropped.map(|_| ()))
    })
    .await?;
    let mut late: Vec<i64> = Vec::new();
    for run in api.runs("state=succeeded").await? {
        late.push(millis(&run["published_at"])? - millis(&run["trigger_time"])?);
    }
    late.sort_unstable();
    ensure!(late[late.len() / 2] < 250, "half of the runs are late: {late:?}");
    let begun = Instant::now();
    ensure!(node.terminate().await?.success());
    ensure!(begun.elapsed() < Duration::from_secs(12), "stopping took {:?}", begun.elapsed());
    Ok(())
}

#[tokio::test]
async fn a_clean_stop_sends_what_waits() -> Result<()> {
    let (world, receiver) = (World::start(Database::Sqlite).await?, Receiver::start().await?);
    let mut node = node(&world, "n1", &receiver.endpoint(), &[("OTEL_BSP_SCHEDULE_DELAY", "60000")]).await?;
    let api = node.api();
    api.apply(&task("job", json!({}))).await?;
    let _worker = worker::python(&world.nats.url(), "test")?;
    let run_id = trigger(&api, "job").await?;
    api.run_reaches(&run_id, &["succeeded"], SOON).await?;
    ensure!(receiver.spans().is_empty(), "something was sent before its time");
    ensure!(node.terminate().await?.success());
    receiver.run(&run_id, Deadline::seconds(1)).await?.check()?;
    Ok(())
}

#[tokio::test]
async fn a_run_that_outlives_its_leader_is_still_one_trace() -> Result<()> {
    let (world, receiver) = (World::start(Database::Postgres).await?, Receiver::start().await?);
    let mut first = node(&world, "n1", &receiver.endpoint(), &[]).await?;
    let second = node(&world, "n2", &receiver.endpoint(), &[]).await?;
    first.api().apply(&task("job", json!({}))).await?;
    let hands = Hands::on(&world.jetstream().await?, "test-default-t60r0").await?;
    let run_id = trigger(&first.api(), "job").await?;
    let message = hands.next().await?;
    hands.event(&message, "started", json!({"worker_id": "w1", "at": now()})).await?;
    first.api().run_reaches(&run_id, &["running"], SOON).await?;
    let trace_id = run_id.replace('-', "");
    eventually(SOON, "the publish is told", || async { Ok(receiver.trace(&trace_id).first().map(|_| ())) }).await?;
    first.kill9()?;
    let api = second.api();
    eventually(SOON, "the other node leads", || async {
        Ok((api.leader().await?.as_deref() == Some("n2")).then_some(()))
    })
    .await?;
    hands.event(&message, "succeeded", json!({"worker_id": "w1", "finished_at": now()})).await?;
    answer(&message, AckKind::Ack).await?;
    api.run_reaches(&run_id, &["succeeded"], SOON).await?;
    let trace = receiver.run(&run_id, SOON).await?;
    trace.check()?;
    ensure!(trace.names() == ["attempt", "plan", "publish", "run"], "{:?}", trace.names());
    let senders = ["publish", "run"].iter().map(|name| trace.one(name).map(|got| got.resource("service.instance.id")));
    let senders = senders.collect::<Result<Vec<_>>>()?;
    ensure!(senders == [Some("n1".to_owned()), Some("n2".to_owned())], "{senders:?}");
    ensure!(traceparent(&message)?.contains(&trace.one("publish")?.span_id()), "the worker has another parent");
    Ok(())
}

#[tokio::test]
async fn a_ratio_of_the_traces_is_kept_and_workers_are_told_which() -> Result<()> {
    let (world, receiver) = (World::start(Database::Sqlite).await?, Receiver::start().await?);
    let ratio = [("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", "0.3")];
    let node = node(&world, "n1", &receiver.endpoint(), &ratio).await?;
    let api = node.api();
    api.apply(&task("job", json!({}))).await?;
    let hands = Hands::on(&world.jetstream().await?, "test-default-t60r0").await?;
    let runs: Vec<Value> = (0..60).map(|_| json!({"task_id": "job"})).collect();
    api.enqueue(&Value::from(runs)).await?;
    let (mut kept, mut left_out) = (Vec::new(), Vec::new());
    for _ in 0..60 {
        let message = hands.next().await?;
        let parent = traceparent(&message)?;
        let fields: Vec<&str> = parent.split('-').collect();
        if fields[3] == "01" {
            kept.push(fields[1].to_owned());
        } else {
            left_out.push(fields[1].to_owned());
        }
        answer(&message, AckKind::Ack).await?;
    }
    ensure!((5..=35).contains(&kept.len()), "{} of 60 are kept", kept.len());
    for trace in &kept {
        receiver.run(trace, SOON).await?.check()?;
    }
    eventually(SOON, "every run has ended", || async {
        Ok((api.runs("state=succeeded").await?.len() == 60).then_some(()))
    })
    .await?;
    ensure!(left_out.iter().all(|trace| receiver.trace(trace).is_empty()), "a trace that was not to be kept came");
    Ok(())
}
