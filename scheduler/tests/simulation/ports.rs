//! A node's ports: the adapters in memory behind its ties, and checks of whatever goes through them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use ax_scheduler::core::command::Command;
use ax_scheduler::core::definitions::{AuditEntry, DefinitionView, TaskRow};
use ax_scheduler::core::run::{Attempt, Run, Signal};
use ax_scheduler::core::token::Token;
use ax_scheduler::ports::{
    Batch, Bus, BusError, Clock, ConsumerState, DecideChange, Guard, Hint, LeaderAnswer, LeaseEntry, LeaseValue,
    LeaseWrite, NodeInfo, Outgoing, Planned, PubAck, PublishError, Publisher, RunFilter, ShardState, Store, StoreError,
    StreamMessage, StreamState, TaskFilter, TaskHistory, Watermark,
};
use ax_shared::wire::{GroupConfig, WorkerEntry};
use ax_shared::{ConsumerName, Group, RunId, TaskId, Timestamp};
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::time::sleep;
use uuid::Uuid;

use crate::link::{Fate, Link, NodeClock};
use crate::world::short;

/// How far ahead of its clock a leader may plan: the horizon, and what its clock stepped back since.
pub(crate) const HORIZON: Duration = Duration::from_secs(2);
/// How long a publish waits for its answer.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(2);

pub(crate) struct SimStore(pub(crate) Arc<Link>);

impl SimStore {
    fn inner(&self) -> &dyn Store {
        &*self.0.world.store
    }
}

#[async_trait]
impl Store for SimStore {
    async fn migrate(&self) -> Result<Vec<String>, StoreError> {
        self.0.sql("migrate", self.inner().migrate()).await
    }
    async fn database_id(&self) -> Result<Uuid, StoreError> {
        self.0.sql("database_id", self.inner().database_id()).await
    }
    async fn ping(&self) -> Result<(), StoreError> {
        self.0.sql("ping", self.inner().ping()).await
    }
    async fn server_time(&self) -> Result<Option<Timestamp>, StoreError> {
        self.0.sql("server_time", self.inner().server_time()).await
    }
    fn is_shared(&self) -> bool {
        true
    }

    async fn change_definitions(&self, ids: &[TaskId], decide: DecideChange<'_>) -> Result<(), StoreError> {
        let world = self.0.world.clone();
        let decide = Box::new(move |view: DefinitionView| {
            let planned_until = view.planned_until;
            let mut write = decide(view)?;
            for run in &mut write.runs {
                run.run_id = world.id(run.run_id);
                run.flow_id = world.id(run.flow_id);
            }
            for task in &mut write.tasks {
                task.delay_run_id = task.delay_run_id.map(|id| world.id(id));
            }
            world.defined(planned_until, &write);
            Some(write)
        });
        self.0.sql("change_definitions", self.inner().change_definitions(ids, decide)).await
    }
    async fn tokens(&self) -> Result<Vec<Token>, StoreError> {
        self.0.sql("tokens", self.inner().tokens()).await
    }
    async fn add_token(&self, token: &Token, audit: &AuditEntry) -> Result<bool, StoreError> {
        self.0.sql("add_token", self.inner().add_token(token, audit)).await
    }
    async fn revoke_token(&self, name: &str, audit: &AuditEntry) -> Result<bool, StoreError> {
        self.0.sql("revoke_token", self.inner().revoke_token(name, audit)).await
    }
    async fn task(&self, id: &TaskId) -> Result<Option<TaskRow>, StoreError> {
        self.0.sql("task", self.inner().task(id)).await
    }
    async fn tasks(&self, ids: &[TaskId]) -> Result<Vec<TaskRow>, StoreError> {
        self.0.sql("tasks", self.inner().tasks(ids)).await
    }
    async fn list_tasks(&self, filter: &TaskFilter) -> Result<Vec<TaskRow>, StoreError> {
        self.0.sql("list_tasks", self.inner().list_tasks(filter)).await
    }
    async fn histories(&self, ids: &[TaskId], now: Timestamp) -> Result<BTreeMap<TaskId, TaskHistory>, StoreError> {
        self.0.sql("histories", self.inner().histories(ids, now)).await
    }

