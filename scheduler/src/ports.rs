//! The outside world on one page: what the loops need of a database, of a bus and of a clock.
//!
//! `store/` and `bus/` implement these; only `app` names a concrete implementation. Every implementation passes the
//! conformance suite of its port.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use ax_shared::wire::{GroupConfig, WorkerEntry};
use ax_shared::{ConsumerName, Group, RunId, TaskId, Timestamp};
use bytes::Bytes;
use futures::stream::BoxStream;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::core::command::Command;
use crate::core::definitions::{AuditEntry, DefinitionView, DefinitionWrite, TaskRow};
use crate::core::run::{Attempt, Run, RunState, Signal};
use crate::core::token::Token;

// ---------------------------------------------------------------------------------------------------------- time ----

/// Where the present instant comes from.
pub trait Clock: Send + Sync + 'static {
    /// The present instant on the corrected clock.
    fn now(&self) -> Timestamp;
    /// Time since boot, suspend included (CLOCK_BOOTTIME): never steps, for leases and deadlines.
    fn boot(&self) -> Duration;
}

// ------------------------------------------------------------------------------------------------------ database ----

/// Why the database did not do as asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another leader has taken over: the epoch is no longer the caller's. Step down.
    #[error("fenced: the database's epoch is not {mine} any more")]
    Fenced {
        /// The epoch that the caller holds.
        mine: u64,
    },
    /// It cannot be reached, timed out, is locked, or the transaction was rolled back: try again later.
    #[error("the database is not available")]
    Unavailable(#[source] sqlx::Error),
    /// A row or value is not what this version of ax wrote.
    #[error("the database holds something unexpected: {0}")]
    Corrupt(String),
    /// The database was refused: wrong URL, unknown scheme, missing rights, newer schema, in use by another node.
    #[error("{0}")]
    Refused(String),
}

/// What a shard's row holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardState {
    /// Fencing number of the present leader.
    pub epoch: u64,
    /// Counts changes of definitions.
    pub definitions_rev: u64,
    /// Every instant up to here has its row.
    pub planned_until: Timestamp,
    /// The revision that the watermark was last moved on: what changed after it is not planned up to there yet.
    pub planned_rev: u64,
    /// How far AX_EVENTS has been settled.
    pub settled: EventsPosition,
}

/// A place in AX_EVENTS.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventsPosition {
    /// Incarnation of the stream (its creation time); empty before the first.
    pub incarnation: String,
    /// The last sequence that has been settled; 0 before the first.
    pub seq: u64,
}

/// Moves the watermark at the end of a planning pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watermark {
    /// Every instant up to here has its row now.
    pub until: Timestamp,
    /// The `definitions_rev` that the pass was planned on.
    pub seen_rev: u64,
}

/// What became of a batch of planned rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Planned {
    /// The rows are in; `inserted[i]` is false when row i had been there before.
    Done {
        /// One per row.
        inserted: Vec<bool>,
    },
    /// Definitions have changed since; nothing was written. Only with a watermark.
    RevChanged {
        /// The present revision.
        rev: u64,
    },
}

/// Everything that one flush writes, in one transaction under the epoch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// Whole mutable halves of existing runs, each run at most once. A result of none leaves the stored one, since runs
    /// are loaded without it.
    pub runs: Vec<Run>,
    /// Attempts, inserted or overwritten by (run_id, attempt).
    pub attempts: Vec<Attempt>,
    /// Signals to keep (again = no change).
    pub signals_add: Vec<Signal>,
    /// Signals that have been applied.
    pub signals_remove: Vec<Signal>,
    /// Commands that are carried out with this batch.
    pub commands_done: Vec<Uuid>,
    /// How far AX_EVENTS is settled with this batch.
    pub settled: Option<EventsPosition>,
}

impl Batch {
    /// Whether there is nothing to write.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
            && self.attempts.is_empty()
            && self.signals_add.is_empty()
            && self.signals_remove.is_empty()
            && self.commands_done.is_empty()
            && self.settled.is_none()
    }
}

