//! Workers that are killed, stopped and frozen in mid-run.

use std::time::Duration;

use anyhow::{Result, ensure};
use ax_tests::api::Api;
use ax_tests::ax::Node;
use ax_tests::world::{Database, World, task};
use ax_tests::{Deadline, Scratch, eventually, holds, lasts};
use serde_json::{Value, json};

use crate::program::{self, Options, SOON, enqueue, entered, lines, outcomes};

/// Any damage is repaired within a minute and one sweep.
const REPAIRED: Deadline = Deadline::seconds(130);
/// Longer than the ack deadline of the shortest profile, which is three seconds.
const PAST_THE_DEADLINE: Duration = Duration::from_millis(4500);

struct Place {
    world: World,
    _node: Node,
    api: Api,
    folder: Scratch,
}

impl Place {
    /// A node and a task `job` with a timeout of one second.
    async fn new(more: Value) -> Result<Self> {
        let world = World::start(Database::Sqlite).await?;
        let (node, api) = world.leader("n1").await?;
        let mut definition = task("job", json!({"handler": "work", "timeout_ms": 1000}));
        definition["retry_backoff"] = json!({"initial_ms": 100, "multiplier": 1, "max_ms": 100, "jitter_ms": 0});
        if let (Some(all), Value::Object(more)) = (definition.as_object_mut(), more) {
            all.extend(more);
        }
        api.apply(&definition).await?;
        Ok(Self { world, _node: node, api, folder: Scratch::new("gate")? })
    }

    fn start(&self, worker_id: &str, grace: Duration) -> Result<ax_tests::process::Process> {
        program::start(&self.world.nats.url(), worker_id, Options { grace, ..Options::default() })
    }

    /// A run that works until [`Place::open`].
    async fn gated(&self) -> Result<String> {
        enqueue(&self.api, "job", json!({"until": self.folder.join("open")})).await
    }

    fn open(&self) -> Result<()> {
        Ok(std::fs::write(self.folder.join("open"), "")?)
    }
}

const GRACE: Duration = Duration::from_secs(20);

#[tokio::test]
async fn a_run_whose_worker_was_killed_is_made_again_by_another_after_the_ack_deadline() -> Result<()> {
    let place = Place::new(json!({"max_retry": 1})).await?;
    let mut first = place.start("first", GRACE)?;
    let run_id = place.gated().await?;
    entered(&first, &run_id, 1).await?;
    first.kill9()?;
    let _second = place.start("second", GRACE)?;
    place.open()?;
    let run = place.api.run_reaches(&run_id, &["succeeded"], SOON).await?;
    ensure!(outcomes(&run) == ["timed_out", "succeeded"] && run["result"]["by"] == "second", "{run}");
    Ok(())
}

#[tokio::test]
async fn the_last_attempt_of_a_killed_worker_ends_the_run_as_timed_out() -> Result<()> {
    let place = Place::new(json!({})).await?;
    let mut worker = place.start("first", GRACE)?;
    let run_id = place.gated().await?;
    entered(&worker, &run_id, 1).await?;
    worker.kill9()?;
    let run = place.api.run_reaches(&run_id, &["timed_out"], REPAIRED).await?;
    ensure!(outcomes(&run) == ["timed_out"], "{run}");
    Ok(())
}

#[tokio::test]
async fn a_stopped_worker_finishes_what_runs_and_takes_nothing_more() -> Result<()> {
    let place = Place::new(json!({"timeout_ms": 20_000})).await?;
    let mut first = place.start("first", GRACE)?;
    let run_id = place.gated().await?;
    entered(&first, &run_id, 1).await?;
    let (output, api) = (first.output().clone(), place.api.clone());
    let stopped = tokio::spawn(async move { first.terminate(GRACE).await.map(|status| (status, first)) });
    // It has heard the signal when what comes next is left alone for longer than a pull is open.
    lasts(Duration::from_millis(1500)).await;
    let late = enqueue(&api, "job", json!({})).await?;
    let state = || async { Ok(api.run(&late).await?["state"].clone()) };
    eventually(SOON, "the late run is published", || async { Ok((state().await? == "triggered").then_some(())) })
        .await?;
    holds(Duration::from_secs(2), "a stopping worker takes nothing", json!("triggered"), state).await?;
    place.open()?;
    let (status, _first) = stopped.await??;
    ensure!(status.success(), "{status}");
    ensure!(output.text().contains("worker stopped"), "{}", output.text());
    let run = api.run_reaches(&run_id, &["succeeded"], SOON).await?;
    ensure!(outcomes(&run) == ["succeeded"], "{run}");
    let _second = place.start("second", GRACE)?;
    api.run_reaches(&late, &["succeeded"], SOON).await?;
    Ok(())
}

#[tokio::test]
async fn what_outlives_the_grace_is_released_and_costs_no_retry() -> Result<()> {
    let place = Place::new(json!({"timeout_ms": 20_000, "max_retry": 1})).await?;
    let mut first = place.start("first", Duration::from_millis(300))?;
    // Succeeds in the third attempt: the released one, a failure, a success.
    let payload = json!({"until": place.folder.join("open"), "from_attempt": 3});
    let run_id = enqueue(&place.api, "job", payload).await?;
    entered(&first, &run_id, 1).await?;
    ensure!(first.terminate(GRACE).await?.success());
    let second = place.start("second", GRACE)?;
    entered(&second, &run_id, 2).await?;
    place.open()?;
    let run = place.api.run_reaches(&run_id, &["succeeded", "failed", "timed_out"], SOON).await?;
    ensure!(outcomes(&run) == ["released", "failed", "succeeded"], "{run}");
    Ok(())
}

