//! A bus in memory that means the same as NATS, for tests and simulations.
//!
//! A [`MemoryServer`] is what nodes share. Each node has a [`MemoryBus`] of its own, whose connection can be cut and
//! mended; [`Hands`] are a worker. Time is the server's [`Clock`](crate::ports::Clock), nothing is random and maps are
//! ordered, so the same calls at the same instants have the same outcome. [`Faults`] drop, double and lose.
//!
//! Left out: replicas, sizes and ages of streams, and what a server forgets in a restart.

mod hands;
mod server;
mod streams;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use ax_shared::wire::{GroupConfig, WorkerEntry};
use ax_shared::{ConsumerName, Group, RunId, TaskId};
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use uuid::Uuid;

pub use self::hands::{Delivery, Hands};
pub use self::server::{Fate, Faults, MemoryServer};
use self::server::{Serving, State};
use crate::ports::{
    Bus, BusError, ConsumerState, Guard, Hint, LeaderAnswer, LeaseEntry, LeaseValue, LeaseWrite, NodeInfo, Outgoing,
    PubAck, PublishError, Publisher, StreamMessage, StreamState,
};

/// One node's connection to a [`MemoryServer`].
#[derive(Debug)]
pub struct MemoryBus {
    server: MemoryServer,
    /// Since when it is up, on the server's boot clock; none while it is cut.
    up_since: Arc<Mutex<Option<Duration>>>,
    /// How often it has been cut: what was opened before is dead.
    cuts: Arc<AtomicU64>,
    frozen: Arc<AtomicBool>,
}

fn cut_off() -> BusError {
    BusError::Unavailable("not connected".into())
}

impl MemoryBus {
    fn new(server: MemoryServer) -> Arc<Self> {
        let up_since = Arc::new(Mutex::new(Some(server.boot())));
        Arc::new(Self { server, up_since, cuts: Arc::default(), frozen: Arc::default() })
    }

    /// Cuts the connection: every call fails, publishers are dead, readers end with an error.
    pub fn cut(&self) {
        *self.up_since.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.cuts.fetch_add(1, Ordering::SeqCst);
        self.server.wake();
    }

    /// Connects again.
    pub fn mend(&self) {
        *self.up_since.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.server.boot());
        self.server.wake();
    }

    /// Freezes or thaws its process: what it serves is there, but does not answer.
    pub fn freeze(&self, frozen: bool) {
        self.frozen.store(frozen, Ordering::SeqCst);
    }

    /// The server's state, if connected.
    fn state<T>(&self, work: impl FnOnce(&mut State) -> T) -> Result<T, BusError> {
        if self.uptime().is_none() {
            return Err(cut_off());
        }
        Ok(self.server.with(work))
    }

    fn uptime(&self) -> Option<Duration> {
        let since = *self.up_since.lock().unwrap_or_else(PoisonError::into_inner);
        since.map(|since| self.server.boot().saturating_sub(since))
    }

    fn alive(&self) -> Box<dyn Fn() -> bool + Send> {
        let up_since = self.up_since.clone();
        Box::new(move || up_since.lock().unwrap_or_else(PoisonError::into_inner).is_some())
    }

    fn serve(&self, serving: Serving) -> Result<Guard, BusError> {
        let frozen = self.frozen.clone();
        let frozen = Box::new(move || frozen.load(Ordering::SeqCst));
        let id = self.state(|state| state.serve(serving, self.alive(), frozen))?;
        let server = self.server.clone();
        Ok(Guard::new(move || server.with(|state| state.stop_serving(id))))
    }
}

#[async_trait]
impl Bus for MemoryBus {
    async fn prepare(&self, database_id: Uuid) -> Result<(), BusError> {
        self.state(|state| state.claim(database_id))?
    }

    fn connected_for(&self) -> Duration {
        // Up is never zero, also at the instant of connecting.
        self.uptime().map_or(Duration::ZERO, |up| up.max(Duration::from_nanos(1)))
    }

