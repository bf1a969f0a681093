//! What the API shows of tasks and runs.

use std::sync::Arc;

use ax_shared::{FieldError, Group, Handler, Queue, RunId, RunKind, TaskDefinition, TaskId, Timestamp};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::core::definitions::TaskRow;
use crate::core::run::{Attempt, AttemptOutcome, Run, RunState, Stretch};

/// A task as the API shows it.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct TaskView {
    /// The definition in canonical form.
    #[serde(flatten)]
    pub definition: Arc<TaskDefinition>,
    /// Counts accepted changes, from 1.
    pub version: u64,
    /// Phase of `EVERY`.
    pub anchor_at: Timestamp,
    /// When the task was first accepted.
    pub created_at: Timestamp,
    /// When this version was accepted.
    pub updated_at: Timestamp,
    /// The next instant at which it fires; none for paused tasks and those that have no schedule.
    pub next_fire_at: Option<Timestamp>,
    /// The run with the newest trigger time that is not in the future.
    pub last_run: Option<RunView>,
    /// When the newest success ended.
    pub last_success_at: Option<Timestamp>,
}

/// A page of tasks.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct TaskPage {
    /// By id ascending.
    pub tasks: Vec<TaskView>,
    /// Where the next page begins; none on the last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// A run as lists show it.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[expect(missing_docs, reason = "the fields are those of `core::run::Run`, documented there")]
pub struct RunView {
    pub run_id: RunId,
    pub task_id: TaskId,
    pub group: Group,
    pub queue: Queue,
    pub handler: Handler,
    pub kind: RunKind,
    pub flow_id: RunId,
    pub trigger_time: Timestamp,
    pub state: RunState,
    pub reason: Option<String>,
    pub attempt: u32,
    pub max_attempts: u32,
    pub priority: u8,
    pub lateness_ms: Option<i64>,
    pub worker_id: Option<String>,
    pub trace_id: String,
    pub published_at: Option<Timestamp>,
    pub started_at: Option<Timestamp>,
    pub finished_at: Option<Timestamp>,
    /// `from`, `to` and `count` of a row that stands for many instants.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub stretch: Option<Stretch>,
}

impl RunView {
    /// What lists show of a run.
    #[must_use]
    pub fn of(run: &Run) -> Self {
        Self {
            run_id: run.run_id,
            task_id: run.task_id.clone(),
            group: run.group.clone(),
            queue: run.queue.clone(),
            handler: run.handler.clone(),
            kind: run.kind,
            flow_id: run.flow_id,
            trigger_time: run.trigger_at,
            state: run.state,
            reason: run.reason.clone(),
            attempt: run.attempt,
            max_attempts: run.max_attempts,
            priority: run.priority,
            lateness_ms: run.lateness_ms,
            worker_id: run.worker_id.clone(),
            trace_id: run.run_id.trace_id(),
            published_at: run.published_at,
            started_at: run.started_at,
            finished_at: run.finished_at,
            stretch: run.stretch,
        }
    }
}

/// A page of runs.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct RunPage {
    /// Newest trigger time first.
    pub runs: Vec<RunView>,
    /// Where the next page begins; none on the last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// A run with everything that is known of it.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct RunDetail {
    /// What lists show.
    #[serde(flatten)]
    pub run: RunView,
    /// The payload that came with the trigger; none = the task's.
    pub payload: Option<Value>,
    /// The handler's answer.
    pub result: Option<Value>,
    /// Deliveries in order.
    pub attempts: Vec<AttemptView>,
    /// What happened, in order of time.
    pub timeline: Vec<TimelineEntry>,
}

/// An attempt as the API shows it.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[expect(missing_docs, reason = "the fields are those of `core::run::Attempt`, documented there")]
pub struct AttemptView {
    pub attempt: u32,
    pub outcome: Option<AttemptOutcome>,
    pub worker_id: Option<String>,
    pub started_at: Option<Timestamp>,
    pub finished_at: Option<Timestamp>,
    pub error: Option<String>,
}

/// One thing that happened to a run.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct TimelineEntry {
    /// When.
    pub at: Timestamp,
    /// What: `planned` or `requested`, `due`, `published`, `started`, an attempt's outcome, the final state.
    pub event: &'static str,
    /// Of which attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    /// By whom.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker_id: Option<String>,
    /// Why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

impl RunDetail {
    /// Everything that is known of a run by `now`.
    #[must_use]
    pub fn of(run: Run, attempts: Vec<Attempt>, now: Timestamp) -> Self {
        Self {
            run: RunView::of(&run),
            timeline: timeline(&run, &attempts, now),
            attempts: attempts
                .into_iter()
                .map(|a| AttemptView {
                    attempt: a.attempt,
                    outcome: a.outcome,
                    worker_id: a.worker_id,
                    started_at: a.started_at,
                    finished_at: a.finished_at,
                    error: a.error,
                })
                .collect(),
            payload: run.payload,
            result: run.result,
        }
    }
}

