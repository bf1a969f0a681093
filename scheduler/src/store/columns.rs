//! Rows as both databases have them ↔ the types of the core.
//!
//! U+0000 cannot be kept in Postgres' text; in reasons, errors and names, which come from workers and callers, it becomes
//! U+FFFD before it is written, so that no report of a worker can stop the leader's commits. In JSON it stays, escaped.

use std::borrow::Cow;
use std::fmt::Display;
use std::str::FromStr;
use std::sync::Arc;

use ax_shared::definition::Status;
use ax_shared::{Profile, RunId, RunKind, TaskDefinition, TaskId, Timestamp};
use serde::de::DeserializeOwned;
use serde_json::Value;
use uuid::Uuid;

use crate::core::definitions::TaskRow;
use crate::core::run::{
    Attempt, AttemptOutcome, Decision, Intent, Message, Run, RunState, Signal, SignalKind, Stretch,
};
use crate::core::token::{Role, Token};
use crate::ports::StoreError;

/// A row of `run`.
#[derive(Debug, sqlx::FromRow)]
pub(super) struct RunColumns {
    run_id: Uuid,
    task_id: String,
    kind: String,
    flow_id: Uuid,
    trigger_at: i64,
    publish_at: i64,
    payload: Option<String>,
    stretch_from: Option<i64>,
    stretch_to: Option<i64>,
    stretch_count: Option<i64>,
    created_at: i64,
    executor_group: String,
    queue: String,
    handler: String,
    priority: i64,
    profile: Option<String>,
    state: String,
    reason: Option<String>,
    adopted: bool,
    decision: Option<String>,
    intent: Option<String>,
    message_no: i64,
    message_incarnation: Option<String>,
    message_seq: Option<i64>,
    message_open: Option<bool>,
    attempt_base: i64,
    attempt: i64,
    max_attempts: i64,
    worker_id: Option<String>,
    lateness_ms: Option<i64>,
    published_at: Option<i64>,
    started_at: Option<i64>,
    finished_at: Option<i64>,
    result: Option<String>,
}

impl RunColumns {
    /// The run, or what is wrong with the row.
    pub(super) fn into_run(self) -> Result<Run, StoreError> {
        let id = self.run_id;
        self.parse().map_err(|what| StoreError::Corrupt(format!("run {id}: {what}")))
    }

    fn parse(self) -> Result<Run, String> {
        let stretch = match (self.stretch_from, self.stretch_to, self.stretch_count) {
            (Some(from), Some(to), Some(count)) => {
                Some(Stretch { from: at(from), to: at(to), count: unsigned("stretch_count", count)? })
            }
            (None, None, None) => None,
            _ => return Err("half a stretch".into()),
        };
        let message = match (self.message_incarnation, self.message_seq, self.message_open) {
            (Some(incarnation), Some(seq), Some(open)) => {
                Some(Message { incarnation, seq: unsigned("message_seq", seq)?, open })
            }
            (None, None, None) => None,
            _ => return Err("half a message".into()),
        };
        Ok(Run {
            run_id: RunId(self.run_id),
            task_id: name("task_id", &self.task_id)?,
            kind: word("kind", &self.kind, RunKind::parse)?,
            flow_id: RunId(self.flow_id),
            trigger_at: at(self.trigger_at),
            publish_at: at(self.publish_at),
            payload: self.payload.as_deref().map(|text| json("payload", text)).transpose()?,
            stretch,
            created_at: at(self.created_at),
            group: name("executor_group", &self.executor_group)?,
            queue: name("queue", &self.queue)?,
            handler: name("handler", &self.handler)?,
            priority: unsigned("priority", self.priority)?,
            profile: self.profile.as_deref().map(|text| word("profile", text, Profile::parse)).transpose()?,
            state: word("state", &self.state, RunState::parse)?,
            reason: self.reason,
            adopted: self.adopted,
            decision: self.decision.as_deref().map(|text| word("decision", text, decision_of)).transpose()?,
            intent: self.intent.as_deref().map(|text| word("intent", text, intent_of)).transpose()?,
            message_no: unsigned("message_no", self.message_no)?,
            message,
            attempt_base: unsigned("attempt_base", self.attempt_base)?,
            attempt: unsigned("attempt", self.attempt)?,
            max_attempts: unsigned("max_attempts", self.max_attempts)?,
            worker_id: self.worker_id,
            lateness_ms: self.lateness_ms,
            published_at: self.published_at.map(at),
            started_at: self.started_at.map(at),
            finished_at: self.finished_at.map(at),
            result: self.result.as_deref().map(|text| json("result", text)).transpose()?,
        })
    }
}