/// While it was frozen its message went to another worker. When it comes back its handler has a success at hand, and both
/// its answer and its NAK would be taken for those of the other attempt.
#[tokio::test]
async fn a_worker_frozen_past_the_deadline_says_nothing_about_an_attempt_that_another_makes_again() -> Result<()> {
    let place = Place::new(json!({"timeout_ms": 900, "max_retry": 3})).await?;
    let first = place.start("first", GRACE)?;
    let run_id = enqueue(&place.api, "job", json!({"ms": 600})).await?;
    entered(&first, &run_id, 1).await?;
    first.freeze()?;
    let second = place.start("second", GRACE)?;
    entered(&second, &run_id, 2).await?;
    // In the midst of the second attempt.
    first.thaw()?;
    let run = place.api.run_reaches(&run_id, &["succeeded", "failed", "timed_out"], SOON).await?;
    ensure!(outcomes(&run) == ["timed_out", "succeeded"] && run["result"]["by"] == "second", "{run}");
    eventually(SOON, "the first says why it keeps silent", || async {
        Ok(first.output().text().contains("nothing is told about this attempt").then_some(()))
    })
    .await?;
    let run_after = || async {
        let run = place.api.run(&run_id).await?;
        Ok((run["state"].clone(), run["attempts"].as_array().map(Vec::len)))
    };
    holds(Duration::from_secs(5), "nothing moves any more", (json!("succeeded"), Some(2)), run_after).await?;
    Ok(())
}

#[tokio::test]
async fn a_worker_frozen_for_a_moment_goes_on_as_if_nothing_had_been() -> Result<()> {
    let place = Place::new(json!({"timeout_ms": 20_000, "max_retry": 1})).await?;
    let worker = place.start("first", GRACE)?;
    let run_id = place.gated().await?;
    entered(&worker, &run_id, 1).await?;
    worker.freeze()?;
    lasts(PAST_THE_DEADLINE).await;
    worker.thaw()?;
    place.open()?;
    let run = place.api.run_reaches(&run_id, &["succeeded"], SOON).await?;
    ensure!(outcomes(&run) == ["succeeded"], "{run}");
    Ok(())
}

/// A worker that has been frozen for longer than its handler may take finds the handler's answer, but too late.
#[tokio::test]
async fn a_success_that_a_frozen_worker_finds_after_its_timeout_does_not_count() -> Result<()> {
    let place = Place::new(json!({"timeout_ms": 4_000, "max_retry": 0})).await?;
    let worker = place.start("first", GRACE)?;
    let run_id = place.gated().await?;
    entered(&worker, &run_id, 1).await?;
    worker.freeze()?;
    place.open()?;
    // Past the timeout of 4 s, before the ack deadline of 7 s.
    lasts(Duration::from_millis(4_800)).await;
    worker.thaw()?;
    let run = place.api.run_reaches(&run_id, &["succeeded", "failed", "timed_out"], SOON).await?;
    ensure!(run["state"] == "timed_out" && outcomes(&run) == ["timed_out"], "{run}");
    let error = run["attempts"][0]["error"].as_str().unwrap_or_default();
    ensure!(error.contains("no result within 4000 ms"), "the worker itself has told it: {run}");
    Ok(())
}

/// Its pull was open when it froze, so it was given a message that it sees only when another has executed it.
#[tokio::test]
async fn a_message_that_a_frozen_worker_finds_waiting_is_left_to_others() -> Result<()> {
    let place = Place::new(json!({"max_retry": 3})).await?;
    let first = place.start("first", GRACE)?;
    let warm_up = enqueue(&place.api, "job", json!({})).await?;
    place.api.run_reaches(&warm_up, &["succeeded"], SOON).await?;
    // Nobody else pulls: whatever is published now goes to its open pull, unless that has just ended.
    let stream = place.world.jetstream().await?.get_stream("AX_TRIGGERS").await?;
    let run_id = loop {
        first.freeze()?;
        let run_id = enqueue(&place.api, "job", json!({})).await?;
        place.api.run_reaches(&run_id, &["triggered"], SOON).await?;
        lasts(Duration::from_millis(1200)).await;
        if stream.consumer_info("test-default-t1r3").await?.num_ack_pending == 1 {
            break run_id;
        }
        first.thaw()?;
        place.api.run_reaches(&run_id, &["succeeded"], SOON).await?;
    };
    let second = place.start("second", GRACE)?;
    let run = place.api.run_reaches(&run_id, &["succeeded"], SOON).await?;
    ensure!(run["result"]["by"] == "second", "{run}");
    first.thaw()?;
    let after = enqueue(&place.api, "job", json!({})).await?;
    place.api.run_reaches(&after, &["succeeded"], SOON).await?;
    let twice =
        lines(&first).iter().chain(&lines(&second)).filter(|l| l.what == "entered" && l.run_id == run_id).count();
    ensure!(twice == 1, "{:?} {:?}", lines(&first), lines(&second));
    Ok(())
}
