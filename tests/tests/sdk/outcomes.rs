//! A hundred runs of each way in which a run can end.

use anyhow::{Context, Result, bail, ensure};
use ax_tests::api::{Api, FINAL};
use ax_tests::world::{Database, World, task};
use ax_tests::{Deadline, eventually};
use futures::{StreamExt, TryStreamExt};
use serde_json::{Value, json};

use crate::program::{self, Options, outcomes};

const EACH: usize = 100;

/// A task and how each of its runs has to end.
struct Way {
    task_id: &'static str,
    definition: Value,
    state: &'static str,
    outcomes: Vec<&'static str>,
    /// What the error of the last attempt says.
    error: Option<&'static str>,
}

fn ways() -> Vec<Way> {
    let backoff = json!({"initial_ms": 50, "multiplier": 2, "max_ms": 200, "jitter_ms": 20});
    let way = |task_id, more: Value, state, outcomes: &[&'static str], error| {
        let mut definition = json!({"handler": "work", "retry_backoff": backoff});
        if let (Some(all), Value::Object(more)) = (definition.as_object_mut(), more) {
            all.extend(more);
        }
        Way { task_id, definition: task(task_id, definition), state, outcomes: outcomes.to_vec(), error }
    };
    let mut unknown = vec!["released"; 10];
    unknown.push("failed");
    vec![
        way("success", json!({"payload": {"ms": 5}}), "succeeded", &["succeeded"], None),
        way(
            "retried",
            json!({"max_retry": 3, "payload": {"from_attempt": 3}}),
            "succeeded",
            &["failed", "failed", "succeeded"],
            None,
        ),
        way(
            "exhausted",
            json!({"max_retry": 2, "payload": {"from_attempt": 99}}),
            "failed",
            &["failed"; 3],
            Some("not before attempt 99"),
        ),
        way("give_up", json!({"handler": "give_up", "max_retry": 3}), "failed", &["failed"], Some("no such order")),
        way(
            "timeout",
            json!({"handler": "hang", "max_retry": 1, "timeout_ms": 500}),
            "timed_out",
            &["timed_out"; 2],
            Some("no result within 500 ms"),
        ),
        way("panic", json!({"handler": "panic", "max_retry": 1}), "failed", &["failed"; 2], Some("it went boom")),
        way("unknown", json!({"handler": "nobody.has_it"}), "failed", &unknown, Some("no handler nobody.has_it")),
        way("unknown.retried", json!({"handler": "x", "max_retry": 20}), "failed", &unknown, Some("no handler x")),
    ]
}

#[tokio::test]
async fn a_hundred_runs_of_each_outcome_show_the_right_attempts() -> Result<()> {
    let world = World::start(Database::Postgres).await?;
    let (_node, api) = world.leader("n1").await?;
    let ways = ways();
    let definitions: Vec<&Value> = ways.iter().map(|way| &way.definition).collect();
    api.apply(&json!({ "tasks": definitions })).await?;
    let options = Options { concurrency: 48, ..Options::default() };
    let _workers =
        [program::start(&world.nats.url(), "w1", options)?, program::start(&world.nats.url(), "w2", options)?];
    for way in &ways {
        let runs: Vec<Value> = (0..EACH).map(|_| json!({"task_id": way.task_id})).collect();
        api.enqueue(&Value::Array(runs)).await?;
    }
    for way in &ways {
        check(&api, way).await.with_context(|| way.task_id)?;
    }
    let stream = world.jetstream().await?.get_stream("AX_TRIGGERS").await?;
    eventually(Deadline::seconds(30), "no message is left behind", || async {
        Ok((stream.get_info().await?.state.messages == 0).then_some(()))
    })
    .await
}

async fn check(api: &Api, way: &Way) -> Result<()> {
    let runs = eventually(Deadline::seconds(180), "all have ended", || async {
        let runs = api.runs(&format!("task_id={}", way.task_id)).await?;
        let ended = runs.iter().filter(|run| FINAL.contains(&run["state"].as_str().unwrap_or_default())).count();
        if ended == EACH {
            return Ok(Some(runs));
        }
        bail!("{ended} of {} have ended", runs.len())
    })
    .await?;
    let ids = runs.iter().filter_map(|run| run["run_id"].as_str());
    let runs: Vec<Value> = futures::stream::iter(ids).map(|id| api.run(id)).buffered(8).try_collect().await?;
    for run in &runs {
        ensure!(run["state"] == way.state && outcomes(run) == way.outcomes, "{run}");
        let attempts = run["attempts"].as_array().context("no attempts")?;
        let numbers: Vec<u64> = attempts.iter().filter_map(|attempt| attempt["attempt"].as_u64()).collect();
        ensure!(numbers == (1..=way.outcomes.len() as u64).collect::<Vec<_>>(), "{run}");
        let last = attempts.last().context("no attempt")?;
        match way.error {
            Some(error) => ensure!(last["error"].as_str().is_some_and(|told| told.contains(error)), "{run}"),
            None => ensure!(run["result"]["attempt"] == way.outcomes.len() as u64, "{run}"),
        }
    }
    Ok(())
}
