//! What nodes and workers share.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ax_shared::wire::{GroupConfig, WorkerEntry};
use ax_shared::{ConsumerName, Group, Prefix, RunId, TaskId};
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use uuid::Uuid;

use super::streams::{Consumer, Stream};
use super::{Hands, MemoryBus};
use crate::ports::{
    BusError, Clock, ConsumerState, LeaderAnswer, LeaseEntry, LeaseValue, LeaseWrite, NodeInfo, Outgoing, PubAck,
    PublishError,
};

/// How long a worker's entry lives.
const WORKER_TTL: Duration = Duration::from_secs(10);

/// What goes wrong, until it is changed.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// Acks make no metric.
    pub drop_metrics: bool,
    /// NAK, TERM and used-up deliveries make no advisory.
    pub drop_advisories: bool,
    /// Everything that is stored in AX_EVENTS is stored twice.
    pub double_events: bool,
    /// So many of the next publishes are stored, and their answer is lost.
    pub lose_pubacks: u32,
    /// So many of the next publishes are lost.
    pub lose_publishes: u32,
    /// Followers that ask for the leader hear nothing, though it is there.
    pub leader_is_silent: bool,
}

/// A NATS server in memory. Cheap to clone.
#[derive(Clone)]
pub struct MemoryServer {
    state: Arc<Mutex<State>>,
    clock: Arc<dyn Clock>,
    prefix: Prefix,
    changed: Arc<watch::Sender<u64>>,
}

impl fmt::Debug for MemoryServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryServer").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

pub(super) enum Serving {
    Leader(LeaseValue),
    Node(String, Arc<dyn Fn() -> NodeInfo + Send + Sync>),
}

/// Whether the connection of whoever answers or hears is up.
type Alive = Box<dyn Fn() -> bool + Send>;

type NodeAnswer = Arc<dyn Fn() -> NodeInfo + Send + Sync>;

struct Server {
    id: u64,
    serving: Serving,
    alive: Alive,
}

struct Heard {
    subject: String,
    alive: Alive,
    sender: mpsc::UnboundedSender<(String, Bytes)>,
}

struct Lease {
    value: LeaseValue,
    renewed_at: Duration,
}

pub(super) struct State {
    clock: Arc<dyn Clock>,
    prefix: Prefix,
    lease_ttl: Duration,
    database_id: Option<Uuid>,
    pub(super) triggers: Stream,
    pub(super) events: Stream,
    /// How many streams there have been: the source of incarnations.
    streams: u64,
    lease: Option<Lease>,
    lease_revision: u64,
    consumers: BTreeMap<String, Consumer>,
    pub(super) groups: BTreeMap<Group, GroupConfig>,
    workers: BTreeMap<String, (WorkerEntry, Duration)>,
    keys: BTreeMap<(TaskId, String), (RunId, Duration)>,
    serving: Vec<Server>,
    served: u64,
    heard: Vec<Heard>,
    pub(super) faults: Faults,
}

impl MemoryServer {
    /// A server on which nothing has happened, with leases of `lease_ttl`.
    #[must_use]
    pub fn new(clock: Arc<dyn Clock>, prefix: Prefix, lease_ttl: Duration) -> Self {
        let state = State {
            clock: clock.clone(),
            prefix: prefix.clone(),
            lease_ttl,
            database_id: None,
            triggers: Stream::new("memory-1".into()),
            events: Stream::new("memory-2".into()),
            streams: 2,
            lease: None,
            lease_revision: 0,
            consumers: BTreeMap::new(),
            groups: BTreeMap::new(),
            workers: BTreeMap::new(),
            keys: BTreeMap::new(),
            serving: Vec::new(),
            served: 0,
            heard: Vec::new(),
            faults: Faults::default(),
        };
        Self { state: Arc::new(Mutex::new(state)), clock, prefix, changed: Arc::new(watch::Sender::new(0)) }
    }

    /// Connects a node.
    #[must_use]
    pub fn bus(&self) -> Arc<MemoryBus> {
        MemoryBus::new(self.clone())
    }

    /// Connects a worker.
    #[must_use]
    pub fn hands(&self) -> Hands {
        Hands::new(self.clone())
    }

    /// Changes what goes wrong.
    pub fn faults(&self, change: impl FnOnce(&mut Faults)) {
        self.with(|state| change(&mut state.faults));
    }

    /// Deletes AX_TRIGGERS with its consumers and makes it anew.
    pub fn recreate_triggers(&self) {
        self.with(|state| {
            state.triggers = Stream::new(state.next_incarnation());
            state.consumers.clear();
        });
    }

    /// Deletes AX_EVENTS and makes it anew.
    pub fn recreate_events(&self) {
        self.with(|state| state.events = Stream::new(state.next_incarnation()));
        self.wake();
    }

    pub(super) fn prefix(&self) -> &Prefix {
        &self.prefix
    }

    pub(super) fn boot(&self) -> Duration {
        self.clock.boot()
    }

    pub(super) fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        work(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Lets readers look.
    pub(super) fn wake(&self) {
        self.changed.send_modify(|n| *n += 1);
    }

    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }
}