    async fn insert_command(&self, command: &Command, audit: &AuditEntry) -> Result<(), StoreError> {
        self.0.sql("insert_command", self.inner().insert_command(command, audit)).await
    }
    async fn commands(&self, limit: u32) -> Result<Vec<Command>, StoreError> {
        self.0.sql("commands", self.inner().commands(limit)).await
    }
    async fn insert_runs(&self, runs: &[Run], audit: &[AuditEntry]) -> Result<Vec<bool>, StoreError> {
        let world = &self.0.world;
        let runs: Vec<Run> = runs
            .iter()
            .map(|run| Run { run_id: world.id(run.run_id), flow_id: world.id(run.flow_id), ..run.clone() })
            .collect();
        let insert = async {
            let inserted = self.inner().insert_runs(&runs, audit).await?;
            for (run, _) in runs.iter().zip(&inserted).filter(|(_, new)| **new) {
                world.say(format_args!("{} {} {} inserted", self.0.node, run.task_id, run.run_id));
                world.book().one_offs.insert(run.run_id);
            }
            Ok(inserted)
        };
        self.0.sql("insert_runs", insert).await
    }
    async fn list_runs(&self, filter: &RunFilter) -> Result<Vec<Run>, StoreError> {
        self.0.sql("list_runs", self.inner().list_runs(filter)).await
    }
    async fn run(&self, id: RunId) -> Result<Option<(Run, Vec<Attempt>)>, StoreError> {
        self.0.sql("run", self.inner().run(id)).await
    }

    async fn shard(&self) -> Result<ShardState, StoreError> {
        self.0.sql("shard", self.inner().shard()).await
    }
    async fn acquire(&self, at_least: u64, now: Timestamp) -> Result<ShardState, StoreError> {
        let acquire = async {
            let state = self.inner().acquire(at_least, now).await?;
            self.0.world.acquired(&self.0.node, state.epoch);
            Ok(state)
        };
        self.0.sql("acquire", acquire).await
    }
    async fn heartbeat(&self, epoch: u64) -> Result<(), StoreError> {
        let heartbeat = async {
            self.inner().heartbeat(epoch).await?;
            self.0.world.accepted(&self.0.node, "a heartbeat", epoch);
            Ok(())
        };
        self.0.sql("heartbeat", heartbeat).await
    }
    async fn definitions(&self, since: u64) -> Result<(u64, Vec<TaskRow>), StoreError> {
        self.0.sql("definitions", self.inner().definitions(since)).await
    }
    async fn plan(&self, epoch: u64, runs: &[Run], watermark: Option<Watermark>) -> Result<Planned, StoreError> {
        let plan = async {
            let before = self.inner().shard().await?.planned_until;
            let planned = self.inner().plan(epoch, runs, watermark).await?;
            let world = &self.0.world;
            world.accepted(&self.0.node, "a plan", epoch);
            if let Planned::Done { inserted } = &planned {
                for (run, _) in runs.iter().zip(inserted).filter(|(_, new)| **new) {
                    match run.stretch {
                        None => world.say(format_args!("{} planned {}", self.0.node, crate::world::name(run))),
                        Some(s) => world.say(format_args!(
                            "{} missed {} {}…{} ({})",
                            self.0.node,
                            run.task_id,
                            short(s.from),
                            short(s.to),
                            s.count
                        )),
                    }
                }
            }
            let after = self.inner().shard().await?.planned_until;
            // The instant of the pass lies a little back, and its clock may have stepped since.
            let latest = NodeClock(self.0.clone()).now() + HORIZON;
            world.planned(&self.0.node, before, after, self.0.latest(latest));
            Ok(planned)
        };
        self.0.sql("plan", plan).await
    }
    async fn adopt_runs(&self, epoch: u64, due_before: Timestamp, limit: u32) -> Result<Vec<Run>, StoreError> {
        let adopt = async {
            let runs = self.inner().adopt_runs(epoch, due_before, limit).await?;
            self.0.world.accepted(&self.0.node, "an adoption", epoch);
            Ok(runs)
        };
        self.0.sql("adopt_runs", adopt).await
    }
    async fn unfinished(&self, epoch: u64) -> Result<Vec<Run>, StoreError> {
        self.0.sql("unfinished", self.inner().unfinished(epoch)).await
    }
    async fn attempts(&self, runs: &[RunId]) -> Result<Vec<Attempt>, StoreError> {
        self.0.sql("attempts", self.inner().attempts(runs)).await
    }
    async fn signals(&self, epoch: u64, incarnation: &str) -> Result<Vec<Signal>, StoreError> {
        self.0.sql("signals", self.inner().signals(epoch, incarnation)).await
    }
    async fn commit(&self, epoch: u64, batch: &Batch) -> Result<(), StoreError> {
        let commit = async {
            let mut before = Vec::with_capacity(batch.runs.len());
            for run in &batch.runs {
                before.push(match self.inner().run(run.run_id).await? {
                    Some((run, attempts)) => (Some(run), attempts),
                    None => (None, Vec::new()),
                });
            }
            self.inner().commit(epoch, batch).await?;
            let world = &self.0.world;
            if let Some(settled) = &batch.settled {
                world.say(format_args!("{} has settled up to {}", self.0.node, settled.seq));
            }
            world.accepted(&self.0.node, "a commit", epoch);
            world.committed(&self.0.node, &before, batch);
            Ok(())
        };
        self.0.sql("commit", commit).await
    }
}

