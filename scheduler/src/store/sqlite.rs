//! SQLite: one node, one file, one writer connection, a few readers (WAL).
//!
//! A lock on `<file>.lock`, held for the life of the store, keeps a second node from the same file; the operating system
//! releases it however the process ends. A commit is durable when it answers (`synchronous = FULL`). There is one writer
//! connection and every change begins with `BEGIN IMMEDIATE` on it, so a change sees everything before it; the leader waits
//! for at most one call of a user.

mod rows;

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

use async_trait::async_trait;
use ax_shared::{Group, RunId, TaskId, Timestamp};
use futures::TryStreamExt;
use sqlx::migrate::Migrator;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{AssertSqlSafe, Sqlite as Db, Transaction};
use tokio::sync::{Mutex, MutexGuard};
use uuid::Uuid;

use super::columns::{
    RunColumns, SignalColumns, TaskColumns, TokenColumns, at, folded, signed, status_word, text, unsigned,
};
use super::{SHARD, queries};
use crate::core::command::Command;
use crate::core::definitions::{AuditEntry, DefinitionView, TaskRow};
use crate::core::run::{Attempt, Run, Signal};
use crate::core::token::Token;
use crate::ports::{
    Batch, DecideChange, EventsPosition, Planned, RunFilter, ShardState, Store, StoreError, TaskFilter, TaskHistory,
    Watermark,
};

static STEPS: Migrator = sqlx::migrate!("../migrations/sqlite");

/// How long to wait for the writer, or for another program that has the file locked.
const BUSY: Duration = Duration::from_secs(5);

const TASK: &str =
    "task_id, definition, version, rev, anchor_at, effective_at, delay_run_id, created_at, updated_at, deleted_at";

/// A run with everything.
static WHOLE: LazyLock<String> = LazyLock::new(|| queries::run_columns("", "payload", "result"));
/// A run without its result.
static OWED: LazyLock<String> = LazyLock::new(|| queries::run_columns("", "payload", "NULL"));
/// A run without payload and result.
static BRIEF: LazyLock<String> = LazyLock::new(|| queries::run_columns("", "NULL", "NULL"));

static RUN: LazyLock<String> = LazyLock::new(|| format!("SELECT {} FROM run WHERE run_id = $1", *WHOLE));
static LAST_RUNS: LazyLock<String> = LazyLock::new(|| {
    format!(
        "SELECT {} FROM json_each($1) t CROSS JOIN run WHERE run_id = (SELECT run_id FROM run \
         WHERE task_id = t.value AND trigger_at <= $2 ORDER BY trigger_at DESC, run_id DESC LIMIT 1)",
        *BRIEF
    )
});
const LAST_SUCCESSES: &str = "SELECT t.value, (SELECT finished_at FROM run WHERE task_id = t.value \
     AND ended_as = 'succeeded' ORDER BY trigger_at DESC, run_id DESC LIMIT 1) FROM json_each($1) t";
static ADOPT: LazyLock<String> = LazyLock::new(|| {
    format!(
        "UPDATE run SET adopted = 1 WHERE run_id IN (SELECT run_id FROM run WHERE live AND adopted = 0 \
         AND state = 'pending' AND publish_at < $1 ORDER BY publish_at, run_id LIMIT $2) RETURNING {}",
        *OWED
    )
});
static UNFINISHED: LazyLock<String> = LazyLock::new(|| format!("SELECT {} FROM run WHERE live AND adopted = 1", *OWED));

/// The SQLite implementation of [`Store`].
#[derive(Debug)]
pub struct Sqlite {
    writer: SqlitePool,
    readers: SqlitePool,
    /// Held while a user's call waits for the writer or has it.
    turn: Mutex<()>,
    /// None beside a node that has the file.
    _lock: Option<File>,
}

impl Sqlite {
    /// Opens or makes the file of `sqlite://PATH`, and the folders that it is in.
    ///
    /// # Errors
    /// See [`super::open`].
    pub async fn open(url: &str) -> Result<Self, StoreError> {
        let path = path(url)?;
        Self::open_at(&path, true).await
    }

