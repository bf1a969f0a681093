//! Several consumers, one worker, and its room.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use ax_shared::RunId;
use ax_tests::{eventually, holds, lasts};
use ax_worker::{Context as Cx, Failure};
use futures::{StreamExt, TryStreamExt};
use serde_json::Value;

use crate::between::Between;
use crate::world::{SOON, Trigger, World, nothing};

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
        move |_: Value, _: Cx| {
            let gate = gate.clone();
            async move {
                gate.acquire().await?.forget();
                Ok(Value::Null)
            }
        }
    };
    let worker = world.start(|w| w.handler("work", handler).concurrency(2));
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
        move |_: Value, cx: Cx| {
            order.lock().unwrap_or_else(PoisonError::into_inner).push(cx.max_attempts());
            async { Ok(Value::Null) }
        }
    };
    let worker = world.start(|w| w.handler("work", handler));
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
    let worker = world.start(|w| w.handler("work", nothing));
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
        move |_: Value, cx: Cx| {
            seen.lock().unwrap_or_else(PoisonError::into_inner).push(cx.run_id());
            async { Ok(Value::Null) }
        }
    };
    let worker = world.start(|w| w.handler("work", handler).concurrency(64));
    world.settled().await?;
    worker.stop().await?;
    let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let mut wanted = runs;
    seen.sort();
    wanted.sort();
    assert_eq!(seen, wanted);
    Ok(())
}

#[tokio::test]
async fn a_consumer_is_pulled_only_when_its_heaviest_run_fits() -> Result<()> {
    let world = World::new().await?;
    let light = world.consumer(60_000, 0).await?;
    let heavy = world.consumer_with(60_000, 1, 3.0, None).await?;
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let handler = {
        let gate = gate.clone();
        move |_: Value, _: Cx| {
            let gate = gate.clone();
            async move {
                gate.acquire().await?.forget();
                Ok(Value::Null)
            }
        }
    };
    let stream = world.context.get_stream("AX_TRIGGERS").await?;
    let taken = || async {
        let of = async |name: &str| anyhow::Ok(stream.consumer_info(name).await?.num_ack_pending);
        Ok((of(&light).await?, of(&heavy).await?))
    };
    for _ in 0..2 {
        let headers = vec![("Ax-Weight", "3".to_owned())];
        world.publish(Trigger { retries: 1, headers, ..Trigger::default() }).await?;
    }
    let worker = world.start(|w| w.handler("work", handler).concurrency(4));
    eventually(SOON, "one heavy run is taken", || async { Ok((taken().await? == (0, 1)).then_some(())) }).await?;
    for _ in 0..3 {
        world.publish(Trigger::default()).await?;
    }
    eventually(SOON, "a light one fits beside it", || async { Ok((taken().await? == (1, 1)).then_some(())) }).await?;
    holds(Duration::from_millis(1500), "no more than that", (1, 1), taken).await?;
    gate.add_permits(5);
    world.settled().await?;
    worker.stop().await
}

/// Two workers with little room and three consumers: nobody's messages wait for long.
#[tokio::test]
async fn runs_of_a_rare_consumer_do_not_wait_behind_those_of_a_busy_one() -> Result<()> {
    let world = World::new().await?;
    for retries in 0..3 {
        world.consumer(60_000, retries).await?;
    }
    let seen = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let seen = seen.clone();
        move |_: Value, cx: Cx| {
            let seen = seen.clone();
            async move {
                tokio::time::sleep(Duration::from_millis(20)).await;
                seen.lock().unwrap_or_else(PoisonError::into_inner).push(cx.max_attempts());
                Ok::<_, Failure>(())
            }
        }
    };
    for _ in 0..400 {
        world.publish(Trigger::default()).await?;
    }
    let workers: Vec<_> = (0..2).map(|_| world.start(|w| w.handler("work", handler.clone()).concurrency(2))).collect();
    eventually(SOON, "they are at work", || async {
        Ok((seen.lock().unwrap_or_else(PoisonError::into_inner).len() >= 10).then_some(()))
    })
    .await?;
    for retries in [1, 2] {
        world.publish(Trigger { retries, ..Trigger::default() }).await?;
    }
    world.settled().await?;
    let seen = seen.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let place = |attempts| seen.iter().position(|there| *there == attempts);
    assert!(seen.len() == 402 && place(2) < Some(300) && place(3) < Some(300), "{seen:?}");
    for worker in workers {
        worker.stop().await?;
    }
    Ok(())
}

/// Pulls that are asked for without a connection would leave when it is back, for nobody who listens: what they bring
/// would be lost until its ack deadline.
#[tokio::test]
async fn what_is_delivered_after_a_disconnection_goes_to_nobody_who_has_gone() -> Result<()> {
    let world = World::new().await?;
    world.consumer(1000, 5).await?;
    let between = Between::to(&world.nats.url()).await?;
    let worker = World::start_at(between.url(), |w| w.handler("work", nothing).concurrency(4));
    world.publish(Trigger { retries: 5, timeout_ms: 1000, ..Trigger::default() }).await?;
    world.settled().await?;
    between.cut();
    // Long enough for several pulls to be given up.
    lasts(Duration::from_secs(12)).await;
    for _ in 0..10 {
        world.publish(Trigger { retries: 5, timeout_ms: 1000, ..Trigger::default() }).await?;
    }
    between.mend();
    world.settled().await?;
    let succeeded: Vec<_> = world.events().await?.into_iter().filter(|(kind, ..)| kind == "succeeded").collect();
    assert!(succeeded.len() == 11 && succeeded.iter().all(|(.., body)| body["attempt"] == 1), "{succeeded:?}");
    worker.stop().await
}
