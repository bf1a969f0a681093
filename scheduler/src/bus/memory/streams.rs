//! A stream of messages, and the consumers of a work queue.

use std::collections::BTreeMap;
use std::time::Duration;

use ax_shared::{ConsumerName, Timestamp};
use bytes::Bytes;

use super::server::matches;
use crate::ports::{ConsumerState, PubAck, StreamMessage, StreamState};

/// For how long a message id is remembered.
const DUPLICATE_WINDOW: Duration = Duration::from_secs(120);

#[derive(Debug)]
pub(super) struct Stream {
    incarnation: String,
    last_seq: u64,
    messages: BTreeMap<u64, StreamMessage>,
    /// Sequence and boot time of each message id.
    ids: BTreeMap<String, (u64, Duration)>,
}

impl Stream {
    pub(super) fn new(incarnation: String) -> Self {
        Self { incarnation, last_seq: 0, messages: BTreeMap::new(), ids: BTreeMap::new() }
    }

    pub(super) fn state(&self) -> StreamState {
        StreamState {
            incarnation: self.incarnation.clone(),
            first_seq: self.messages.keys().next().copied().unwrap_or(self.last_seq + 1),
            last_seq: self.last_seq,
            messages: self.messages.len() as u64,
        }
    }

    pub(super) fn append(
        &mut self,
        subject: String,
        headers: BTreeMap<String, String>,
        payload: Bytes,
        at: Timestamp,
        boot: Duration,
    ) -> PubAck {
        if let Some(id) = headers.get("Nats-Msg-Id") {
            self.ids.retain(|_, (_, stored)| boot.saturating_sub(*stored) < DUPLICATE_WINDOW);
            if let Some((seq, _)) = self.ids.get(id) {
                return PubAck { seq: *seq, duplicate: true };
            }
            self.ids.insert(id.clone(), (self.last_seq + 1, boot));
        }
        self.last_seq += 1;
        let seq = self.last_seq;
        self.messages.insert(seq, StreamMessage { seq, subject, headers, payload, at });
        PubAck { seq, duplicate: false }
    }

    pub(super) fn at(&self, seq: u64) -> Option<StreamMessage> {
        self.messages.get(&seq).cloned()
    }

    pub(super) fn after(&self, seq: u64) -> Option<StreamMessage> {
        self.messages.range(seq + 1..).next().map(|(_, message)| message.clone())
    }

    pub(super) fn last_of(&self, subject: &str) -> Option<StreamMessage> {
        self.messages.values().rev().find(|message| matches(subject, &message.subject)).cloned()
    }

    pub(super) fn all(&self) -> Vec<StreamMessage> {
        self.messages.values().cloned().collect()
    }

    pub(super) fn drop_through(&mut self, seq: u64) {
        self.messages = self.messages.split_off(&(seq + 1));
    }

    /// Loses everything after a sequence, and what is known of it, as a server does that is killed before its last blocks
    /// are on disk.
    pub(super) fn truncate(&mut self, last_seq: u64) {
        self.last_seq = self.last_seq.min(last_seq);
        self.messages.split_off(&(last_seq + 1));
        self.ids.retain(|_, (seq, _)| *seq <= last_seq);
    }

    pub(super) fn remove(&mut self, seq: u64) -> bool {
        self.messages.remove(&seq).is_some()
    }

    /// The first message after `seq` whose subject begins with `start`.
    fn next_under(&self, start: &str, seq: u64) -> Option<u64> {
        self.messages.range(seq + 1..).find(|(_, message)| message.subject.starts_with(start)).map(|(seq, _)| *seq)
    }
}

/// A message that a worker has, or had.
#[derive(Debug, Clone, Copy)]
struct Out {
    deliveries: u32,
    delivered_at: Duration,
    /// When it is delivered again.
    again_at: Duration,
}

#[derive(Debug)]
pub(super) struct Consumer {
    name: ConsumerName,
    /// What the subjects of its messages begin with.
    start: String,
    delivered_seq: u64,
    out: BTreeMap<u64, Out>,
}

impl Consumer {
    pub(super) fn new(name: ConsumerName, start: String) -> Self {
        Self { name, start, delivered_seq: 0, out: BTreeMap::new() }
    }

    pub(super) fn state(&self, stream: &Stream) -> ConsumerState {
        let pending = stream.messages.range(self.delivered_seq + 1..);
        ConsumerState {
            name: self.name.to_string(),
            delivered_seq: self.delivered_seq,
            pending: pending.filter(|(_, message)| message.subject.starts_with(&self.start)).count() as u64,
            ack_pending: self.out.len() as u64,
            waiting: 0,
        }
    }

    /// What was after a sequence has never been delivered.
    pub(super) fn truncate(&mut self, last_seq: u64) {
        self.delivered_seq = self.delivered_seq.min(last_seq);
        self.out.split_off(&(last_seq + 1));
    }

    /// Drops messages whose deliveries are used up and answers them: (sequence, deliveries).
    pub(super) fn exhausted(&mut self, stream: &Stream, boot: Duration) -> Vec<(u64, u32)> {
        let max = self.name.profile.max_deliver();
        self.out.retain(|seq, _| stream.messages.contains_key(seq));
        let exhausted: Vec<(u64, u32)> = self
            .out
            .iter()
            .filter(|(_, out)| out.again_at <= boot && out.deliveries >= max)
            .map(|(seq, out)| (*seq, out.deliveries))
            .collect();
        for (seq, _) in &exhausted {
            self.out.remove(seq);
        }
        exhausted
    }

    /// The next message and the number of its delivery: one to deliver again before a new one.
    pub(super) fn pull(&mut self, stream: &Stream, boot: Duration) -> Option<(StreamMessage, u32)> {
        let wait = Duration::from_secs(self.name.profile.ack_wait_s().into());
        let again = self.out.iter_mut().find(|(_, out)| out.again_at <= boot);
        let (seq, deliveries) = match again {
            Some((seq, out)) => {
                *out = Out { deliveries: out.deliveries + 1, delivered_at: boot, again_at: boot + wait };
                (*seq, out.deliveries)
            }
            None => {
                let seq = stream.next_under(&self.start, self.delivered_seq)?;
                self.delivered_seq = seq;
                self.out.insert(seq, Out { deliveries: 1, delivered_at: boot, again_at: boot + wait });
                (seq, 1)
            }
        };
        stream.at(seq).map(|message| (message, deliveries))
    }

    /// Ends the delivery of a message: deliveries so far and nanoseconds since the last one; none if it is not out.
    pub(super) fn settle(&mut self, seq: u64, boot: Duration) -> Option<(u32, u64)> {
        let out = self.out.remove(&seq)?;
        let took = boot.saturating_sub(out.delivered_at).as_nanos();
        Some((out.deliveries, u64::try_from(took).unwrap_or(u64::MAX)))
    }

    /// Lets a message be delivered again after `delay`; false if it is not out.
    pub(super) fn postpone(&mut self, seq: u64, boot: Duration, delay: Duration) -> bool {
        let Some(out) = self.out.get_mut(&seq) else { return false };
        out.again_at = boot + delay;
        true
    }
}
