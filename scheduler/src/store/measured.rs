//! Any store, timed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use ax_shared::{RunId, TaskId, Timestamp};
use uuid::Uuid;

use crate::core::command::Command;
use crate::core::definitions::{AuditEntry, TaskRow};
use crate::core::run::{Attempt, Run, Signal};
use crate::core::token::Token;
use crate::metrics as names;
use crate::ports::{
    Batch, DecideChange, Planned, RunFilter, ShardState, Store, StoreError, TaskFilter, TaskHistory, Watermark,
};

struct Measured<S> {
    inner: S,
    db: &'static str,
}

/// Wraps a store so that every operation, refused ones too, is counted in the histogram `ax_sql_seconds{op, db}`,
/// waiting for a connection included.
pub(super) fn measured<S: Store>(inner: S, db: &'static str) -> Arc<dyn Store> {
    Arc::new(Measured { inner, db })
}

impl<S> Measured<S> {
    async fn time<T>(&self, op: &'static str, work: impl Future<Output = T> + Send) -> T {
        let start = Instant::now();
        let result = work.await;
        metrics::histogram!(names::SQL.name, "op" => op, "db" => self.db).record(start.elapsed().as_secs_f64());
        result
    }
}

#[async_trait]
impl<S: Store> Store for Measured<S> {
    async fn migrate(&self) -> Result<Vec<String>, StoreError> {
        self.time("migrate", self.inner.migrate()).await
    }

    async fn database_id(&self) -> Result<Uuid, StoreError> {
        self.time("database_id", self.inner.database_id()).await
    }

    async fn ping(&self) -> Result<(), StoreError> {
        self.time("ping", self.inner.ping()).await
    }

    async fn server_time(&self) -> Result<Option<Timestamp>, StoreError> {
        self.time("server_time", self.inner.server_time()).await
    }

    fn is_shared(&self) -> bool {
        self.inner.is_shared()
    }

    async fn change_definitions(&self, ids: &[TaskId], decide: DecideChange<'_>) -> Result<(), StoreError> {
        self.time("change_definitions", self.inner.change_definitions(ids, decide)).await
    }

    async fn task(&self, id: &TaskId) -> Result<Option<TaskRow>, StoreError> {
        self.time("task", self.inner.task(id)).await
    }

    async fn tasks(&self, ids: &[TaskId]) -> Result<Vec<TaskRow>, StoreError> {
        self.time("tasks", self.inner.tasks(ids)).await
    }

    async fn list_tasks(&self, filter: &TaskFilter) -> Result<Vec<TaskRow>, StoreError> {
        self.time("list_tasks", self.inner.list_tasks(filter)).await
    }

    async fn histories(&self, ids: &[TaskId], now: Timestamp) -> Result<BTreeMap<TaskId, TaskHistory>, StoreError> {
        self.time("histories", self.inner.histories(ids, now)).await
    }

    async fn insert_runs(&self, runs: &[Run], audit: &[AuditEntry]) -> Result<Vec<bool>, StoreError> {
        self.time("insert_runs", self.inner.insert_runs(runs, audit)).await
    }

    async fn list_runs(&self, filter: &RunFilter) -> Result<Vec<Run>, StoreError> {
        self.time("list_runs", self.inner.list_runs(filter)).await
    }

    async fn run(&self, id: RunId) -> Result<Option<(Run, Vec<Attempt>)>, StoreError> {
        self.time("run", self.inner.run(id)).await
    }

    async fn insert_command(&self, command: &Command, audit: &AuditEntry) -> Result<(), StoreError> {
        self.time("insert_command", self.inner.insert_command(command, audit)).await
    }

    async fn commands(&self, limit: u32) -> Result<Vec<Command>, StoreError> {
        self.time("commands", self.inner.commands(limit)).await
    }

    async fn tokens(&self) -> Result<Vec<Token>, StoreError> {
        self.time("tokens", self.inner.tokens()).await
    }

    async fn add_token(&self, token: &Token, audit: &AuditEntry) -> Result<bool, StoreError> {
        self.time("add_token", self.inner.add_token(token, audit)).await
    }

    async fn revoke_token(&self, name: &str, audit: &AuditEntry) -> Result<bool, StoreError> {
        self.time("revoke_token", self.inner.revoke_token(name, audit)).await
    }

    async fn shard(&self) -> Result<ShardState, StoreError> {
        self.time("shard", self.inner.shard()).await
    }

    async fn acquire(&self, at_least: u64, now: Timestamp) -> Result<ShardState, StoreError> {
        self.time("acquire", self.inner.acquire(at_least, now)).await
    }

    async fn heartbeat(&self, epoch: u64) -> Result<(), StoreError> {
        self.time("heartbeat", self.inner.heartbeat(epoch)).await
    }

    async fn definitions(&self, since: u64) -> Result<(u64, Vec<TaskRow>), StoreError> {
        self.time("definitions", self.inner.definitions(since)).await
    }

    async fn plan(&self, epoch: u64, runs: &[Run], watermark: Option<Watermark>) -> Result<Planned, StoreError> {
        self.time("plan", self.inner.plan(epoch, runs, watermark)).await
    }

    async fn adopt_runs(&self, epoch: u64, due_before: Timestamp, limit: u32) -> Result<Vec<Run>, StoreError> {
        self.time("adopt_runs", self.inner.adopt_runs(epoch, due_before, limit)).await
    }

    async fn unfinished(&self, epoch: u64) -> Result<Vec<Run>, StoreError> {
        self.time("unfinished", self.inner.unfinished(epoch)).await
    }

    async fn attempts(&self, runs: &[RunId]) -> Result<Vec<Attempt>, StoreError> {
        self.time("attempts", self.inner.attempts(runs)).await
    }

    async fn signals(&self, epoch: u64, incarnation: &str) -> Result<Vec<Signal>, StoreError> {
        self.time("signals", self.inner.signals(epoch, incarnation)).await
    }

    async fn commit(&self, epoch: u64, batch: &Batch) -> Result<(), StoreError> {
        self.time("commit", self.inner.commit(epoch, batch)).await
    }
}
