//! A store in memory, for simulations and tests: same answers as the databases, nothing kept.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use ax_shared::{RunId, TaskId, Timestamp};
use uuid::Uuid;

use super::columns::{TaskSearch, folded, signed, text};
use crate::core::command::Command;
use crate::core::definitions::{AuditEntry, DefinitionView, TaskRow};
use crate::core::run::{Attempt, Run, RunState, Signal};
use crate::core::token::Token;
use crate::ports::{
    Batch, DecideChange, Planned, RunFilter, ShardState, Store, StoreError, TaskFilter, TaskHistory, Watermark,
};

/// The implementation of [`Store`] in memory. Every method is one critical section.
#[derive(Debug)]
pub struct Memory {
    database_id: Uuid,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    tasks: BTreeMap<TaskId, TaskRow>,
    runs: BTreeMap<RunId, Run>,
    by_trigger: BTreeSet<(Timestamp, RunId)>,
    attempts: BTreeMap<(RunId, u32), Attempt>,
    signals: BTreeMap<(u64, &'static str, u32, String), Signal>,
    audit: Vec<AuditEntry>,
    commands: BTreeMap<Uuid, Command>,
    /// By name; revoked ones are gone.
    tokens: BTreeMap<String, Token>,
    led: bool,
    shard: ShardState,
}

impl Default for Memory {
    fn default() -> Self {
        Self {
            database_id: Uuid::now_v7(),
            inner: Mutex::new(Inner {
                tasks: BTreeMap::new(),
                runs: BTreeMap::new(),
                by_trigger: BTreeSet::new(),
                attempts: BTreeMap::new(),
                signals: BTreeMap::new(),
                audit: Vec::new(),
                commands: BTreeMap::new(),
                tokens: BTreeMap::new(),
                led: false,
                shard: ShardState {
                    epoch: 0,
                    definitions_rev: 0,
                    planned_until: Timestamp::default(),
                    planned_rev: 0,
                    settled: Default::default(),
                },
            }),
        }
    }
}

impl Memory {
    /// Makes an empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Every line of the audit, oldest first.
    #[must_use]
    pub fn audit(&self) -> Vec<AuditEntry> {
        self.lock().audit.clone()
    }

    /// Every run, by id.
    #[must_use]
    pub fn all_runs(&self) -> Vec<Run> {
        self.lock().runs.values().cloned().collect()
    }

    /// Every run that has not ended, by id.
    #[must_use]
    pub fn unfinished_runs(&self) -> Vec<Run> {
        self.lock().runs.values().filter(|run| !run.state.is_final()).cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing panics in the middle of a change but `decide`, which runs before it.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fenced(&self, epoch: u64) -> Result<MutexGuard<'_, Inner>, StoreError> {
        let inner = self.lock();
        if inner.shard.epoch == epoch { Ok(inner) } else { Err(StoreError::Fenced { mine: epoch }) }
    }
}

impl Inner {
    fn insert_runs(&mut self, runs: &[Run]) -> Vec<bool> {
        runs.iter()
            .map(|run| {
                if self.runs.contains_key(&run.run_id) {
                    return false;
                }
                self.by_trigger.insert((run.trigger_at, run.run_id));
                self.runs.insert(run.run_id, kept(run.clone()));
                true
            })
            .collect()
    }

    fn history(&self, id: &TaskId, now: Timestamp) -> TaskHistory {
        let newest = |wanted: &dyn Fn(&Run) -> bool| {
            self.by_trigger.iter().rev().map(|(_, id)| &self.runs[id]).find(|run| run.task_id == *id && wanted(run))
        };
        TaskHistory {
            last_run: newest(&|run| run.trigger_at <= now).map(brief),
            last_success_at: newest(&|run| run.state == RunState::Succeeded).and_then(|run| run.finished_at),
        }
    }
}

/// A run as a database keeps it.
fn kept(mut run: Run) -> Run {
    for field in [&mut run.reason, &mut run.worker_id] {
        *field = field.take().map(|value| text(&value).into_owned());
    }
    run
}

fn brief(run: &Run) -> Run {
    Run { payload: None, result: None, ..run.clone() }
}

#[async_trait]
impl Store for Memory {
    async fn migrate(&self) -> Result<Vec<String>, StoreError> {
        Ok(Vec::new())
    }

