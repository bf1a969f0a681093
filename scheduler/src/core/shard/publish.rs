//! From the delivery queue to the stream.

use std::cmp::Reverse;

use ax_shared::subjects::header;
use ax_shared::{Group, Handler, Prefix, Profile, Queue, RunId, Timestamp};

use super::{Effect, Phase, Shard};
use crate::core::run::{Intent, Message, Run, RunState};
use crate::core::settle::RunEvent;
use crate::core::trigger;
use crate::ports::{Outgoing, PubAck, StreamMessage};

/// Waits before a publish that was not answered is tried again, in milliseconds.
const RETRY_PUBLISH_MS: i64 = 200;

/// A run to publish.
#[derive(Debug, Clone, PartialEq)]
pub struct Publish {
    /// The run.
    pub run_id: RunId,
    /// Its message.
    pub message: Outgoing,
}

/// What looking for a run's message in the stream yielded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LookedUp {
    /// It is the run's current message.
    Adopted,
    /// It is an earlier message of the run, which has been replaced: to be deleted.
    Stale {
        /// Its sequence.
        seq: u64,
    },
}

impl Shard {
    /// The next message to publish, by the order of the delivery queues. None, too, until it is in SQL which messages were
    /// lost with the tail of the stream.
    pub fn pop_publish(&mut self) -> Option<Publish> {
        if self.cuts_written < self.cuts {
            return None;
        }
        while let Some(run_id) = self.queues.pop() {
            let Some(live) = self.runs.get_mut(&run_id).filter(|l| l.phase == Phase::Queued) else { continue };
            let spec = live
                .spec
                .clone()
                .or_else(|| self.tasks.get(&live.ledger.run.task_id).map(|task| task.row.definition.clone()));
            let Some(spec) = spec else {
                let at = self.latest;
                self.apply(run_id, RunEvent::Ended { state: RunState::Cancelled, reason: "task_deleted".into(), at });
                continue;
            };
            live.phase = Phase::Publishing;
            live.in_flight = true;
            live.sent_in_doubt = live.run().intent == Some(Intent::Doubt);
            live.floor = self.triggers_last;
            let message = trigger::message(&self.prefix, live.run(), &spec, self.epoch, self.sampler);
            return Some(Publish { run_id, message });
        }
        None
    }

    /// The stream has the message. `at` is the instant of the PubAck. False when the stream cannot be the one that is
    /// known: its incarnation has to be looked at, and the message is published again.
    pub fn published(&mut self, run_id: RunId, ack: PubAck, at: Timestamp) -> bool {
        let live = self.runs.get(&run_id);
        let shrank = live.is_some_and(|live| !ack.duplicate && ack.seq <= live.floor);
        if shrank || live.is_some_and(|live| live.ack_is_stale) {
            if shrank {
                // Should it be another stream altogether, nothing of this one is believed after the next look.
                self.note_now(at);
                self.cut_triggers(ack.seq - 1);
            }
            // Stored in the old stream or in the new one: published again, the new one tells.
            self.publish_unanswered(run_id, at, false);
            return !shrank;
        }
        self.triggers_last = self.triggers_last.max(ack.seq);
        self.own_message(run_id, ack.seq, at);
        let Some(live) = self.runs.get_mut(&run_id) else { return true };
        live.unanswered = false;
        live.in_flight = false;
        if !ack.duplicate && live.sent_in_doubt && live.run().intent == Some(Intent::Doubt) {
            // Stored just now, so that none of what was told about it is among what was lost.
            live.ledger.run.intent = None;
        }
        // Whether or not this changes the run: it may leave memory now.
        self.touch(run_id);
        if let Some(live) = self.runs.get_mut(&run_id)
            && live.phase == Phase::Publishing
        {
            live.phase = Phase::Out;
            if live.run().intent == Some(Intent::Cancel) {
                self.effects.push(Effect::Cancel { run_id });
                self.touch(run_id);
            }
        }
        true
    }

