//! Whole batches of rows, each in one statement: arrays go in, `unnest` makes rows of them.

use std::collections::HashSet;
use std::sync::LazyLock;

use ax_shared::{Profile, RunId, Timestamp};
use sqlx::postgres::{PgArguments, PgConnection, Postgres};
use sqlx::query::Query;
use uuid::Uuid;

use super::super::columns::{
    AttemptColumns, TaskSearch, at, decision_word, definition_text, intent_word, json_bytes, json_text, opt_text,
    run_bytes, signed, status_word, text, unsigned, written,
};
use super::super::{SHARD, batches};
use crate::core::definitions::{AuditEntry, TaskRow};
use crate::core::run::{Attempt, AttemptOutcome, Run, Signal};
use crate::ports::{EventsPosition, ShardState, StoreError};

type Columns = &'static [(&'static str, &'static str)];

/// The half of a run that never changes, in the order of [`fixed`].
const FIXED: Columns = &[
    ("run_id", "uuid"),
    ("task_id", "text"),
    ("kind", "text"),
    ("flow_id", "uuid"),
    ("trigger_at", "bigint"),
    ("publish_at", "bigint"),
    ("payload", "text"),
    ("stretch_from", "bigint"),
    ("stretch_to", "bigint"),
    ("stretch_count", "bigint"),
    ("created_at", "bigint"),
];
/// The half of a run that belongs to the leader, in the order of [`mutable`].
const MUTABLE: Columns = &[
    ("executor_group", "text"),
    ("queue", "text"),
    ("handler", "text"),
    ("priority", "bigint"),
    ("profile", "text"),
    ("state", "text"),
    ("reason", "text"),
    ("adopted", "boolean"),
    ("decision", "text"),
    ("intent", "text"),
    ("message_no", "bigint"),
    ("message_incarnation", "text"),
    ("message_seq", "bigint"),
    ("message_open", "boolean"),
    ("attempt_base", "bigint"),
    ("attempt", "bigint"),
    ("max_attempts", "bigint"),
    ("worker_id", "text"),
    ("lateness_ms", "bigint"),
    ("published_at", "bigint"),
    ("started_at", "bigint"),
    ("finished_at", "bigint"),
    ("result", "text"),
];

fn names(columns: impl Iterator<Item = &'static (&'static str, &'static str)>) -> String {
    columns.map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}

fn unnest(columns: impl Iterator<Item = &'static (&'static str, &'static str)> + Clone) -> String {
    let arrays: Vec<_> = columns.clone().enumerate().map(|(i, (_, kind))| format!("${}::{kind}[]", i + 1)).collect();
    format!("unnest({}) AS u({})", arrays.join(", "), names(columns))
}

static INSERT_RUNS: LazyLock<String> = LazyLock::new(|| {
    let columns = FIXED.iter().chain(MUTABLE);
    let values: Vec<_> = columns
        .clone()
        .map(
            |(name, _)| {
                if matches!(*name, "payload" | "result") { format!("{name}::json") } else { (*name).to_owned() }
            },
        )
        .collect();
    format!(
        "INSERT INTO run ({}) SELECT {} FROM {} ON CONFLICT (run_id) DO NOTHING RETURNING run_id",
        names(columns.clone()),
        values.join(", "),
        unnest(columns)
    )
});

static UPDATE_RUNS: LazyLock<String> = LazyLock::new(|| {
    let sets: Vec<_> = MUTABLE
        .iter()
        .map(|(name, _)| match *name {
            // Rows are loaded without their results: none means "as it is".
            "result" => "result = coalesce(u.result::json, r.result)".to_owned(),
            name => format!("{name} = u.{name}"),
        })
        .collect();
    format!(
        "UPDATE run r SET {} FROM {} WHERE r.run_id = u.run_id",
        sets.join(", "),
        unnest(FIXED[..1].iter().chain(MUTABLE))
    )
});

type PgQuery<'q> = Query<'q, Postgres, PgArguments>;

fn column<'a, T, C>(rows: &[&'a T], value: impl Fn(&'a T) -> C) -> Vec<C> {
    rows.iter().map(|row| value(row)).collect()
}