    async fn database_id(&self) -> Result<Uuid, StoreError> {
        Ok(self.database_id)
    }

    async fn ping(&self) -> Result<(), StoreError> {
        Ok(())
    }

    async fn server_time(&self) -> Result<Option<Timestamp>, StoreError> {
        Ok(None)
    }

    fn is_shared(&self) -> bool {
        false
    }

    async fn change_definitions(&self, ids: &[TaskId], decide: DecideChange<'_>) -> Result<(), StoreError> {
        let mut inner = self.lock();
        let tasks: HashMap<_, _> =
            ids.iter().filter_map(|id| inner.tasks.get(id).map(|task| (id.clone(), task.clone()))).collect();
        let ShardState { planned_until, planned_rev, .. } = inner.shard;
        let Some(write) = decide(DefinitionView { tasks, planned_until, planned_rev }) else {
            return Ok(());
        };
        if !write.tasks.is_empty() {
            inner.shard.definitions_rev += 1;
        }
        let rev = inner.shard.definitions_rev;
        for task in write.tasks {
            inner.tasks.insert(task.definition.task_id.clone(), TaskRow { rev, ..task });
        }
        inner.insert_runs(&write.runs);
        inner.audit.extend(write.audit);
        Ok(())
    }

    async fn task(&self, id: &TaskId) -> Result<Option<TaskRow>, StoreError> {
        Ok(self.lock().tasks.get(id).filter(|task| task.deleted_at.is_none()).cloned())
    }

    async fn tasks(&self, ids: &[TaskId]) -> Result<Vec<TaskRow>, StoreError> {
        let inner = self.lock();
        let ids: BTreeSet<_> = ids.iter().collect();
        Ok(ids
            .into_iter()
            .filter_map(|id| inner.tasks.get(id))
            .filter(|task| task.deleted_at.is_none())
            .cloned()
            .collect())
    }

    async fn list_tasks(&self, filter: &TaskFilter) -> Result<Vec<TaskRow>, StoreError> {
        let inner = self.lock();
        let label = filter.label.as_deref().map(text);
        let q = filter.q.as_deref().map(folded);
        Ok(inner
            .tasks
            .iter()
            .filter(|(id, task)| {
                let search = TaskSearch::of(&task.definition);
                task.deleted_at.is_none()
                    && filter.group.as_ref().is_none_or(|group| *group == task.definition.executor_group)
                    && filter.status.is_none_or(|status| status == task.definition.status)
                    && label.as_ref().is_none_or(|label| search.labels.iter().any(|have| have == label))
                    && q.as_ref().is_none_or(|q| search.search.contains(q))
                    && filter.after.as_ref().is_none_or(|after| *id > after)
            })
            .take(filter.limit as usize)
            .map(|(_, task)| task.clone())
            .collect())
    }

    async fn histories(&self, ids: &[TaskId], now: Timestamp) -> Result<BTreeMap<TaskId, TaskHistory>, StoreError> {
        let inner = self.lock();
        Ok(ids.iter().map(|id| (id.clone(), inner.history(id, now))).collect())
    }

    async fn insert_runs(&self, runs: &[Run], audit: &[AuditEntry]) -> Result<Vec<bool>, StoreError> {
        let mut inner = self.lock();
        let written = inner.insert_runs(runs);
        inner.audit.extend(super::audit_of(runs, &written, audit));
        Ok(written)
    }

