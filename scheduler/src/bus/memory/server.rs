//! What nodes and workers share.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ax_shared::wire::{GroupConfig, WorkerEntry};
use ax_shared::{ConsumerName, Group, Prefix, RunId, TaskId, Timestamp};
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::{Notify, mpsc};
use uuid::Uuid;

use super::streams::{Consumer, Stream};
use super::{Hands, MemoryBus};
use crate::ports::{
    BusError, Clock, ConsumerState, LeaderAnswer, LeaseEntry, LeaseValue, LeaseWrite, NodeInfo, Outgoing, PubAck,
    PublishError, StreamMessage,
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

/// What becomes of a message on its way into AX_EVENTS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fate {
    /// It is stored.
    #[default]
    Stored,
    /// It is lost.
    Lost,
    /// It is stored twice.
    Doubled,
    /// It is stored this much later: others overtake it.
    Late(Duration),
}

type Judge = Box<dyn FnMut(&str) -> Fate + Send>;

/// A NATS server in memory. Cheap to clone.
#[derive(Clone)]
pub struct MemoryServer {
    state: Arc<Mutex<State>>,
    clock: Arc<dyn Clock>,
    prefix: Prefix,
    changed: Arc<Notify>,
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
    /// Whether its process is frozen: there, without an answer.
    frozen: Alive,
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
    /// Copies of triggers for operators.
    pub(super) dead: Stream,
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
    judge: Option<Judge>,
    /// What is late for AX_EVENTS, by when it will be stored.
    late: BTreeMap<(Duration, u64), Stored>,
    lates: u64,
}