pub(crate) struct SimBus(pub(crate) Arc<Link>);

impl SimBus {
    fn inner(&self) -> &dyn Bus {
        &*self.0.bus
    }
}

#[async_trait]
impl Bus for SimBus {
    async fn prepare(&self, database_id: Uuid) -> Result<(), BusError> {
        self.0.nats(self.inner().prepare(database_id)).await
    }
    fn connected_for(&self) -> Duration {
        self.inner().connected_for()
    }

    async fn lease(&self) -> Result<Option<LeaseEntry>, BusError> {
        self.0.nats(self.inner().lease()).await
    }
    async fn lease_take(&self, value: &LeaseValue, expected: Option<u64>) -> Result<LeaseWrite, BusError> {
        self.0.nats(self.inner().lease_take(value, expected)).await
    }
    async fn lease_release(&self, revision: u64) -> Result<LeaseWrite, BusError> {
        self.0.nats(self.inner().lease_release(revision)).await
    }
    async fn ask_leader(&self, timeout: Duration) -> Result<LeaderAnswer, BusError> {
        let answer = self.0.nats(self.inner().ask_leader(timeout)).await?;
        if answer == LeaderAnswer::TimedOut {
            sleep(timeout).await;
            self.0.alive().await;
        }
        Ok(answer)
    }
    async fn serve_leader(&self, value: LeaseValue) -> Result<Guard, BusError> {
        self.0.nats(self.inner().serve_leader(value)).await
    }
    async fn serve_node(
        &self,
        node_id: &str,
        info: Arc<dyn Fn() -> NodeInfo + Send + Sync>,
    ) -> Result<Guard, BusError> {
        self.0.nats(self.inner().serve_node(node_id, info)).await
    }
    async fn ask_node(&self, node_id: &str, timeout: Duration) -> Result<Option<NodeInfo>, BusError> {
        self.0.nats(self.inner().ask_node(node_id, timeout)).await
    }
    async fn ask_nodes(&self, wait: Duration) -> Result<Vec<NodeInfo>, BusError> {
        self.0.nats(self.inner().ask_nodes(wait)).await
    }
    async fn hint(&self, hint: Hint) {
        // Best effort: what the weather takes is gone.
        let _ = self
            .0
            .nats(async {
                self.inner().hint(hint).await;
                Ok(())
            })
            .await;
    }
    async fn hints(&self) -> Result<BoxStream<'static, Hint>, BusError> {
        let heard = self.0.nats(self.inner().hints()).await?;
        Ok(behind(&self.0, heard))
    }

    async fn triggers(&self) -> Result<StreamState, BusError> {
        self.0.nats(self.inner().triggers()).await
    }
    async fn events(&self) -> Result<StreamState, BusError> {
        self.0.nats(self.inner().events()).await
    }
    async fn read_events(&self, after: u64) -> Result<BoxStream<'static, Result<StreamMessage, BusError>>, BusError> {
        let read = self.0.nats(self.inner().read_events(after)).await?;
        Ok(behind(&self.0, read))
    }
    async fn trigger_at(&self, seq: u64) -> Result<Option<StreamMessage>, BusError> {
        self.0.nats(self.inner().trigger_at(seq)).await
    }
    async fn next_trigger(&self, from: u64) -> Result<Option<StreamMessage>, BusError> {
        self.0.nats(self.inner().next_trigger(from)).await
    }
    async fn last_trigger(&self, subject: &str) -> Result<Option<StreamMessage>, BusError> {
        self.0.nats(self.inner().last_trigger(subject)).await
    }
    async fn publisher(&self) -> Result<Arc<dyn Publisher>, BusError> {
        let inner = self.0.nats(self.inner().publisher()).await?;
        Ok(Arc::new(SimPublisher { link: self.0.clone(), inner }))
    }

    async fn consumers(&self) -> Result<Vec<ConsumerState>, BusError> {
        self.0.nats(self.inner().consumers()).await
    }
    async fn consumer(&self, name: &ConsumerName) -> Result<Option<ConsumerState>, BusError> {
        self.0.nats(self.inner().consumer(name)).await
    }
    async fn ensure_consumer(&self, name: &ConsumerName) -> Result<(), BusError> {
        self.0.nats(self.inner().ensure_consumer(name)).await
    }
    async fn remove_consumer(&self, name: &str) -> Result<(), BusError> {
        self.0.nats(self.inner().remove_consumer(name)).await
    }
    async fn poke(&self, name: &str) -> Result<(), BusError> {
        self.0.nats(self.inner().poke(name)).await
    }

    async fn groups(&self) -> Result<BTreeMap<Group, GroupConfig>, BusError> {
        self.0.nats(self.inner().groups()).await
    }
    async fn put_group(&self, group: &Group, config: Option<&GroupConfig>) -> Result<(), BusError> {
        self.0.nats(self.inner().put_group(group, config)).await
    }
    async fn workers(&self) -> Result<Vec<WorkerEntry>, BusError> {
        self.0.nats(self.inner().workers()).await
    }
    async fn claim_key(&self, task: &TaskId, key: &str, proposed: RunId, window: Duration) -> Result<RunId, BusError> {
        let proposed = self.0.world.id(proposed);
        self.0.nats(self.inner().claim_key(task, key, proposed, window)).await
    }

    async fn tell(&self, subject: String, body: Bytes) {
        let _ = self
            .0
            .nats(async {
                self.inner().tell(subject, body).await;
                Ok(())
            })
            .await;
    }
    async fn hear(&self, subject: &str) -> Result<BoxStream<'static, (String, Bytes)>, BusError> {
        let heard = self.0.nats(self.inner().hear(subject)).await?;
        Ok(behind(&self.0, heard))
    }
}

