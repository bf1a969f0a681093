//! The worker against a real nats-server, with triggers published by hand.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use async_nats::jetstream::consumer::pull;
use async_nats::jetstream::stream::{Config, DiscardPolicy, RetentionPolicy};
use async_nats::jetstream::{self, AckKind, kv, object_store};
use ax_shared::{Group, Profile, RunId};
use ax_tests::nats::Nats;
use ax_tests::worker::Hands;
use ax_tests::{eventually, holds};
use ax_worker::{Builder, Failure, Job, Worker};
use futures::{StreamExt, TryStreamExt};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const SOON: Duration = Duration::from_secs(20);

/// A server with the streams and buckets of an installation, and a group `g`.
struct World {
    nats: Nats,
    context: jetstream::Context,
    consumers: Mutex<Vec<String>>,
}

struct Running {
    stop: CancellationToken,
    task: JoinHandle<Result<(), ax_worker::WorkerError>>,
}

impl Running {
    async fn stop(self) -> Result<()> {
        self.stop.cancel();
        Ok(tokio::time::timeout(SOON, self.task).await.context("the worker does not stop")???)
    }
}

/// What differs from a plain trigger.
struct Trigger {
    run_id: RunId,
    handler: &'static str,
    timeout_ms: u64,
    retries: u32,
    headers: Vec<(&'static str, String)>,
    payload: Value,
}

impl Default for Trigger {
    fn default() -> Self {
        Self {
            run_id: RunId(Uuid::now_v7()),
            handler: "work",
            timeout_ms: 60_000,
            retries: 0,
            headers: Vec::new(),
            payload: Value::Null,
        }
    }
}

impl World {
    async fn new() -> Result<Self> {
        let nats = Nats::start().await?;
        let context = nats.jetstream().await?;
        let triggers = Config {
            name: "AX_TRIGGERS".into(),
            subjects: vec!["ax.trigger.>".into()],
            retention: RetentionPolicy::WorkQueue,
            discard: DiscardPolicy::New,
            ..Config::default()
        };
        context.create_stream(triggers).await?;
        let events = Config { name: "AX_EVENTS".into(), subjects: vec!["ax.event.>".into()], ..Config::default() };
        context.create_stream(events).await?;
        for (name, seconds) in [("ax_groups", 0), ("ax_workers", 10)] {
            let max_age = Duration::from_secs(seconds);
            context.create_key_value(kv::Config { bucket: name.into(), max_age, ..Default::default() }).await?;
        }
        context.create_object_store(object_store::Config { bucket: "ax_results".into(), ..Default::default() }).await?;
        Ok(Self { nats, context, consumers: Mutex::default() })
    }

    /// Makes a consumer as the scheduler would and adds it to the group.
    async fn consumer(&self, timeout_ms: u64, retries: u32) -> Result<String> {
        let profile = Profile::of(timeout_ms, retries);
        let name = format!("g-default-{profile}");
        let config = pull::Config {
            durable_name: Some(name.clone()),
            filter_subject: format!("ax.trigger.g.default.{profile}.>"),
            ack_wait: Duration::from_secs(profile.ack_wait_s().into()),
            max_deliver: profile.max_deliver().into(),
            max_ack_pending: -1,
            ..pull::Config::default()
        };
        self.context.create_consumer_on_stream(config, "AX_TRIGGERS").await?;
        let all = {
            let mut consumers = self.consumers.lock().unwrap_or_else(PoisonError::into_inner);
            consumers.push(name.clone());
            consumers.clone()
        };
        let all: Vec<Value> = all
            .into_iter()
            .map(|name| json!({ "name": name, "queue": "default", "profile": "t60r3", "max_weight": 1.0 }))
            .collect();
        let groups = self.context.get_key_value("ax_groups").await?;
        groups.put("g", json!({ "consumers": all }).to_string().into()).await?;
        Ok(name)
    }