/// A row of `attempt`.
#[derive(Debug, sqlx::FromRow)]
pub(super) struct AttemptColumns {
    run_id: Uuid,
    attempt: i64,
    outcome: Option<String>,
    worker_id: Option<String>,
    started_at: Option<i64>,
    finished_at: Option<i64>,
    error: Option<String>,
}

impl AttemptColumns {
    /// The attempt, or what is wrong with the row.
    pub(super) fn into_attempt(self) -> Result<Attempt, StoreError> {
        let (id, no) = (self.run_id, self.attempt);
        self.parse().map_err(|what| StoreError::Corrupt(format!("attempt {no} of run {id}: {what}")))
    }

    fn parse(self) -> Result<Attempt, String> {
        Ok(Attempt {
            run_id: RunId(self.run_id),
            attempt: unsigned("attempt", self.attempt)?,
            outcome: self.outcome.as_deref().map(|text| word("outcome", text, AttemptOutcome::parse)).transpose()?,
            worker_id: self.worker_id,
            started_at: self.started_at.map(at),
            finished_at: self.finished_at.map(at),
            error: self.error,
        })
    }
}

/// A row of `signal`.
#[derive(Debug, sqlx::FromRow)]
pub(super) struct SignalColumns {
    incarnation: String,
    seq: i64,
    kind: String,
    deliveries: i64,
    at: i64,
}

impl SignalColumns {
    /// The signal, or what is wrong with the row.
    pub(super) fn into_signal(self) -> Result<Signal, StoreError> {
        let seq = self.seq;
        self.parse().map_err(|what| StoreError::Corrupt(format!("signal of sequence {seq}: {what}")))
    }

    fn parse(self) -> Result<Signal, String> {
        Ok(Signal {
            incarnation: self.incarnation,
            seq: unsigned("seq", self.seq)?,
            kind: word("kind", &self.kind, SignalKind::parse)?,
            deliveries: unsigned("deliveries", self.deliveries)?,
            at: at(self.at),
            delivered_at: None,
        })
    }
}

/// A row of `task`, without the columns that only filters read.
#[derive(Debug, sqlx::FromRow)]
pub(super) struct TaskColumns {
    task_id: String,
    definition: String,
    version: i64,
    rev: i64,
    anchor_at: i64,
    effective_at: i64,
    delay_run_id: Option<Uuid>,
    created_at: i64,
    updated_at: i64,
    deleted_at: Option<i64>,
}

impl TaskColumns {
    /// The task, or what is wrong with the row.
    pub(super) fn into_task(self) -> Result<TaskRow, StoreError> {
        self.parse().map_err(|what| StoreError::Corrupt(format!("task {:?}: {what}", self.task_id)))
    }

    fn parse(&self) -> Result<TaskRow, String> {
        let definition: TaskDefinition = json("definition", &self.definition)?;
        if definition.task_id.as_str() != self.task_id {
            return Err(format!("its definition is that of {}", definition.task_id));
        }
        Ok(TaskRow {
            definition: Arc::new(definition),
            version: unsigned("version", self.version)?,
            rev: unsigned("rev", self.rev)?,
            anchor_at: at(self.anchor_at),
            effective_at: at(self.effective_at),
            delay_run_id: self.delay_run_id.map(RunId),
            created_at: at(self.created_at),
            updated_at: at(self.updated_at),
            deleted_at: self.deleted_at.map(at),
        })
    }
}

/// What filters read of a definition.
pub(super) struct TaskSearch {
    /// Id and name in lower case, a line each.
    pub(super) search: String,
    /// `name` and `name=value` of each label.
    pub(super) labels: Vec<String>,
}

impl TaskSearch {
    /// Takes it out of a definition.
    pub(super) fn of(definition: &TaskDefinition) -> Self {
        let search = folded(&format!("{}\n{}", definition.task_id, definition.name));
        let labels = definition
            .labels
            .iter()
            .flat_map(|(key, value)| [key.clone(), format!("{key}={value}")])
            .map(|label| text(&label).into_owned())
            .collect();
        Self { search, labels }
    }
}

/// A text as it is searched: lower case, without NUL.
pub(super) fn folded(q: &str) -> String {
    text(q).to_lowercase()
}

/// The word of a status in SQL.
pub(super) fn status_word(status: Status) -> &'static str {
    match status {
        Status::Enabled => "enabled",
        Status::Paused => "paused",
    }
}