/// What a process hears only while it lives.
fn behind<T: Send + 'static>(link: &Arc<Link>, heard: BoxStream<'static, T>) -> BoxStream<'static, T> {
    let link = link.clone();
    heard
        .then(move |item| {
            let link = link.clone();
            async move {
                link.alive().await;
                item
            }
        })
        .boxed()
}

struct SimPublisher {
    link: Arc<Link>,
    inner: Arc<dyn Publisher>,
}

#[async_trait]
impl Publisher for SimPublisher {
    async fn publish(&self, message: Outgoing) -> Result<PubAck, PublishError> {
        let (link, world) = (&self.link, &self.link.world);
        let headers = message.headers.clone();
        let header = |name: &str| headers.iter().find(|(n, _)| *n == name).map(|(_, value)| value.clone());
        let id = header("Nats-Msg-Id").unwrap_or_default();
        if let Some(at) = header("Ax-Publish-At").and_then(|at| at.parse::<Timestamp>().ok()) {
            let now = NodeClock(link.clone()).now();
            // A clock that has stepped back since the decision does not make it wrong, nor does a leader whose clock
            // was ahead make a later message of the run wrong.
            let again = !id.ends_with(":1");
            // Nor does one that only its successor publishes, after all clocks stepped back.
            let again = again || world.book().turned_back.is_some_and(|from| at > from);
            if !again && link.latest(now) < at {
                world.violate(format!("{} publishes {id}, due at {at}, at {now}", link.node));
            }
        }
        let fate = link.send().await;
        if self.is_closed() || fate == Fate::Cut {
            return Err(PublishError::Closed);
        }
        if fate == Fate::Lost {
            sleep(PUBLISH_TIMEOUT).await;
            link.alive().await;
            return Err(PublishError::Transient("lost".into()));
        }
        let epoch: Option<u64> = header("Ax-Epoch").and_then(|epoch| epoch.parse().ok());
        let run_id: Option<RunId> = header("Ax-Run-Id").and_then(|id| id.parse().ok());
        let answer = self.inner.publish(message).await;
        if let (Some(epoch), Some(run_id)) = (epoch, run_id)
            && epoch < world.book().epoch
        {
            world.say(format_args!("{} publishes past the fence", link.node));
            world.book().past_the_fence.insert(run_id);
        }
        world.say(format_args!("{} publishes {id}: {answer:?} {fate:?}", link.node));
        if fate == Fate::Unanswered {
            sleep(PUBLISH_TIMEOUT).await;
            link.alive().await;
            return Err(PublishError::Transient("no answer".into()));
        }
        link.receive().await;
        if self.is_closed() { Err(PublishError::Closed) } else { answer }
    }

    async fn delete(&self, seq: u64) -> Result<bool, PublishError> {
        let (link, world) = (&self.link, &self.link.world);
        let fate = link.send().await;
        if self.is_closed() || fate == Fate::Cut {
            return Err(PublishError::Closed);
        }
        if fate == Fate::Lost {
            sleep(PUBLISH_TIMEOUT).await;
            link.alive().await;
            return Err(PublishError::Transient("lost".into()));
        }
        let answer = self.inner.delete(seq).await;
        world.say(format_args!("{} deletes {seq}: {answer:?} {fate:?}", link.node));
        if fate == Fate::Unanswered {
            sleep(PUBLISH_TIMEOUT).await;
            link.alive().await;
            return Err(PublishError::Transient("no answer".into()));
        }
        link.receive().await;
        if self.is_closed() { Err(PublishError::Closed) } else { answer }
    }

    fn is_closed(&self) -> bool {
        self.inner.is_closed()
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}
