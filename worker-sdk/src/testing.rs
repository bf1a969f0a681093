//! Runs a handler once without NATS, for tests of handlers.
//!
//! ```
//! use ax_worker::testing::{Answer, Run};
//! use ax_worker::{Context, Failure};
//!
//! async fn charge(amount: u32, cx: Context<&'static str>) -> Result<String, Failure> {
//!     if amount == 0 {
//!         return Err(Failure::give_up("nothing to charge"));
//!     }
//!     cx.log("charging");
//!     cx.progress(50.0, "half");
//!     Ok(format!("{amount} {}", cx.state()))
//! }
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! let done = Run::with_state("euro").payload(5).attempt(2, 4).execute(charge).await;
//! assert_eq!(done.result::<String>().unwrap(), "5 euro");
//! assert_eq!(done.lines[0].text, "charging");
//! assert_eq!(done.kinds(), ["started", "progress", "succeeded"]);
//!
//! let done = Run::with_state("euro").payload(0).execute(charge).await;
//! assert_eq!(done.failure().unwrap().message(), "nothing to charge");
//! assert_eq!(done.answer, Answer::Term); // not again
//! # });
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ax_shared::definition::RetryBackoff;
use ax_shared::wire::{EventBody, WIRE_VERSION};
use ax_shared::{Group, Handler, RunAddress, RunId, TaskId, Timestamp};
use futures::FutureExt;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::value::to_raw_value;

use crate::clock;
use crate::context::{Aside, Attempt, Facts, Fetch};
use crate::handler::erase;
use crate::runtime::{Ended, Outcome, Span, Stops, Trigger, make, started};
use crate::trace::Parent;
use crate::{CancellationToken, Context, Failure, LogLine};

const WORKER_ID: &str = "testing";

/// One attempt to make, as a trigger would describe it. By default: the first and only attempt of a manual run of the
/// task `task` in the group `testing`, with the payload null, and a minute for it.
#[derive(Debug)]
pub struct Run<S = ()> {
    facts: Facts,
    payload: Value,
    backoff: RetryBackoff,
    state: Arc<S>,
    stops: Stops,
}

/// How the message would have been answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Acknowledged: done.
    Ack,
    /// To be delivered again after this time.
    Again(Duration),
    /// Not to be delivered again.
    Term,
}

/// An event as it would have been published.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// `started`, `progress`, `succeeded`, `failed`, `released` or `cancelled`.
    pub kind: String,
    /// The body.
    pub body: Value,
}

/// What came of an attempt.
#[derive(Debug)]
pub struct Done {
    /// All events, in order; the last one is the outcome.
    pub events: Vec<Event>,
    /// The run's log.
    pub lines: Vec<LogLine>,
    /// How the message would have been answered.
    pub answer: Answer,
}

impl Run {
    /// An attempt of a handler without state.
    #[must_use]
    pub fn new() -> Self {
        Self::with_state(())
    }
}

impl Default for Run {
    fn default() -> Self {
        Self::new()
    }
}

