//! A run that is delivered again.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use async_nats::jetstream::AckKind;
use ax_shared::RunId;
use ax_tests::eventually;
use ax_tests::worker::Hands;
use ax_worker::{CancellationToken, Context as Cx, Failure};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::between::Between;
use crate::world::{SOON, Trigger, World};

#[tokio::test]
async fn a_run_that_has_succeeded_is_not_executed_again() -> Result<()> {
    let world = World::new().await?;
    let name = world.consumer(60_000, 3).await?;
    let calls = Arc::new(AtomicUsize::new(0));
    // Delivered once, its success told, its ack lost.
    let run = world.publish(Trigger { retries: 3, ..Trigger::default() }).await?;
    let hands = Hands::on(&world.context, &name).await?;
    let message = hands.next().await?;
    let told = |run: RunId| {
        let context = world.context.clone();
        async move {
            let body = json!({ "run_id": run, "attempt": 1, "result": "first" }).to_string();
            context.publish(format!("ax.event.succeeded.g.some.task.{run}"), body.into()).await?.await?;
            anyhow::Ok(())
        }
    };
    told(run).await?;
    message.ack_with(AckKind::Nak(None)).await.map_err(anyhow::Error::msg)?;
    // Published anew by the scheduler, though it had succeeded.
    let republished = RunId(Uuid::now_v7());
    told(republished).await?;
    let headers = vec![("Ax-Republished", "true".to_owned()), ("Ax-Attempt-Base", "2".to_owned())];
    world.publish(Trigger { run_id: republished, retries: 3, headers, ..Trigger::default() }).await?;
    // And one that is in doubt like them, and has not succeeded.
    let headers = vec![("Ax-Republished", "true".to_owned()), ("Ax-Attempt-Base", "2".to_owned())];
    let fresh = world.publish(Trigger { retries: 3, headers, ..Trigger::default() }).await?;
    let counted = calls.clone();
    let handler = move |_: Value, _: Cx| {
        counted.fetch_add(1, Ordering::SeqCst);
        async { Ok(json!("second")) }
    };
    let worker = world.start(|w| w.handler("work", handler));
    world.settled().await?;
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    let succeeded: Vec<_> = world.events().await?.into_iter().filter(|(kind, ..)| kind == "succeeded").collect();
    let of = |run: RunId| {
        let events = succeeded.iter().filter(move |(_, _, body)| body["run_id"] == run.to_string());
        events.map(|(_, id, body)| (id.clone(), body["result"].clone())).collect::<Vec<_>>()
    };
    // Told again under its own attempt.
    assert_eq!(of(run).last(), Some(&(format!("{run}:1:succeeded"), json!("first"))));
    assert_eq!(of(republished).last(), Some(&(format!("{republished}:1:succeeded"), json!("first"))));
    assert_eq!(of(fresh), [(format!("{fresh}:3:succeeded"), json!("second"))]);
    worker.stop().await
}

#[tokio::test]
async fn an_outcome_survives_a_restart_of_the_server() -> Result<()> {
    let mut world = World::new().await?;
    world.consumer(60_000, 3).await?;
    let (calls, gate) = (Arc::new(AtomicUsize::new(0)), CancellationToken::new());
    let handler = {
        let (calls, gate) = (calls.clone(), gate.clone());
        move |_: Value, _: Cx| {
            calls.fetch_add(1, Ordering::SeqCst);
            let gate = gate.clone();
            async move {
                gate.cancelled().await;
                Ok(json!("done"))
            }
        }
    };
    let worker = world.start(|w| w.handler("work", handler));
    world.publish(Trigger { retries: 3, ..Trigger::default() }).await?;
    world.until_event("started").await?;
    world.nats.kill9()?;
    gate.cancel();
    world.nats.start_again().await?;
    world.context = world.nats.jetstream().await?;
    world.settled().await?;
    assert_eq!(world.until_event("succeeded").await?["result"], "done");
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    // And it goes on working.
    world.publish(Trigger { retries: 3, ..Trigger::default() }).await?;
    world.settled().await?;
    assert_eq!(calls.load(Ordering::SeqCst), 2);
    worker.stop().await
}

