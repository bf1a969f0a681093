//! What a worker tells about an attempt, and how it answers its message.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use ax_tests::{eventually, holds};
use ax_worker::{Context as Cx, Failure, GiveUp};
use serde_json::{Value, json};

use crate::world::{SOON, Trigger, World, nothing};

#[tokio::test]
async fn a_run_is_executed_told_and_acked() -> Result<()> {
    let world = World::new().await?;
    world.consumer(60_000, 3).await?;
    #[derive(serde::Deserialize)]
    struct Number {
        n: u64,
    }
    #[derive(serde::Serialize)]
    struct Twice {
        twice: u64,
    }
    let handler = |job: Number, cx: Cx| async move {
        assert_eq!((cx.task_id().as_str(), cx.attempt(), cx.max_attempts()), ("some.task", 1, 4));
        assert_eq!(cx.trigger_time().to_string(), "2026-11-30T00:00:00.000Z");
        assert_eq!((cx.kind(), cx.handler(), cx.idempotency_key()), ("manual", "work", cx.run_id().to_string()));
        assert!(cx.remaining() > Duration::from_secs(50) && cx.timeout() == Duration::from_secs(60));
        let n = job.n;
        Ok(Twice { twice: n * 2 })
    };
    let worker = world.start(|w| w.handler("work", handler).worker_id("w.1"));
    let run = world.publish(Trigger { retries: 3, payload: json!({ "n": 21 }), ..Trigger::default() }).await?;
    world.settled().await?;
    let events = world.events().await?;
    let ids: Vec<&str> = events.iter().map(|(_, id, _)| id.as_str()).collect();
    assert_eq!(ids, [format!("{run}:1:started"), format!("{run}:1:succeeded")]);
    let body = &events[1].2;
    assert_eq!((&body["result"], &body["worker_id"]), (&json!({ "twice": 42 }), &json!("w-1")));
    assert!(body["started_at"].is_string() && body["finished_at"].is_string() && body.get("at").is_none());
    assert!(events[0].2["at"].is_string());
    worker.stop().await
}

#[tokio::test]
async fn a_failing_run_is_tried_as_often_as_it_may_and_then_ended() -> Result<()> {
    let world = World::new().await?;
    let name = world.consumer(60_000, 2).await?;
    let handler = |_: Value, cx: Cx| async move {
        let number: u32 = format!("not a number {}", cx.attempt()).parse()?;
        Ok(number)
    };
    let worker = world.start(|w| w.handler("work", handler));
    let run = world.publish(Trigger { retries: 2, ..Trigger::default() }).await?;
    world.settled().await?;
    let failed: Vec<_> = world.events().await?.into_iter().filter(|(kind, ..)| kind == "failed").collect();
    let ids: Vec<&str> = failed.iter().map(|(_, id, _)| id.as_str()).collect();
    assert_eq!(ids, [format!("{run}:1:failed"), format!("{run}:2:failed"), format!("{run}:3:failed")]);
    assert_eq!(failed[0].2["error"], "invalid digit found in string");
    assert_eq!(failed[0].2["retry"], true);
    let info = world.context.get_stream("AX_TRIGGERS").await?.consumer_info(&name).await?;
    assert_eq!((info.num_ack_pending, info.num_pending), (0, 0), "ended by TERM, not left to run out");
    worker.stop().await
}

#[tokio::test]
async fn giving_up_ends_a_run_at_once_and_a_wait_of_ones_own_is_kept() -> Result<()> {
    let world = World::new().await?;
    world.consumer(60_000, 5).await?;
    let give_up =
        |_: Value, _: Cx| async { Err::<Value, _>(Failure::retry("no such order").of_kind("not_found")).give_up() };
    let later = |_: Value, cx: Cx| async move {
        if cx.attempt() == 1 {
            return Err(Failure::retry_after("busy", Duration::from_millis(1200)));
        }
        Ok(Value::Null)
    };
    let worker = world.start(|w| w.handler("work", give_up).handler("later", later));
    world.publish(Trigger { retries: 5, ..Trigger::default() }).await?;
    world.settled().await?;
    let body = world.until_event("failed").await?;
    assert_eq!((&body["retry"], &body["error"]["kind"]), (&json!(false), &json!("not_found")));
    let start = Instant::now();
    world.publish(Trigger { retries: 5, handler: "later", ..Trigger::default() }).await?;
    world.settled().await?;
    assert!(start.elapsed() >= Duration::from_millis(1200), "{:?}", start.elapsed());
    let events = world.events().await?;
    let waits: Vec<&Value> = events.iter().filter_map(|(_, _, body)| body.get("retry_after_ms")).collect();
    assert_eq!(waits, [1200]);
    worker.stop().await
}

