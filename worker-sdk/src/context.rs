//! What a handler knows about the attempt that it makes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ax_shared::{Group, Handler, RunAddress, RunId, TaskId, Timestamp};
use bytes::Bytes;
use futures::future::BoxFuture;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::clock;
use crate::{Failure, GiveUp};

/// Log lines and progress that wait to be told; beyond that they are dropped and counted.
pub(crate) const ASIDE: usize = 1024;
/// Longest text of a log line, in bytes.
const MAX_LINE_BYTES: usize = 64 * 1024;
/// The stream named by lines of [`Context::log`].
const LOG_STREAM: &str = "log";

/// What a handler tells beside its outcome.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Aside {
    Progress { percent: f64, message: Option<String> },
    Log(LogLine),
}

/// A line of a run's log.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct LogLine {
    /// When it was written.
    pub at: Timestamp,
    /// Where it comes from: `log` for [`Context::log`].
    pub stream: String,
    /// The line.
    pub text: String,
}

/// Fetches an object of the results' store by name.
pub(crate) type Fetch = Arc<dyn Fn(String) -> BoxFuture<'static, Result<Bytes, String>> + Send + Sync>;

/// One attempt of a run, as its trigger says.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub(crate) run: RunAddress,
    pub(crate) handler: Handler,
    pub(crate) kind: String,
    pub(crate) trigger_time: Timestamp,
    pub(crate) attempt: u32,
    pub(crate) max_attempts: u32,
    pub(crate) timeout: Duration,
    pub(crate) upstream: BTreeMap<String, Box<RawValue>>,
}

/// What the contexts of one attempt share.
pub(crate) struct Attempt {
    pub(crate) facts: Facts,
    pub(crate) deadline: Instant,
    pub(crate) cancelled: CancellationToken,
    aside: mpsc::Sender<Aside>,
    pub(crate) dropped: AtomicU64,
    fetch: Fetch,
}

impl Attempt {
    /// An attempt that begins now, and the other end of what it tells aside.
    pub(crate) fn begin(facts: Facts, fetch: Fetch) -> (Arc<Self>, mpsc::Receiver<Aside>) {
        let (aside, told) = mpsc::channel(ASIDE);
        let deadline = Instant::now() + facts.timeout;
        let (cancelled, dropped) = (CancellationToken::new(), AtomicU64::new(0));
        (Arc::new(Self { facts, deadline, cancelled, aside, dropped, fetch }), told)
    }

    fn tell(&self, aside: Aside) {
        if let Err(mpsc::error::TrySendError::Full(_)) = self.aside.try_send(aside) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// What a handler knows about the attempt that it makes, and how it tells about it. Cheap to clone.
pub struct Context<S = ()> {
    attempt: Arc<Attempt>,
    state: Arc<S>,
}

impl<S> Clone for Context<S> {
    fn clone(&self) -> Self {
        Self { attempt: self.attempt.clone(), state: self.state.clone() }
    }
}

impl<S> std::fmt::Debug for Context<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("facts", &self.attempt.facts).finish_non_exhaustive()
    }
}

impl<S> Context<S> {
    pub(crate) fn new(attempt: Arc<Attempt>, state: Arc<S>) -> Self {
        Self { attempt, state }
    }

    fn facts(&self) -> &Facts {
        &self.attempt.facts
    }

    /// What the worker was given with [`Worker::state`](crate::Worker::state).
    #[must_use]
    pub fn state(&self) -> &S {
        &self.state
    }

    /// The run, the same over all its attempts.
    #[must_use]
    pub fn run_id(&self) -> RunId {
        self.facts().run.run_id
    }

    /// The key under which to remember what this run has done: a run may be delivered again, under the same key. It is
    /// the run's id as text.
    #[must_use]
    pub fn idempotency_key(&self) -> String {
        self.run_id().to_string()
    }

    /// The task.
    #[must_use]
    pub fn task_id(&self) -> &TaskId {
        &self.facts().run.task_id
    }

    /// The executor group.
    #[must_use]
    pub fn group(&self) -> &Group {
        &self.facts().run.group
    }

    /// The name under which the handler was found.
    #[must_use]
    pub fn handler(&self) -> &str {
        self.facts().handler.as_str()
    }

    /// Why the run exists: `cron`, `every`, `delay`, `manual`, `enqueue`, `upstream`, `catch_up` or `backfill`; later
    /// schedulers may know more.
    #[must_use]
    pub fn kind(&self) -> &str {
        &self.facts().kind
    }

