//! Postgres 14 or newer, shared by several nodes.
//!
//! ```text
//!   leader pool   fenced methods, takeover, definitions: never queues behind requests
//!   api pool      everything that any node does for a caller
//! ```
//!
//! Every method runs on one [`Session`], a connection that goes back to its pool only when the method came to a proper end;
//! after an error, a timeout or a cancelled future it is closed, so that nothing half-done stays open on the server and a
//! dead peer (sqlx offers no TCP keepalive) costs one timeout. The server is told to give up on us likewise: statements,
//! lock waits and idle transactions are bounded, so a node that freezes inside a transaction does not hold the others up.
//!
//! Lock order, the same everywhere, so that there are no deadlocks: the lock of definitions, the shard's row, rows of
//! tasks or runs in the order of their ids. A transaction that moves the shard's row takes it exclusively at its start,
//! except a change of definitions, which takes it shared and is alone in that by the lock of definitions.

mod rows;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::str::FromStr;
use std::sync::LazyLock;
use std::time::Duration;

use async_trait::async_trait;
use ax_shared::{Group, RunId, TaskId, Timestamp};
use futures::TryStreamExt;
use sqlx::migrate::Migrator;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row};
use uuid::Uuid;

use super::columns::{
    RunColumns, SignalColumns, TaskColumns, TokenColumns, at, folded, signed, status_word, task_ids, text, unsigned,
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

static STEPS: Migrator = sqlx::migrate!("../migrations/postgres");

/// The oldest server that ax works with, as `server_version_num`.
const OLDEST: i32 = 140_000;
/// How long opening a connection may take.
const CONNECT: Duration = Duration::from_secs(5);
/// How long a probe may take.
const PROBE: Duration = Duration::from_secs(5);
/// How long a write of the leader may take before it counts as failed.
const LEADER: Duration = Duration::from_secs(15);
/// How long a call of a user may take.
const CALL: Duration = Duration::from_secs(35);
/// How long loading at a takeover may take.
const LOAD: Duration = Duration::from_secs(180);
/// Key of the advisory lock that orders changes of definitions.
const DEFINITIONS_LOCK: i64 = 0x6178_5f64_6566_696e;

const BEGIN: &str = "BEGIN";
const BEGIN_READ: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";
const BEGIN_LOAD: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL statement_timeout = '170s'; SET LOCAL lock_timeout = '10s'";

const TASK: &str = "task_id, definition::text AS definition, version, rev, anchor_at, effective_at, delay_run_id, \
                    created_at, updated_at, deleted_at";

/// A run with everything.
static WHOLE: LazyLock<String> = LazyLock::new(|| queries::run_columns("r.", "r.payload::text", "r.result::text"));
/// A run without its result.
static OWED: LazyLock<String> = LazyLock::new(|| queries::run_columns("r.", "r.payload::text", "NULL::text"));
/// A run without payload and result.
static BRIEF: LazyLock<String> = LazyLock::new(|| queries::run_columns("", "NULL::text", "NULL::text"));

static RUN: LazyLock<String> = LazyLock::new(|| format!("SELECT {} FROM run r WHERE run_id = $1", *WHOLE));
static LAST_RUNS: LazyLock<String> = LazyLock::new(|| {
    format!(
        "SELECT l.* FROM unnest($1::text[]) AS t(id) CROSS JOIN LATERAL (SELECT {} FROM run \
         WHERE task_id = t.id AND trigger_at <= $2 ORDER BY trigger_at DESC, run_id DESC LIMIT 1) AS l",
        *BRIEF
    )
});
static ADOPT: LazyLock<String> = LazyLock::new(|| {
    // The rows are chosen once, before the update (a materialised CTE): as a subquery they might be chosen again and again.
    format!(
        "WITH due AS MATERIALIZED (SELECT run_id FROM run WHERE live AND NOT adopted AND state = 'pending' \
         AND publish_at < $1 ORDER BY publish_at, run_id LIMIT $2 FOR UPDATE SKIP LOCKED) \
         UPDATE run r SET adopted = true FROM due WHERE r.run_id = due.run_id RETURNING {}",
        *OWED
    )
});
static UNFINISHED: LazyLock<String> = LazyLock::new(|| format!("SELECT {} FROM run r WHERE live AND adopted", *OWED));

/// The Postgres implementation of [`Store`].
#[derive(Debug)]
pub struct Postgres {
    leader: PgPool,
    api: PgPool,
    options: PgConnectOptions,
}

impl Postgres {
    /// Connects once, to see that the server is there and new enough.
    ///
    /// # Errors
    /// See [`super::open`].
    pub async fn open(url: &str) -> Result<Self, StoreError> {
        let options = PgConnectOptions::from_str(url)?.application_name("ax").options([
            // All joins are of a short list with an index. Without statistics, as on a table that is filling up, the
            // planner might read the whole table instead.
            ("enable_hashjoin", "off"),
            ("enable_mergejoin", "off"),
            ("random_page_cost", "1.1"),
            ("jit", "off"),
            ("statement_timeout", "30s"),
            ("lock_timeout", "10s"),
            ("idle_in_transaction_session_timeout", "10s"),
            ("client_connection_check_interval", "5s"),
            ("tcp_keepalives_idle", "10"),
            ("tcp_keepalives_interval", "5"),
            ("tcp_keepalives_count", "3"),
        ]);
        let shown = shown(&options);
        let check = async {
            let mut connection = PgConnection::connect_with(&options).await?;
            let version: i32 = sqlx::query_scalar("SELECT current_setting('server_version_num')::int")
                .fetch_one(&mut connection)
                .await?;
            let named: String =
                sqlx::query_scalar("SELECT current_setting('server_version')").fetch_one(&mut connection).await?;
            let encoding: String =
                sqlx::query_scalar("SELECT current_setting('server_encoding')").fetch_one(&mut connection).await?;
            connection.close().await?;
            Ok::<_, sqlx::Error>((version, named, encoding))
        };
        let checked =
            tokio::time::timeout(CONNECT, check).await.unwrap_or_else(|_| Err(timed_out("connecting", CONNECT)));
        let (version, named, encoding) = checked.map_err(|error| cannot_connect(error, &shown))?;
        if version < OLDEST {
            return Err(StoreError::Refused(format!(
                "{shown} is PostgreSQL {named}; ax needs PostgreSQL {} or newer",
                OLDEST / 10_000
            )));
        }
        if encoding != "UTF8" {
            return Err(StoreError::Refused(format!("{shown} is encoded in {encoding}; ax needs a database in UTF8")));
        }
        let pool = |size: u32| PgPoolOptions::new().max_connections(size).acquire_timeout(CONNECT);
        Ok(Self {
            // The leader finds out by the write itself whether a connection still works; it tries again anyway.
            leader: pool(4).test_before_acquire(false).connect_lazy_with(options.clone()),
            api: pool(12).connect_lazy_with(options.clone()),
            options,
        })
    }
}

impl Postgres {
    /// Lets go of the leader's idle connections that a restart of the server has ended: a takeover must not fail once for
    /// each of them.
    async fn drop_dead_connections(&self) {
        let mut alive = Vec::new();
        while let Some(mut connection) = self.leader.try_acquire() {
            match connection.ping().await {
                Ok(()) => alive.push(connection),
                Err(_) => drop(connection.detach()),
            }
        }
    }
}

/// The URL without password and options.
fn shown(options: &PgConnectOptions) -> String {
    let database = options.get_database().unwrap_or(options.get_username());
    format!("postgres://{}@{}:{}/{database}", options.get_username(), options.get_host(), options.get_port())
}

fn cannot_connect(error: sqlx::Error, shown: &str) -> StoreError {
    match error {
        sqlx::Error::Io(source) => StoreError::Unavailable(sqlx::Error::Io(io::Error::new(
            source.kind(),
            format!("cannot connect to {shown}: {source}"),
        ))),
        other => match other.into() {
            StoreError::Refused(reason) => StoreError::Refused(format!("cannot connect to {shown}: {reason}")),
            other => other,
        },
    }
}

fn timed_out(what: &str, limit: Duration) -> sqlx::Error {
    sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, format!("{what} took more than {limit:?}")))
}