#[tokio::test]
async fn a_handler_past_its_timeout_is_stopped_and_its_attempts_never_overlap() -> Result<()> {
    let world = World::new().await?;
    world.consumer(300, 2).await?;
    let (inside, most, calls) =
        (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    struct Leave(Arc<AtomicUsize>);
    impl Drop for Leave {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }
    let handler = {
        let (inside, most, calls) = (inside.clone(), most.clone(), calls.clone());
        move |_: Value, _: Cx| {
            let (inside, most, calls) = (inside.clone(), most.clone(), calls.clone());
            async move {
                calls.fetch_add(1, Ordering::SeqCst);
                most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                let _leave = Leave(inside);
                std::future::pending::<()>().await;
                Ok(Value::Null)
            }
        }
    };
    let worker = world.start(|w| w.handler("work", handler).concurrency(8));
    world.publish(Trigger { timeout_ms: 300, retries: 2, ..Trigger::default() }).await?;
    world.settled().await?;
    assert_eq!(calls.load(Ordering::SeqCst), 3);
    assert_eq!((most.load(Ordering::SeqCst), inside.load(Ordering::SeqCst)), (1, 0));
    let body = world.until_event("failed").await?;
    assert_eq!(body["error"], json!({ "kind": "timeout", "message": "no result within 300 ms" }));
    worker.stop().await
}

#[tokio::test]
async fn a_panic_fails_one_attempt_and_nothing_else() -> Result<()> {
    let world = World::new().await?;
    world.consumer(60_000, 0).await?;
    let panicking = |job: Value, _: Cx| async move {
        assert!(job != "boom", "it went boom");
        Ok(Value::Null)
    };
    let worker = world.start(|w| w.handler("work", panicking));
    world.publish(Trigger { payload: json!("boom"), ..Trigger::default() }).await?;
    world.publish(Trigger::default()).await?;
    world.settled().await?;
    assert_eq!(world.until_event("failed").await?["error"], json!({ "kind": "panic", "message": "it went boom" }));
    world.until_event("succeeded").await?;
    worker.stop().await
}

#[tokio::test]
async fn what_nobody_knows_is_handed_back_and_what_is_no_trigger_is_ended() -> Result<()> {
    let world = World::new().await?;
    let name = world.consumer(60_000, 20).await?;
    let worker = world.start(|w| w.handler("work", nothing));
    let junk = "ax.trigger.g.default.t60r20.some.task.x";
    world.context.publish(junk, "{}".into()).await?.await?;
    world.settled().await?;
    assert!(world.events().await?.is_empty());
    world.publish(Trigger { handler: "other", retries: 20, ..Trigger::default() }).await?;
    let body = world.until_event("released").await?;
    assert_eq!((&body["attempt"], &body["reason"]), (&json!(1), &json!("this worker has no handler other")));
    // Comes again after 5 s, for any worker.
    let kinds = || async { world.kinds().await };
    holds(Duration::from_secs(3), "it waits", vec!["released".to_owned()], kinds).await?;
    eventually(SOON, "it comes again", || async { Ok((world.kinds().await?.len() == 2).then_some(())) }).await?;
    let info = world.context.get_stream("AX_TRIGGERS").await?.consumer_info(&name).await?;
    assert_eq!(info.num_ack_pending, 1);
    worker.stop().await
}

#[tokio::test]
async fn a_large_result_goes_to_the_object_store() -> Result<()> {
    let world = World::new().await?;
    world.consumer(60_000, 0).await?;
    let large = |_: Value, _: Cx| async { Ok("x".repeat(3 << 20)) };
    let worker = world.start(|w| w.handler("work", large));
    let run = world.publish(Trigger::default()).await?;
    world.settled().await?;
    let body = world.until_event("succeeded").await?;
    assert_eq!((&body["result"]["$object"], &body["result"]["size"]), (&json!(run), &json!((3 << 20) + 2)));
    assert!(body["result"]["digest"].as_str().is_some_and(|digest| digest.starts_with("SHA-256=")), "{body}");
    let store = world.context.get_object_store("ax_results").await?;
    assert_eq!(store.info(run.to_string()).await?.size, (3 << 20) + 2);
    worker.stop().await
}

#[tokio::test]
async fn a_cancelled_run_stops_and_says_so() -> Result<()> {
    let world = World::new().await?;
    world.consumer(60_000, 3).await?;
    let waiting = |_: Value, _: Cx| async {
        std::future::pending::<()>().await;
        Ok(Value::Null)
    };
    let worker = world.start(|w| w.handler("work", waiting));
    let run = world.publish(Trigger { retries: 3, ..Trigger::default() }).await?;
    world.until_event("started").await?;
    let client = world.nats.client().await?;
    eventually(SOON, "the event cancelled", || async {
        // Told again, should the first have come before the worker listened.
        client.publish(format!("ax.control.cancel.g.{run}"), "".into()).await?;
        Ok(world.kinds().await?.contains(&"cancelled".to_owned()).then_some(()))
    })
    .await?;
    world.settled().await?;
    worker.stop().await
}

#[tokio::test]
async fn a_payload_of_another_shape_ends_the_run_without_a_retry() -> Result<()> {
    let world = World::new().await?;
    world.consumer(60_000, 3).await?;
    let picky = |amount: u32, _: Cx| async move { Ok(amount) };
    let worker = world.start(|w| w.handler("work", picky));
    world.publish(Trigger { retries: 3, payload: json!("much"), ..Trigger::default() }).await?;
    world.settled().await?;
    let body = world.until_event("failed").await?;
    assert_eq!((&body["retry"], &body["error"]["kind"]), (&json!(false), &json!("payload")));
    let message = body["error"]["message"].as_str().unwrap_or_default();
    assert!(message.contains("\"much\"") && message.contains("u32"), "{message}");
    worker.stop().await
}

/// A handler that blocks its thread cannot be stopped. Its timeout is told nevertheless, its late success is not, and
/// its place stays taken until it has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_blocks_its_thread_times_out_and_its_late_success_is_not_told() -> Result<()> {
    let world = World::new().await?;
    let name = world.consumer(500, 0).await?;
    let ended = Arc::new(AtomicUsize::new(0));
    let blocking = {
        let ended = ended.clone();
        move |_: Value, _: Cx| {
            let ended = ended.clone();
            async move {
                std::thread::sleep(Duration::from_secs(5));
                ended.fetch_add(1, Ordering::SeqCst);
                Ok("late")
            }
        }
    };
    let worker = world.start(|w| w.handler("work", blocking));
    world.publish(Trigger { timeout_ms: 500, ..Trigger::default() }).await?;
    let body = world.until_event("failed").await?;
    assert_eq!((&body["error"]["kind"], ended.load(Ordering::SeqCst)), (&json!("timeout"), 0));
    world.publish(Trigger { timeout_ms: 500, ..Trigger::default() }).await?;
    let stream = world.context.get_stream("AX_TRIGGERS").await?;
    let taken = || async { anyhow::Ok(stream.consumer_info(&name).await?.num_ack_pending) };
    eventually(SOON, "the first is answered", || async { Ok((taken().await? == 0).then_some(())) }).await?;
    eventually(SOON, "the second is taken", || async { Ok((taken().await? == 1).then_some(())) }).await?;
    assert_eq!(ended.load(Ordering::SeqCst), 1, "one at a time");
    world.settled().await?;
    let kinds = world.kinds().await?;
    assert_eq!(kinds, ["started", "failed", "started", "failed"]);
    worker.stop().await
}