/// What the instants of a run and its attempts tell, in order of time.
fn timeline(run: &Run, attempts: &[Attempt], now: Timestamp) -> Vec<TimelineEntry> {
    let entry = |at, event| TimelineEntry { at, event, attempt: None, worker_id: None, detail: None };
    let planned = run.kind.is_scheduled() || run.stretch.is_some();
    let mut entries = vec![entry(run.created_at, if planned { "planned" } else { "requested" })];
    if run.stretch.is_none() && run.publish_at <= now {
        entries.push(entry(run.publish_at, "due"));
    }
    entries.extend(run.published_at.map(|at| entry(at, "published")));
    for attempt in attempts {
        let of_attempt = |at, event| TimelineEntry {
            attempt: Some(attempt.attempt),
            worker_id: attempt.worker_id.clone(),
            ..entry(at, event)
        };
        entries.extend(attempt.started_at.map(|at| of_attempt(at, "started")));
        if let (Some(at), Some(outcome)) = (attempt.finished_at, attempt.outcome) {
            entries.push(TimelineEntry { detail: attempt.error.clone(), ..of_attempt(at, outcome.as_str()) });
        }
    }
    // Where the last attempt's outcome says the same at the same instant, once is enough.
    let state = run.state.as_str();
    if let Some(at) = run.finished_at.filter(|_| run.state.is_final())
        && !entries.iter().any(|e| e.event == state && e.at == at)
    {
        entries.push(TimelineEntry { detail: run.reason.clone(), ..entry(at, state) });
    }
    entries.sort_by_key(|e| e.at);
    entries
}

/// What came of putting one definition.
#[derive(Debug, Clone, PartialEq)]
pub struct PutReport {
    /// Whether there was none before.
    pub created: bool,
    /// The task as it is now.
    pub task: TaskView,
}

/// What came of applying a document.
#[derive(Debug, Clone, Default, PartialEq, Serialize, ToSchema)]
pub struct ApplyReport {
    /// Ids of tasks that there were none of, in the order of the document.
    pub created: Vec<TaskId>,
    /// Ids of tasks that changed.
    pub updated: Vec<TaskId>,
    /// Ids of tasks that are equal to what there was.
    pub unchanged: Vec<TaskId>,
    /// Ids of tasks that were removed.
    pub deleted: Vec<TaskId>,
    /// What deserves a second look: fields left to a default (`defaulted`), consumers added (`consumer_added`).
    pub warnings: Vec<FieldError>,
}

/// What came of resuming a task.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct Resumed {
    /// The task as it is now.
    #[serde(flatten)]
    pub task: TaskView,
    /// The next instants that it will start, up to five.
    pub starts: Vec<Timestamp>,
    /// The instants that passed while it was paused and are not made up.
    pub skipped: Option<Stretch>,
}

/// A run that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
pub struct Requested {
    /// The run.
    pub run_id: RunId,
    /// Whether this request made it; false when its idempotency key was known.
    pub created: bool,
}

/// Runs that were asked for, in the order of the request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Enqueued {
    /// One for each entry of the request.
    pub runs: Vec<Requested>,
}

/// Instants of one schedule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Fires {
    /// In order of time.
    pub fires: Vec<Timestamp>,
}

/// Instants of many tasks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Upcoming {
    /// In order of time, then by task id.
    pub fires: Vec<UpcomingFire>,
    /// Whether something in that time was left out: more than `limit`, or more of one task than `per_task`.
    pub more: bool,
}

/// One instant of one task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct UpcomingFire {
    /// The task.
    pub task_id: TaskId,
    /// When it fires.
    pub at: Timestamp,
}

/// The scheduler processes that answered.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct Nodes {
    /// By node id.
    pub nodes: Vec<crate::ports::NodeInfo>,
}

/// Whether this node can do its work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Readiness {
    /// Whether everything is reachable.
    pub ready: bool,
    /// `ok`, or what is wrong with the database.
    pub database: String,
    /// `ok`, or what is wrong with NATS.
    pub nats: String,
}

impl TaskView {
    /// A task with its history.
    #[must_use]
    pub fn of(row: &TaskRow, next_fire_at: Option<Timestamp>, history: Option<&crate::ports::TaskHistory>) -> Self {
        Self {
            definition: row.definition.clone(),
            version: row.version,
            anchor_at: row.anchor_at,
            created_at: row.created_at,
            updated_at: row.updated_at,
            next_fire_at,
            last_run: history.and_then(|h| h.last_run.as_ref()).map(RunView::of),
            last_success_at: history.and_then(|h| h.last_success_at),
        }
    }
}