    async fn lease(&self) -> Result<Option<LeaseEntry>, BusError> {
        self.state(State::lease)
    }

    async fn lease_take(&self, value: &LeaseValue, expected: Option<u64>) -> Result<LeaseWrite, BusError> {
        self.state(|state| state.write_lease(Some(value), expected))
    }

    async fn lease_release(&self, revision: u64) -> Result<LeaseWrite, BusError> {
        self.state(|state| state.write_lease(None, Some(revision)))
    }

    async fn ask_leader(&self, _timeout: Duration) -> Result<LeaderAnswer, BusError> {
        self.state(State::ask_leader)
    }

    async fn serve_leader(&self, value: LeaseValue) -> Result<Guard, BusError> {
        self.serve(Serving::Leader(value))
    }

    async fn serve_node(
        &self,
        node_id: &str,
        info: Arc<dyn Fn() -> NodeInfo + Send + Sync>,
    ) -> Result<Guard, BusError> {
        self.serve(Serving::Node(node_id.to_owned(), info))
    }

    async fn ask_node(&self, node_id: &str, _timeout: Duration) -> Result<Option<NodeInfo>, BusError> {
        let infos = self.state(|state| state.nodes(Some(node_id)))?;
        // Asked outside the lock: what a node tells of itself may need the bus.
        Ok(infos.first().map(|info| info()))
    }

    async fn ask_nodes(&self, _wait: Duration) -> Result<Vec<NodeInfo>, BusError> {
        let infos = self.state(|state| state.nodes(None))?;
        Ok(infos.iter().map(|info| info()).collect())
    }

    async fn hint(&self, hint: Hint) {
        if let Ok(body) = serde_json::to_vec(&hint) {
            self.tell(self.server.prefix().hint(), body.into()).await;
        }
    }

    async fn hints(&self) -> Result<BoxStream<'static, Hint>, BusError> {
        let heard = self.hear(&self.server.prefix().hint()).await?;
        Ok(heard.filter_map(|(_, body)| async move { serde_json::from_slice(&body).ok() }).boxed())
    }

    async fn triggers(&self) -> Result<StreamState, BusError> {
        self.state(|state| state.triggers.state())
    }

    async fn events(&self) -> Result<StreamState, BusError> {
        self.state(|state| state.events.state())
    }

    async fn read_events(&self, after: u64) -> Result<BoxStream<'static, Result<StreamMessage, BusError>>, BusError> {
        let incarnation = self.events().await?.incarnation;
        let reader = Reader {
            server: self.server.clone(),
            changed: self.server.changes(),
            cuts: self.cuts.clone(),
            cut: self.cuts.load(Ordering::SeqCst),
            incarnation,
            after,
        };
        Ok(stream::unfold(Some(reader), |reader| async {
            let mut reader = reader?;
            match reader.next().await {
                Ok(message) => Some((Ok(message), Some(reader))),
                Err(error) => Some((Err(error), None)),
            }
        })
        .boxed())
    }

    async fn trigger_at(&self, seq: u64) -> Result<Option<StreamMessage>, BusError> {
        self.state(|state| state.triggers.at(seq))
    }

    async fn next_trigger(&self, from: u64) -> Result<Option<StreamMessage>, BusError> {
        self.state(|state| state.triggers.after(from.saturating_sub(1)))
    }

    async fn last_trigger(&self, subject: &str) -> Result<Option<StreamMessage>, BusError> {
        self.state(|state| state.triggers.last_of(subject))
    }

    async fn publisher(&self) -> Result<Arc<dyn Publisher>, BusError> {
        self.state(|_| ())?;
        let cut = self.cuts.load(Ordering::SeqCst);
        Ok(Arc::new(MemoryPublisher {
            server: self.server.clone(),
            cuts: self.cuts.clone(),
            cut,
            closed: AtomicU64::new(0),
        }))
    }

    async fn consumers(&self) -> Result<Vec<ConsumerState>, BusError> {
        self.state(|state| state.consumers())
    }

    async fn consumer(&self, name: &ConsumerName) -> Result<Option<ConsumerState>, BusError> {
        self.state(|state| state.consumers().into_iter().find(|there| there.name == name.to_string()))
    }

    async fn ensure_consumer(&self, name: &ConsumerName) -> Result<(), BusError> {
        self.state(|state| state.ensure_consumer(name))
    }

    async fn remove_consumer(&self, name: &str) -> Result<(), BusError> {
        self.state(|state| state.remove_consumer(name))
    }

    async fn poke(&self, name: &str) -> Result<(), BusError> {
        self.state(|state| state.poke(name))??;
        self.server.wake();
        Ok(())
    }

    async fn groups(&self) -> Result<BTreeMap<Group, GroupConfig>, BusError> {
        self.state(|state| state.groups.clone())
    }

    async fn put_group(&self, group: &Group, config: Option<&GroupConfig>) -> Result<(), BusError> {
        self.state(|state| match config {
            Some(config) => drop(state.groups.insert(group.clone(), config.clone())),
            None => drop(state.groups.remove(group)),
        })
    }

    async fn workers(&self) -> Result<Vec<WorkerEntry>, BusError> {
        self.state(State::workers)
    }

    async fn claim_key(&self, task: &TaskId, key: &str, proposed: RunId, window: Duration) -> Result<RunId, BusError> {
        self.state(|state| state.claim_key(task, key, proposed, window))
    }

    async fn tell(&self, subject: String, body: Bytes) {
        // Best effort: a node that is cut off tells nobody.
        let _ = self.state(|state| state.tell(&subject, &body));
    }

    async fn hear(&self, subject: &str) -> Result<BoxStream<'static, (String, Bytes)>, BusError> {
        let heard = self.state(|state| state.hear(subject, self.alive()))?;
        Ok(stream::unfold(heard, |mut heard| async { heard.recv().await.map(|told| (told, heard)) }).boxed())
    }
}