    async fn insert_command(&self, command: &Command, audit: &AuditEntry) -> Result<(), StoreError> {
        let mut inner = self.lock();
        inner.commands.insert(command.id, command.clone());
        inner.audit.push(audit.clone());
        Ok(())
    }

    async fn commands(&self, limit: u32) -> Result<Vec<Command>, StoreError> {
        let mut commands: Vec<Command> = self.lock().commands.values().cloned().collect();
        commands.sort_by_key(|command| (command.at, command.id));
        commands.truncate(limit as usize);
        Ok(commands)
    }

    async fn list_runs(&self, filter: &RunFilter) -> Result<Vec<Run>, StoreError> {
        let inner = self.lock();
        Ok(inner
            .by_trigger
            .iter()
            .rev()
            .filter(|place| filter.after.as_ref().is_none_or(|after| *place < after))
            .map(|(_, id)| &inner.runs[id])
            .filter(|run| {
                filter.task_id.as_ref().is_none_or(|id| *id == run.task_id)
                    && filter.group.as_ref().is_none_or(|group| *group == run.group)
                    && (filter.states.is_empty() || filter.states.contains(&run.state))
                    && filter.from.is_none_or(|from| run.trigger_at >= from)
                    && filter.to.is_none_or(|to| run.trigger_at < to)
            })
            .take(filter.limit as usize)
            .map(brief)
            .collect())
    }

    async fn run(&self, id: RunId) -> Result<Option<(Run, Vec<Attempt>)>, StoreError> {
        let inner = self.lock();
        let attempts = inner.attempts.range((id, 0)..=(id, u32::MAX)).map(|(_, attempt)| attempt.clone()).collect();
        Ok(inner.runs.get(&id).map(|run| (run.clone(), attempts)))
    }

    async fn tokens(&self) -> Result<Vec<Token>, StoreError> {
        Ok(self.lock().tokens.values().cloned().collect())
    }

    async fn add_token(&self, token: &Token, audit: &AuditEntry) -> Result<bool, StoreError> {
        let mut inner = self.lock();
        if inner.tokens.contains_key(&token.name) {
            return Ok(false);
        }
        inner.tokens.insert(token.name.clone(), token.clone());
        inner.audit.push(audit.clone());
        Ok(true)
    }

    async fn revoke_token(&self, name: &str, audit: &AuditEntry) -> Result<bool, StoreError> {
        let mut inner = self.lock();
        if inner.tokens.remove(name).is_none() {
            return Ok(false);
        }
        inner.audit.push(audit.clone());
        Ok(true)
    }

    async fn shard(&self) -> Result<ShardState, StoreError> {
        Ok(self.lock().shard.clone())
    }

    async fn acquire(&self, at_least: u64, now: Timestamp) -> Result<ShardState, StoreError> {
        super::epoch_floor(at_least)?;
        let mut inner = self.lock();
        inner.shard.epoch = inner.shard.epoch.max(at_least) + 1;
        if !std::mem::replace(&mut inner.led, true) {
            inner.shard.planned_until = now;
        }
        Ok(inner.shard.clone())
    }

    async fn heartbeat(&self, epoch: u64) -> Result<(), StoreError> {
        self.fenced(epoch).map(drop)
    }

    async fn definitions(&self, since: u64) -> Result<(u64, Vec<TaskRow>), StoreError> {
        let inner = self.lock();
        let tasks = inner
            .tasks
            .values()
            .filter(|task| task.rev > since && (since > 0 || task.deleted_at.is_none()))
            .cloned()
            .collect();
        Ok((inner.shard.definitions_rev, tasks))
    }

    async fn plan(&self, epoch: u64, runs: &[Run], watermark: Option<Watermark>) -> Result<Planned, StoreError> {
        let mut inner = self.fenced(epoch)?;
        if let Some(Watermark { until, seen_rev }) = watermark {
            let rev = inner.shard.definitions_rev;
            if rev != seen_rev {
                return Ok(Planned::RevChanged { rev });
            }
            inner.shard.planned_until = inner.shard.planned_until.max(until);
            inner.shard.planned_rev = seen_rev;
        }
        Ok(Planned::Done { inserted: inner.insert_runs(runs) })
    }

