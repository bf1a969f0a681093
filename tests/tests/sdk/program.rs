//! The test's own SDK worker as a process, and what it writes.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use ax_tests::api::Api;
use ax_tests::process::Process;
use ax_tests::{Deadline, eventually};
use serde_json::{Value, json};

pub(crate) const SOON: Deadline = Deadline::seconds(30);

/// How a worker is started.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Options {
    pub(crate) concurrency: u32,
    pub(crate) grace: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self { concurrency: 8, grace: Duration::from_secs(20) }
    }
}

/// Starts a worker of the group `test`.
pub(crate) fn start(nats_url: &str, worker_id: &str, options: Options) -> Result<Process> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sdk-worker"));
    command.args(["test", worker_id]).env("NATS_URL", nats_url).env("RUST_BACKTRACE", "0");
    command.env("CONCURRENCY", options.concurrency.to_string());
    command.env("GRACE_MS", options.grace.as_millis().to_string());
    Process::spawn(format!("sdk worker {worker_id}"), &mut command)
}

/// An execution that began or ended, as the worker wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Line {
    /// Milliseconds since 1970.
    pub(crate) at: i64,
    pub(crate) what: String,
    pub(crate) run_id: String,
    pub(crate) attempt: u64,
}

/// What a worker has written about its executions.
pub(crate) fn lines(worker: &Process) -> Vec<Line> {
    let read = |line: &String| {
        let mut words = line.split(' ');
        let at = words.next()?.parse().ok()?;
        let what = words.next().filter(|what| ["entered", "left"].contains(what))?.to_owned();
        Some(Line { at, what, run_id: words.next()?.to_owned(), attempt: words.next()?.parse().ok()? })
    };
    worker.output().lines().iter().filter_map(read).collect()
}

/// Waits until a worker has begun an attempt.
pub(crate) async fn entered(worker: &Process, run_id: &str, attempt: u64) -> Result<()> {
    let what = format!("attempt {attempt} of {run_id} has begun");
    eventually(SOON, &what, || async {
        let found = lines(worker).iter().any(|line| line.run_id == run_id && line.attempt == attempt);
        Ok(found.then_some(()))
    })
    .await
}

/// Enqueues one run.
pub(crate) async fn enqueue(api: &Api, task_id: &str, payload: Value) -> Result<String> {
    let answer = api.enqueue(&json!([{"task_id": task_id, "payload": payload}])).await?;
    Ok(answer["runs"][0]["run_id"].as_str().context("no run_id")?.to_owned())
}

/// The outcomes of a run's attempts, in order.
pub(crate) fn outcomes(run: &Value) -> Vec<&str> {
    run["attempts"].as_array().into_iter().flatten().map(|attempt| attempt["outcome"].as_str().unwrap_or("")).collect()
}
