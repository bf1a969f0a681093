//! Runs, their attempts and the states they move through.

use ax_shared::{Group, Handler, Profile, Queue, RunAddress, RunId, RunKind, TaskId, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// Where a run stands. `docs/run_states.md` draws the moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    /// Not owed yet: upstream runs have not ended.
    Waiting,
    /// Owed and not known to be in the stream. In: planned, triggered by hand, enqueued. Out: published, or ended
    /// unexecuted.
    Pending,
    /// Its message is in the stream. In: PubAck, or any sign of life of the message. Out: `started`, or an outcome.
    Triggered,
    /// A worker said that it began. In: `started`. Out: an outcome; a retry goes back to `triggered`.
    Running,
    /// Final: an attempt succeeded.
    Succeeded,
    /// Final: every attempt failed, or one failed for good.
    Failed,
    /// Final: the last attempt's ack deadline passed without an outcome.
    TimedOut,
    /// Final: somebody cancelled it, or its task was deleted while it was queued.
    Cancelled,
    /// Final, without executing: see the reason.
    Skipped,
    /// Final, without executing: its start deadline passed.
    Expired,
    /// Final, without executing: an upstream did not succeed.
    Blocked,
}

impl RunState {
    /// Every state, in the order of a run's life.
    pub const ALL: [Self; 11] = [
        Self::Waiting,
        Self::Pending,
        Self::Triggered,
        Self::Running,
        Self::Succeeded,
        Self::Failed,
        Self::TimedOut,
        Self::Cancelled,
        Self::Skipped,
        Self::Expired,
        Self::Blocked,
    ];

    /// The word of this state on the wire and in SQL.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Pending => "pending",
            Self::Triggered => "triggered",
            Self::Running => "running",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::TimedOut => "timed_out",
            Self::Cancelled => "cancelled",
            Self::Skipped => "skipped",
            Self::Expired => "expired",
            Self::Blocked => "blocked",
        }
    }

    /// The state of a word, if it is one.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == word)
    }

    /// Whether the run has ended.
    #[must_use]
    pub fn is_final(self) -> bool {
        !matches!(self, Self::Waiting | Self::Pending | Self::Triggered | Self::Running)
    }
}

/// How an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AttemptOutcome {
    /// The handler succeeded.
    Succeeded,
    /// The handler failed, or the message was NAKed or TERMed.
    Failed,
    /// The ack deadline passed without an outcome.
    TimedOut,
    /// Its worker vanished.
    Lost,
    /// A stopping worker handed it back; not counted against the retries.
    Released,
    /// It was cancelled.
    Cancelled,
    /// A later attempt decided the run.
    Superseded,
}

impl AttemptOutcome {
    /// Every outcome.
    pub const ALL: [Self; 7] =
        [Self::Succeeded, Self::Failed, Self::TimedOut, Self::Lost, Self::Released, Self::Cancelled, Self::Superseded];

    /// The word of this outcome on the wire and in SQL.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::TimedOut => "timed_out",
            Self::Lost => "lost",
            Self::Released => "released",
            Self::Cancelled => "cancelled",
            Self::Superseded => "superseded",
        }
    }

    /// The outcome of a word, if it is one.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|outcome| outcome.as_str() == word)
    }
}

/// What the leader has decided about a due run. Stored, so that a successor does not judge again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// It is to be published to its group.
    HandOver,
}

/// What the leader is about to do to a run's message. Committed before it is done, so that a successor finishes it
/// and no absence of the message is taken for an ack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Intent {
    /// Delete the message and end the run as cancelled.
    Cancel,
    /// Delete the message whose deliveries are used up and end the run as failed or timed out.
    Bury,
    /// Nothing is being done yet: events about it were lost, so that its absence proves nothing.
    Doubt,
}

/// A run's current message in AX_TRIGGERS.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Incarnation of the stream: its creation time as the server tells it, RFC 3339 with nanoseconds.
    pub incarnation: String,
    /// Stream sequence; 0 = not known, for a run that has ended and may have messages in the stream all the same.
    pub seq: u64,
    /// Whether the message may still be in the stream. False once its ack was seen or its deletion was answered.
    pub open: bool,
}

/// A stretch of instants that did not run, for one reason, as one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Stretch {
    /// The first instant.
    pub from: Timestamp,
    /// The last instant.
    pub to: Timestamp,
    /// How many instants there are.
    pub count: u64,
}