/// Gives up `work` after `limit`; its session is closed then.
async fn within<T>(limit: Duration, work: impl Future<Output = Result<T, StoreError>> + Send) -> Result<T, StoreError> {
    match tokio::time::timeout(limit, work).await {
        Ok(result) => result,
        Err(_) => Err(timed_out("the answer of Postgres", limit).into()),
    }
}

/// A borrowed connection that is closed when it is dropped, unless it was given back.
struct Session(Option<PoolConnection<sqlx::Postgres>>);

impl Session {
    async fn open(pool: &PgPool) -> Result<Self, StoreError> {
        Ok(Self(Some(pool.acquire().await?)))
    }

    async fn begin(pool: &PgPool, statement: &'static str) -> Result<Self, StoreError> {
        let mut session = Self::open(pool).await?;
        sqlx::raw_sql(statement).execute(session.connection()).await?;
        Ok(session)
    }

    /// Begins a transaction of the leader: locks the shard's row against another leader's taking over.
    async fn fenced(pool: &PgPool, epoch: u64) -> Result<Self, StoreError> {
        let mut session = Self::begin(pool, BEGIN).await?;
        let mine = sqlx::query("SELECT epoch FROM shard WHERE shard_id = $1 AND epoch = $2 FOR SHARE")
            .bind(SHARD)
            .bind(signed(epoch)?)
            .fetch_optional(session.connection())
            .await?;
        if mine.is_none() {
            session.rollback().await?;
            return Err(StoreError::Fenced { mine: epoch });
        }
        Ok(session)
    }

