//! SQL that both databases read alike: lists, whose conditions depend on the filter.
//!
//! Every value is a numbered parameter, bound whether the text mentions it or not; only words of our own enums are
//! written into the text. A filter has few shapes, so the texts are few and their statements stay prepared.

use std::fmt::Write;

use crate::core::run::RunState;
use crate::ports::{RunFilter, TaskFilter};

/// Every column of `run`, with what takes the place of payload and result.
pub(super) fn run_columns(prefix: &str, payload: &str, result: &str) -> String {
    let mut text = String::new();
    for column in RUN_COLUMNS {
        let comma = if text.is_empty() { "" } else { ", " };
        match *column {
            "payload" => write!(text, "{comma}{payload} AS payload"),
            "result" => write!(text, "{comma}{result} AS result"),
            plain => write!(text, "{comma}{prefix}{plain}"),
        }
        .expect("a String takes everything");
    }
    text
}

const RUN_COLUMNS: &[&str] = &[
    "run_id",
    "task_id",
    "kind",
    "flow_id",
    "trigger_at",
    "publish_at",
    "payload",
    "stretch_from",
    "stretch_to",
    "stretch_count",
    "created_at",
    "executor_group",
    "queue",
    "handler",
    "priority",
    "profile",
    "state",
    "reason",
    "adopted",
    "decision",
    "intent",
    "message_no",
    "message_incarnation",
    "message_seq",
    "message_open",
    "attempt_base",
    "attempt",
    "max_attempts",
    "worker_id",
    "lateness_ms",
    "published_at",
    "started_at",
    "finished_at",
    "result",
];

/// Text of [`crate::ports::Store::list_runs`]. Parameters: $1 task, $2 group, $3 from, $4 to, $5 and $6 trigger time
/// and run id of the last row, $7 limit. `columns` as the database has them.
///
/// Each final state is a branch of its own, so that each is read from an index in the order of the list and stops at the
/// limit, however rare it is; the unfinished states, of which there are never many rows, are one branch.
pub(super) fn list_runs(filter: &RunFilter, columns: &str) -> String {
    let mut common = String::new();
    if filter.task_id.is_some() {
        common += " AND task_id = $1";
    }
    if filter.group.is_some() {
        common += " AND executor_group = $2";
    }
    if filter.from.is_some() {
        common += " AND trigger_at >= $3";
    }
    if filter.to.is_some() {
        common += " AND trigger_at < $4";
    }
    if filter.after.is_some() {
        common += " AND (trigger_at, run_id) < ($5, $6)";
    }
    const ORDER: &str = "ORDER BY trigger_at DESC, run_id DESC LIMIT $7";
    let branch = |state: &str| format!("SELECT {columns} FROM run WHERE {state}{common} {ORDER}");
    let mut branches = Vec::new();
    let (ended, unfinished): (Vec<_>, Vec<_>) =
        RunState::ALL.into_iter().filter(|state| filter.states.contains(state)).partition(|state| state.is_final());
    if !unfinished.is_empty() {
        let words: Vec<_> = unfinished.iter().map(|state| format!("'{}'", state.as_str())).collect();
        branches.push(branch(&format!("live AND state IN ({})", words.join(", "))));
    }
    branches.extend(ended.iter().map(|state| match state {
        // Nearly every row: their index by task is of use with a task only.
        RunState::Succeeded if filter.task_id.is_none() => branch("state = 'succeeded'"),
        // Said twice, since not every planner concludes that `= 'failed'` is `<> 'succeeded'`.
        RunState::Succeeded => branch("ended_as = 'succeeded'"),
        other => branch(&format!("ended_as <> 'succeeded' AND ended_as = '{}'", other.as_str())),
    }));
    match branches.len() {
        0 => branch("1 = 1"),
        1 => branches.remove(0),
        _ => {
            let mut text = String::new();
            for (i, branch) in branches.iter().enumerate() {
                let union = if i == 0 { "" } else { " UNION ALL " };
                write!(text, "{union}SELECT * FROM ({branch}) AS b{i}").expect("a String takes everything");
            }
            format!("{text} {ORDER}")
        }
    }
}

/// Text of [`crate::ports::Store::list_tasks`]. Parameters: $1 group, $2 status, $3 label, $4 text in lower case,
/// $5 id of the last row, $6 limit. `label` and `q` are the database's conditions on $3 and $4.
pub(super) fn list_tasks(filter: &TaskFilter, columns: &str, label: &str, q: &str) -> String {
    let mut text = format!("SELECT {columns} FROM task WHERE deleted_at IS NULL");
    for (given, condition) in [
        (filter.group.is_some(), "executor_group = $1"),
        (filter.status.is_some(), "status = $2"),
        (filter.label.is_some(), label),
        (filter.q.is_some(), q),
        (filter.after.is_some(), "task_id > $5"),
    ] {
        if given {
            text += " AND ";
            text += condition;
        }
    }
    text + " ORDER BY task_id LIMIT $6"
}

/// Every token that has not been revoked.
pub(super) const TOKENS: &str =
    "SELECT hash, name, role, created_at, expires_at FROM token WHERE revoked_at IS NULL ORDER BY name";
/// Adds a token, unless there is one of that name.
pub(super) const ADD_TOKEN: &str = "INSERT INTO token (hash, name, role, created_at, expires_at) VALUES ($1, $2, $3, $4, $5) \
     ON CONFLICT (name) WHERE revoked_at IS NULL DO NOTHING";
/// Revokes the token of a name.
pub(super) const REVOKE_TOKEN: &str = "UPDATE token SET revoked_at = $2 WHERE name = $1 AND revoked_at IS NULL";