    async fn adopt_runs(&self, epoch: u64, due_before: Timestamp, limit: u32) -> Result<Vec<Run>, StoreError> {
        let mut inner = self.fenced(epoch)?;
        let mut due: Vec<(Timestamp, RunId)> = inner
            .runs
            .values()
            .filter(|run| !run.adopted && run.state == RunState::Pending && run.publish_at < due_before)
            .map(|run| (run.publish_at, run.run_id))
            .collect();
        due.sort_unstable();
        due.truncate(limit as usize);
        let mut adopted = Vec::with_capacity(due.len());
        for (_, id) in due {
            if let Some(run) = inner.runs.get_mut(&id) {
                run.adopted = true;
                adopted.push(Run { result: None, ..run.clone() });
            }
        }
        Ok(adopted)
    }

    async fn unfinished(&self, epoch: u64) -> Result<Vec<Run>, StoreError> {
        let inner = self.fenced(epoch)?;
        Ok(inner
            .runs
            .values()
            .filter(|run| run.adopted && (!run.state.is_final() || run.message.as_ref().is_some_and(|m| m.open)))
            .map(|run| Run { result: None, ..run.clone() })
            .collect())
    }

    async fn attempts(&self, runs: &[RunId]) -> Result<Vec<Attempt>, StoreError> {
        let inner = self.lock();
        let runs: BTreeSet<_> = runs.iter().collect();
        Ok(runs
            .into_iter()
            .flat_map(|id| inner.attempts.range((*id, 0)..=(*id, u32::MAX)))
            .map(|(_, attempt)| attempt.clone())
            .collect())
    }

    async fn signals(&self, epoch: u64, incarnation: &str) -> Result<Vec<Signal>, StoreError> {
        let mut inner = self.fenced(epoch)?;
        inner.signals.retain(|_, signal| signal.incarnation == incarnation);
        Ok(inner.signals.values().cloned().collect())
    }

    async fn commit(&self, epoch: u64, batch: &Batch) -> Result<(), StoreError> {
        let mut inner = self.fenced(epoch)?;
        // What a database would refuse is refused before anything is written.
        for seq in batch.runs.iter().filter_map(|run| run.message.as_ref()).map(|message| message.seq) {
            signed(seq)?;
        }
        for run in &batch.runs {
            if let Some(old) = inner.runs.get_mut(&run.run_id) {
                let result = run.result.clone().or_else(|| old.result.take());
                *old = kept(Run {
                    task_id: old.task_id.clone(),
                    kind: old.kind,
                    flow_id: old.flow_id,
                    trigger_at: old.trigger_at,
                    publish_at: old.publish_at,
                    payload: old.payload.take(),
                    stretch: old.stretch,
                    created_at: old.created_at,
                    result,
                    ..run.clone()
                });
            }
        }
        for id in &batch.commands_done {
            inner.commands.remove(id);
        }
        for attempt in &batch.attempts {
            let mut attempt = attempt.clone();
            for field in [&mut attempt.worker_id, &mut attempt.error] {
                *field = field.take().map(|value| text(&value).into_owned());
            }
            inner.attempts.insert((attempt.run_id, attempt.attempt), attempt);
        }
        let key = |signal: &Signal| (signal.seq, signal.kind.as_str(), signal.deliveries, signal.incarnation.clone());
        for signal in &batch.signals_add {
            inner.signals.entry(key(signal)).or_insert_with(|| signal.clone());
        }
        for signal in &batch.signals_remove {
            inner.signals.remove(&key(signal));
        }
        if let Some(settled) = &batch.settled {
            inner.shard.settled = settled.clone();
        }
        Ok(())
    }
}