struct Reader {
    server: MemoryServer,
    changed: Arc<tokio::sync::Notify>,
    cuts: Arc<AtomicU64>,
    cut: u64,
    incarnation: String,
    after: u64,
}

impl Reader {
    async fn next(&mut self) -> Result<StreamMessage, BusError> {
        let changes = self.changed.clone();
        loop {
            // Before looking, so that what comes while looking wakes.
            let mut changed = std::pin::pin!(changes.notified());
            changed.as_mut().enable();
            if self.cuts.load(Ordering::SeqCst) != self.cut {
                return Err(cut_off());
            }
            let (incarnation, next) =
                self.server.with(|state| (state.events.state().incarnation, state.events.after(self.after)));
            if incarnation != self.incarnation {
                return Err(BusError::Unavailable("AX_EVENTS is another stream now".into()));
            }
            if let Some(message) = next {
                self.after = message.seq;
                return Ok(message);
            }
            changed.await;
        }
    }
}

#[derive(Debug)]
struct MemoryPublisher {
    server: MemoryServer,
    cuts: Arc<AtomicU64>,
    cut: u64,
    closed: AtomicU64,
}

#[async_trait]
impl Publisher for MemoryPublisher {
    async fn publish(&self, message: Outgoing) -> Result<PubAck, PublishError> {
        if self.is_closed() {
            return Err(PublishError::Closed);
        }
        let ack = self.server.with(|state| state.publish(message));
        self.server.wake();
        // An answer takes a moment.
        tokio::task::yield_now().await;
        ack
    }

    async fn delete(&self, seq: u64) -> Result<bool, PublishError> {
        if self.is_closed() {
            return Err(PublishError::Closed);
        }
        let deleted = self.server.with(|state| state.delete_trigger(seq));
        self.server.wake();
        Ok(deleted)
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst) != 0 || self.cuts.load(Ordering::SeqCst) != self.cut
    }

    async fn close(&self) {
        self.closed.store(1, Ordering::SeqCst);
    }
}