    fn connection(&mut self) -> &mut PgConnection {
        self.0.as_mut().expect("a session has its connection until it is given back")
    }

    async fn commit(mut self) -> Result<(), StoreError> {
        sqlx::raw_sql("COMMIT").execute(self.connection()).await?;
        self.done();
        Ok(())
    }

    async fn rollback(mut self) -> Result<(), StoreError> {
        sqlx::raw_sql("ROLLBACK").execute(self.connection()).await?;
        self.done();
        Ok(())
    }

    /// Gives the connection back to its pool.
    fn done(mut self) {
        self.0.take();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(mut connection) = self.0.take() {
            connection.close_on_drop();
        }
    }
}

#[async_trait]
impl Store for Postgres {
    async fn migrate(&self) -> Result<Vec<String>, StoreError> {
        within(LOAD, async {
            // On a connection of its own, since a failed step leaves the lock that orders migrations with its session.
            let mut connection = PgConnection::connect_with(&self.options)
                .await
                .map_err(|error| cannot_connect(error, &shown(&self.options)))?;
            sqlx::raw_sql("SET statement_timeout = 0; SET lock_timeout = '120s'").execute(&mut connection).await?;
            let result = super::migrate::migrate(&mut connection, &STEPS).await;
            connection.close().await.ok();
            result
        })
        .await
    }

    async fn database_id(&self) -> Result<Uuid, StoreError> {
        within(CALL, async {
            let mut session = Session::open(&self.api).await?;
            let id = sqlx::query_scalar("SELECT database_id FROM meta").fetch_one(session.connection()).await?;
            session.done();
            Ok(id)
        })
        .await
    }

    async fn ping(&self) -> Result<(), StoreError> {
        within(PROBE, async {
            let mut session = Session::open(&self.api).await?;
            // Locking a row writes to the table and to the log, and is refused by a standby.
            sqlx::query("SELECT one FROM meta FOR SHARE").fetch_one(session.connection()).await?;
            session.done();
            Ok(())
        })
        .await
    }

    async fn server_time(&self) -> Result<Option<Timestamp>, StoreError> {
        within(PROBE, async {
            let mut session = Session::open(&self.leader).await?;
            let ms: i64 = sqlx::query_scalar("SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint")
                .fetch_one(session.connection())
                .await?;
            session.done();
            Ok(Some(at(ms)))
        })
        .await
    }

    fn is_shared(&self) -> bool {
        true
    }

