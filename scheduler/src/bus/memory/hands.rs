//! A worker in a test's hands.

use std::collections::BTreeMap;
use std::time::Duration;

use ax_shared::Group;
use ax_shared::wire::{GroupConfig, WorkerEntry};
use bytes::Bytes;

use super::MemoryServer;
use crate::ports::StreamMessage;

/// Pulls from consumers and decides about each message.
#[derive(Debug, Clone)]
pub struct Hands {
    server: MemoryServer,
}

/// One delivery of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// The consumer that delivered it.
    pub consumer: String,
    /// The message.
    pub message: StreamMessage,
    /// Number of this delivery, from 1.
    pub number: u32,
}

impl Hands {
    pub(super) fn new(server: MemoryServer) -> Self {
        Self { server }
    }

    /// Takes the next message of a consumer, if there is one.
    #[must_use]
    pub fn pull(&self, consumer: &str) -> Option<Delivery> {
        let pulled = self.server.with(|state| state.pull(consumer));
        self.server.wake();
        pulled.map(|(message, number)| Delivery { consumer: consumer.to_owned(), message, number })
    }

    /// Says that it is done. Works through an old delivery, too.
    pub fn ack(&self, delivery: &Delivery) {
        self.server.with(|state| state.ack(&delivery.consumer, delivery.message.seq, delivery.number));
        self.server.wake();
    }

    /// Says that it failed and may be delivered again after `delay`.
    pub fn nak(&self, delivery: &Delivery, delay: Duration) {
        self.server.with(|state| state.nak(&delivery.consumer, delivery.message.seq, delivery.number, delay));
        self.server.wake();
    }

    /// Says that it failed for good.
    pub fn term(&self, delivery: &Delivery) {
        self.server.with(|state| state.term(&delivery.consumer, delivery.message.seq, delivery.number));
        self.server.wake();
    }

    /// Stores an event in AX_EVENTS.
    pub fn event(&self, subject: &str, message_id: Option<&str>, payload: impl Into<Bytes>) {
        let headers: BTreeMap<String, String> =
            message_id.map(|id| ("Nats-Msg-Id".to_owned(), id.to_owned())).into_iter().collect();
        self.server.with(|state| state.store_event(subject.to_owned(), headers, payload.into()));
        self.server.wake();
    }

    /// The last event with a subject.
    #[must_use]
    pub fn last_event(&self, subject: &str) -> Option<StreamMessage> {
        self.server.with(|state| state.events.last_of(subject))
    }

    /// What the groups' consumers are, as workers read it.
    #[must_use]
    pub fn groups(&self) -> BTreeMap<Group, GroupConfig> {
        self.server.with(|state| state.groups.clone())
    }

    /// Writes a worker's entry, which lives for 10 s.
    pub fn register(&self, entry: WorkerEntry) {
        self.server.with(|state| state.register(entry));
    }
}