/// Which tasks to list, by id ascending; deleted ones are left out.
#[derive(Debug, Clone, Default)]
pub struct TaskFilter {
    /// Of this group.
    pub group: Option<Group>,
    /// Enabled or paused.
    pub status: Option<ax_shared::definition::Status>,
    /// Having this label, `name` or `name=value`.
    pub label: Option<String>,
    /// Text in id or name, case-insensitive.
    pub q: Option<String>,
    /// Ids after this one.
    pub after: Option<TaskId>,
    /// At most this many.
    pub limit: u32,
}

/// Which runs to list, newest trigger time first, then by run id descending.
#[derive(Debug, Clone, Default)]
pub struct RunFilter {
    /// Of this task.
    pub task_id: Option<TaskId>,
    /// Of this group.
    pub group: Option<Group>,
    /// In any of these states; empty = any.
    pub states: Vec<RunState>,
    /// Trigger time ≥ this.
    pub from: Option<Timestamp>,
    /// Trigger time < this.
    pub to: Option<Timestamp>,
    /// After this (trigger time, run id) in the order of the list.
    pub after: Option<(Timestamp, RunId)>,
    /// At most this many.
    pub limit: u32,
}

/// A task's newest run and newest success.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TaskHistory {
    /// The run with the newest trigger time that is not in the future, payload and result left out.
    pub last_run: Option<Run>,
    /// When the success with the newest trigger time ended.
    pub last_success_at: Option<Timestamp>,
}

/// Decides on a change of definitions; runs inside the transaction, on what is true there. None = write nothing. What
/// the caller wants to know of the decision it lets the closure put aside.
pub type DecideChange<'a> = Box<dyn FnOnce(DefinitionView) -> Option<DefinitionWrite> + Send + 'a>;

/// The database. Methods with an `epoch` belong to the leader and fail with [`StoreError::Fenced`] when it is not the
/// shard's any more, having written nothing.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Brings the schema up to date; idempotent, safe to call from several nodes at once. Answers the names of the
    /// steps that were applied by this call.
    async fn migrate(&self) -> Result<Vec<String>, StoreError>;
    /// The database's id, made with its schema and never changed.
    async fn database_id(&self) -> Result<Uuid, StoreError>;
    /// Proves that the database can be written to by this node's connection pool, or says why not.
    async fn ping(&self) -> Result<(), StoreError>;
    /// The database server's clock; none when it is this machine's own (SQLite).
    async fn server_time(&self) -> Result<Option<Timestamp>, StoreError>;
    /// Whether several nodes can share it.
    fn is_shared(&self) -> bool;

    /// Changes definitions: orders all such changes by a lock, reads the rows of `ids` (tombstones too) and the
    /// watermark, lets `decide` choose what to write, writes it and, last, counts `definitions_rev` up and stamps it on
    /// the rows. None or a write without tasks does not count the revision. All or nothing.
    async fn change_definitions(&self, ids: &[TaskId], decide: DecideChange<'_>) -> Result<(), StoreError>;
    /// One task, tombstones left out.
    async fn task(&self, id: &TaskId) -> Result<Option<TaskRow>, StoreError>;
    /// Several tasks by id, in no order; unknown and deleted ones are left out.
    async fn tasks(&self, ids: &[TaskId]) -> Result<Vec<TaskRow>, StoreError>;
    /// Tasks of a filter.
    async fn list_tasks(&self, filter: &TaskFilter) -> Result<Vec<TaskRow>, StoreError>;
    /// The newest run and success of each of these tasks.
    async fn histories(&self, ids: &[TaskId], now: Timestamp) -> Result<BTreeMap<TaskId, TaskHistory>, StoreError>;

    /// Inserts one-off runs, all or nothing, with an audit line each where given (left out when its run was there
    /// before); `true` where this call wrote the row, `false` where a run of that id was there before.
    async fn insert_runs(&self, runs: &[Run], audit: &[AuditEntry]) -> Result<Vec<bool>, StoreError>;
    /// Runs of a filter. Results and payloads are left out (None).
    async fn list_runs(&self, filter: &RunFilter) -> Result<Vec<Run>, StoreError>;
    /// One run, whole, with its attempts in order.
    async fn run(&self, id: RunId) -> Result<Option<(Run, Vec<Attempt>)>, StoreError>;

    /// Stores a command for the leader, with a line of the audit.
    async fn insert_command(&self, command: &Command, audit: &AuditEntry) -> Result<(), StoreError>;
    /// Commands that have not been carried out, oldest first.
    async fn commands(&self, limit: u32) -> Result<Vec<Command>, StoreError>;

    /// Every token that has not been revoked, by name; those that have expired, too.
    async fn tokens(&self) -> Result<Vec<Token>, StoreError>;
    /// Adds a token with a line of the audit; false, and nothing is written, when one of that name has not been revoked.
    async fn add_token(&self, token: &Token, audit: &AuditEntry) -> Result<bool, StoreError>;
    /// Revokes the token of a name, at the instant of its line of the audit; false, and nothing is written, when there
    /// is none.
    async fn revoke_token(&self, name: &str, audit: &AuditEntry) -> Result<bool, StoreError>;

    /// The shard's row, unfenced.
    async fn shard(&self) -> Result<ShardState, StoreError>;
    /// Becomes leader: epoch = max(present, `at_least`) + 1. The row of a new database starts with
    /// `planned_until` = `now`.
    async fn acquire(&self, at_least: u64, now: Timestamp) -> Result<ShardState, StoreError>;
    /// Proves that `epoch` is still the shard's and that the database takes writes.
    async fn heartbeat(&self, epoch: u64) -> Result<(), StoreError>;
    /// Task rows with `rev` > `since` (all that are not deleted when `since` = 0), and the present revision, both of
    /// one moment.
    async fn definitions(&self, since: u64) -> Result<(u64, Vec<TaskRow>), StoreError>;
    /// Plans: inserts rows that are not there yet and, with a watermark, moves it. All or nothing.
    async fn plan(&self, epoch: u64, runs: &[Run], watermark: Option<Watermark>) -> Result<Planned, StoreError>;
    /// Takes up to `limit` pending one-off runs that nobody has adopted and that are due before `due_before`: marks
    /// them adopted and answers them, earliest first.
    async fn adopt_runs(&self, epoch: u64, due_before: Timestamp, limit: u32) -> Result<Vec<Run>, StoreError>;
    /// Every adopted run that has not ended, results left out, and every final run whose message may still be open.
    async fn unfinished(&self, epoch: u64) -> Result<Vec<Run>, StoreError>;
    /// Attempts of these runs.
    async fn attempts(&self, runs: &[RunId]) -> Result<Vec<Attempt>, StoreError>;
    /// Signals of an incarnation of AX_TRIGGERS; those of other incarnations are deleted.
    async fn signals(&self, epoch: u64, incarnation: &str) -> Result<Vec<Signal>, StoreError>;
    /// Writes a batch.
    async fn commit(&self, epoch: u64, batch: &Batch) -> Result<(), StoreError>;
}