    async fn change_definitions(&self, ids: &[TaskId], decide: DecideChange<'_>) -> Result<(), StoreError> {
        within(CALL, async {
            let mut session = Session::begin(&self.api, BEGIN).await?;
            sqlx::query("SELECT pg_advisory_xact_lock($1)")
                .bind(DEFINITIONS_LOCK)
                .execute(session.connection())
                .await?;
            let mut tasks = HashMap::new();
            {
                let text = AssertSqlSafe(format!("SELECT {TASK} FROM task WHERE task_id = ANY($1)"));
                let mut found =
                    sqlx::query_as::<_, TaskColumns>(text).bind(task_ids(ids)).fetch(session.connection());
                while let Some(row) = found.try_next().await? {
                    let task = row.into_task()?;
                    tasks.insert(task.definition.task_id.clone(), task);
                }
            }
            // The watermark that the change is decided on must be the one that it is committed on, or instants between
            // the two would be owed by neither the old schedule nor the new one. So the row is locked, shared and as late
            // as can be: until the commit only a new watermark and a takeover wait; planned rows and settled events, which
            // share the lock, do not.
            let text = "SELECT definitions_rev, planned_until, planned_rev FROM shard WHERE shard_id = $1 FOR SHARE";
            let shard = sqlx::query(text).bind(SHARD).fetch_one(session.connection()).await?;
            let rev: i64 = shard.try_get(0)?;
            let planned_until = shard.try_get::<Option<i64>, _>(1)?.map(at).unwrap_or_default();
            let planned_rev = unsigned("planned_rev", shard.try_get(2)?).map_err(StoreError::Corrupt)?;
            let Some(write) = decide(DefinitionView { tasks, planned_until, planned_rev }) else {
                return session.rollback().await;
            };
            // Nobody else counts the revision while we hold the lock of definitions, so the rows can carry it at once.
            rows::upsert_tasks(session.connection(), &write.tasks, rev + 1).await?;
            rows::insert_runs(session.connection(), &write.runs).await?;
            rows::insert_audit(session.connection(), &write.audit).await?;
            if !write.tasks.is_empty() {
                let counted = sqlx::query(
                    "UPDATE shard SET definitions_rev = definitions_rev + 1 WHERE shard_id = $1 AND definitions_rev = $2",
                )
                .bind(SHARD)
                .bind(rev)
                .execute(session.connection())
                .await?;
                if counted.rows_affected() != 1 {
                    return Err(StoreError::Corrupt(format!("definitions_rev moved past {rev} without its lock")));
                }
            }
            session.commit().await
        })
        .await
    }

    async fn task(&self, id: &TaskId) -> Result<Option<TaskRow>, StoreError> {
        Ok(self.tasks(std::slice::from_ref(id)).await?.pop())
    }

    async fn tasks(&self, ids: &[TaskId]) -> Result<Vec<TaskRow>, StoreError> {
        within(CALL, async {
            let mut session = Session::open(&self.api).await?;
            let text = AssertSqlSafe(format!("SELECT {TASK} FROM task WHERE task_id = ANY($1) AND deleted_at IS NULL"));
            let found: Vec<TaskColumns> =
                sqlx::query_as(text).bind(task_ids(ids)).fetch_all(session.connection()).await?;
            session.done();
            found.into_iter().map(TaskColumns::into_task).collect()
        })
        .await
    }

    async fn list_tasks(&self, filter: &TaskFilter) -> Result<Vec<TaskRow>, StoreError> {
        within(CALL, async {
            let mut session = Session::open(&self.api).await?;
            let sql =
                queries::list_tasks(filter, TASK, "labels <> '{}' AND labels @> ARRAY[$3]", "strpos(search, $4) > 0");
            let found: Vec<TaskColumns> = sqlx::query_as(AssertSqlSafe(sql))
                .bind(filter.group.as_ref().map(Group::as_str))
                .bind(filter.status.map(status_word))
                .bind(filter.label.as_deref().map(text))
                .bind(filter.q.as_deref().map(folded))
                .bind(filter.after.as_ref().map(TaskId::as_str))
                .bind(i64::from(filter.limit))
                .fetch_all(session.connection())
                .await?;
            session.done();
            found.into_iter().map(TaskColumns::into_task).collect()
        })
        .await
    }

    async fn histories(&self, ids: &[TaskId], now: Timestamp) -> Result<BTreeMap<TaskId, TaskHistory>, StoreError> {
        within(CALL, async {
            let mut session = Session::begin(&self.api, BEGIN_READ).await?;
            let mut histories: BTreeMap<TaskId, TaskHistory> =
                ids.iter().map(|id| (id.clone(), TaskHistory::default())).collect();
            let last: Vec<RunColumns> = sqlx::query_as(LAST_RUNS.as_str())
                .bind(task_ids(ids))
                .bind(now.as_millis())
                .fetch_all(session.connection())
                .await?;
            for row in last {
                let run = row.into_run()?;
                if let Some(history) = histories.get_mut(&run.task_id) {
                    history.last_run = Some(run);
                }
            }
            let successes: Vec<(String, Option<i64>)> = sqlx::query_as(
                "SELECT t.id, s.finished_at FROM unnest($1::text[]) AS t(id) CROSS JOIN LATERAL (SELECT finished_at FROM run \
                 WHERE task_id = t.id AND ended_as = 'succeeded' ORDER BY trigger_at DESC, run_id DESC LIMIT 1) AS s",
            )
            .bind(task_ids(ids))
            .fetch_all(session.connection())
            .await?;
            for (id, finished_at) in successes {
                if let Some(history) = histories.get_mut(id.as_str()) {
                    history.last_success_at = finished_at.map(at);
                }
            }
            session.commit().await?;
            Ok(histories)
        })
        .await
    }

