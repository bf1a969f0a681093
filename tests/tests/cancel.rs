//! A run is cancelled by hand in whatever state it is: at once, for good, and as often as one likes.

use std::time::Duration;

use anyhow::{Result, ensure};
use ax_tests::worker::{self, Hands};
use ax_tests::world::{Database, World, task};
use ax_tests::{Deadline, holds};
use serde_json::{Value, json};

const SOON: Deadline = Deadline::seconds(30);

/// Cancels twice; the run is cancelled with the reason of the first, and stays so.
async fn cancelled(api: &ax_tests::api::Api, run_id: &str) -> Result<Value> {
    let path = format!("/runs/{run_id}/cancel");
    let first = api.post(&path, &json!({"reason": "wrong date"})).await?;
    ensure!(first.status == 200, "{first:?}");
    let first = first.ok()?;
    ensure!(first["state"] == "cancelled" && first["reason"] == "wrong date", "{first}");
    let second = api.post(&path, &json!({"reason": "another"})).await?;
    ensure!(second.status == 200, "{second:?}");
    ensure!(second.ok()?["reason"] == "wrong date");
    Ok(first)
}

async fn in_every_state(database: Database) -> Result<()> {
    let world = World::start(database).await?;
    let (_node, api) = world.leader("n1").await?;
    let mut job = task("job", json!({"max_retry": 3, "timeout_ms": 60_000}));
    job["retry_backoff"] = json!({"initial_ms": 60_000, "multiplier": 1, "max_ms": 60_000, "jitter_ms": 0});
    api.apply(&job).await?;
    let trigger = async |body: Value| -> Result<String> {
        let made = api.trigger("job", &body).await?.ok()?;
        Ok(made["run_id"].as_str().unwrap_or_default().to_owned())
    };

    // Pending: delayed for a century, so that no leader has it in memory.
    let delayed = trigger(json!({"delay_ms": 3_000_000_000_000_u64})).await?;
    let run = cancelled(&api, &delayed).await?;
    ensure!(run["attempt"] == 0, "{run}");

    // Triggered: in the stream, no worker has it.
    let triggered = trigger(json!({})).await?;
    api.run_reaches(&triggered, &["triggered"], SOON).await?;
    cancelled(&api, &triggered).await?;

    // Running, and its worker goes on as if nothing had happened: what it says in the end changes nothing.
    let running = trigger(json!({})).await?;
    let context = world.jetstream().await?;
    let names = worker::consumers(&context, "test").await?;
    ensure!(names.len() == 1, "{names:?}");
    let consumer = Hands::on(&context, &names[0]).await?;
    let message = consumer.next().await?;
    consumer.event(&message, "started", json!({"worker_id": "w"})).await?;
    api.run_reaches(&running, &["running"], SOON).await?;
    let run = cancelled(&api, &running).await?;
    ensure!(run["attempts"][0]["outcome"] == "cancelled", "{run}");
    consumer.event(&message, "succeeded", json!({"result": 1})).await?;
    message.ack().await.map_err(|e| anyhow::anyhow!("{e}"))?;

    // Backing off: failed once, the next attempt a minute away.
    let backing_off = trigger(json!({})).await?;
    let message = consumer.next().await?;
    consumer.event(&message, "failed", json!({"error": "no", "retry": true})).await?;
    message
        .ack_with(async_nats::jetstream::AckKind::Nak(Some(Duration::from_secs(60))))
        .await
        .map_err(|e| anyhow::anyhow!("{e}"))?;
    ax_tests::eventually(SOON, "its first attempt has failed", || async {
        let run = api.run(&backing_off).await?;
        Ok((run["attempts"][0]["outcome"] == "failed").then_some(()))
    })
    .await?;
    cancelled(&api, &backing_off).await?;

    // All of it is final, and nothing is left in the stream.
    let ids = [delayed, triggered, running, backing_off];
    holds(Duration::from_secs(3), "cancelled runs stay cancelled", true, || async {
        let mut all = true;
        for id in &ids {
            all &= api.run(id).await?["state"] == "cancelled";
        }
        Ok(all)
    })
    .await?;
    ax_tests::eventually(SOON, "no message is left", || async {
        let mut stream = context.get_stream("AX_TRIGGERS").await?;
        Ok((stream.info().await?.state.messages == 0).then_some(()))
    })
    .await?;

    // A run that has ended stays as it ended; one that does not exist is refused.
    let done = trigger(json!({})).await?;
    consumer.next().await?.double_ack().await.map_err(|e| anyhow::anyhow!("{e}"))?;
    api.run_reaches(&done, &["succeeded"], SOON).await?;
    let answer = api.post(&format!("/runs/{done}/cancel"), &json!({})).await?.ok()?;
    ensure!(answer["state"] == "succeeded", "{answer}");
    api.post("/runs/00000000-0000-7000-8000-000000000000/cancel", &json!({})).await?.refused(404)?;
    Ok(())
}

#[tokio::test]
async fn a_run_is_cancelled_in_whatever_state_and_stays_so_with_sqlite() -> Result<()> {
    in_every_state(Database::Sqlite).await
}

#[tokio::test]
async fn a_run_is_cancelled_in_whatever_state_and_stays_so_with_postgres() -> Result<()> {
    in_every_state(Database::Postgres).await
}