impl State {
    fn boot(&self) -> Duration {
        self.clock.boot()
    }

    fn next_incarnation(&mut self) -> String {
        self.streams += 1;
        format!("memory-{}", self.streams)
    }

    pub(super) fn claim(&mut self, database_id: Uuid) -> Result<(), BusError> {
        match self.database_id {
            Some(owner) if owner != database_id => Err(BusError::Incompatible(format!(
                "the stream {} belongs to the database {owner}, and this node uses the database {database_id}",
                self.prefix.triggers_stream()
            ))),
            _ => {
                self.database_id = Some(database_id);
                Ok(())
            }
        }
    }

    pub(super) fn lease(&mut self) -> Option<LeaseEntry> {
        let now = self.boot();
        let ttl = self.lease_ttl;
        self.lease.take_if(|lease| now.saturating_sub(lease.renewed_at) >= ttl);
        self.lease.as_ref().map(|lease| LeaseEntry { value: lease.value.clone(), revision: self.lease_revision })
    }

    pub(super) fn write_lease(&mut self, value: Option<&LeaseValue>, expected: Option<u64>) -> LeaseWrite {
        if self.lease().map(|entry| entry.revision) != expected {
            return LeaseWrite::Lost;
        }
        let renewed_at = self.boot();
        self.lease = value.map(|value| Lease { value: value.clone(), renewed_at });
        self.lease_revision += 1;
        LeaseWrite::Won(self.lease_revision)
    }

    pub(super) fn serve(&mut self, serving: Serving, alive: Alive) -> u64 {
        self.served += 1;
        self.serving.push(Server { id: self.served, serving, alive });
        self.served
    }

    pub(super) fn stop_serving(&mut self, id: u64) {
        self.serving.retain(|server| server.id != id);
    }

    pub(super) fn ask_leader(&mut self) -> LeaderAnswer {
        let leader = self.serving.iter().filter(|server| (server.alive)()).find_map(|server| match &server.serving {
            Serving::Leader(value) => Some(value.clone()),
            Serving::Node(..) => None,
        });
        match leader {
            None => LeaderAnswer::NoResponders,
            Some(_) if self.faults.leader_is_silent => LeaderAnswer::TimedOut,
            Some(value) => LeaderAnswer::Alive(value),
        }
    }

    pub(super) fn nodes(&self, of: Option<&str>) -> Vec<NodeAnswer> {
        let alive = self.serving.iter().filter(|server| (server.alive)());
        alive
            .filter_map(|server| match &server.serving {
                Serving::Node(node_id, info) if of.is_none_or(|of| of == node_id) => Some(info.clone()),
                _ => None,
            })
            .collect()
    }

    pub(super) fn tell(&mut self, subject: &str, body: &Bytes) {
        self.heard.retain(|heard| !heard.sender.is_closed());
        for heard in self.heard.iter().filter(|heard| (heard.alive)() && matches(&heard.subject, subject)) {
            // Closed since: nobody misses it.
            let _ = heard.sender.send((subject.to_owned(), body.clone()));
        }
    }

    pub(super) fn hear(&mut self, subject: &str, alive: Alive) -> mpsc::UnboundedReceiver<(String, Bytes)> {
        let (sender, receiver) = mpsc::unbounded_channel();
        self.heard.push(Heard { subject: subject.to_owned(), sender, alive });
        receiver
    }

    pub(super) fn publish(&mut self, message: Outgoing) -> Result<PubAck, PublishError> {
        if let Some(left) = self.faults.lose_publishes.checked_sub(1) {
            self.faults.lose_publishes = left;
            return Err(PublishError::Transient("no answer in time".into()));
        }
        let expected = self.prefix.all_triggers();
        if !matches(&expected, &message.subject) {
            return Err(PublishError::Transient("no stream listens, or it has no leader".into()));
        }
        let headers = message.headers.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let (at, boot) = (self.clock.now(), self.boot());
        let ack = self.triggers.append(message.subject, headers, message.payload, at, boot);
        if let Some(left) = self.faults.lose_pubacks.checked_sub(1) {
            self.faults.lose_pubacks = left;
            return Err(PublishError::Transient("no answer in time".into()));
        }
        Ok(ack)
    }

    pub(super) fn store_event(&mut self, subject: String, headers: BTreeMap<String, String>, payload: Bytes) {
        let (at, boot) = (self.clock.now(), self.boot());
        if self.faults.double_events {
            // A second copy past the stream's memory of ids.
            self.events.append(subject.clone(), BTreeMap::new(), payload.clone(), at, boot);
        }
        self.events.append(subject, headers, payload, at, boot);
    }

    fn server_event(&mut self, kind: &str, consumer: &str, more: Value) {
        let stream = self.prefix.triggers_stream();
        let mut body = json!({
            "id": format!("memory-{}", self.events.state().last_seq + 1),
            "timestamp": self.clock.now().to_string(),
            "stream": stream,
            "consumer": consumer,
        });
        if let (Some(body), Value::Object(more)) = (body.as_object_mut(), more) {
            body.extend(more);
        }
        let subject = format!("$JS.EVENT.{kind}.{stream}.{consumer}");
        self.store_event(subject, BTreeMap::new(), body.to_string().into());
    }