fn fixed<'q>(query: PgQuery<'q>, runs: &[&Run]) -> Result<PgQuery<'q>, StoreError> {
    let counts: Vec<Option<i64>> = runs
        .iter()
        .map(|run| run.stretch.map(|stretch| signed(stretch.count)).transpose())
        .collect::<Result<_, StoreError>>()?;
    Ok(query
        .bind(column(runs, |run| run.run_id.0))
        .bind(column(runs, |run| run.task_id.as_str().to_owned()))
        .bind(column(runs, |run| run.kind.as_str()))
        .bind(column(runs, |run| run.flow_id.0))
        .bind(column(runs, |run| run.trigger_at.as_millis()))
        .bind(column(runs, |run| run.publish_at.as_millis()))
        .bind(column(runs, |run| run.payload.as_ref().map(json_text)))
        .bind(column(runs, |run| run.stretch.map(|stretch| stretch.from.as_millis())))
        .bind(column(runs, |run| run.stretch.map(|stretch| stretch.to.as_millis())))
        .bind(counts)
        .bind(column(runs, |run| run.created_at.as_millis())))
}

fn mutable<'q>(query: PgQuery<'q>, runs: &[&Run]) -> Result<PgQuery<'q>, StoreError> {
    let seqs: Vec<Option<i64>> = runs
        .iter()
        .map(|run| run.message.as_ref().map(|message| signed(message.seq)).transpose())
        .collect::<Result<_, StoreError>>()?;
    Ok(query
        .bind(column(runs, |run| run.group.as_str().to_owned()))
        .bind(column(runs, |run| run.queue.as_str().to_owned()))
        .bind(column(runs, |run| run.handler.as_str().to_owned()))
        .bind(column(runs, |run| i64::from(run.priority)))
        .bind(column(runs, |run| run.profile.as_ref().map(Profile::to_string)))
        .bind(column(runs, |run| run.state.as_str()))
        .bind(column(runs, |run| opt_text(&run.reason)))
        .bind(column(runs, |run| run.adopted))
        .bind(column(runs, |run| run.decision.map(decision_word)))
        .bind(column(runs, |run| run.intent.map(intent_word)))
        .bind(column(runs, |run| i64::from(run.message_no)))
        .bind(column(runs, |run| run.message.as_ref().map(|message| message.incarnation.clone())))
        .bind(seqs)
        .bind(column(runs, |run| run.message.as_ref().map(|message| message.open)))
        .bind(column(runs, |run| i64::from(run.attempt_base)))
        .bind(column(runs, |run| i64::from(run.attempt)))
        .bind(column(runs, |run| i64::from(run.max_attempts)))
        .bind(column(runs, |run| opt_text(&run.worker_id)))
        .bind(column(runs, |run| run.lateness_ms))
        .bind(column(runs, |run| run.published_at.map(Timestamp::as_millis)))
        .bind(column(runs, |run| run.started_at.map(Timestamp::as_millis)))
        .bind(column(runs, |run| run.finished_at.map(Timestamp::as_millis)))
        .bind(column(runs, |run| run.result.as_ref().map(json_text))))
}

/// Inserts runs that are not there yet; `true` for those that this call wrote.
pub(super) async fn insert_runs(connection: &mut PgConnection, runs: &[Run]) -> Result<Vec<bool>, StoreError> {
    // In the order of ids, so that two callers with the same runs wait for each other instead of in a circle.
    let mut sorted: Vec<&Run> = runs.iter().collect();
    sorted.sort_by_key(|run| run.run_id);
    let mut inserted: HashSet<Uuid> = HashSet::new();
    for batch in batches(&sorted, |run| run_bytes(run)) {
        let query = mutable(fixed(sqlx::query(INSERT_RUNS.as_str()), batch)?, batch)?;
        for row in query.fetch_all(&mut *connection).await? {
            inserted.insert(sqlx::Row::try_get(&row, 0)?);
        }
    }
    Ok(written(runs.iter().map(|run| run.run_id), inserted))
}

/// Overwrites the mutable halves of runs.
pub(super) async fn update_runs(connection: &mut PgConnection, runs: &[Run]) -> Result<(), StoreError> {
    let mut sorted: Vec<&Run> = runs.iter().collect();
    sorted.sort_by_key(|run| run.run_id);
    for batch in batches(&sorted, |run| run_bytes(run)) {
        let query = sqlx::query(UPDATE_RUNS.as_str()).bind(column(batch, |run| run.run_id.0));
        let updated = mutable(query, batch)?.execute(&mut *connection).await?.rows_affected();
        if updated != batch.len() as u64 {
            tracing::warn!(written = batch.len(), found = updated, "runs to update are not in the database");
        }
    }
    Ok(())
}