    /// The instant for which the run is scheduled, not the one at which it was delivered.
    #[must_use]
    pub fn trigger_time(&self) -> Timestamp {
        self.facts().trigger_time
    }

    /// Number of this attempt, from 1. Attempts that were handed back have a number too.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.facts().attempt
    }

    /// Number of the last attempt that may be made, as it was when the trigger was published.
    #[must_use]
    pub fn max_attempts(&self) -> u32 {
        self.facts().max_attempts
    }

    /// What one attempt may take.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.facts().timeout
    }

    /// When this attempt times out.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        self.attempt.deadline
    }

    /// Time left until the deadline; zero when it has passed.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.attempt.deadline.saturating_duration_since(Instant::now())
    }

    /// Reads the result of an upstream task, from the object store if it is a large one. The result of an upstream
    /// that was skipped is null.
    ///
    /// # Errors
    /// A failure that ends the run when the task is no upstream of this one or its result has another shape; one that
    /// is tried again when the object store does not answer.
    pub async fn upstream<T: DeserializeOwned>(&self, task_id: &str) -> Result<T, Failure> {
        let Some(result) = self.facts().upstream.get(task_id) else {
            return Err(Failure::give_up(format!("{task_id} is not among the upstream tasks")));
        };
        let shape =
            |error: serde_json::Error| Failure::give_up(format!("the result of {task_id} is not as expected: {error}"));
        match reference(result) {
            None => serde_json::from_str(result.get()).map_err(shape),
            Some(object) => {
                let bytes = (self.attempt.fetch)(object).await;
                let bytes = bytes.map_err(|why| Failure::retry(format!("load the result of {task_id}: {why}")))?;
                serde_json::from_slice(&bytes).map_err(shape)
            }
        }
    }

    /// The tasks whose results [`upstream`](Self::upstream) can read.
    pub fn upstream_tasks(&self) -> impl Iterator<Item = &str> {
        self.facts().upstream.keys().map(String::as_str)
    }

    /// Whether the attempt has to stop: it has timed out, was cancelled, or the worker stops and its grace is over. A
    /// second later the handler is dropped at its next await. Code that blocks its thread cannot be dropped: it has to
    /// ask this now and then.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.attempt.cancelled.is_cancelled()
    }

    /// Returns when the attempt has to stop.
    pub async fn cancelled(&self) {
        self.attempt.cancelled.cancelled().await;
    }

    /// The same as a token, for those who want one.
    #[must_use]
    pub fn cancellation(&self) -> &CancellationToken {
        &self.attempt.cancelled
    }

    /// Tells how far the run is, `percent` from 0 to 100, with a text for people or an empty one. Never waits and never
    /// fails: told often, the newest is sent twice a second.
    pub fn progress(&self, percent: f64, message: impl Into<String>) {
        let message = Some(message.into()).filter(|message| !message.is_empty());
        let percent = if percent.is_finite() { percent.clamp(0.0, 100.0) } else { 0.0 };
        self.attempt.tell(Aside::Progress { percent, message });
    }

    /// Writes a line to the run's log. Never waits and never fails: lines that come faster than NATS takes them are
    /// dropped and counted in a line of their own. What is longer than 64 KiB is cut.
    pub fn log(&self, text: impl Into<String>) {
        let mut text = text.into();
        if text.len() > MAX_LINE_BYTES {
            text.truncate(text.floor_char_boundary(MAX_LINE_BYTES));
            text.push('…');
        }
        self.attempt.tell(Aside::Log(line(text)));
    }
}

/// A line of [`Context::log`] written now.
pub(crate) fn line(text: String) -> LogLine {
    LogLine { at: clock::wall(), stream: LOG_STREAM.into(), text }
}

/// The name of the object that a result stands for, if it is a reference: `{"$object": name, "size", "digest"}`.
fn reference(result: &RawValue) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Reference {
        #[serde(rename = "$object")]
        object: String,
        #[serde(rename = "size")]
        _size: u64,
    }
    // Most results are no reference: look before parsing.
    if !result.get().contains("\"$object\"") {
        return None;
    }
    serde_json::from_str::<Reference>(result.get()).ok().map(|found| found.object)
}

/// Reads a payload as the handler's own type.
pub(crate) fn read_payload<T: DeserializeOwned>(payload: &RawValue) -> Result<T, Failure> {
    serde_json::from_str(payload.get())
        .map_err(|error| Failure::retry(format!("the payload is not as expected: {error}")).of_kind("payload"))
        .give_up()
}