    pub(super) fn consumers(&self) -> Vec<ConsumerState> {
        self.consumers.values().map(|consumer| consumer.state(&self.triggers)).collect()
    }

    pub(super) fn ensure_consumer(&mut self, name: &ConsumerName) {
        let all = self.prefix.triggers_of(&name.group, &name.queue, name.profile);
        let start = all.trim_end_matches('>').to_owned();
        self.consumers.entry(name.to_string()).or_insert_with(|| Consumer::new(name.clone(), start));
    }

    pub(super) fn remove_consumer(&mut self, name: &str) {
        self.consumers.remove(name);
    }

    /// Tells of used-up deliveries, which a server does when somebody pulls.
    pub(super) fn poke(&mut self, name: &str) -> Result<(), BusError> {
        let boot = self.boot();
        let Some(consumer) = self.consumers.get_mut(name) else {
            return Err(BusError::Unavailable(format!("the consumer {name} is not there")));
        };
        for (seq, deliveries) in consumer.exhausted(&self.triggers, boot) {
            if !self.faults.drop_advisories {
                let more = json!({ "stream_seq": seq, "deliveries": deliveries });
                self.server_event("ADVISORY.CONSUMER.MAX_DELIVERIES", name, more);
            }
        }
        Ok(())
    }

    pub(super) fn pull(&mut self, name: &str) -> Option<(crate::ports::StreamMessage, u32)> {
        self.poke(name).ok()?;
        let boot = self.boot();
        self.consumers.get_mut(name)?.pull(&self.triggers, boot)
    }

    pub(super) fn ack(&mut self, name: &str, seq: u64) {
        let boot = self.boot();
        let Some((deliveries, took)) = self.consumers.get_mut(name).and_then(|c| c.settle(seq, boot)) else { return };
        self.triggers.remove(seq);
        if !self.faults.drop_metrics {
            let more = json!({ "stream_seq": seq, "deliveries": deliveries, "ack_time": took });
            self.server_event("METRIC.CONSUMER.ACK", name, more);
        }
    }

    pub(super) fn nak(&mut self, name: &str, seq: u64, delay: Duration) {
        let boot = self.boot();
        let Some(deliveries) = self.consumers.get_mut(name).and_then(|c| c.postpone(seq, boot, delay)) else { return };
        if !self.faults.drop_advisories {
            let more = json!({ "stream_seq": seq, "deliveries": deliveries });
            self.server_event("ADVISORY.CONSUMER.MSG_NAKED", name, more);
        }
    }

    pub(super) fn term(&mut self, name: &str, seq: u64) {
        let boot = self.boot();
        let Some((deliveries, _)) = self.consumers.get_mut(name).and_then(|c| c.settle(seq, boot)) else { return };
        self.triggers.remove(seq);
        if !self.faults.drop_advisories {
            let more = json!({ "stream_seq": seq, "deliveries": deliveries });
            self.server_event("ADVISORY.CONSUMER.MSG_TERMINATED", name, more);
        }
    }

    pub(super) fn workers(&mut self) -> Vec<WorkerEntry> {
        let now = self.boot();
        self.workers.retain(|_, (_, told)| now.saturating_sub(*told) < WORKER_TTL);
        self.workers.values().map(|(entry, _)| entry.clone()).collect()
    }

    pub(super) fn register(&mut self, entry: WorkerEntry) {
        let now = self.boot();
        self.workers.insert(format!("{}.{}", entry.group, entry.worker_id), (entry, now));
    }

    pub(super) fn claim_key(&mut self, task: &TaskId, key: &str, proposed: RunId, window: Duration) -> RunId {
        let now = self.boot();
        self.keys.retain(|_, (_, until)| now < *until);
        // Whole seconds, as on the server.
        let seconds = window.as_secs() + u64::from(window.subsec_nanos() > 0);
        let until = now + Duration::from_secs(seconds.max(1));
        self.keys.entry((task.clone(), key.to_owned())).or_insert((proposed, until)).0
    }
}

/// Whether `subject` is one of those that `pattern` stands for: `*` is one token, a last `>` one or more.
fn matches(pattern: &str, subject: &str) -> bool {
    let mut tokens = subject.split('.');
    for part in pattern.split('.') {
        match (part, tokens.next()) {
            (">", Some(_)) => return true,
            ("*", Some(_)) => {}
            (part, Some(token)) if part == token => {}
            _ => return false,
        }
    }
    tokens.next().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_stand_for_tokens() {
        for (pattern, subject) in [("a.>", "a.b"), ("a.>", "a.b.c"), ("a.*.c", "a.b.c"), ("a.b", "a.b")] {
            assert!(matches(pattern, subject), "{pattern} {subject}");
        }
        for (pattern, subject) in [("a.>", "a"), ("a.*", "a.b.c"), ("a.b", "a"), ("a", "a.b"), ("a.*", "b.c")] {
            assert!(!matches(pattern, subject), "{pattern} {subject}");
        }
    }
}