/// One instance of a task at one trigger time; the row `run` in SQL.
///
/// The first block is fixed at insertion. The rest belongs to the leader alone, which always writes it as a whole.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Identity, stable over attempts.
    pub run_id: RunId,
    /// The task.
    pub task_id: TaskId,
    /// Why the run exists.
    pub kind: RunKind,
    /// The runs that one root fire set off share it; equal to the root's run id.
    pub flow_id: RunId,
    /// The instant for which the run is scheduled.
    pub trigger_at: Timestamp,
    /// The instant at which it is to be handed over: trigger time, plus delay or spread.
    pub publish_at: Timestamp,
    /// The payload that came with the trigger; none = the task's at the moment of the decision.
    pub payload: Option<Value>,
    /// Only for rows of kind `missed` and `skipped`.
    pub stretch: Option<Stretch>,
    /// When the row was made.
    pub created_at: Timestamp,

    /// Executor group, as of the decision.
    pub group: Group,
    /// Lane, as of the decision.
    pub queue: Queue,
    /// Handler, as of the decision.
    pub handler: Handler,
    /// Priority 1–10, as of the decision.
    pub priority: u8,
    /// Profile of the consumer that the message was published to.
    pub profile: Option<Profile>,
    /// Where it stands.
    pub state: RunState,
    /// Why it is in that state; before the end, the reason given by the caller for one-off runs, and by whoever cancels.
    pub reason: Option<String>,
    /// Whether the leader has it in memory: scheduled rows from the start, one-off rows once taken up.
    pub adopted: bool,
    /// What was decided at the due instant.
    pub decision: Option<Decision>,
    /// What is being done to its message.
    pub intent: Option<Intent>,
    /// Number of its messages so far; the current one is `<run_id>:<message_no>`.
    pub message_no: u32,
    /// The current message, once known.
    pub message: Option<Message>,
    /// Attempts used up before the current message.
    pub attempt_base: u32,
    /// The current attempt; 0 before the first.
    pub attempt: u32,
    /// Number of the last attempt that may be made.
    pub max_attempts: u32,
    /// Who executes or executed it, if it said so.
    pub worker_id: Option<String>,
    /// A worker's receipt (first `started`) minus `publish_at`, in milliseconds.
    pub lateness_ms: Option<i64>,
    /// When the stream had its message.
    pub published_at: Option<Timestamp>,
    /// When the current attempt began.
    pub started_at: Option<Timestamp>,
    /// When it became final.
    pub finished_at: Option<Timestamp>,
    /// The handler's answer.
    pub result: Option<Value>,
}

impl Run {
    /// The run's tokens in subjects.
    #[must_use]
    pub fn address(&self) -> RunAddress {
        RunAddress { group: self.group.clone(), task_id: self.task_id.clone(), run_id: self.run_id }
    }
}

/// One delivery of a run to a worker; the row `attempt` in SQL, keyed by (run_id, attempt).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Attempt {
    /// The run.
    pub run_id: RunId,
    /// Numbered from 1 across messages.
    pub attempt: u32,
    /// How it ended; none while it has not.
    pub outcome: Option<AttemptOutcome>,
    /// Who executed it, if it said so.
    pub worker_id: Option<String>,
    /// When it began, if its worker said so.
    pub started_at: Option<Timestamp>,
    /// When it ended.
    pub finished_at: Option<Timestamp>,
    /// What went wrong, one line for people.
    pub error: Option<String>,
}

/// What the server told about a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SignalKind {
    /// It was acked (ack metric).
    Acked,
    /// It was NAKed.
    Naked,
    /// It was TERMed.
    Terminated,
    /// Its deliveries are used up.
    MaxDeliveries,
}

impl SignalKind {
    /// The word of this kind in SQL.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Acked => "acked",
            Self::Naked => "naked",
            Self::Terminated => "terminated",
            Self::MaxDeliveries => "max_deliveries",
        }
    }

    /// The kind of a word, if it is one.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Acked, Self::Naked, Self::Terminated, Self::MaxDeliveries].into_iter().find(|k| k.as_str() == word)
    }
}

/// What the server told about a sequence of AX_TRIGGERS that no row owns yet: it overtook its own PubAck. Kept until
/// a publish or a look-up yields the sequence; the row `signal` in SQL, keyed by
/// (incarnation, seq, kind, deliveries).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Signal {
    /// Incarnation of AX_TRIGGERS when it was read.
    pub incarnation: String,
    /// Sequence in AX_TRIGGERS.
    pub seq: u64,
    /// What happened.
    pub kind: SignalKind,
    /// Deliveries of the message so far.
    pub deliveries: u32,
    /// When the server told it.
    pub at: Timestamp,
    /// When the acked delivery was made, if known; not stored, since a takeover need not know it.
    pub delivered_at: Option<Timestamp>,
}
