//! What happens while something behind the API is away.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use ax_scheduler::api::service::Expected;
use ax_scheduler::loops::clock::SystemClock;
use ax_tests::postgres::Postgres;
use ax_tests::{Deadline, eventually};
use reqwest::header;
use serde_json::json;

use crate::world::{World, caller, service, task};

#[tokio::test]
async fn without_nats_definitions_are_taken_and_keys_are_not() -> Result<()> {
    let mut world = World::start().await?;
    world.put("a", task("a", json!({}))).await?.is(201);
    assert_eq!(world.page("/readyz").await?.0, 200);
    world.nats.kill9()?;
    eventually(Deadline::seconds(10), "readiness is red", async || {
        Ok((world.page("/readyz").await?.0 == 503).then_some(()))
    })
    .await?;
    let (_, body) = world.page("/readyz").await?;
    assert!(body.contains("NATS"), "{body}");
    assert_eq!(world.page("/healthz").await?.0, 200, "the process lives");

    let begun = Instant::now();
    world.put("b", task("b", json!({"queue_label": "other"}))).await?.is(201);
    world.post("/tasks/a/trigger", json!({})).await?.is(201);
    assert!(begun.elapsed() < Duration::from_secs(2), "what needs no NATS does not wait for it");
    let refused = world.post("/tasks/a/trigger", json!({"idempotency_key": "k"})).await?.refused(503);
    assert!(!refused.header(header::RETRY_AFTER).is_empty());
    world.get("/nodes").await?.refused(503);

    world.nats.start_again().await?;
    eventually(Deadline::seconds(20), "readiness is green", async || {
        Ok((world.page("/readyz").await?.0 == 200).then_some(()))
    })
    .await?;
    world.post("/tasks/a/trigger", json!({"idempotency_key": "k"})).await?.is(201);
    Ok(())
}

#[tokio::test]
async fn without_the_database_everything_is_refused_in_time_and_comes_back() -> Result<()> {
    let world = World::start().await?;
    let mut postgres = Postgres::start().await?;
    let store = ax_scheduler::store::open(&postgres.create_database().await?).await?;
    let service = service(store.clone(), world.bus.clone(), Arc::new(SystemClock::new()), false);
    assert!(!service.readiness().await.ready, "a database without its schema is not ready");
    store.migrate().await?;
    assert!(service.readiness().await.ready);

    postgres.stop().await?;
    let begun = Instant::now();
    let readiness = service.readiness().await;
    assert!(!readiness.ready && readiness.nats == "ok", "{readiness:?}");
    assert!(begun.elapsed() < Duration::from_secs(5));
    let id = "a".parse()?;
    let refused = service.put_task(&caller(), &id, task("a", json!({})), Expected::Any).await.unwrap_err();
    assert_eq!((refused.status(), refused.retry_after_s().is_some()), (503, true), "{refused:?}");
    assert!(begun.elapsed() < Duration::from_secs(30));

    postgres.start_again().await?;
    eventually(Deadline::seconds(20), "readiness is green", async || Ok(service.readiness().await.ready.then_some(())))
        .await?;
    service.put_task(&caller(), &id, task("a", json!({})), Expected::Any).await?;
    Ok(())
}
