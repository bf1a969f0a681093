//! A worker that only pulls and acknowledges is a complete worker; what it says by events outranks what it says by acks.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use async_nats::jetstream::AckKind;
use ax_tests::api::Api;
use ax_tests::ax::Node;
use ax_tests::worker::{Hands, Trigger};
use ax_tests::world::{Database, World, task};
use ax_tests::{Deadline, eventually};
use serde_json::{Value, json};

const SOON: Deadline = Deadline::seconds(20);
/// Any damage is repaired within a minute and one sweep.
const REPAIRED: Deadline = Deadline::seconds(130);

/// One node, one task `job`, and a worker in the test's hands.
struct Job {
    world: World,
    _node: Node,
    api: Api,
    hands: Hands,
}

impl Job {
    /// `consumer` is what the definition's timeout and retries amount to.
    async fn start(more: Value, consumer: &str) -> Result<Self> {
        let world = World::start(Database::Sqlite).await?;
        let (node, api) = world.leader("n1").await?;
        api.apply(&task("job", more)).await?;
        let hands = Hands::on(&world.jetstream().await?, consumer).await?;
        Ok(Self { world, _node: node, api, hands })
    }

    async fn trigger(&self) -> Result<String> {
        let answer = self.api.trigger("job", &json!({})).await?.ok()?;
        Ok(answer["run_id"].as_str().context("no run_id")?.to_owned())
    }

    /// Waits for the run's end in `state`, and until its message has left the stream.
    async fn ends(&self, run_id: &str, state: &str, deadline: Deadline) -> Result<Value> {
        let run = self.api.run_reaches(run_id, &[state], deadline).await?;
        let stream = self.world.jetstream().await?.get_stream("AX_TRIGGERS").await?;
        eventually(deadline, "its message is gone", || async {
            Ok((stream.get_info().await?.state.messages == 0).then_some(()))
        })
        .await?;
        Ok(run)
    }
}

async fn answer(message: &async_nats::jetstream::Message, kind: AckKind) -> Result<()> {
    message.ack_with(kind).await.map_err(|error| anyhow!(error))?;
    // The acknowledgement is in the server when the test goes on.
    message.context.client().flush().await?;
    Ok(())
}

fn outcomes(run: &Value) -> Vec<&str> {
    run["attempts"].as_array().into_iter().flatten().filter_map(|attempt| attempt["outcome"].as_str()).collect()
}

#[tokio::test]
async fn an_ack_is_success() -> Result<()> {
    let job = Job::start(json!({}), "test-default-t60r0").await?;
    let run_id = job.trigger().await?;
    answer(&job.hands.next().await?, AckKind::Ack).await?;
    let run = job.ends(&run_id, "succeeded", SOON).await?;
    ensure!(outcomes(&run) == ["succeeded"], "{run}");
    Ok(())
}

/// Ack metrics are told at most once. Here none arrives at all: the stream of events no longer listens to them.
#[tokio::test]
async fn acks_whose_metrics_are_all_lost_are_found_by_reconciliation() -> Result<()> {
    let job = Job::start(json!({"overlap_policy": "allow"}), "test-default-t60r0").await?;
    let context = job.world.jetstream().await?;
    let mut config = context.get_stream("AX_EVENTS").await?.cached_info().config.clone();
    let before = config.subjects.len();
    config.subjects.retain(|subject| !subject.contains("METRIC"));
    ensure!(config.subjects.len() < before, "AX_EVENTS does not listen to ack metrics: {:?}", config.subjects);
    context.update_stream(config).await?;
    let mut runs = Vec::new();
    for _ in 0..20 {
        runs.push(job.trigger().await?);
        answer(&job.hands.next().await?, AckKind::Ack).await?;
    }
    for run_id in &runs {
        let run = job.ends(run_id, "succeeded", REPAIRED).await?;
        ensure!(outcomes(&run) == ["succeeded"], "{run}");
    }
    Ok(())
}

#[tokio::test]
async fn a_nak_is_a_failed_attempt_and_delivers_again() -> Result<()> {
    let job = Job::start(json!({"max_retry": 2}), "test-default-t60r2").await?;
    let run_id = job.trigger().await?;
    let first = job.hands.next().await?;
    ensure!(Trigger::of(&first)?.attempt == 1);
    answer(&first, AckKind::Nak(Some(Duration::from_millis(200)))).await?;
    let second = job.hands.next().await?;
    let trigger = Trigger::of(&second)?;
    ensure!(trigger.run_id == run_id && trigger.attempt == 2, "{trigger:?}");
    answer(&second, AckKind::Ack).await?;
    let run = job.ends(&run_id, "succeeded", SOON).await?;
    ensure!(outcomes(&run) == ["failed", "succeeded"] && run["attempt"] == 2, "{run}");
    Ok(())
}

#[tokio::test]
async fn naks_to_the_last_delivery_end_in_failed() -> Result<()> {
    let job = Job::start(json!({"max_retry": 1}), "test-default-t60r1").await?;
    let run_id = job.trigger().await?;
    for _ in 0..2 {
        answer(&job.hands.next().await?, AckKind::Nak(None)).await?;
    }
    let run = job.ends(&run_id, "failed", REPAIRED).await?;
    ensure!(outcomes(&run) == ["failed", "failed"], "{run}");
    ensure!(job.hands.take(Duration::from_millis(500)).await?.is_none(), "a third delivery");
    Ok(())
}