    /// Opens the file also while a node has it, for what is no business of the node's; answers whether one has it. A
    /// file that is not there is made only if `make`.
    ///
    /// # Errors
    /// See [`super::open`].
    pub async fn open_beside(url: &str, make: bool) -> Result<(Self, bool), StoreError> {
        let path = path(url)?;
        if !make && !path.exists() {
            return Err(StoreError::Refused(format!(
                "there is no database {} (AX_DATABASE_URL names the one of your server)",
                path.display()
            )));
        }
        let store = Self::open_at(&path, false).await?;
        let beside = store._lock.is_none();
        Ok((store, beside))
    }

    async fn open_at(path: &Path, alone: bool) -> Result<Self, StoreError> {
        let refused = |what: &str, error: &dyn std::fmt::Display| {
            StoreError::Refused(format!("the database {} cannot be opened: {what}: {error}", path.display()))
        };
        // The folder is made, its parents are not: those missing too is more likely a slip in the path.
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.exists()) {
            std::fs::create_dir(folder).map_err(|error| refused("its folder cannot be made", &error))?;
        }
        let lock = match lock(path)? {
            None if alone => {
                return Err(StoreError::Refused(format!(
                    "the database {} is in use by another ax node; several nodes need Postgres",
                    path.display()
                )));
            }
            lock => lock,
        };
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(BUSY)
            .foreign_keys(true);
        let pool = || SqlitePoolOptions::new().acquire_timeout(BUSY).idle_timeout(None).max_lifetime(None);
        let cannot = |error: sqlx::Error| refused("SQLite", &error);
        // The writer first: it makes the file.
        let writer =
            pool().max_connections(1).min_connections(1).connect_with(options.clone()).await.map_err(cannot)?;
        let readers = pool()
            .max_connections(4)
            .connect_with(options.create_if_missing(false).pragma("query_only", "on"))
            .await
            .map_err(cannot)?;
        Ok(Self { writer, readers, turn: Mutex::new(()), _lock: lock })
    }

    /// Begins a change of the leader.
    async fn fenced(&self, epoch: u64) -> Result<Transaction<'static, Db>, StoreError> {
        let mut change = self.writer.begin_with("BEGIN IMMEDIATE").await?;
        let mine = sqlx::query("SELECT 1 FROM shard WHERE shard_id = $1 AND epoch = $2")
            .bind(SHARD)
            .bind(signed(epoch)?)
            .fetch_optional(&mut *change)
            .await?;
        if mine.is_none() {
            change.rollback().await?;
            return Err(StoreError::Fenced { mine: epoch });
        }
        Ok(change)
    }

    /// Begins a change for a user.
    async fn change(&self) -> Result<(MutexGuard<'_, ()>, Transaction<'static, Db>), StoreError> {
        let turn = tokio::time::timeout(BUSY, self.turn.lock())
            .await
            .map_err(|_| StoreError::Unavailable(sqlx::Error::PoolTimedOut))?;
        let change = self.writer.begin_with("BEGIN IMMEDIATE").await?;
        Ok((turn, change))
    }
}

/// The path in `sqlite://PATH`, taken as it is.
fn path(url: &str) -> Result<PathBuf, StoreError> {
    let refused = |why: &str| Err(StoreError::Refused(format!("the database URL {url:?} is not sqlite://PATH: {why}")));
    let Some(path) = url.strip_prefix("sqlite://") else {
        return refused(if url.contains(":memory:") { "a database in memory keeps no promise" } else { "no \"//\"" });
    };
    match path {
        "" => refused("it has no path"),
        _ if path.contains(":memory:") => refused("a database in memory keeps no promise"),
        _ if path.contains('?') => refused("it takes no options"),
        _ => Ok(PathBuf::from(path)),
    }
}

/// Takes the lock that says which node has the file; none when another one has it.
fn lock(path: &Path) -> Result<Option<File>, StoreError> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let cannot = |error: std::io::Error| {
        StoreError::Refused(format!("the database {} cannot be opened: its lock file: {error}", path.display()))
    };
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(&name).map_err(cannot)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(cannot(error)),
    }
}

