//! What happens while something behind the API is away.

use std::time::{Duration, Instant};

use anyhow::Result;
use ax_tests::{Deadline, eventually};
use reqwest::header;
use serde_json::json;

use crate::world::{World, task};

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