    async fn insert_runs(&self, runs: &[Run], audit: &[AuditEntry]) -> Result<Vec<bool>, StoreError> {
        within(CALL, async {
            let mut session = Session::begin(&self.api, BEGIN).await?;
            let written = rows::insert_runs(session.connection(), runs).await?;
            rows::insert_audit(session.connection(), &super::audit_of(runs, &written, audit)).await?;
            session.commit().await?;
            Ok(written)
        })
        .await
    }

    async fn insert_command(&self, command: &Command, audit: &AuditEntry) -> Result<(), StoreError> {
        within(CALL, async {
            let mut session = Session::begin(&self.api, BEGIN).await?;
            sqlx::query("INSERT INTO command (id, kind, subject, body, created_at) VALUES ($1, $2, $3, $4::json, $5)")
                .bind(command.id)
                .bind(command.kind.as_str())
                .bind(command.run_id.to_string())
                .bind(super::command_body(command)?)
                .bind(command.at.as_millis())
                .execute(session.connection())
                .await?;
            rows::insert_audit(session.connection(), std::slice::from_ref(audit)).await?;
            session.commit().await
        })
        .await
    }

    async fn commands(&self, limit: u32) -> Result<Vec<Command>, StoreError> {
        within(LEADER, async {
            let mut session = Session::open(&self.leader).await?;
            let found: Vec<String> =
                sqlx::query_scalar("SELECT body::text FROM command ORDER BY created_at, id LIMIT $1")
                    .bind(i64::from(limit))
                    .fetch_all(session.connection())
                    .await?;
            session.done();
            found.iter().map(|body| super::command_of(body)).collect()
        })
        .await
    }

    async fn list_runs(&self, filter: &RunFilter) -> Result<Vec<Run>, StoreError> {
        within(CALL, async {
            let mut session = Session::open(&self.api).await?;
            let found: Vec<RunColumns> = sqlx::query_as(AssertSqlSafe(queries::list_runs(filter, &BRIEF)))
                .bind(filter.task_id.as_ref().map(TaskId::as_str))
                .bind(filter.group.as_ref().map(Group::as_str))
                .bind(filter.from.map(Timestamp::as_millis))
                .bind(filter.to.map(Timestamp::as_millis))
                .bind(filter.after.map(|(trigger_at, _)| trigger_at.as_millis()))
                .bind(filter.after.map(|(_, id)| id.0))
                .bind(i64::from(filter.limit))
                .fetch_all(session.connection())
                .await?;
            session.done();
            found.into_iter().map(RunColumns::into_run).collect()
        })
        .await
    }

    async fn run(&self, id: RunId) -> Result<Option<(Run, Vec<Attempt>)>, StoreError> {
        within(CALL, async {
            let mut session = Session::begin(&self.api, BEGIN_READ).await?;
            let run: Option<RunColumns> =
                sqlx::query_as(RUN.as_str()).bind(id.0).fetch_optional(session.connection()).await?;
            let attempts = rows::attempts(session.connection(), &[id]).await?;
            session.commit().await?;
            Ok(run.map(RunColumns::into_run).transpose()?.map(|run| (run, attempts)))
        })
        .await
    }

    async fn tokens(&self) -> Result<Vec<Token>, StoreError> {
        within(CALL, async {
            let mut session = Session::open(&self.api).await?;
            let found: Vec<TokenColumns> = sqlx::query_as(queries::TOKENS).fetch_all(session.connection()).await?;
            session.done();
            found.into_iter().map(TokenColumns::into_token).collect()
        })
        .await
    }

