//! Whole batches of rows, each in one statement: one JSON parameter, an array of an array per row, which `json_each` makes
//! rows of.

use std::collections::HashSet;
use std::sync::LazyLock;

use ax_shared::{Profile, RunId, Timestamp};
use serde_json::Value;
use sqlx::sqlite::SqliteConnection;
use uuid::Uuid;

use super::super::batches;
use super::super::columns::{
    AttemptColumns, TaskSearch, decision_word, definition_text, intent_word, json_bytes, json_text, opt_text,
    run_bytes, signed, status_word, text, written,
};
use crate::core::definitions::{AuditEntry, TaskRow};
use crate::core::run::{Attempt, AttemptOutcome, Run, Signal};
use crate::ports::StoreError;

/// The half of a run that never changes, in the order of [`fixed`].
const FIXED: &[&str] = &[
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
];
/// The half of a run that belongs to the leader, in the order of [`mutable`].
const MUTABLE: &[&str] = &[
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

fn value(i: usize, name: &str) -> String {
    match name {
        "run_id" | "flow_id" | "delay_run_id" => format!("unhex(u.value ->> {i})"),
        _ => format!("u.value ->> {i}"),
    }
}

fn insert(table: &str, columns: &[&str], conflict: &str) -> String {
    let values: Vec<_> = columns.iter().enumerate().map(|(i, name)| value(i, name)).collect();
    // `WHERE true` keeps the parser from taking ON for that of a join.
    format!(
        "INSERT INTO {table} ({}) SELECT {} FROM json_each($1) u WHERE true {conflict}",
        columns.join(", "),
        values.join(", ")
    )
}

fn overwrite(key: &str, columns: &[&str]) -> String {
    let sets: Vec<_> = columns.iter().map(|name| format!("{name} = excluded.{name}")).collect();
    format!("ON CONFLICT ({key}) DO UPDATE SET {}", sets.join(", "))
}

static INSERT_RUNS: LazyLock<String> =
    LazyLock::new(|| insert("run", &[FIXED, MUTABLE].concat(), "ON CONFLICT (run_id) DO NOTHING RETURNING run_id"));

pub(super) static UPDATE_RUNS: LazyLock<String> = LazyLock::new(|| {
    let sets: Vec<_> = MUTABLE
        .iter()
        .enumerate()
        .map(|(i, name)| match *name {
            // Rows are loaded without their results: none means "as it is".
            "result" => format!("result = coalesce(u.value ->> {}, run.result)", i + 1),
            name => format!("{name} = {}", value(i + 1, name)),
        })
        .collect();
    format!("UPDATE run SET {} FROM json_each($1) u WHERE run.run_id = unhex(u.value ->> 0)", sets.join(", "))
});

const TASK: &[&str] = &[
    "task_id",
    "definition",
    "version",
    "rev",
    "anchor_at",
    "effective_at",
    "delay_run_id",
    "created_at",
    "updated_at",
    "deleted_at",
    "executor_group",
    "status",
    "name",
    "search",
    "labels",
];
static UPSERT_TASKS: LazyLock<String> = LazyLock::new(|| insert("task", TASK, &overwrite("task_id", &TASK[1..])));

const ATTEMPT: &[&str] = &["run_id", "attempt", "outcome", "worker_id", "started_at", "finished_at", "error"];
static UPSERT_ATTEMPTS: LazyLock<String> =
    LazyLock::new(|| insert("attempt", ATTEMPT, &overwrite("run_id, attempt", &ATTEMPT[2..])));

static INSERT_AUDIT: LazyLock<String> =
    LazyLock::new(|| insert("audit", &["at", "actor", "action", "subject", "detail"], ""));

static ADD_SIGNALS: LazyLock<String> =
    LazyLock::new(|| insert("signal", &["incarnation", "seq", "kind", "deliveries", "at"], "ON CONFLICT DO NOTHING"));

fn hex(id: RunId) -> String {
    id.0.simple().to_string()
}

fn millis(at: Option<Timestamp>) -> Value {
    at.map(Timestamp::as_millis).into()
}

fn fixed(run: &Run) -> Result<Vec<Value>, StoreError> {
    let stretch = run.stretch;
    Ok(vec![
        hex(run.run_id).into(),
        run.task_id.as_str().into(),
        run.kind.as_str().into(),
        hex(run.flow_id).into(),
        run.trigger_at.as_millis().into(),
        run.publish_at.as_millis().into(),
        run.payload.as_ref().map(json_text).into(),
        millis(stretch.map(|stretch| stretch.from)),
        millis(stretch.map(|stretch| stretch.to)),
        stretch.map(|stretch| signed(stretch.count)).transpose()?.into(),
        run.created_at.as_millis().into(),
    ])
}

fn mutable(run: &Run) -> Result<Vec<Value>, StoreError> {
    let message = run.message.as_ref();
    Ok(vec![
        run.group.as_str().into(),
        run.queue.as_str().into(),
        run.handler.as_str().into(),
        run.priority.into(),
        run.profile.as_ref().map(Profile::to_string).into(),
        run.state.as_str().into(),
        opt_text(&run.reason).into(),
        run.adopted.into(),
        run.decision.map(decision_word).into(),
        run.intent.map(intent_word).into(),
        run.message_no.into(),
        message.map(|message| message.incarnation.as_str()).into(),
        message.map(|message| signed(message.seq)).transpose()?.into(),
        message.map(|message| message.open).into(),
        run.attempt_base.into(),
        run.attempt.into(),
        run.max_attempts.into(),
        opt_text(&run.worker_id).into(),
        run.lateness_ms.into(),
        millis(run.published_at),
        millis(run.started_at),
        millis(run.finished_at),
        run.result.as_ref().map(json_text).into(),
    ])
}

fn parameter<T>(rows: &[T], row: impl Fn(&T) -> Result<Vec<Value>, StoreError>) -> Result<String, StoreError> {
    let rows = rows.iter().map(|each| row(each).map(Value::from)).collect::<Result<Vec<_>, _>>()?;
    Ok(Value::from(rows).to_string())
}

/// Inserts runs that are not there yet; `true` for those that this call wrote.
pub(super) async fn insert_runs(connection: &mut SqliteConnection, runs: &[Run]) -> Result<Vec<bool>, StoreError> {
    let mut inserted: HashSet<Uuid> = HashSet::new();
    for batch in batches(runs, run_bytes) {
        let rows = parameter(batch, |run| Ok([fixed(run)?, mutable(run)?].concat()))?;
        let ids: Vec<Uuid> = sqlx::query_scalar(INSERT_RUNS.as_str()).bind(rows).fetch_all(&mut *connection).await?;
        inserted.extend(ids);
    }
    Ok(written(runs.iter().map(|run| run.run_id), inserted))
}

/// Overwrites the mutable halves of runs.
pub(super) async fn update_runs(connection: &mut SqliteConnection, runs: &[Run]) -> Result<(), StoreError> {
    for batch in batches(runs, run_bytes) {
        let rows = parameter(batch, |run| Ok([vec![hex(run.run_id).into()], mutable(run)?].concat()))?;
        let updated = sqlx::query(UPDATE_RUNS.as_str()).bind(rows).execute(&mut *connection).await?.rows_affected();
        if updated != batch.len() as u64 {
            tracing::warn!(written = batch.len(), found = updated, "runs to update are not in the database");
        }
    }
    Ok(())
}

/// Inserts or overwrites tasks, all with one revision.
pub(super) async fn upsert_tasks(
    connection: &mut SqliteConnection,
    tasks: &[TaskRow],
    rev: i64,
) -> Result<(), StoreError> {
    for batch in batches(tasks, |task| json_bytes(&task.definition.payload)) {
        let rows = parameter(batch, |task| {
            let definition = &task.definition;
            let search = TaskSearch::of(definition);
            Ok(vec![
                definition.task_id.as_str().into(),
                definition_text(definition)?.into(),
                signed(task.version)?.into(),
                rev.into(),
                task.anchor_at.as_millis().into(),
                task.effective_at.as_millis().into(),
                task.delay_run_id.map(hex).into(),
                task.created_at.as_millis().into(),
                task.updated_at.as_millis().into(),
                millis(task.deleted_at),
                definition.executor_group.as_str().into(),
                status_word(definition.status).into(),
                text(&definition.name).into(),
                search.search.into(),
                Value::from(search.labels).to_string().into(),
            ])
        })?;
        sqlx::query(UPSERT_TASKS.as_str()).bind(rows).execute(&mut *connection).await?;
    }
    Ok(())
}

/// Appends lines to the audit.
pub(super) async fn insert_audit(connection: &mut SqliteConnection, audit: &[AuditEntry]) -> Result<(), StoreError> {
    for batch in batches(audit, |entry| json_bytes(&entry.detail)) {
        let rows = parameter(batch, |entry| {
            Ok(vec![
                entry.at.as_millis().into(),
                text(&entry.actor).into(),
                text(&entry.action).into(),
                text(&entry.subject).into(),
                json_text(&entry.detail).into(),
            ])
        })?;
        sqlx::query(INSERT_AUDIT.as_str()).bind(rows).execute(&mut *connection).await?;
    }
    Ok(())
}

/// Inserts or overwrites attempts; of several with one key the last counts.
pub(super) async fn upsert_attempts(connection: &mut SqliteConnection, attempts: &[Attempt]) -> Result<(), StoreError> {
    let attempts = super::super::last_of_each(attempts);
    for batch in batches(&attempts, |attempt| attempt.error.as_ref().map_or(0, String::len)) {
        let rows = parameter(batch, |attempt| {
            Ok(vec![
                hex(attempt.run_id).into(),
                attempt.attempt.into(),
                attempt.outcome.map(AttemptOutcome::as_str).into(),
                opt_text(&attempt.worker_id).into(),
                millis(attempt.started_at),
                millis(attempt.finished_at),
                opt_text(&attempt.error).into(),
            ])
        })?;
        sqlx::query(UPSERT_ATTEMPTS.as_str()).bind(rows).execute(&mut *connection).await?;
    }
    Ok(())
}

/// Reads attempts of runs, by run and number.
pub(super) async fn attempts(connection: &mut SqliteConnection, runs: &[RunId]) -> Result<Vec<Attempt>, StoreError> {
    let ids: Vec<String> = runs.iter().copied().map(hex).collect();
    let found: Vec<AttemptColumns> = sqlx::query_as(
        "SELECT run_id, attempt, outcome, worker_id, started_at, finished_at, error FROM attempt \
         WHERE run_id IN (SELECT unhex(value) FROM json_each($1)) ORDER BY run_id, attempt",
    )
    .bind(Value::from(ids).to_string())
    .fetch_all(connection)
    .await?;
    found.into_iter().map(AttemptColumns::into_attempt).collect()
}

/// Keeps signals.
pub(super) async fn add_signals(connection: &mut SqliteConnection, signals: &[Signal]) -> Result<(), StoreError> {
    for batch in batches(signals, |_| 0) {
        let rows = parameter(batch, |signal| {
            let mut row = signal_key(signal)?;
            row.push(signal.at.as_millis().into());
            Ok(row)
        })?;
        sqlx::query(ADD_SIGNALS.as_str()).bind(rows).execute(&mut *connection).await?;
    }
    Ok(())
}

/// Removes signals.
pub(super) async fn remove_signals(connection: &mut SqliteConnection, signals: &[Signal]) -> Result<(), StoreError> {
    for batch in batches(signals, |_| 0) {
        let keys = parameter(batch, signal_key)?;
        sqlx::query(
            "DELETE FROM signal WHERE (incarnation, seq, kind, deliveries) IN (SELECT value ->> 0, value ->> 1, \
             value ->> 2, value ->> 3 FROM json_each($1))",
        )
        .bind(keys)
        .execute(&mut *connection)
        .await?;
    }
    Ok(())
}

fn signal_key(signal: &Signal) -> Result<Vec<Value>, StoreError> {
    Ok(vec![
        signal.incarnation.as_str().into(),
        signed(signal.seq)?.into(),
        signal.kind.as_str().into(),
        signal.deliveries.into(),
    ])
}