// ----------------------------------------------------------------------------------------------------------- bus ----

/// Why NATS did not do as asked.
#[derive(Debug, thiserror::Error)]
pub enum BusError {
    /// Not connected, no answer in time, JetStream without a leader: try again later.
    #[error("NATS is not available: {0}")]
    Unavailable(String),
    /// The server refused for good.
    #[error("NATS refused: {0}")]
    Refused(String),
    /// This installation cannot work: too old a server, no JetStream, streams of another database.
    #[error("{0}")]
    Incompatible(String),
}

/// Why a publish to AX_TRIGGERS has no PubAck.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// No answer in time, no responders, "in process" and the like: publish again with the same message id.
    #[error("the publish was not answered: {0}")]
    Transient(String),
    /// The stream refused this message for good (too large …). A full stream is not for good.
    #[error("{0}")]
    Refused(String),
    /// The publishing connection is gone and will not come back.
    #[error("the publishing connection is closed")]
    Closed,
}

/// The value of the lease key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseValue {
    /// The holder's configured name.
    pub node_id: String,
    /// The holder's random instance id: two processes with one name are two holders.
    pub instance: Uuid,
    /// The holder's epoch.
    pub epoch: u64,
    /// When it became leader.
    pub since: Timestamp,
}

/// The lease as it is in KV.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseEntry {
    /// Who holds it.
    pub value: LeaseValue,
    /// Revision for the next compare-and-set.
    pub revision: u64,
}

/// What came of a compare-and-set on the lease key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseWrite {
    /// It is ours at this revision.
    Won(u64),
    /// The key is not as expected: somebody else has it, or it expired.
    Lost,
}