    async fn add_token(&self, token: &Token, audit: &AuditEntry) -> Result<bool, StoreError> {
        within(CALL, async {
            let mut session = Session::begin(&self.api, BEGIN).await?;
            let added = sqlx::query(queries::ADD_TOKEN)
                .bind(token.hash.as_slice())
                .bind(&token.name)
                .bind(token.role.as_str())
                .bind(token.created_at.as_millis())
                .bind(token.expires_at.map(Timestamp::as_millis))
                .execute(session.connection())
                .await?;
            if added.rows_affected() == 0 {
                session.rollback().await?;
                return Ok(false);
            }
            rows::insert_audit(session.connection(), std::slice::from_ref(audit)).await?;
            session.commit().await?;
            Ok(true)
        })
        .await
    }

    async fn revoke_token(&self, name: &str, audit: &AuditEntry) -> Result<bool, StoreError> {
        within(CALL, async {
            let mut session = Session::begin(&self.api, BEGIN).await?;
            let revoked = sqlx::query(queries::REVOKE_TOKEN)
                .bind(name)
                .bind(audit.at.as_millis())
                .execute(session.connection())
                .await?;
            if revoked.rows_affected() == 0 {
                session.rollback().await?;
                return Ok(false);
            }
            rows::insert_audit(session.connection(), std::slice::from_ref(audit)).await?;
            session.commit().await?;
            Ok(true)
        })
        .await
    }

    async fn shard(&self) -> Result<ShardState, StoreError> {
        within(LEADER, async {
            let mut session = Session::open(&self.leader).await?;
            let state = rows::shard(session.connection()).await?;
            session.done();
            Ok(state)
        })
        .await
    }

    async fn acquire(&self, at_least: u64, now: Timestamp) -> Result<ShardState, StoreError> {
        within(LEADER, async {
            self.drop_dead_connections().await;
            let mut session = Session::begin(&self.leader, BEGIN).await?;
            sqlx::query(
                "UPDATE shard SET epoch = greatest(epoch, $2) + 1, planned_until = coalesce(planned_until, $3) \
                 WHERE shard_id = $1",
            )
            .bind(SHARD)
            .bind(super::epoch_floor(at_least)?)
            .bind(now.as_millis())
            .execute(session.connection())
            .await?;
            let state = rows::shard(session.connection()).await?;
            session.commit().await?;
            Ok(state)
        })
        .await
    }

    async fn heartbeat(&self, epoch: u64) -> Result<(), StoreError> {
        // The lock of the fence is itself a write.
        within(LEADER, async { Session::fenced(&self.leader, epoch).await?.commit().await }).await
    }

    async fn definitions(&self, since: u64) -> Result<(u64, Vec<TaskRow>), StoreError> {
        within(LOAD, async {
            let mut session = Session::begin(&self.leader, BEGIN_LOAD).await?;
            let rev: i64 = sqlx::query_scalar("SELECT definitions_rev FROM shard WHERE shard_id = $1")
                .bind(SHARD)
                .fetch_one(session.connection())
                .await?;
            let alive = if since == 0 { " AND deleted_at IS NULL" } else { "" };
            let text = AssertSqlSafe(format!("SELECT {TASK} FROM task WHERE rev > $1{alive}"));
            let mut tasks = Vec::new();
            {
                let mut found = sqlx::query_as::<_, TaskColumns>(text).bind(signed(since)?).fetch(session.connection());
                while let Some(row) = found.try_next().await? {
                    tasks.push(row.into_task()?);
                }
            }
            session.commit().await?;
            Ok((unsigned("definitions_rev", rev).map_err(StoreError::Corrupt)?, tasks))
        })
        .await
    }

    async fn plan(&self, epoch: u64, runs: &[Run], watermark: Option<Watermark>) -> Result<Planned, StoreError> {
        within(LEADER, async {
            let mut session = match watermark {
                None => Session::fenced(&self.leader, epoch).await?,
                Some(Watermark { until, seen_rev }) => {
                    let mut session = Session::begin(&self.leader, BEGIN).await?;
                    // Waits for a change of definitions that is about to commit, and then sees its revision.
                    let moved = sqlx::query(
                        "UPDATE shard SET planned_until = greatest(planned_until, $4), planned_rev = $3 \
                         WHERE shard_id = $1 AND epoch = $2 AND definitions_rev = $3",
                    )
                    .bind(SHARD)
                    .bind(signed(epoch)?)
                    .bind(signed(seen_rev)?)
                    .bind(until.as_millis())
                    .execute(session.connection())
                    .await?;
                    if moved.rows_affected() == 0 {
                        let present = rows::shard(session.connection()).await?;
                        session.rollback().await?;
                        return if present.epoch == epoch {
                            Ok(Planned::RevChanged { rev: present.definitions_rev })
                        } else {
                            Err(StoreError::Fenced { mine: epoch })
                        };
                    }
                    session
                }
            };
            let inserted = rows::insert_runs(session.connection(), runs).await?;
            session.commit().await?;
            Ok(Planned::Done { inserted })
        })
        .await
    }