struct Stored {
    subject: String,
    headers: BTreeMap<String, String>,
    payload: Bytes,
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
            triggers: Stream::new(incarnation(clock.now(), 1)),
            events: Stream::new(incarnation(clock.now(), 2)),
            dead: Stream::new(incarnation(clock.now(), 3)),
            streams: 3,
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
            judge: None,
            late: BTreeMap::new(),
            lates: 0,
        };
        Self { state: Arc::new(Mutex::new(state)), clock, prefix, changed: Arc::default() }
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

    /// Lets `judge` decide, by its subject, what becomes of each message for AX_EVENTS.
    pub fn judge_events(&self, judge: impl FnMut(&str) -> Fate + Send + 'static) {
        self.with(|state| state.judge = Some(Box::new(judge)));
    }

    /// Stores everything that is late for AX_EVENTS now.
    pub fn settle_late(&self) {
        self.with(|state| state.store_late(Duration::MAX));
        self.wake();
    }

    /// Drops everything in AX_EVENTS up to a sequence, as its limits do.
    pub fn drop_events(&self, through: u64) {
        self.with(|state| state.events.drop_through(through));
    }

    /// AX_TRIGGERS, in order.
    #[must_use]
    pub fn trigger_messages(&self) -> Vec<StreamMessage> {
        self.with(|state| state.triggers.all())
    }

    /// Deletes AX_TRIGGERS with its consumers and makes it anew.
    pub fn recreate_triggers(&self) {
        self.with(|state| {
            state.triggers = Stream::new(state.next_incarnation());
            state.consumers.clear();
        });
    }

    /// AX_TRIGGERS loses its newest `count` sequences and goes on as the same stream: what a server does that is killed
    /// before its last blocks are on disk.
    pub fn truncate_triggers(&self, count: u64) {
        self.with(|state| {
            let last_seq = state.triggers.state().last_seq.saturating_sub(count);
            state.triggers.truncate(last_seq);
            state.consumers.values_mut().for_each(|consumer| consumer.truncate(last_seq));
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
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.late.is_empty() {
            let now = state.boot();
            if state.store_late(now) {
                self.wake();
            }
        }
        work(&mut state)
    }

    /// Lets readers look.
    pub(super) fn wake(&self) {
        self.changed.notify_waiters();
    }

    pub(super) fn changes(&self) -> Arc<Notify> {
        self.changed.clone()
    }
}

impl State {
    fn boot(&self) -> Duration {
        self.clock.boot()
    }

    fn next_incarnation(&mut self) -> String {
        self.streams += 1;
        incarnation(self.clock.now(), self.streams)
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

    pub(super) fn serve(&mut self, serving: Serving, alive: Alive, frozen: Alive) -> u64 {
        self.served += 1;
        self.serving.push(Server { id: self.served, serving, alive, frozen });
        self.served
    }

    pub(super) fn stop_serving(&mut self, id: u64) {
        self.serving.retain(|server| server.id != id);
    }

    pub(super) fn ask_leader(&mut self) -> LeaderAnswer {
        let mut answer = LeaderAnswer::NoResponders;
        for server in self.serving.iter().filter(|server| (server.alive)()) {
            let Serving::Leader(value) = &server.serving else { continue };
            // Of several that hear the question the first answer counts.
            if !self.faults.leader_is_silent && !(server.frozen)() {
                return LeaderAnswer::Alive(value.clone());
            }
            answer = LeaderAnswer::TimedOut;
        }
        answer
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
        let (at, boot) = (self.clock.now(), self.boot());
        let stream = if matches(&self.prefix.all_triggers(), &message.subject) {
            &mut self.triggers
        } else if matches(&self.prefix.all_dead(), &message.subject) {
            &mut self.dead
        } else {
            return Err(PublishError::Transient("no stream listens, or it has no leader".into()));
        };
        let headers = message.headers.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let ack = stream.append(message.subject, headers, message.payload, at, boot);
        if let Some(left) = self.faults.lose_pubacks.checked_sub(1) {
            self.faults.lose_pubacks = left;
            return Err(PublishError::Transient("no answer in time".into()));
        }
        Ok(ack)
    }

    pub(super) fn store_event(&mut self, subject: String, headers: BTreeMap<String, String>, payload: Bytes) {
        let mut fate = self.judge.as_mut().map_or(Fate::Stored, |judge| judge(&subject));
        if self.faults.double_events && fate == Fate::Stored {
            fate = Fate::Doubled;
        }
        let (at, boot) = (self.clock.now(), self.boot());
        match fate {
            Fate::Lost => return,
            Fate::Late(by) => {
                self.lates += 1;
                self.late.insert((boot + by, self.lates), Stored { subject, headers, payload });
                return;
            }
            Fate::Doubled => {
                // A second copy past the stream's memory of ids.
                self.events.append(subject.clone(), BTreeMap::new(), payload.clone(), at, boot);
            }
            Fate::Stored => {}
        }
        self.events.append(subject, headers, payload, at, boot);
    }

    /// Stores what was late until `now`; whether there was anything.
    fn store_late(&mut self, now: Duration) -> bool {
        let mut any = false;
        while let Some(entry) = self.late.first_entry().filter(|entry| entry.key().0 <= now) {
            let Stored { subject, headers, payload } = entry.remove();
            let (at, boot) = (self.clock.now(), self.boot());
            self.events.append(subject, headers, payload, at, boot);
            any = true;
        }
        any
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

    pub(super) fn pull(&mut self, name: &str) -> Option<(StreamMessage, u32)> {
        self.poke(name).ok()?;
        let boot = self.boot();
        self.consumers.get_mut(name)?.pull(&self.triggers, boot)
    }

    /// Ends a delivery. Whatever is told of an answer names the delivery that was answered.
    pub(super) fn ack(&mut self, name: &str, seq: u64, deliveries: u32) {
        let boot = self.boot();
        let Some((_, took)) = self.consumers.get_mut(name).and_then(|c| c.settle(seq, boot)) else { return };
        self.triggers.remove(seq);
        if !self.faults.drop_metrics {
            let more = json!({ "stream_seq": seq, "deliveries": deliveries, "ack_time": took });
            self.server_event("METRIC.CONSUMER.ACK", name, more);
        }
    }

    pub(super) fn nak(&mut self, name: &str, seq: u64, deliveries: u32, delay: Duration) {
        let boot = self.boot();
        if !self.consumers.get_mut(name).is_some_and(|c| c.postpone(seq, boot, delay)) {
            return;
        }
        if !self.faults.drop_advisories {
            let more = json!({ "stream_seq": seq, "deliveries": deliveries });
            self.server_event("ADVISORY.CONSUMER.MSG_NAKED", name, more);
        }
    }

    pub(super) fn term(&mut self, name: &str, seq: u64, deliveries: u32) {
        let boot = self.boot();
        if self.consumers.get_mut(name).and_then(|c| c.settle(seq, boot)).is_none() {
            return;
        }
        self.triggers.remove(seq);
        if !self.faults.drop_advisories {
            let more = json!({ "stream_seq": seq, "deliveries": deliveries });
            self.server_event("ADVISORY.CONSUMER.MSG_TERMINATED", name, more);
        }
    }

    /// Deletes a message. Of one that a worker has, the server tells that it was terminated (2.15.1: "Unacknowledged
    /// message was deleted").
    pub(super) fn delete_trigger(&mut self, seq: u64) -> bool {
        let boot = self.boot();
        let deleted = self.triggers.remove(seq);
        let holders = self.consumers.iter_mut().filter_map(|(name, c)| Some((name.clone(), c.settle(seq, boot)?.0)));
        for (name, deliveries) in holders.collect::<Vec<_>>() {
            if deleted && !self.faults.drop_advisories {
                let more = json!({ "stream_seq": seq, "deliveries": deliveries });
                self.server_event("ADVISORY.CONSUMER.MSG_TERMINATED", &name, more);
            }
        }
        deleted
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

/// When a stream was made, with as many nanoseconds as there were streams: no two are the same.
fn incarnation(at: Timestamp, number: u64) -> String {
    let at = at.to_string();
    format!("{}{:06}Z", at.trim_end_matches('Z'), number)
}

/// Whether `subject` is one of those that `pattern` stands for: `*` is one token, a last `>` one or more.
pub(super) fn matches(pattern: &str, subject: &str) -> bool {
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