#[tokio::test]
async fn silence_until_the_ack_deadline_delivers_again() -> Result<()> {
    let job = Job::start(json!({"max_retry": 1, "timeout_ms": 1000}), "test-default-t1r1").await?;
    let run_id = job.trigger().await?;
    drop(job.hands.next().await?);
    let second = job.hands.next().await?;
    ensure!(Trigger::of(&second)?.attempt == 2);
    answer(&second, AckKind::Ack).await?;
    let run = job.ends(&run_id, "succeeded", SOON).await?;
    ensure!(outcomes(&run) == ["timed_out", "succeeded"], "{run}");
    Ok(())
}

#[tokio::test]
async fn silence_to_the_last_delivery_ends_in_timed_out() -> Result<()> {
    let job = Job::start(json!({"max_retry": 1, "timeout_ms": 1000}), "test-default-t1r1").await?;
    let run_id = job.trigger().await?;
    drop(job.hands.next().await?);
    drop(job.hands.next().await?);
    let run = job.ends(&run_id, "timed_out", REPAIRED).await?;
    ensure!(outcomes(&run) == ["timed_out", "timed_out"], "{run}");
    Ok(())
}

#[tokio::test]
async fn a_term_is_failed_for_good() -> Result<()> {
    let job = Job::start(json!({"max_retry": 5}), "test-default-t60r5").await?;
    let run_id = job.trigger().await?;
    answer(&job.hands.next().await?, AckKind::Term).await?;
    let run = job.ends(&run_id, "failed", SOON).await?;
    ensure!(outcomes(&run) == ["failed"], "{run}");
    ensure!(job.hands.take(Duration::from_millis(500)).await?.is_none(), "delivered again");
    Ok(())
}

#[tokio::test]
async fn a_failed_event_outranks_the_ack() -> Result<()> {
    let job = Job::start(json!({"max_retry": 5}), "test-default-t60r5").await?;
    let run_id = job.trigger().await?;
    let message = job.hands.next().await?;
    job.hands
        .event(&message, "failed", json!({"error": {"kind": "bad_row", "message": "row 7"}, "retry": false}))
        .await?;
    answer(&message, AckKind::Ack).await?;
    let run = job.ends(&run_id, "failed", SOON).await?;
    ensure!(outcomes(&run) == ["failed"] && run["attempts"][0]["error"].to_string().contains("row 7"), "{run}");
    Ok(())
}

#[tokio::test]
async fn a_succeeded_event_outranks_the_nak_and_its_result_is_kept() -> Result<()> {
    let job = Job::start(json!({"max_retry": 5}), "test-default-t60r5").await?;
    let run_id = job.trigger().await?;
    let message = job.hands.next().await?;
    job.hands.event(&message, "started", json!({"worker_id": "w1", "at": "2026-01-01T00:00:00.000Z"})).await?;
    let run = job.api.run_reaches(&run_id, &["running"], SOON).await?;
    ensure!(run["worker_id"] == "w1", "{run}");
    let result = json!({"rows": 9_007_199_254_740_993_u64, "名": "值"});
    job.hands.event(&message, "succeeded", json!({"result": result, "worker_id": "w1"})).await?;
    answer(&message, AckKind::Nak(Some(Duration::from_secs(60)))).await?;
    let run = job.ends(&run_id, "succeeded", REPAIRED).await?;
    ensure!(run["result"] == result && outcomes(&run) == ["succeeded"], "{run}");
    Ok(())
}

/// An attempt that a stopping worker hands back does not use up a retry.
#[tokio::test]
async fn a_released_attempt_is_not_counted() -> Result<()> {
    let job = Job::start(json!({"max_retry": 0}), "test-default-t60r0").await?;
    let run_id = job.trigger().await?;
    let message = job.hands.next().await?;
    job.hands.event(&message, "released", json!({"reason": "the worker stops"})).await?;
    answer(&message, AckKind::Nak(None)).await?;
    let again = eventually(REPAIRED, "the run is delivered again", || job.hands.take(Duration::from_secs(5))).await?;
    ensure!(Trigger::of(&again)?.run_id == run_id);
    answer(&again, AckKind::Ack).await?;
    let run = job.ends(&run_id, "succeeded", SOON).await?;
    ensure!(outcomes(&run) == ["released", "succeeded"], "{run}");
    Ok(())
}

#[tokio::test]
async fn a_malformed_event_is_passed_over() -> Result<()> {
    let job = Job::start(json!({}), "test-default-t60r0").await?;
    let run_id = job.trigger().await?;
    let message = job.hands.next().await?;
    let client = job.world.nats.client().await?;
    let subjects =
        [format!("ax.event.succeeded.test.job.{run_id}"), "ax.event.nonsense".into(), "ax.event.failed.a.b.c".into()];
    for subject in subjects {
        for body in ["", "{", "[]", "{\"run_id\":7}", "\u{0}\u{1}", "{\"run_id\":\"nobody\",\"attempt\":-1}"] {
            client.publish(subject.clone(), body.into()).await?;
        }
    }
    client.flush().await?;
    answer(&message, AckKind::Ack).await?;
    let run = job.ends(&run_id, "succeeded", SOON).await?;
    ensure!(outcomes(&run) == ["succeeded"], "{run}");
    Ok(())
}