    async fn publish(&self, trigger: Trigger) -> Result<RunId> {
        let run_id = trigger.run_id;
        let mut headers = async_nats::HeaderMap::new();
        headers.insert("Ax-Version", "1");
        headers.insert("Ax-Timeout-Ms", trigger.timeout_ms.to_string());
        headers.insert("Ax-Max-Attempts", (trigger.retries + 1).to_string());
        headers.insert("Ax-Attempt-Base", "0");
        headers.insert("Ax-Retry-Backoff", "10,1,10,0");
        for (name, value) in trigger.headers {
            headers.insert(name, value);
        }
        let profile = Profile::of(trigger.timeout_ms, trigger.retries);
        let body = json!({
            "run_id": run_id, "task_id": "some.task", "handler": trigger.handler, "kind": "manual",
            "trigger_time": "2026-11-30T00:00:00.000Z", "payload": trigger.payload, "upstream": {}, "attempt_base": 0,
        });
        let subject = format!("ax.trigger.g.default.{profile}.some.task.{run_id}");
        self.context.publish_with_headers(subject, headers, body.to_string().into()).await?.await?;
        Ok(run_id)
    }

    async fn start(&self, with: impl FnOnce(Builder) -> Result<Builder>) -> Result<Running> {
        let client = ax_worker::connect(&self.nats.url()).await?;
        let builder = with(Worker::builder(client, Group::new("g")?))?;
        let stop = CancellationToken::new();
        let task = tokio::spawn(builder.run(stop.clone()));
        Ok(Running { stop, task })
    }

    /// Every event so far: (kind, message id, body).
    async fn events(&self) -> Result<Vec<(String, String, Value)>> {
        let stream = self.context.get_stream("AX_EVENTS").await?;
        let count = stream.cached_info().state.last_sequence;
        let mut events = Vec::new();
        for seq in 1..=count {
            let message = stream.get_raw_message(seq).await?;
            let kind = message.subject.split('.').nth(2).context("no kind")?.to_owned();
            let id = message.headers.get("Nats-Msg-Id").map(ToString::to_string).unwrap_or_default();
            events.push((kind, id, serde_json::from_slice(&message.payload)?));
        }
        Ok(events)
    }

    async fn kinds(&self) -> Result<Vec<String>> {
        Ok(self.events().await?.into_iter().map(|(kind, ..)| kind).collect())
    }

    async fn messages(&self) -> Result<u64> {
        Ok(self.context.get_stream("AX_TRIGGERS").await?.cached_info().state.messages)
    }

    async fn settled(&self) -> Result<()> {
        eventually(SOON, "every trigger is settled", || async { Ok((self.messages().await? == 0).then_some(())) }).await
    }

