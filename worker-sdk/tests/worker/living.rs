//! A worker's entry, and its end.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ax_tests::{eventually, holds};
use ax_worker::{CancellationToken, Context as Cx, Failure, Worker};
use serde_json::{Value, json};

use crate::world::{SOON, Trigger, World, nothing};

#[tokio::test]
async fn a_worker_is_listed_while_it_lives() -> Result<()> {
    let world = World::new().await?;
    world.consumer(60_000, 0).await?;
    let gate = CancellationToken::new();
    let handler = {
        let gate = gate.clone();
        move |_: Value, _: Cx| {
            let gate = gate.clone();
            async move {
                gate.cancelled().await;
                Ok(Value::Null)
            }
        }
    };
    let worker = world.start(|w| w.handler("work", handler).worker_id("w1").concurrency(3));
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
    let stuck = |_: Value, cx: Cx| async move {
        cx.cancelled().await;
        Err::<Value, _>(Failure::retry("stopped"))
    };
    let first = world.start(|w| w.handler("work", stuck).grace(Duration::from_millis(200)));
    let run = world.publish(Trigger { retries: 3, ..Trigger::default() }).await?;
    world.until_event("started").await?;
    let start = Instant::now();
    first.stop().await?;
    assert_eq!(world.until_event("released").await?["attempt"], 1);
    let second = world.start(|w| w.handler("work", nothing));
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

/// Handlers that block every thread of the program's runtime for longer than an entry lives: it stays, and what else the
/// worker has to do is done in time.
#[tokio::test]
async fn handlers_that_block_every_thread_stop_neither_the_heartbeat_nor_the_timeout() -> Result<()> {
    const THREADS: u32 = 2;
    let world = World::new().await?;
    world.consumer(60_000, 0).await?;
    world.consumer(1000, 0).await?;
    let url = world.nats.url();
    let stop = CancellationToken::new();
    let stopping = stop.clone();
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let opened = gate.clone();
    let program = std::thread::spawn(move || -> Result<()> {
        let blocking = move |_: Value, _: Cx| {
            let gate = opened.clone();
            async move {
                let open = gate.0.lock().unwrap_or_else(PoisonError::into_inner);
                drop(gate.1.wait_while(open, |open| !*open));
                Ok(())
            }
        };
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS as usize).enable_all().build()?;
        let worker = Worker::new(url, "g").worker_id("w").handler("work", blocking).concurrency(THREADS + 1);
        // On one of the threads that are going to be blocked, as a server's would.
        let running = runtime.spawn(worker.run_until(stopping));
        runtime.block_on(running)??;
        Ok(())
    });
    for _ in 0..THREADS {
        world.publish(Trigger::default()).await?;
    }
    let bucket = world.context.get_key_value("ax_workers").await?;
    let runs = || async {
        let entry = bucket.get("g.w").await?;
        let entry: Option<Value> = entry.map(|entry| serde_json::from_slice(&entry)).transpose()?;
        anyhow::Ok(entry.map(|entry| entry["running"].as_array().map_or(0, Vec::len)))
    };
    let all = Some(THREADS as usize);
    eventually(SOON, "both are listed as running", || async { Ok((runs().await? == all).then_some(())) }).await?;
    // A run that finds no thread times out in time.
    world.publish(Trigger { timeout_ms: 1000, ..Trigger::default() }).await?;
    let asked = Instant::now();
    assert_eq!(world.until_event("failed").await?["error"]["kind"], "timeout");
    assert!(asked.elapsed() < Duration::from_secs(6), "{:?}", asked.elapsed());
    let listed = || async { Ok(bucket.get("g.w").await?.is_some()) };
    holds(Duration::from_secs(12), "the entry stays for longer than it lives by itself", true, listed).await?;
    assert!(!world.kinds().await?.contains(&"succeeded".to_owned()), "the threads were blocked all the time");
    *gate.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
    gate.1.notify_all();
    world.settled().await?;
    stop.cancel();
    let ended = tokio::task::spawn_blocking(|| program.join());
    tokio::time::timeout(SOON, ended).await??.map_err(|_| anyhow::anyhow!("the program panicked"))?
}

#[tokio::test]
async fn a_worker_whose_future_is_dropped_hands_back_what_runs() -> Result<()> {
    let world = World::new().await?;
    world.consumer(60_000, 3).await?;
    let waiting = |_: Value, cx: Cx| async move {
        cx.cancelled().await;
        Err::<(), _>(Failure::retry("stopped"))
    };
    let worker = Worker::new(world.nats.url(), "g").worker_id("w").handler("work", waiting);
    let worker = tokio::spawn(worker.run_until(CancellationToken::new()));
    world.publish(Trigger { retries: 3, ..Trigger::default() }).await?;
    world.until_event("started").await?;
    worker.abort();
    assert_eq!(world.until_event("released").await?["attempt"], 1);
    let bucket = world.context.get_key_value("ax_workers").await?;
    eventually(SOON, "it signs off", || async { Ok(bucket.get("g.w").await?.is_none().then_some(())) }).await
}

#[tokio::test]
async fn what_is_wrong_with_a_worker_is_told_when_it_begins() -> Result<()> {
    let run = |worker: Worker| worker.run_until(CancellationToken::new());
    let told = |error: ax_worker::WorkerError| error.to_string();
    let url = "nats://127.0.0.1:1";
    let error = run(Worker::new(url, "a.b").handler("work", nothing)).await.err().context("a group")?;
    assert!(told(error).contains("executor_group"));
    let error = run(Worker::new(url, "g").handler("a b", nothing)).await.err().context("a handler")?;
    assert!(told(error).contains("handler"));
    let error = run(Worker::new(url, "g")).await.err().context("no handler")?;
    assert!(told(error).contains("no handler"));
    let error = run(Worker::new(url, "g").handler("work", nothing)).await.err().context("no server")?;
    assert_eq!(told(error), "cannot connect to NATS");
    Ok(())
}