/// Inserts or overwrites tasks, all with one revision.
pub(super) async fn upsert_tasks(connection: &mut PgConnection, tasks: &[TaskRow], rev: i64) -> Result<(), StoreError> {
    let mut sorted: Vec<&TaskRow> = tasks.iter().collect();
    sorted.sort_by(|a, b| a.definition.task_id.cmp(&b.definition.task_id));
    for batch in batches(&sorted, |task| json_bytes(&task.definition.payload)) {
        let mut definitions = Vec::with_capacity(batch.len());
        let mut versions = Vec::with_capacity(batch.len());
        let mut searches = Vec::with_capacity(batch.len());
        let mut labels = Vec::with_capacity(batch.len());
        for task in batch {
            definitions.push(definition_text(&task.definition)?);
            versions.push(signed(task.version)?);
            let search = TaskSearch::of(&task.definition);
            searches.push(search.search);
            // Arrays of arrays have to be rectangular: each row's labels travel as a JSON array.
            labels.push(serde_json::Value::from(search.labels).to_string());
        }
        sqlx::query(
            "INSERT INTO task (task_id, definition, version, rev, anchor_at, effective_at, delay_run_id, created_at, \
                               updated_at, deleted_at, executor_group, status, name, search, labels) \
             SELECT task_id, definition::json, version, $1, anchor_at, effective_at, delay_run_id, created_at, updated_at, \
                    deleted_at, executor_group, status, name, search, \
                    ARRAY(SELECT json_array_elements_text(labels::json)) \
             FROM unnest($2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::bigint[], $7::uuid[], $8::bigint[], \
                         $9::bigint[], $10::bigint[], $11::text[], $12::text[], $13::text[], $14::text[], $15::text[]) \
                  AS u(task_id, definition, version, anchor_at, effective_at, delay_run_id, created_at, updated_at, \
                       deleted_at, executor_group, status, name, search, labels) \
             ON CONFLICT (task_id) DO UPDATE SET definition = excluded.definition, version = excluded.version, \
                 rev = excluded.rev, anchor_at = excluded.anchor_at, effective_at = excluded.effective_at, \
                 delay_run_id = excluded.delay_run_id, created_at = excluded.created_at, \
                 updated_at = excluded.updated_at, deleted_at = excluded.deleted_at, \
                 executor_group = excluded.executor_group, status = excluded.status, name = excluded.name, \
                 search = excluded.search, labels = excluded.labels",
        )
        .bind(rev)
        .bind(column(batch, |task| task.definition.task_id.as_str().to_owned()))
        .bind(definitions)
        .bind(versions)
        .bind(column(batch, |task| task.anchor_at.as_millis()))
        .bind(column(batch, |task| task.effective_at.as_millis()))
        .bind(column(batch, |task| task.delay_run_id.map(|id| id.0)))
        .bind(column(batch, |task| task.created_at.as_millis()))
        .bind(column(batch, |task| task.updated_at.as_millis()))
        .bind(column(batch, |task| task.deleted_at.map(Timestamp::as_millis)))
        .bind(column(batch, |task| task.definition.executor_group.as_str().to_owned()))
        .bind(column(batch, |task| status_word(task.definition.status)))
        .bind(column(batch, |task| text(&task.definition.name)))
        .bind(searches)
        .bind(labels)
        .execute(&mut *connection)
        .await?;
    }
    Ok(())
}

/// Appends lines to the audit.
pub(super) async fn insert_audit(connection: &mut PgConnection, audit: &[AuditEntry]) -> Result<(), StoreError> {
    let audit: Vec<&AuditEntry> = audit.iter().collect();
    for batch in batches(&audit, |entry| json_bytes(&entry.detail)) {
        sqlx::query(
            "INSERT INTO audit (at, actor, action, subject, detail) SELECT at, actor, action, subject, detail::json \
             FROM unnest($1::bigint[], $2::text[], $3::text[], $4::text[], $5::text[]) AS u(at, actor, action, subject, detail)",
        )
        .bind(column(batch, |entry| entry.at.as_millis()))
        .bind(column(batch, |entry| text(&entry.actor)))
        .bind(column(batch, |entry| text(&entry.action)))
        .bind(column(batch, |entry| text(&entry.subject)))
        .bind(column(batch, |entry| json_text(&entry.detail)))
        .execute(&mut *connection)
        .await?;
    }
    Ok(())
}