    async fn until_event(&self, kind: &str) -> Result<Value> {
        eventually(SOON, &format!("the event {kind}"), || async {
            Ok(self.events().await?.into_iter().find(|(there, ..)| there == kind).map(|(.., body)| body))
        })
        .await
    }
}

async fn nothing(_: Job) -> Result<Value, Failure> {
    Ok(Value::Null)
}

#[tokio::test]
async fn a_run_is_executed_told_and_acked() -> Result<()> {
    let world = World::new().await?;
    world.consumer(60_000, 3).await?;
    let handler = |job: Job| async move {
        assert_eq!((job.task_id.as_str(), job.attempt, job.max_attempts), ("some.task", 1, 4));
        assert_eq!(job.trigger_time.to_string(), "2026-11-30T00:00:00.000Z");
        let n: std::collections::BTreeMap<String, u64> = job.parse()?;
        Ok(json!({ "twice": n["n"] * 2 }))
    };
    let worker = world.start(|b| Ok(b.handler("work", handler)?.worker_id("w.1"))).await?;
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
    let handler = |job: Job| async move {
        let number: u32 = format!("not a number {}", job.attempt).parse()?;
        Ok(number)
    };
    let worker = world.start(|b| Ok(b.handler("work", handler)?)).await?;
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
    let give_up = |_: Job| async { Err::<Value, _>(Failure::give_up("no such order").of_kind("not_found")) };
    let later = |job: Job| async move {
        if job.attempt == 1 {
            return Err(Failure::retry_after("busy", Duration::from_millis(1200)));
        }
        Ok(Value::Null)
    };
    let worker = world.start(|b| Ok(b.handler("work", give_up)?.handler("later", later)?)).await?;
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
        move |_: Job| {
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
    let worker = world.start(|b| Ok(b.handler("work", handler)?.concurrency(8))).await?;
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
    let panicking = |job: Job| async move {
        assert!(job.payload != "boom", "it went boom");
        Ok(Value::Null)
    };
    let worker = world.start(|b| Ok(b.handler("work", panicking)?)).await?;
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
    let worker = world.start(|b| Ok(b.handler("work", nothing)?)).await?;
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
    let handler = move |_: Job| {
        counted.fetch_add(1, Ordering::SeqCst);
        async { Ok(json!("second")) }
    };
    let worker = world.start(|b| Ok(b.handler("work", handler)?)).await?;
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
async fn no_more_is_taken_than_there_is_room_for() -> Result<()> {
    let world = World::new().await?;
    let name = world.consumer(60_000, 0).await?;
    for _ in 0..6 {
        world.publish(Trigger::default()).await?;
    }
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let handler = {
        let gate = gate.clone();
        move |_: Job| {
            let gate = gate.clone();
            async move {
                gate.acquire().await?.forget();
                Ok(Value::Null)
            }
        }
    };
    let worker = world.start(|b| Ok(b.handler("work", handler)?.concurrency(2))).await?;
    let stream = world.context.get_stream("AX_TRIGGERS").await?;
    let taken = || async { Ok(stream.consumer_info(&name).await?.num_ack_pending) };
    eventually(SOON, "two are taken", || async { Ok((taken().await? == 2).then_some(())) }).await?;
    holds(Duration::from_millis(1500), "the others stay", 2, taken).await?;
    gate.add_permits(6);
    world.settled().await?;
    worker.stop().await
}

#[tokio::test]
async fn one_slot_serves_all_consumers_in_turn() -> Result<()> {
    let world = World::new().await?;
    let order = Arc::new(Mutex::new(Vec::new()));
    for retries in 0..3 {
        world.consumer(60_000, retries).await?;
    }
    for _ in 0..20 {
        world.publish(Trigger { retries: 0, ..Trigger::default() }).await?;
    }
    for retries in [1, 2] {
        world.publish(Trigger { retries, ..Trigger::default() }).await?;
    }
    let handler = {
        let order = order.clone();
        move |job: Job| {
            order.lock().unwrap_or_else(PoisonError::into_inner).push(job.max_attempts);
            async { Ok(Value::Null) }
        }
    };
    let worker = world.start(|b| Ok(b.handler("work", handler)?)).await?;
    world.settled().await?;
    let order = order.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let place = |attempts| order.iter().position(|there| *there == attempts);
    assert!(place(2) < Some(8) && place(3) < Some(8), "{order:?}");
    // An idle worker with one slot still looks at each of them soon.
    let start = Instant::now();
    for retries in [2, 0, 1] {
        world.publish(Trigger { retries, ..Trigger::default() }).await?;
        world.settled().await?;
    }
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    worker.stop().await
}

#[tokio::test]
async fn consumers_that_appear_later_are_pulled_soon() -> Result<()> {
    let world = World::new().await?;
    let worker = world.start(|b| Ok(b.handler("work", nothing)?)).await?;
    world.consumer(60_000, 0).await?;
    world.publish(Trigger::default()).await?;
    world.settled().await?;
    world.consumer(60_000, 1).await?;
    let start = Instant::now();
    world.publish(Trigger { retries: 1, ..Trigger::default() }).await?;
    world.settled().await?;
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    worker.stop().await
}

#[tokio::test]
async fn a_worker_is_listed_while_it_lives() -> Result<()> {
    let world = World::new().await?;
    world.consumer(60_000, 0).await?;
    let gate = CancellationToken::new();
    let handler = {
        let gate = gate.clone();
        move |_: Job| {
            let gate = gate.clone();
            async move {
                gate.cancelled().await;
                Ok(Value::Null)
            }
        }
    };
    let worker = world.start(|b| Ok(b.handler("work", handler)?.worker_id("w1").concurrency(3))).await?;
    let run = world.publish(Trigger::default()).await?;
    let bucket = world.context.get_key_value("ax_workers").await?;
    let entry = eventually(SOON, "the run is listed", || async {
        let Some(entry) = bucket.get("g.w1").await? else { return Ok(None) };
        let entry: Value = serde_json::from_slice(&entry)?;
        Ok((entry["running"] == json!([run])).then_some(entry))
    })
    .await?;
    assert_eq!((&entry["capacity"], &entry["pid"]), (&json!(3.0), &json!(std::process::id())));
    gate.cancel();
    worker.stop().await?;
    assert!(bucket.get("g.w1").await?.is_none(), "it has signed off");
    assert_eq!(world.messages().await?, 0, "what ran was finished before");
    Ok(())
}

#[tokio::test]
async fn what_outlives_the_grace_is_handed_back_and_goes_to_another_worker_at_once() -> Result<()> {
    let world = World::new().await?;
    world.consumer(60_000, 3).await?;
    let stuck = |job: Job| async move {
        job.cancelled.cancelled().await;
        Err::<Value, _>(Failure::retry("stopped"))
    };
    let first = world.start(|b| Ok(b.handler("work", stuck)?.grace(Duration::from_millis(200)))).await?;
    let run = world.publish(Trigger { retries: 3, ..Trigger::default() }).await?;
    world.until_event("started").await?;
    let start = Instant::now();
    first.stop().await?;
    assert_eq!(world.until_event("released").await?["attempt"], 1);
    let second = world.start(|b| Ok(b.handler("work", nothing)?)).await?;
    world.settled().await?;
    assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
    let ids: Vec<String> = world.events().await?.into_iter().map(|(_, id, _)| id).collect();
    assert_eq!(
        ids,
        [
            format!("{run}:1:started"),
            format!("{run}:1:released"),
            format!("{run}:2:started"),
            format!("{run}:2:succeeded")
        ]
    );
    second.stop().await
}

#[tokio::test]
async fn an_outcome_survives_a_restart_of_the_server() -> Result<()> {
    let mut world = World::new().await?;
    world.consumer(60_000, 3).await?;
    let (calls, gate) = (Arc::new(AtomicUsize::new(0)), CancellationToken::new());
    let handler = {
        let (calls, gate) = (calls.clone(), gate.clone());
        move |_: Job| {
            calls.fetch_add(1, Ordering::SeqCst);
            let gate = gate.clone();
            async move {
                gate.cancelled().await;
                Ok(json!("done"))
            }
        }
    };
    let worker = world.start(|b| Ok(b.handler("work", handler)?)).await?;
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

#[tokio::test]
async fn a_large_result_goes_to_the_object_store() -> Result<()> {
    let world = World::new().await?;
    world.consumer(60_000, 0).await?;
    let large = |_: Job| async { Ok("x".repeat(3 << 20)) };
    let worker = world.start(|b| Ok(b.handler("work", large)?)).await?;
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
    let waiting = |_: Job| async {
        std::future::pending::<()>().await;
        Ok(Value::Null)
    };
    let worker = world.start(|b| Ok(b.handler("work", waiting)?)).await?;
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
async fn many_short_runs_are_executed_exactly_once_each() -> Result<()> {
    const COUNT: usize = 2000;
    let world = World::new().await?;
    world.consumer(60_000, 0).await?;
    world.consumer(60_000, 1).await?;
    let runs: Vec<RunId> = futures::stream::iter(0..COUNT)
        .map(|n| world.publish(Trigger { retries: (n % 2) as u32, ..Trigger::default() }))
        .buffer_unordered(64)
        .try_collect()
        .await?;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let seen = seen.clone();
        move |job: Job| {
            seen.lock().unwrap_or_else(PoisonError::into_inner).push(job.run_id);
            async { Ok(Value::Null) }
        }
    };
    let worker = world.start(|b| Ok(b.handler("work", handler)?.concurrency(64))).await?;
    world.settled().await?;
    worker.stop().await?;
    let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let mut wanted = runs;
    seen.sort();
    wanted.sort();
    assert_eq!(seen, wanted);
    Ok(())
}