/// What came of asking `ax.internal.leader`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaderAnswer {
    /// The leader answered.
    Alive(LeaseValue),
    /// Nobody listens there.
    NoResponders,
    /// Somebody may listen, nobody answered in time (a frozen leader).
    TimedOut,
}

/// What a node tells about itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct NodeInfo {
    /// Configured name.
    pub node_id: String,
    /// Random instance id.
    pub instance: Uuid,
    /// Version of the program.
    pub version: String,
    /// Whether it leads now.
    pub leader: bool,
    /// Its epoch if it leads, else the last that it saw.
    pub epoch: u64,
    /// Corrected clock minus the machine's clock, in milliseconds.
    pub clock_offset_ms: f64,
    /// When the process started.
    pub started_at: Timestamp,
    /// Address of its HTTP API.
    pub http_addr: String,
    /// Host name and process id.
    pub host: String,
    /// Process id.
    pub pid: u32,
}

/// Tells the leader that rows were inserted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hint {
    /// One-off runs.
    Runs,
    /// Definitions.
    Definitions,
    /// Commands of operators.
    Commands,
}

/// A stream as its leader tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamState {
    /// Creation time, RFC 3339 with nanoseconds: a stream that was deleted and made again has another.
    pub incarnation: String,
    /// First sequence that it holds.
    pub first_seq: u64,
    /// Last sequence that it ever gave.
    pub last_seq: u64,
    /// Messages that it holds.
    pub messages: u64,
}

/// A message out of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamMessage {
    /// Its sequence.
    pub seq: u64,
    /// Its subject.
    pub subject: String,
    /// Headers, first value each.
    pub headers: BTreeMap<String, String>,
    /// Body.
    pub payload: Bytes,
    /// When the stream stored it, by the server's clock.
    pub at: Timestamp,
}

/// A message to publish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outgoing {
    /// Subject.
    pub subject: String,
    /// Headers.
    pub headers: Vec<(&'static str, String)>,
    /// Body.
    pub payload: Bytes,
}

/// The stream's answer to a publish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PubAck {
    /// Sequence; for a duplicate that of the original.
    pub seq: u64,
    /// Whether the stream had a message of that id already.
    pub duplicate: bool,
}

/// A pull consumer as the server tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerState {
    /// Its name.
    pub name: String,
    /// Highest stream sequence that it has delivered.
    pub delivered_seq: u64,
    /// Messages not delivered yet.
    pub pending: u64,
    /// Messages delivered and not acked.
    pub ack_pending: u64,
    /// Open pulls.
    pub waiting: u64,
}

/// A connection that only publishes to and deletes from AX_TRIGGERS and never reconnects: what it has not confirmed
/// when it is lost is never sent by it later, past the fence.
#[async_trait]
pub trait Publisher: Send + Sync + 'static {
    /// Publishes and waits for the PubAck, at most 2 s. Meant to be called many times at once.
    async fn publish(&self, message: Outgoing) -> Result<PubAck, PublishError>;
    /// Deletes a message of AX_TRIGGERS by sequence; false when it was not there.
    async fn delete(&self, seq: u64) -> Result<bool, PublishError>;
    /// Whether the connection is gone.
    fn is_closed(&self) -> bool;
    /// Closes it; publishes under way fail.
    async fn close(&self);
}

