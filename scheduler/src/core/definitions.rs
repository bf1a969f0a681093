//! Accepting a definition: which version it becomes, whether its phase moves, which run it sets off.

use std::sync::Arc;

use ax_shared::{RunId, RunKind, TaskDefinition, TaskId, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::core::run::{Run, RunState};

/// A stored definition; the row `task` in SQL. Deleted tasks stay as a tombstone, so that every node hears of it and
/// versions go on where they were.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskRow {
    /// The definition.
    pub definition: Arc<TaskDefinition>,
    /// Counts accepted changes, from 1.
    pub version: u64,
    /// `definitions_rev` of the change that wrote this row; set by the store.
    pub rev: u64,
    /// Phase of `EVERY`: the moment at which this schedule was accepted.
    pub anchor_at: Timestamp,
    /// From when on (exclusive) instants of this schedule are owed: acceptance of the schedule, pause or resume, never
    /// earlier than what had been planned by then.
    pub effective_at: Timestamp,
    /// The run that `delay_seconds` set off; a changed delay sets off another and takes the place of this one.
    pub delay_run_id: Option<RunId>,
    /// When the task was first accepted.
    pub created_at: Timestamp,
    /// When this version was accepted.
    pub updated_at: Timestamp,
    /// When the task was deleted.
    pub deleted_at: Option<Timestamp>,
}

/// What became of one definition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// There was none of that id.
    Created,
    /// It differs from the one before.
    Updated,
    /// It is equal to the one before; nothing was written.
    Unchanged,
    /// It was deleted.
    Deleted,
}

/// One line of the audit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AuditEntry {
    /// When.
    pub at: Timestamp,
    /// Who: the token's name, or the address of the caller.
    pub actor: String,
    /// What: `task.created`, `task.updated`, `task.deleted`, `task.paused`, `task.resumed`, `run.triggered` …
    pub action: String,
    /// On what: the task or run id.
    pub subject: String,
    /// Before and after, or further facts.
    pub detail: Value,
}

/// Rows that a change of definitions writes, in one transaction that ends with `definitions_rev + 1`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DefinitionWrite {
    /// Whole task rows, new or changed (`rev` is set by the store).
    pub tasks: Vec<TaskRow>,
    /// Runs that come with them (delayed runs, skipped stretches).
    pub runs: Vec<Run>,
    /// Who changed what.
    pub audit: Vec<AuditEntry>,
}

/// What a change of definitions is decided on, read under the lock that orders such changes.
#[derive(Debug, Clone, Default)]
pub struct DefinitionView {
    /// The rows of the ids asked for that exist, tombstones included.
    pub tasks: std::collections::HashMap<TaskId, TaskRow>,
    /// The planning watermark.
    pub planned_until: Timestamp,
}

impl TaskRow {
    /// A run of this task, owed at `publish_at`, with what the definition says now.
    #[must_use]
    pub fn new_run(
        &self,
        run_id: RunId,
        kind: RunKind,
        trigger_at: Timestamp,
        publish_at: Timestamp,
        now: Timestamp,
    ) -> Run {
        let d = &self.definition;
        Run {
            run_id,
            task_id: d.task_id.clone(),
            kind,
            flow_id: run_id,
            trigger_at,
            publish_at,
            payload: None,
            stretch: None,
            created_at: now,
            group: d.executor_group.clone(),
            queue: d.queue_label.clone(),
            handler: d.handler.clone(),
            priority: d.priority,
            profile: None,
            state: RunState::Pending,
            reason: None,
            adopted: kind.is_scheduled(),
            decision: None,
            intent: None,
            message_no: 1,
            message: None,
            attempt_base: 0,
            attempt: 0,
            max_attempts: d.max_attempts(),
            worker_id: None,
            lateness_ms: None,
            published_at: None,
            started_at: None,
            finished_at: None,
            result: None,
        }
    }
}