#[tokio::test]
async fn a_run_past_its_start_deadline_or_of_a_later_wire_format_is_not_executed() -> Result<()> {
    let world = World::new().await?;
    world.consumer(60_000, 3).await?;
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let handler = move |_: Value, _: Cx| {
        counted.fetch_add(1, Ordering::SeqCst);
        async { Ok(()) }
    };
    let worker = world.start(|w| w.handler("work", handler));
    let publish = |name: &'static str, value: &str| {
        world.publish(Trigger { retries: 3, headers: vec![(name, value.to_owned())], ..Trigger::default() })
    };
    publish("Ax-Start-Deadline", "2026-11-30T00:00:00.000Z").await?;
    world.settled().await?;
    let body = world.until_event("failed").await?;
    assert_eq!((&body["retry"], &body["error"]["kind"]), (&json!(false), &json!("expired")));
    publish("Ax-Start-Deadline", "2999-11-30T00:00:00.000Z").await?;
    world.settled().await?;
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    publish("Ax-Version", "2").await?;
    let body = world.until_event("released").await?;
    assert!(body["reason"].as_str().is_some_and(|reason| reason.contains("version 2")), "{body}");
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    worker.stop().await
}

#[tokio::test]
async fn an_unknown_handler_is_handed_back_ten_times_and_then_failed() -> Result<()> {
    let world = World::new().await?;
    world.consumer(60_000, 20).await?;
    let worker = world.start(|w| w.handler("work", nothing));
    for (base, kind) in [("9", "released"), ("10", "failed")] {
        let headers = vec![("Ax-Attempt-Base", base.to_owned()), ("Ax-Max-Attempts", "21".to_owned())];
        world.publish(Trigger { handler: "other", retries: 20, headers, ..Trigger::default() }).await?;
        world.until_event(kind).await?;
    }
    let body = world.until_event("failed").await?;
    assert_eq!((&body["error"]["kind"], &body["retry"]), (&json!("unknown_handler"), &json!(false)));
    worker.stop().await
}