/// The rest of what ax does with NATS.
#[async_trait]
pub trait Bus: Send + Sync + 'static {
    /// Checks the server and makes or updates streams and buckets, idempotently, binding them to this database.
    async fn prepare(&self, database_id: Uuid) -> Result<(), BusError>;
    /// Whether the general connection is up, and for how long it has been (zero = down).
    fn connected_for(&self) -> Duration;

    /// The lease as its stream's leader has it.
    async fn lease(&self) -> Result<Option<LeaseEntry>, BusError>;
    /// Takes the lease when nobody holds it (`expected` none) or when it still is at revision `expected`.
    async fn lease_take(&self, value: &LeaseValue, expected: Option<u64>) -> Result<LeaseWrite, BusError>;
    /// Deletes the lease if it still is at `revision`, so that another node can take it at once.
    async fn lease_release(&self, revision: u64) -> Result<LeaseWrite, BusError>;
    /// Asks whether a leader lives.
    async fn ask_leader(&self, timeout: Duration) -> Result<LeaderAnswer, BusError>;
    /// Answers followers that ask, until the guard is dropped.
    async fn serve_leader(&self, value: LeaseValue) -> Result<Guard, BusError>;
    /// Answers those that ask for this node or for all nodes, until the guard is dropped.
    async fn serve_node(&self, node_id: &str, info: Arc<dyn Fn() -> NodeInfo + Send + Sync>)
    -> Result<Guard, BusError>;
    /// Asks for the node of an id.
    async fn ask_node(&self, node_id: &str, timeout: Duration) -> Result<Option<NodeInfo>, BusError>;
    /// Asks all nodes and collects answers for `wait`.
    async fn ask_nodes(&self, wait: Duration) -> Result<Vec<NodeInfo>, BusError>;
    /// Tells the leader about new rows; best effort.
    async fn hint(&self, hint: Hint);
    /// Hears hints. Ends only with the connection.
    async fn hints(&self) -> Result<BoxStream<'static, Hint>, BusError>;

    /// AX_TRIGGERS as its leader tells it.
    async fn triggers(&self) -> Result<StreamState, BusError>;
    /// AX_EVENTS as its leader tells it.
    async fn events(&self) -> Result<StreamState, BusError>;
    /// Reads AX_EVENTS in order from `after` + 1 on, without end. An item Err means that reading has to begin anew.
    async fn read_events(&self, after: u64) -> Result<BoxStream<'static, Result<StreamMessage, BusError>>, BusError>;
    /// The message of AX_TRIGGERS with a sequence, from the stream's leader.
    async fn trigger_at(&self, seq: u64) -> Result<Option<StreamMessage>, BusError>;
    /// The first message of AX_TRIGGERS at a sequence or after it, from the stream's leader.
    async fn next_trigger(&self, from: u64) -> Result<Option<StreamMessage>, BusError>;
    /// The last message of AX_TRIGGERS with a subject, from the stream's leader.
    async fn last_trigger(&self, subject: &str) -> Result<Option<StreamMessage>, BusError>;
    /// Opens a publishing connection.
    async fn publisher(&self) -> Result<Arc<dyn Publisher>, BusError>;

    /// Consumers of AX_TRIGGERS.
    async fn consumers(&self) -> Result<Vec<ConsumerState>, BusError>;
    /// One consumer.
    async fn consumer(&self, name: &ConsumerName) -> Result<Option<ConsumerState>, BusError>;
    /// Makes the consumer if it is not there, or corrects its settings.
    async fn ensure_consumer(&self, name: &ConsumerName) -> Result<(), BusError>;
    /// Removes a consumer; no error when it is not there.
    async fn remove_consumer(&self, name: &str) -> Result<(), BusError>;
    /// Pulls in a way that cannot take a message, which makes the server tell pending MAX_DELIVERIES.
    async fn poke(&self, name: &str) -> Result<(), BusError>;

    /// What KV `ax_groups` says.
    async fn groups(&self) -> Result<BTreeMap<Group, GroupConfig>, BusError>;
    /// Writes a group's entry, or removes it.
    async fn put_group(&self, group: &Group, config: Option<&GroupConfig>) -> Result<(), BusError>;
    /// Registered workers.
    async fn workers(&self) -> Result<Vec<WorkerEntry>, BusError>;
    /// Decides which run an idempotency key of a task means for `window`: `proposed`, or the run that an earlier
    /// request proposed.
    async fn claim_key(&self, task: &TaskId, key: &str, proposed: RunId, window: Duration) -> Result<RunId, BusError>;

    /// Publishes without storing; best effort.
    async fn tell(&self, subject: String, body: Bytes);
    /// Hears what is told on a subject (wildcards allowed): (subject, body).
    async fn hear(&self, subject: &str) -> Result<BoxStream<'static, (String, Bytes)>, BusError>;
}

/// Ends something when dropped.
pub struct Guard(Option<Box<dyn FnOnce() + Send + Sync>>);

impl Guard {
    /// Runs `end` when dropped.
    #[must_use]
    pub fn new(end: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self(Some(Box::new(end)))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(end) = self.0.take() {
            end();
        }
    }
}