    async fn adopt_runs(&self, epoch: u64, due_before: Timestamp, limit: u32) -> Result<Vec<Run>, StoreError> {
        within(LEADER, async {
            let mut session = Session::fenced(&self.leader, epoch).await?;
            let found: Vec<RunColumns> = sqlx::query_as(ADOPT.as_str())
                .bind(due_before.as_millis())
                .bind(i64::from(limit))
                .fetch_all(session.connection())
                .await?;
            // Read before the commit: a row that cannot be read stays un-adopted.
            let mut runs = found.into_iter().map(RunColumns::into_run).collect::<Result<Vec<_>, _>>()?;
            session.commit().await?;
            runs.sort_by_key(|run| (run.publish_at, run.run_id));
            Ok(runs)
        })
        .await
    }

    async fn unfinished(&self, epoch: u64) -> Result<Vec<Run>, StoreError> {
        within(LOAD, async {
            let mut session = Session::fenced(&self.leader, epoch).await?;
            sqlx::raw_sql("SET LOCAL statement_timeout = '170s'").execute(session.connection()).await?;
            let mut runs = Vec::new();
            {
                let mut found = sqlx::query_as::<_, RunColumns>(UNFINISHED.as_str()).fetch(session.connection());
                while let Some(row) = found.try_next().await? {
                    runs.push(row.into_run()?);
                }
            }
            session.commit().await?;
            Ok(runs)
        })
        .await
    }

    async fn attempts(&self, runs: &[RunId]) -> Result<Vec<Attempt>, StoreError> {
        within(LOAD, async {
            let mut session = Session::open(&self.leader).await?;
            let attempts = rows::attempts(session.connection(), runs).await?;
            session.done();
            Ok(attempts)
        })
        .await
    }

    async fn signals(&self, epoch: u64, incarnation: &str) -> Result<Vec<Signal>, StoreError> {
        within(LEADER, async {
            let mut session = Session::fenced(&self.leader, epoch).await?;
            sqlx::query("DELETE FROM signal WHERE incarnation <> $1")
                .bind(incarnation)
                .execute(session.connection())
                .await?;
            let found: Vec<SignalColumns> = sqlx::query_as(
                "SELECT incarnation, seq, kind, deliveries, at FROM signal ORDER BY seq, kind, deliveries",
            )
            .fetch_all(session.connection())
            .await?;
            session.commit().await?;
            found.into_iter().map(SignalColumns::into_signal).collect()
        })
        .await
    }

    async fn commit(&self, epoch: u64, batch: &Batch) -> Result<(), StoreError> {
        within(LEADER, async {
            let mut session = Session::fenced(&self.leader, epoch).await?;
            rows::update_runs(session.connection(), &batch.runs).await?;
            rows::upsert_attempts(session.connection(), &batch.attempts).await?;
            rows::add_signals(session.connection(), &batch.signals_add).await?;
            rows::remove_signals(session.connection(), &batch.signals_remove).await?;
            if !batch.commands_done.is_empty() {
                sqlx::query("DELETE FROM command WHERE id = ANY($1)")
                    .bind(&batch.commands_done)
                    .execute(session.connection())
                    .await?;
            }
            if let Some(EventsPosition { incarnation, seq }) = &batch.settled {
                sqlx::query("UPDATE settled SET events_seq = $2, incarnation = $3 WHERE shard_id = $1")
                    .bind(SHARD)
                    .bind(signed(*seq)?)
                    .bind(incarnation)
                    .execute(session.connection())
                    .await?;
            }
            session.commit().await
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_server_of_the_compose_file_is_new_enough() {
        let compose = include_str!("../../../docker-compose.yml");
        let tag = compose.split_once("image: postgres:").and_then(|(_, rest)| rest.split(['-', '.', '\n']).next());
        let major: Option<i32> = tag.and_then(|tag| tag.parse().ok());
        assert!(major.is_some_and(|major| major * 10_000 >= super::OLDEST), "{tag:?}");
    }
}