#[tokio::test]
async fn after_a_failure_another_worker_gets_the_first_chance() -> Result<()> {
    let world = World::new().await?;
    world.consumer(60_000, 3).await?;
    let broken = |_: Value, _: Cx| async { Err::<(), _>(Failure::retry_after("broken", Duration::ZERO)) };
    let bad = world.start(|w| w.handler("work", broken).worker_id("bad"));
    world.publish(Trigger { retries: 3, ..Trigger::default() }).await?;
    world.until_event("failed").await?;
    // Wherever the next attempt of this one goes, of those that follow the good one gets the second.
    let good = world.start(|w| w.handler("work", nothing).worker_id("good"));
    world.settled().await?;
    let before = world.events().await?.len();
    for _ in 0..10 {
        world.publish(Trigger { retries: 3, ..Trigger::default() }).await?;
        world.settled().await?;
    }
    let events = world.events().await?;
    let failed: Vec<_> = events[before..].iter().filter(|(kind, ..)| kind == "failed").collect();
    assert!(failed.iter().all(|(_, _, body)| body["attempt"] == 1), "{failed:?}");
    bad.stop().await?;
    good.stop().await
}

#[tokio::test]
async fn a_trigger_that_cannot_be_read_ends_its_run_and_not_only_its_message() -> Result<()> {
    let world = World::new().await?;
    world.consumer(60_000, 3).await?;
    let worker = world.start(|w| w.handler("work", nothing));
    let run = ax_shared::RunId(uuid::Uuid::now_v7());
    let mut headers = async_nats::HeaderMap::new();
    let run_text = run.to_string();
    for (name, value) in [("Ax-Version", "1"), ("Ax-Run-Id", run_text.as_str()), ("Ax-Task-Id", "some.task")] {
        headers.insert(name, value);
    }
    let profile = ax_shared::Profile::of(60_000, 3);
    let subject = format!("ax.trigger.g.default.{profile}.some.task.{run}");
    world.context.publish_with_headers(subject, headers, "{}".into()).await?.await?;
    world.settled().await?;
    let events = world.events().await?;
    let (kind, id, body) = &events[0];
    assert_eq!((events.len(), kind.as_str(), id), (1, "failed", &format!("{run}:1:failed")));
    assert_eq!((&body["retry"], &body["error"]["kind"]), (&json!(false), &json!("trigger")));
    worker.stop().await
}