/// The word of a decision in SQL.
pub(super) fn decision_word(decision: Decision) -> &'static str {
    match decision {
        Decision::HandOver => "hand_over",
    }
}

fn decision_of(word: &str) -> Option<Decision> {
    (word == decision_word(Decision::HandOver)).then_some(Decision::HandOver)
}

/// The word of an intent in SQL.
pub(super) fn intent_word(intent: Intent) -> &'static str {
    match intent {
        Intent::Cancel => "cancel",
        Intent::Bury => "bury",
        Intent::Doubt => "doubt",
    }
}

fn intent_of(word: &str) -> Option<Intent> {
    [Intent::Cancel, Intent::Bury, Intent::Doubt].into_iter().find(|intent| intent_word(*intent) == word)
}

/// A text as it can be kept: NUL becomes U+FFFD.
pub(super) fn text(text: &str) -> Cow<'_, str> {
    if text.contains('\0') { Cow::Owned(text.replace('\0', "\u{fffd}")) } else { Cow::Borrowed(text) }
}

/// An optional text as it can be kept.
pub(super) fn opt_text(value: &Option<String>) -> Option<Cow<'_, str>> {
    value.as_deref().map(text)
}

/// A count as SQL has it.
pub(super) fn signed(number: u64) -> Result<i64, StoreError> {
    i64::try_from(number).map_err(|_| StoreError::Corrupt(format!("{number} is beyond what SQL can count")))
}

/// A token as SQL has it.
#[derive(Debug, sqlx::FromRow)]
pub(super) struct TokenColumns {
    hash: Vec<u8>,
    name: String,
    role: String,
    created_at: i64,
    expires_at: Option<i64>,
}

impl TokenColumns {
    pub(super) fn into_token(self) -> Result<Token, StoreError> {
        let corrupt = |what: &str| StoreError::Corrupt(format!("the {what} of the token {:?}", self.name));
        Ok(Token {
            role: Role::parse(&self.role).ok_or_else(|| corrupt("role"))?,
            hash: self.hash.as_slice().try_into().map_err(|_| corrupt("hash"))?,
            created_at: at(self.created_at),
            expires_at: self.expires_at.map(at),
            name: self.name,
        })
    }
}

/// A count out of SQL.
pub(super) fn unsigned<T: TryFrom<i64>>(what: &str, number: i64) -> Result<T, String> {
    T::try_from(number).map_err(|_| format!("{what} is {number}"))
}

/// An instant out of SQL.
pub(super) fn at(ms: i64) -> Timestamp {
    Timestamp::from_millis(ms)
}

/// JSON text of a value.
pub(super) fn json_text(value: &Value) -> String {
    value.to_string()
}

/// How many bytes of JSON a run carries.
pub(super) fn run_bytes(run: &Run) -> usize {
    run.payload.as_ref().map_or(0, json_bytes) + run.result.as_ref().map_or(0, json_bytes)
}

/// Counts the bytes of a value's JSON text.
pub(super) fn json_bytes(value: &Value) -> usize {
    struct Counter(usize);
    impl std::io::Write for Counter {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut counter = Counter(0);
    // A Value always serialises, and the counter takes everything.
    serde_json::to_writer(&mut counter, value).ok();
    counter.0
}

/// JSON text of a definition.
pub(super) fn definition_text(definition: &TaskDefinition) -> Result<String, StoreError> {
    serde_json::to_string(definition)
        .map_err(|error| StoreError::Corrupt(format!("definition of {}: {error}", definition.task_id)))
}

/// The ids of tasks as texts.
pub(super) fn task_ids(ids: &[TaskId]) -> Vec<&str> {
    ids.iter().map(TaskId::as_str).collect()
}

fn json<T: DeserializeOwned>(what: &str, text: &str) -> Result<T, String> {
    serde_json::from_str(text).map_err(|error| format!("{what}: {error}"))
}

fn word<T>(what: &str, text: &str, parse: impl Fn(&str) -> Option<T>) -> Result<T, String> {
    parse(text).ok_or_else(|| format!("{what} is {text:?}, a word that this version of ax does not know"))
}

fn name<T: FromStr<Err: Display>>(what: &str, text: &str) -> Result<T, String> {
    text.parse().map_err(|error| format!("{what}: {error}"))
}

/// Which of `ids` were written, given the ids that the database says it wrote: an id given twice was written once.
pub(super) fn written(ids: impl Iterator<Item = RunId>, mut inserted: std::collections::HashSet<Uuid>) -> Vec<bool> {
    ids.map(|id| inserted.remove(&id.0)).collect()
}