/// The server takes an ack deadline for missed that this worker does not know of, and gives the message to the same worker
/// again: the first attempt is stopped and says nothing more, and the two never work at once.
#[tokio::test]
async fn an_attempt_that_is_superseded_in_its_own_worker_is_stopped_and_tells_nothing() -> Result<()> {
    let world = World::new().await?;
    world.consumer_with(60_000, 5, 1.0, Some(Duration::from_secs(1))).await?;
    let log = Arc::new(Mutex::new(Vec::new()));
    struct Leave(Arc<Mutex<Vec<String>>>, u32);
    impl Drop for Leave {
        fn drop(&mut self) {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).push(format!("left {}", self.1));
        }
    }
    let handler = {
        let log = log.clone();
        move |_: Value, cx: Cx| {
            let log = log.clone();
            async move {
                let attempt = cx.attempt();
                log.lock().unwrap_or_else(PoisonError::into_inner).push(format!("entered {attempt}"));
                let _leave = Leave(log, attempt);
                if attempt == 1 {
                    std::future::pending::<()>().await;
                }
                Ok(attempt)
            }
        }
    };
    let worker = world.start(|w| w.handler("work", handler).concurrency(4));
    world.publish(Trigger { retries: 5, ..Trigger::default() }).await?;
    world.settled().await?;
    let log = log.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let last = log.iter().filter(|line| line.starts_with("entered")).count();
    assert!(last >= 2 && log[..2] == ["entered 1".to_owned(), "left 1".to_owned()], "{log:?}");
    let events = world.events().await?;
    let of_first: Vec<&str> =
        events.iter().filter(|(_, _, body)| body["attempt"] == 1).map(|(kind, ..)| kind.as_str()).collect();
    assert_eq!(of_first, ["started"]);
    assert!(world.until_event("succeeded").await?["attempt"].as_u64() >= Some(2));
    worker.stop().await
}

/// The server has heard a refusal, and its confirmation is lost: repeated, it would hit the next attempt.
#[tokio::test]
async fn a_refusal_whose_confirmation_is_lost_does_not_hit_the_next_attempt() -> Result<()> {
    let world = World::new().await?;
    world.consumer(60_000, 5).await?;
    let between = Between::to(&world.nats.url()).await?;
    between.lose_confirmations(true);
    let handler = |_: Value, cx: Cx| async move {
        if cx.attempt() == 1 {
            return Err(Failure::retry("not yet"));
        }
        // Longer than a confirmation is waited for.
        tokio::time::sleep(Duration::from_secs(5)).await;
        Ok(cx.attempt())
    };
    let worker = World::start_at(between.url(), |w| w.handler("work", handler).concurrency(4));
    world.publish(Trigger { retries: 5, ..Trigger::default() }).await?;
    eventually(SOON, "the confirmation is lost", || async { Ok((between.lost() > 0).then_some(())) }).await?;
    world.until_event("succeeded").await?;
    world.settled().await?;
    assert_eq!(world.kinds().await?, ["started", "failed", "started", "succeeded"]);
    between.lose_confirmations(false);
    worker.stop().await
}

/// The second attempt waits for the first, which blocks its thread, for longer than the ack deadline: meanwhile it is kept,
/// and nobody gets it beside.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_waits_to_be_entered_for_longer_than_its_ack_deadline_is_not_executed_twice() -> Result<()> {
    let world = World::new().await?;
    world.consumer(1000, 5).await?;
    let calls = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let calls = calls.clone();
        move |_: Value, cx: Cx| {
            let calls = calls.clone();
            async move {
                calls.lock().unwrap_or_else(PoisonError::into_inner).push(cx.attempt());
                if cx.attempt() == 1 {
                    std::thread::sleep(Duration::from_millis(6500));
                }
                tokio::time::sleep(Duration::from_millis(500)).await;
                Ok(cx.attempt())
            }
        }
    };
    let worker = world.start(|w| w.handler("work", handler).concurrency(4));
    world.publish(Trigger { retries: 5, timeout_ms: 1000, ..Trigger::default() }).await?;
    world.settled().await?;
    assert_eq!(*calls.lock().unwrap_or_else(PoisonError::into_inner), [1, 2]);
    assert_eq!(world.kinds().await?, ["started", "failed", "started", "succeeded"]);
    worker.stop().await
}
