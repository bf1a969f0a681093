//! Definitions from code. Who answers here is made up, on a real nats-server; `ax` itself is asked in the project's tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use ax_tests::eventually;
use ax_worker::{CancellationToken, Task, Worker, WorkerError};
use futures::StreamExt;
use serde_json::{Value, json};

use crate::world::{SOON, Trigger, World, nothing};

/// Answers applies with `answer`, which is given their number and document.
async fn answers(
    world: &World,
    answer: impl Fn(usize, Value) -> (async_nats::HeaderMap, Value) + Send + 'static,
) -> Result<Arc<AtomicUsize>> {
    let client = world.nats.client().await?;
    let mut requests = client.subscribe("ax.api.v1.apply").await?;
    client.flush().await?;
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    tokio::spawn(async move {
        while let Some(request) = requests.next().await {
            let number = counted.fetch_add(1, Ordering::SeqCst);
            let (headers, body) = answer(number, serde_json::from_slice(&request.payload).unwrap_or_default());
            if let Some(reply) = request.reply {
                let _ = client.publish_with_headers(reply, headers, body.to_string().into()).await;
            }
        }
    });
    Ok(count)
}

fn error(code: &str, text: &str) -> async_nats::HeaderMap {
    let mut headers = async_nats::HeaderMap::new();
    headers.insert("Nats-Service-Error-Code", code);
    headers.insert("Nats-Service-Error", text);
    headers
}

fn nightly() -> Task {
    Task::new("nightly", Duration::from_secs(60), 3).cron("0 2 * * *").handler("work").payload(json!({"db": "orders"}))
}

#[tokio::test]
async fn definitions_are_applied_as_one_document_until_somebody_takes_them() -> Result<()> {
    let world = World::new().await?;
    world.consumer(60_000, 0).await?;
    let hourly = Task::new("work", Duration::from_millis(1500), 0).every(Duration::from_secs(3600));
    let worker = world.start(|w| w.handler("work", nothing).task(nightly()).task(hourly));
    // Nobody answers yet: the worker works nevertheless.
    world.publish(Trigger::default()).await?;
    world.settled().await?;
    let (seen, mut documents) = tokio::sync::mpsc::unbounded_channel();
    let count = answers(&world, move |number, document| {
        let _ = seen.send(document);
        match number {
            0 => (error("503", "no leader"), json!({"error": {"title": "no leader"}})),
            _ => (async_nats::HeaderMap::new(), json!({"created": ["nightly"], "warnings": ["a consumer was added"]})),
        }
    })
    .await?;
    let document = tokio::time::timeout(SOON, documents.recv()).await?.context("no request")?;
    let task = &document["tasks"][0];
    assert_eq!(document["tasks"].as_array().map(Vec::len), Some(2));
    assert_eq!(
        (&task["executor_group"], &task["timeout_ms"], &task["max_retry"]),
        (&json!("g"), &json!(60_000), &json!(3))
    );
    assert_eq!(document["tasks"][1]["cron_expr"], "EVERY 3600s");
    let again = tokio::time::timeout(SOON, documents.recv()).await?.context("it was not asked again")?;
    assert_eq!(again, document);
    // Taken: that is all.
    world.publish(Trigger::default()).await?;
    world.settled().await?;
    assert_eq!(count.load(Ordering::SeqCst), 2);
    worker.stop().await
}

#[tokio::test]
async fn a_worker_whose_definitions_are_refused_ends_and_says_why() -> Result<()> {
    let world = World::new().await?;
    world.consumer(60_000, 0).await?;
    let problem = json!({"status": 422, "errors": [{"field": "tasks[0].cron_expr", "rule": "schedule"}]});
    let body = json!({ "error": problem });
    answers(&world, move |_, _| (error("422", "the definition is not valid"), body.clone())).await?;
    let worker = Worker::new(world.nats.url(), "g").worker_id("w").handler("work", nothing).task(nightly());
    let ended = tokio::time::timeout(SOON, worker.run_until(CancellationToken::new())).await?;
    let error = ended.err().context("it was refused")?;
    assert!(error.to_string().contains("tasks[0].cron_expr"), "{error}");
    assert!(matches!(&error, WorkerError::Refused { problem: told, .. } if *told == problem), "{error:?}");
    let bucket = world.context.get_key_value("ax_workers").await?;
    eventually(SOON, "it signs off", || async { Ok(bucket.get("g.w").await?.is_none().then_some(())) }).await
}

#[tokio::test]
async fn a_definition_without_its_handler_is_refused_before_anything_begins() -> Result<()> {
    let worker = Worker::new("nats://127.0.0.1:1", "g").handler("other", nothing).task(nightly());
    let error = worker.run_until(CancellationToken::new()).await.err().context("it has no handler")?;
    assert!(matches!(&error, WorkerError::TaskWithoutHandler { handler, .. } if handler == "work"), "{error}");
    Ok(())
}