    /// The publish was not answered: the same message again, later or (with a new connection) at once.
    pub fn publish_unanswered(&mut self, run_id: RunId, now: Timestamp, at_once: bool) {
        self.touch(run_id);
        let Some(live) = self.runs.get_mut(&run_id) else { return };
        live.in_flight = false;
        live.ack_is_stale = false;
        if live.phase != Phase::Publishing {
            return;
        }
        let group = live.run().group.clone();
        live.phase = Phase::Replacing;
        live.unanswered = true;
        self.queues.end(&group, run_id);
        if at_once {
            self.queue(run_id);
        } else {
            self.later.push(Reverse((now.plus_millis(RETRY_PUBLISH_MS), run_id)));
        }
    }

    /// The stream refused the message for good.
    pub fn publish_refused(&mut self, run_id: RunId, reason: String, at: Timestamp) {
        if let Some(live) = self.runs.get_mut(&run_id) {
            live.in_flight = false;
        }
        self.touch(run_id);
        self.apply(run_id, RunEvent::Refused { reason, at });
    }

    /// Adopts a message of a run found in the stream at takeover, if it is the current one.
    pub fn adopt_message(&mut self, run_id: RunId, found: &StreamMessage) -> Option<LookedUp> {
        let live = self.runs.get_mut(&run_id)?;
        let id = found.headers.get(header::MSG_ID).map(String::as_str).unwrap_or_default();
        let number = id.rsplit_once(':').and_then(|(_, number)| number.parse::<u32>().ok());
        match number.map(|number| number.cmp(&live.run().message_no)) {
            Some(std::cmp::Ordering::Equal) => {}
            // A later leader's: it is not this one's to judge.
            Some(std::cmp::Ordering::Greater) => return None,
            Some(std::cmp::Ordering::Less) | None => return Some(LookedUp::Stale { seq: found.seq }),
        }
        if live.phase != Phase::Ended {
            live.phase = Phase::Out;
            let run = &mut live.ledger.run;
            run.decision = Some(crate::core::run::Decision::HandOver);
            bind_to(run, found, &self.prefix);
            let group = run.group.clone();
            self.queues.begin(&group, run_id);
            self.mark_busy(run_id);
        }
        self.own_message(run_id, found.seq, found.at);
        Some(LookedUp::Adopted)
    }

    /// The run's message has a sequence: apply what was told about that before it was known.
    fn own_message(&mut self, run_id: RunId, seq: u64, at: Timestamp) {
        if !self.runs.contains_key(&run_id) {
            return;
        }
        let incarnation = self.triggers_incarnation.clone();
        self.by_seq.insert(seq, run_id);
        self.apply(run_id, RunEvent::Published { message: Message { incarnation, seq, open: true }, at });
        for signal in self.signals.remove(&seq).unwrap_or_default() {
            // One of them may have replaced the message: what else was told about it is of no more interest, and would
            // be taken for news of its successor.
            if self.by_seq.get(&seq) == Some(&run_id) {
                self.apply_signal(run_id, signal.kind, signal.deliveries, signal.at, signal.delivered_at);
            }
            self.signals_remove.push(signal);
        }
        // An outcome that overtook the PubAck left the message without a closing.
        if let Some(live) = self.runs.get(&run_id)
            && live.phase == Phase::Ended
            && live.run().message.as_ref().is_some_and(|m| m.open)
        {
            self.closing.push(Reverse((at, run_id)));
        }
    }
}

/// Binds a run to what it was published with: a leader that could not record it knows no more of it.
fn bind_to(run: &mut Run, found: &StreamMessage, prefix: &Prefix) {
    let rest = found.subject.strip_prefix(prefix.as_str()).and_then(|s| s.strip_prefix(".trigger."));
    let mut tokens = rest.unwrap_or_default().split('.');
    let (group, queue, profile) = (tokens.next(), tokens.next(), tokens.next());
    if let (Some(Ok(group)), Some(Ok(queue)), Some(profile)) =
        (group.map(Group::new), queue.map(Queue::new), profile.and_then(Profile::parse))
    {
        (run.group, run.queue, run.profile) = (group, queue, Some(profile));
    }
    let told = |name: &str| found.headers.get(name).map(String::as_str);
    if let Some(Ok(handler)) = told(header::HANDLER).map(Handler::new) {
        run.handler = handler;
    }
    if let Some(attempts) = told(header::MAX_ATTEMPTS).and_then(|text| text.parse().ok()) {
        // What was handed back meanwhile has raised it, and is not counted.
        run.max_attempts = run.max_attempts.max(attempts);
    }
}