/// Inserts or overwrites attempts; of several with one key the last counts.
pub(super) async fn upsert_attempts(connection: &mut PgConnection, attempts: &[Attempt]) -> Result<(), StoreError> {
    let attempts = super::super::last_of_each(attempts);
    for batch in batches(&attempts, |attempt| attempt.error.as_ref().map_or(0, String::len)) {
        sqlx::query(
            "INSERT INTO attempt (run_id, attempt, outcome, worker_id, started_at, finished_at, error) \
             SELECT * FROM unnest($1::uuid[], $2::bigint[], $3::text[], $4::text[], $5::bigint[], $6::bigint[], $7::text[]) \
             ON CONFLICT (run_id, attempt) DO UPDATE SET outcome = excluded.outcome, worker_id = excluded.worker_id, \
                 started_at = excluded.started_at, finished_at = excluded.finished_at, error = excluded.error",
        )
        .bind(column(batch, |attempt| attempt.run_id.0))
        .bind(column(batch, |attempt| i64::from(attempt.attempt)))
        .bind(column(batch, |attempt| attempt.outcome.map(AttemptOutcome::as_str)))
        .bind(column(batch, |attempt| opt_text(&attempt.worker_id)))
        .bind(column(batch, |attempt| attempt.started_at.map(Timestamp::as_millis)))
        .bind(column(batch, |attempt| attempt.finished_at.map(Timestamp::as_millis)))
        .bind(column(batch, |attempt| opt_text(&attempt.error)))
        .execute(&mut *connection)
        .await?;
    }
    Ok(())
}

/// Reads attempts of runs, by run and number.
pub(super) async fn attempts(connection: &mut PgConnection, runs: &[RunId]) -> Result<Vec<Attempt>, StoreError> {
    let ids: Vec<Uuid> = runs.iter().map(|id| id.0).collect();
    let found: Vec<AttemptColumns> = sqlx::query_as(
        "SELECT run_id, attempt, outcome, worker_id, started_at, finished_at, error FROM attempt \
         WHERE run_id = ANY($1) ORDER BY run_id, attempt",
    )
    .bind(ids)
    .fetch_all(connection)
    .await?;
    found.into_iter().map(AttemptColumns::into_attempt).collect()
}

/// Keeps signals.
pub(super) async fn add_signals(connection: &mut PgConnection, signals: &[Signal]) -> Result<(), StoreError> {
    let signals: Vec<&Signal> = signals.iter().collect();
    for batch in batches(&signals, |_| 0) {
        let query = sqlx::query(
            "INSERT INTO signal (incarnation, seq, kind, deliveries, at) \
             SELECT * FROM unnest($1::text[], $2::bigint[], $3::text[], $4::bigint[], $5::bigint[]) ON CONFLICT DO NOTHING",
        );
        signal_key(query, batch)?.bind(column(batch, |signal| signal.at.as_millis())).execute(&mut *connection).await?;
    }
    Ok(())
}

/// Removes signals.
pub(super) async fn remove_signals(connection: &mut PgConnection, signals: &[Signal]) -> Result<(), StoreError> {
    let signals: Vec<&Signal> = signals.iter().collect();
    for batch in batches(&signals, |_| 0) {
        let query = sqlx::query(
            "DELETE FROM signal s USING unnest($1::text[], $2::bigint[], $3::text[], $4::bigint[]) \
             AS u(incarnation, seq, kind, deliveries) WHERE s.incarnation = u.incarnation AND s.seq = u.seq \
             AND s.kind = u.kind AND s.deliveries = u.deliveries",
        );
        signal_key(query, batch)?.execute(&mut *connection).await?;
    }
    Ok(())
}

fn signal_key<'q>(query: PgQuery<'q>, signals: &[&Signal]) -> Result<PgQuery<'q>, StoreError> {
    let seqs = signals.iter().map(|signal| signed(signal.seq)).collect::<Result<Vec<_>, _>>()?;
    Ok(query
        .bind(column(signals, |signal| signal.incarnation.clone()))
        .bind(seqs)
        .bind(column(signals, |signal| signal.kind.as_str()))
        .bind(column(signals, |signal| i64::from(signal.deliveries))))
}

/// Reads the shard's row.
pub(super) async fn shard(connection: &mut PgConnection) -> Result<ShardState, StoreError> {
    type Row = (i64, i64, Option<i64>, i64, i64, String);
    let (epoch, rev, planned_until, planned_rev, seq, incarnation): Row = sqlx::query_as(
        "SELECT s.epoch, s.definitions_rev, s.planned_until, s.planned_rev, e.events_seq, e.incarnation \
         FROM shard s JOIN settled e USING (shard_id) WHERE shard_id = $1",
    )
    .bind(SHARD)
    .fetch_one(connection)
    .await?;
    let parse = || {
        Ok(ShardState {
            epoch: unsigned("epoch", epoch)?,
            definitions_rev: unsigned("definitions_rev", rev)?,
            planned_until: planned_until.map(at).unwrap_or_default(),
            planned_rev: unsigned("planned_rev", planned_rev)?,
            settled: EventsPosition { incarnation, seq: unsigned("events_seq", seq)? },
        })
    };
    parse().map_err(StoreError::Corrupt)
}