async fn shard(connection: &mut SqliteConnection) -> Result<ShardState, StoreError> {
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

/// Ids of tasks as a JSON array.
fn id_array(ids: &[TaskId]) -> String {
    serde_json::Value::from(super::columns::task_ids(ids)).to_string()
}

#[async_trait]
impl Store for Sqlite {
    async fn migrate(&self) -> Result<Vec<String>, StoreError> {
        let mut connection = self.writer.acquire().await?;
        super::migrate::migrate(&mut *connection, &STEPS).await
    }

    async fn database_id(&self) -> Result<Uuid, StoreError> {
        Ok(sqlx::query_scalar("SELECT database_id FROM meta").fetch_one(&self.readers).await?)
    }

    async fn ping(&self) -> Result<(), StoreError> {
        let (_turn, mut change) = self.change().await?;
        sqlx::query("UPDATE meta SET database_id = database_id").execute(&mut *change).await?;
        change.commit().await?;
        Ok(())
    }

    async fn server_time(&self) -> Result<Option<Timestamp>, StoreError> {
        Ok(None)
    }

    fn is_shared(&self) -> bool {
        false
    }

    async fn change_definitions(&self, ids: &[TaskId], decide: DecideChange<'_>) -> Result<(), StoreError> {
        let (_turn, mut change) = self.change().await?;
        let text = AssertSqlSafe(format!("SELECT {TASK} FROM task WHERE task_id IN (SELECT value FROM json_each($1))"));
        let found: Vec<TaskColumns> = sqlx::query_as(text).bind(id_array(ids)).fetch_all(&mut *change).await?;
        let mut tasks = HashMap::new();
        for row in found {
            let task = row.into_task()?;
            tasks.insert(task.definition.task_id.clone(), task);
        }
        let ShardState { planned_until, planned_rev, definitions_rev, .. } = shard(&mut change).await?;
        let Some(write) = decide(DefinitionView { tasks, planned_until, planned_rev }) else {
            change.rollback().await?;
            return Ok(());
        };
        rows::upsert_tasks(&mut change, &write.tasks, signed(definitions_rev + 1)?).await?;
        rows::insert_runs(&mut change, &write.runs).await?;
        rows::insert_audit(&mut change, &write.audit).await?;
        if !write.tasks.is_empty() {
            sqlx::query("UPDATE shard SET definitions_rev = definitions_rev + 1 WHERE shard_id = $1")
                .bind(SHARD)
                .execute(&mut *change)
                .await?;
        }
        change.commit().await?;
        Ok(())
    }

    async fn task(&self, id: &TaskId) -> Result<Option<TaskRow>, StoreError> {
        Ok(self.tasks(std::slice::from_ref(id)).await?.pop())
    }

    async fn tasks(&self, ids: &[TaskId]) -> Result<Vec<TaskRow>, StoreError> {
        let text = AssertSqlSafe(format!(
            "SELECT {TASK} FROM task WHERE task_id IN (SELECT value FROM json_each($1)) AND deleted_at IS NULL"
        ));
        let found: Vec<TaskColumns> = sqlx::query_as(text).bind(id_array(ids)).fetch_all(&self.readers).await?;
        found.into_iter().map(TaskColumns::into_task).collect()
    }

    async fn list_tasks(&self, filter: &TaskFilter) -> Result<Vec<TaskRow>, StoreError> {
        let label = "EXISTS (SELECT 1 FROM json_each(labels) l WHERE l.value = $3)";
        let sql = queries::list_tasks(filter, TASK, label, "instr(search, $4) > 0");
        let found: Vec<TaskColumns> = sqlx::query_as(AssertSqlSafe(sql))
            .bind(filter.group.as_ref().map(Group::as_str))
            .bind(filter.status.map(status_word))
            .bind(filter.label.as_deref().map(text))
            .bind(filter.q.as_deref().map(folded))
            .bind(filter.after.as_ref().map(TaskId::as_str))
            .bind(i64::from(filter.limit))
            .fetch_all(&self.readers)
            .await?;
        found.into_iter().map(TaskColumns::into_task).collect()
    }

    async fn histories(&self, ids: &[TaskId], now: Timestamp) -> Result<BTreeMap<TaskId, TaskHistory>, StoreError> {
        let mut view = self.readers.begin().await?;
        let mut histories: BTreeMap<TaskId, TaskHistory> =
            ids.iter().map(|id| (id.clone(), TaskHistory::default())).collect();
        let last: Vec<RunColumns> =
            sqlx::query_as(LAST_RUNS.as_str()).bind(id_array(ids)).bind(now.as_millis()).fetch_all(&mut *view).await?;
        for row in last {
            let run = row.into_run()?;
            if let Some(history) = histories.get_mut(&run.task_id) {
                history.last_run = Some(run);
            }
        }
        let successes: Vec<(String, Option<i64>)> =
            sqlx::query_as(LAST_SUCCESSES).bind(id_array(ids)).fetch_all(&mut *view).await?;
        for (id, finished_at) in successes {
            if let Some(history) = histories.get_mut(id.as_str()) {
                history.last_success_at = finished_at.map(at);
            }
        }
        view.commit().await?;
        Ok(histories)
    }

    async fn insert_runs(&self, runs: &[Run], audit: &[AuditEntry]) -> Result<Vec<bool>, StoreError> {
        let (_turn, mut change) = self.change().await?;
        let written = rows::insert_runs(&mut change, runs).await?;
        rows::insert_audit(&mut change, &super::audit_of(runs, &written, audit)).await?;
        change.commit().await?;
        Ok(written)
    }

    async fn insert_command(&self, command: &Command, audit: &AuditEntry) -> Result<(), StoreError> {
        let (_turn, mut change) = self.change().await?;
        sqlx::query("INSERT INTO command (id, kind, subject, body, created_at) VALUES ($1, $2, $3, $4, $5)")
            .bind(command.id)
            .bind(command.kind.as_str())
            .bind(command.run_id.to_string())
            .bind(super::command_body(command)?)
            .bind(command.at.as_millis())
            .execute(&mut *change)
            .await?;
        rows::insert_audit(&mut change, std::slice::from_ref(audit)).await?;
        change.commit().await?;
        Ok(())
    }

    async fn commands(&self, limit: u32) -> Result<Vec<Command>, StoreError> {
        let found: Vec<String> = sqlx::query_scalar("SELECT body FROM command ORDER BY created_at, id LIMIT $1")
            .bind(i64::from(limit))
            .fetch_all(&self.readers)
            .await?;
        found.iter().map(|body| super::command_of(body)).collect()
    }

    async fn list_runs(&self, filter: &RunFilter) -> Result<Vec<Run>, StoreError> {
        let found: Vec<RunColumns> = sqlx::query_as(AssertSqlSafe(queries::list_runs(filter, &BRIEF)))
            .bind(filter.task_id.as_ref().map(TaskId::as_str))
            .bind(filter.group.as_ref().map(Group::as_str))
            .bind(filter.from.map(Timestamp::as_millis))
            .bind(filter.to.map(Timestamp::as_millis))
            .bind(filter.after.map(|(trigger_at, _)| trigger_at.as_millis()))
            .bind(filter.after.map(|(_, id)| id.0))
            .bind(i64::from(filter.limit))
            .fetch_all(&self.readers)
            .await?;
        found.into_iter().map(RunColumns::into_run).collect()
    }

    async fn run(&self, id: RunId) -> Result<Option<(Run, Vec<Attempt>)>, StoreError> {
        let mut view = self.readers.begin().await?;
        let run: Option<RunColumns> = sqlx::query_as(RUN.as_str()).bind(id.0).fetch_optional(&mut *view).await?;
        let attempts = rows::attempts(&mut view, &[id]).await?;
        view.commit().await?;
        Ok(run.map(RunColumns::into_run).transpose()?.map(|run| (run, attempts)))
    }

    async fn tokens(&self) -> Result<Vec<Token>, StoreError> {
        let found: Vec<TokenColumns> = sqlx::query_as(queries::TOKENS).fetch_all(&self.readers).await?;
        found.into_iter().map(TokenColumns::into_token).collect()
    }

    async fn add_token(&self, token: &Token, audit: &AuditEntry) -> Result<bool, StoreError> {
        let (_turn, mut change) = self.change().await?;
        let added = sqlx::query(queries::ADD_TOKEN)
            .bind(token.hash.as_slice())
            .bind(&token.name)
            .bind(token.role.as_str())
            .bind(token.created_at.as_millis())
            .bind(token.expires_at.map(Timestamp::as_millis))
            .execute(&mut *change)
            .await?;
        if added.rows_affected() == 0 {
            change.rollback().await?;
            return Ok(false);
        }
        rows::insert_audit(&mut change, std::slice::from_ref(audit)).await?;
        change.commit().await?;
        Ok(true)
    }

    async fn revoke_token(&self, name: &str, audit: &AuditEntry) -> Result<bool, StoreError> {
        let (_turn, mut change) = self.change().await?;
        let revoked =
            sqlx::query(queries::REVOKE_TOKEN).bind(name).bind(audit.at.as_millis()).execute(&mut *change).await?;
        if revoked.rows_affected() == 0 {
            change.rollback().await?;
            return Ok(false);
        }
        rows::insert_audit(&mut change, std::slice::from_ref(audit)).await?;
        change.commit().await?;
        Ok(true)
    }

    async fn shard(&self) -> Result<ShardState, StoreError> {
        shard(&mut *self.readers.acquire().await?).await
    }

    async fn acquire(&self, at_least: u64, now: Timestamp) -> Result<ShardState, StoreError> {
        let mut change = self.writer.begin_with("BEGIN IMMEDIATE").await?;
        sqlx::query(
            "UPDATE shard SET epoch = max(epoch, $2) + 1, planned_until = coalesce(planned_until, $3) WHERE shard_id = $1",
        )
        .bind(SHARD)
        .bind(super::epoch_floor(at_least)?)
        .bind(now.as_millis())
        .execute(&mut *change)
        .await?;
        let state = shard(&mut change).await?;
        change.commit().await?;
        Ok(state)
    }

    async fn heartbeat(&self, epoch: u64) -> Result<(), StoreError> {
        let mut change = self.fenced(epoch).await?;
        sqlx::query("UPDATE shard SET epoch = epoch WHERE shard_id = $1").bind(SHARD).execute(&mut *change).await?;
        change.commit().await?;
        Ok(())
    }

    async fn definitions(&self, since: u64) -> Result<(u64, Vec<TaskRow>), StoreError> {
        let mut view = self.readers.begin().await?;
        let rev = shard(&mut view).await?.definitions_rev;
        let alive = if since == 0 { " AND deleted_at IS NULL" } else { "" };
        let text = AssertSqlSafe(format!("SELECT {TASK} FROM task WHERE rev > $1{alive}"));
        let mut tasks = Vec::new();
        {
            let mut found = sqlx::query_as::<_, TaskColumns>(text).bind(signed(since)?).fetch(&mut *view);
            while let Some(row) = found.try_next().await? {
                tasks.push(row.into_task()?);
            }
        }
        view.commit().await?;
        Ok((rev, tasks))
    }

    async fn plan(&self, epoch: u64, runs: &[Run], watermark: Option<Watermark>) -> Result<Planned, StoreError> {
        let mut change = self.fenced(epoch).await?;
        if let Some(Watermark { until, seen_rev }) = watermark {
            let moved = sqlx::query(
                "UPDATE shard SET planned_until = max(coalesce(planned_until, $3), $3), planned_rev = $2 \
                 WHERE shard_id = $1 AND definitions_rev = $2",
            )
            .bind(SHARD)
            .bind(signed(seen_rev)?)
            .bind(until.as_millis())
            .execute(&mut *change)
            .await?;
            if moved.rows_affected() == 0 {
                let rev = shard(&mut change).await?.definitions_rev;
                change.rollback().await?;
                return Ok(Planned::RevChanged { rev });
            }
        }
        let inserted = rows::insert_runs(&mut change, runs).await?;
        change.commit().await?;
        Ok(Planned::Done { inserted })
    }

    async fn adopt_runs(&self, epoch: u64, due_before: Timestamp, limit: u32) -> Result<Vec<Run>, StoreError> {
        let mut change = self.fenced(epoch).await?;
        let found: Vec<RunColumns> = sqlx::query_as(ADOPT.as_str())
            .bind(due_before.as_millis())
            .bind(i64::from(limit))
            .fetch_all(&mut *change)
            .await?;
        // Read before the commit: a row that cannot be read stays un-adopted.
        let mut runs = found.into_iter().map(RunColumns::into_run).collect::<Result<Vec<_>, _>>()?;
        change.commit().await?;
        runs.sort_by_key(|run| (run.publish_at, run.run_id));
        Ok(runs)
    }

    async fn unfinished(&self, epoch: u64) -> Result<Vec<Run>, StoreError> {
        let mut change = self.fenced(epoch).await?;
        let mut runs = Vec::new();
        {
            let mut found = sqlx::query_as::<_, RunColumns>(UNFINISHED.as_str()).fetch(&mut *change);
            while let Some(row) = found.try_next().await? {
                runs.push(row.into_run()?);
            }
        }
        change.commit().await?;
        Ok(runs)
    }

    async fn attempts(&self, runs: &[RunId]) -> Result<Vec<Attempt>, StoreError> {
        rows::attempts(&mut *self.readers.acquire().await?, runs).await
    }

    async fn signals(&self, epoch: u64, incarnation: &str) -> Result<Vec<Signal>, StoreError> {
        let mut change = self.fenced(epoch).await?;
        sqlx::query("DELETE FROM signal WHERE incarnation <> $1").bind(incarnation).execute(&mut *change).await?;
        let found: Vec<SignalColumns> =
            sqlx::query_as("SELECT incarnation, seq, kind, deliveries, at FROM signal ORDER BY seq, kind, deliveries")
                .fetch_all(&mut *change)
                .await?;
        change.commit().await?;
        found.into_iter().map(SignalColumns::into_signal).collect()
    }

    async fn commit(&self, epoch: u64, batch: &Batch) -> Result<(), StoreError> {
        let mut change = self.fenced(epoch).await?;
        rows::update_runs(&mut change, &batch.runs).await?;
        rows::upsert_attempts(&mut change, &batch.attempts).await?;
        rows::add_signals(&mut change, &batch.signals_add).await?;
        rows::remove_signals(&mut change, &batch.signals_remove).await?;
        for id in &batch.commands_done {
            sqlx::query("DELETE FROM command WHERE id = $1").bind(*id).execute(&mut *change).await?;
        }
        if let Some(EventsPosition { incarnation, seq }) = &batch.settled {
            sqlx::query("UPDATE settled SET events_seq = $2, incarnation = $3 WHERE shard_id = $1")
                .bind(SHARD)
                .bind(signed(*seq)?)
                .bind(incarnation)
                .execute(&mut *change)
                .await?;
        }
        change.commit().await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::run::RunState;

    #[tokio::test]
    async fn no_query_reads_the_whole_history() {
        let folder = tempfile::tempdir().unwrap();
        let store = Sqlite::open(&format!("sqlite://{}", folder.path().join("ax.db").display())).await.unwrap();
        store.migrate().await.unwrap();
        let plan = async |sql: &str| -> String {
            let rows: Vec<(i64, i64, i64, String)> = sqlx::query_as(AssertSqlSafe(format!("EXPLAIN QUERY PLAN {sql}")))
                .fetch_all(&store.readers)
                .await
                .unwrap();
            rows.into_iter().map(|row| row.3).collect::<Vec<_>>().join("\n")
        };
        let whole = |plan: &str| plan.lines().any(|line| line.starts_with("SCAN run") && !line.contains(" USING "));
        let sorted = |plan: &str| plan.contains("TEMP B-TREE FOR ORDER BY");
        for sql in [&**RUN, &**LAST_RUNS, LAST_SUCCESSES, &**ADOPT, &**UNFINISHED, &**rows::UPDATE_RUNS] {
            let plan = plan(sql).await;
            assert!(!whole(&plan), "{sql}\n{plan}");
        }
        let with = |task: bool, group: bool, after: bool, states: &[RunState]| RunFilter {
            task_id: task.then(|| "t".parse().unwrap()),
            group: group.then(|| "g".parse().unwrap()),
            states: states.to_vec(),
            after: after.then(|| (at(0), RunId(Uuid::nil()))),
            ..RunFilter::default()
        };
        use RunState::{Failed, Pending, Running, Succeeded};
        for task in [false, true] {
            for group in [false, true] {
                for after in [false, true] {
                    for states in [&[][..], &[Succeeded], &[Failed], &[Failed, Succeeded], &[Running, Pending]] {
                        let sql = queries::list_runs(&with(task, group, after, states), &BRIEF);
                        let plan = plan(&sql).await;
                        assert!(!whole(&plan), "{sql}\n{plan}");
                        // Runs that have not ended are few; of all others only as many are read as the page holds. The
                        // pages of several states are merged.
                        assert!(!sorted(&plan) || states.len() > 1, "{sql}\n{plan}");
                    }
                }
            }
        }
    }
}