impl<S: Send + Sync + 'static> Run<S> {
    /// An attempt of a handler with a state.
    ///
    /// # Panics
    /// Never: the names it makes up are valid.
    pub fn with_state(state: S) -> Self {
        let run = RunAddress {
            group: Group::new("testing").expect("a valid name"),
            task_id: TaskId::new("task").expect("a valid name"),
            run_id: RunId(uuid::Uuid::now_v7()),
        };
        let facts = Facts {
            handler: Handler::of_task(&run.task_id),
            run,
            kind: "manual".into(),
            trigger_time: clock::wall(),
            attempt: 1,
            max_attempts: 1,
            timeout: Duration::from_secs(60),
            upstream: BTreeMap::new(),
        };
        Self {
            facts,
            payload: Value::Null,
            backoff: RetryBackoff { jitter_ms: 0, ..RetryBackoff::default() },
            state: Arc::new(state),
            stops: Stops::default(),
        }
    }

    /// The payload.
    ///
    /// # Panics
    /// When it cannot be written as JSON.
    #[must_use]
    pub fn payload(mut self, payload: impl Serialize) -> Self {
        self.payload = serde_json::to_value(payload).expect("the payload is JSON");
        self
    }

    /// Number of the attempt, from 1, and of the last one that may be made.
    #[must_use]
    pub fn attempt(mut self, attempt: u32, of: u32) -> Self {
        (self.facts.attempt, self.facts.max_attempts) = (attempt, of);
        self
    }

    /// What the attempt may take.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.facts.timeout = timeout;
        self
    }

    /// The run's id.
    #[must_use]
    pub fn run_id(mut self, run_id: RunId) -> Self {
        self.facts.run.run_id = run_id;
        self
    }

    /// The task.
    ///
    /// # Panics
    /// When no task can have this id.
    #[must_use]
    pub fn task_id(mut self, task_id: &str) -> Self {
        self.facts.run.task_id = TaskId::new(task_id).expect("a valid task id");
        self
    }

    /// Why the run exists, such as `cron`.
    #[must_use]
    pub fn kind(mut self, kind: &str) -> Self {
        kind.clone_into(&mut self.facts.kind);
        self
    }

    /// The instant for which the run is scheduled.
    #[must_use]
    pub fn trigger_time(mut self, at: Timestamp) -> Self {
        self.facts.trigger_time = at;
        self
    }

    /// The result of an upstream task.
    ///
    /// # Panics
    /// When it cannot be written as JSON.
    #[must_use]
    pub fn upstream(mut self, task_id: &str, result: impl Serialize) -> Self {
        let result = to_raw_value(&result).expect("the result is JSON");
        self.facts.upstream.insert(task_id.to_owned(), result);
        self
    }

    /// Cancels the run when `token` is, as an operator would.
    #[must_use]
    pub fn cancelled_by(mut self, token: CancellationToken) -> Self {
        self.stops.cancel = token;
        self
    }

    /// Stops the worker, its grace being over, when `token` is cancelled.
    #[must_use]
    pub fn released_by(mut self, token: CancellationToken) -> Self {
        self.stops.release = token;
        self
    }

    /// Makes the attempt, in the way of a worker: panics and timeouts included.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub async fn execute<T, F, R, O>(self, handler: F) -> Done
    where
        T: DeserializeOwned + Send + 'static,
        F: Fn(T, Context<S>) -> R + Send + Sync + 'static,
        R: Future<Output = Result<O, Failure>> + Send + 'static,
        O: Serialize,
    {
        let trigger = Trigger {
            facts: self.facts,
            payload: to_raw_value(&self.payload).expect("a JSON value is JSON"),
            backoff: self.backoff,
            weight: 1.0,
            epoch: 0,
            republished: false,
            version: WIRE_VERSION,
            start_deadline: None,
            parent: Parent::default(),
        };
        let facts = trigger.facts.clone();
        let missing: Fetch = Arc::new(|name| async move { Err(format!("no object {name}")) }.boxed());
        let (attempt, mut aside) = Attempt::begin(facts.clone(), missing);
        let over = CancellationToken::new();
        let told = async {
            let mut told = Vec::new();
            loop {
                tokio::select! {
                    biased;
                    Some(one) = aside.recv() => told.push(one),
                    () = over.cancelled() => break,
                }
            }
            told
        };
        let run = erase(handler, self.state);
        let span = trigger.parent.span(&facts, WORKER_ID);
        let runtime = tokio::runtime::Handle::current();
        let payload = trigger.payload.clone();
        let made = async {
            let made = make(&runtime, &run, attempt, payload, span, &self.stops, async {}).await;
            over.cancel();
            made
        };
        let (told, Ended { end, started_at, finished_at, .. }) = tokio::join!(told, made);

        let event = |kind: &str, body: &[u8]| Event {
            kind: kind.to_owned(),
            body: serde_json::from_slice(body).unwrap_or_default(),
        };
        let begun = serde_json::to_vec(&started(&trigger, WORKER_ID, started_at)).unwrap_or_default();
        let mut events = vec![event("started", &begun)];
        let mut lines = Vec::new();
        for one in told {
            match one {
                Aside::Log(line) => lines.push(line),
                Aside::Progress { percent, message } => {
                    let mut body = EventBody::new(facts.run.run_id, facts.attempt);
                    (body.percent, body.message) = (Some(percent), message);
                    events.push(event("progress", &serde_json::to_vec(&body).unwrap_or_default()));
                }
            }
        }
        let times = Span { started_at, finished_at };
        let outcome = Outcome::of(&trigger, WORKER_ID, end, times, 0.0).expect("no other attempt supersedes this one");
        events.push(event(outcome.kind, &outcome.bytes()));
        let answer = match outcome.answer {
            crate::runtime::Answer::Ack => Answer::Ack,
            crate::runtime::Answer::Nak(wait) => Answer::Again(wait),
            crate::runtime::Answer::Term => Answer::Term,
        };
        Done { events, lines, answer }
    }
}

impl Done {
    fn last(&self) -> &Event {
        self.events.last().expect("an attempt has an outcome")
    }

    /// How it ended: `succeeded`, `failed`, `released` or `cancelled`.
    #[must_use]
    pub fn outcome(&self) -> &str {
        &self.last().kind
    }

    /// The kinds of all events.
    #[must_use]
    pub fn kinds(&self) -> Vec<&str> {
        self.events.iter().map(|event| event.kind.as_str()).collect()
    }

    /// The result, read as a type; none unless the attempt succeeded with a result of that shape.
    #[must_use]
    pub fn result<T: DeserializeOwned>(&self) -> Option<T> {
        let event = self.last();
        (event.kind == "succeeded").then(|| serde_json::from_value(event.body["result"].clone()).ok())?
    }

    /// The failure; none unless the attempt failed. That of a timeout has the kind `timeout`, that of a panic `panic`.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        let event = self.last();
        if event.kind != "failed" {
            return None;
        }
        let body: EventBody = serde_json::from_value(event.body.clone()).ok()?;
        Some(Failure {
            error: body.error?,
            retry: body.retry.unwrap_or(true),
            retry_after: body.retry_after_ms.map(Duration::from_millis),
        })
    }
}
