//! Bodies of the messages between scheduler and workers. Readers ignore unknown fields.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Timestamp;
use crate::ids::{Group, Handler, Queue, RunId, TaskId};

/// Version of the wire format that this crate writes and reads.
pub const WIRE_VERSION: u32 = 1;
/// The largest result carried inline in an event, in bytes of JSON text.
pub const MAX_INLINE_RESULT_BYTES: usize = 512 * 1024;

/// Why a run exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum RunKind {
    /// A cron expression matched.
    Cron,
    /// An interval elapsed.
    Every,
    /// The `delay_seconds` of a definition elapsed.
    Delay,
    /// Somebody triggered the task.
    Manual,
    /// A program enqueued the run.
    Enqueue,
    /// Not a run: a stretch of instants that were missed while no scheduler ran.
    Missed,
    /// Not a run: a stretch of instants that were skipped, e.g. while the task was paused.
    Skipped,
}

impl RunKind {
    /// The word of this kind on the wire and in SQL.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cron => "cron",
            Self::Every => "every",
            Self::Delay => "delay",
            Self::Manual => "manual",
            Self::Enqueue => "enqueue",
            Self::Missed => "missed",
            Self::Skipped => "skipped",
        }
    }

    /// The kind of a word, if it is one.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Cron, Self::Every, Self::Delay, Self::Manual, Self::Enqueue, Self::Missed, Self::Skipped]
            .into_iter()
            .find(|kind| kind.as_str() == word)
    }

    /// Whether the run comes from the schedule of its task, so that its id is derived from its instant.
    #[must_use]
    pub fn is_scheduled(self) -> bool {
        matches!(self, Self::Cron | Self::Every)
    }

    /// Whether the overlap policy of the task binds the run: enqueued and delayed runs neither block nor are blocked.
    #[must_use]
    pub fn is_bound_by_overlap(self) -> bool {
        matches!(self, Self::Cron | Self::Every | Self::Manual)
    }
}

/// Body of a trigger message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TriggerBody {
    /// The run.
    pub run_id: RunId,
    /// Its task.
    pub task_id: TaskId,
    /// What to execute.
    pub handler: Handler,
    /// The instant for which the run is scheduled.
    pub trigger_time: Timestamp,
    /// Why the run exists.
    pub kind: RunKind,
    /// The task's payload, or the one that came with the trigger.
    #[serde(default)]
    pub payload: Value,
    /// Results of the upstream tasks by task id.
    #[serde(default)]
    pub upstream: Value,
    /// Attempts used up before this message.
    #[serde(default)]
    pub attempt_base: u32,
}

/// What went wrong in an attempt: a text, or an object with a kind for programs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum WireError {
    /// Text for people.
    Text(String),
    /// A word for programs and a text for people.
    Kinded {
        /// Word for programs.
        kind: String,
        /// Text for people.
        #[serde(default)]
        message: String,
    },
}

impl WireError {
    /// One line for people.
    #[must_use]
    pub fn text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Kinded { kind, message } if message.is_empty() => kind.clone(),
            Self::Kinded { kind, message } => format!("{kind}: {message}"),
        }
    }
}

/// The fields that any event may carry; which ones mean something depends on its kind, the token in its subject.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventBody {
    /// The run.
    pub run_id: RunId,
    /// The attempt, ≥ 1.
    pub attempt: u32,
    /// Who tells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker_id: Option<String>,
    /// When it happened (`started`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Timestamp>,
    /// When the attempt began (`succeeded`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Timestamp>,
    /// When the attempt ended (`succeeded`, `failed`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<Timestamp>,
    /// The handler's answer (`succeeded`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Value>,
    /// What went wrong (`failed`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<WireError>,
    /// Whether another attempt may help (`failed`). Defaults to true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry: Option<bool>,
    /// Wait that the worker chose, in milliseconds (`failed`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
    /// 0–100 (`progress`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percent: Option<f64>,
    /// Text for people (`progress`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Why (`released`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl EventBody {
    /// An event of `attempt` of `run_id` without any further field.
    #[must_use]
    pub fn new(run_id: RunId, attempt: u32) -> Self {
        Self {
            run_id,
            attempt,
            worker_id: None,
            at: None,
            started_at: None,
            finished_at: None,
            result: None,
            error: None,
            retry: None,
            retry_after_ms: None,
            percent: None,
            message: None,
            reason: None,
        }
    }
}

/// One consumer in the value of a group in KV `ax_groups`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GroupConsumer {
    /// The durable consumer's name.
    pub name: String,
    /// The lane.
    pub queue: Queue,
    /// The profile, `t<seconds>r<retries>`.
    pub profile: String,
    /// The largest weight of a task that uses it.
    pub max_weight: f64,
}

/// The value of a group in KV `ax_groups`: what a worker has to pull.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct GroupConfig {
    /// Consumers to pull, each.
    pub consumers: Vec<GroupConsumer>,
    /// Whether nothing is handed over at present.
    #[serde(default)]
    pub paused: bool,
}

/// A worker's entry in KV `ax_workers` under `<group>.<worker_id>`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerEntry {
    /// Unique in its group.
    pub worker_id: String,
    /// Its group.
    pub group: Group,
    /// Host name.
    #[serde(default)]
    pub host: String,
    /// Process id.
    #[serde(default)]
    pub pid: u32,
    /// Name and version of the SDK.
    #[serde(default)]
    pub sdk: String,
    /// Units that it takes at once.
    #[serde(default)]
    pub capacity: f64,
    /// Runs that it executes now.
    #[serde(default)]
    pub running: Vec<RunId>,
}
