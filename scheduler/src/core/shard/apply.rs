//! What happened, applied to the runs in memory.

use std::cmp::Reverse;

use ax_shared::{RunAddress, RunId, TaskDefinition, Timestamp};

use super::{Effect, Phase, Shard};
use crate::core::events::{self, Told};
use crate::core::run::{AttemptOutcome, Decision, RunState, Signal, SignalKind};
use crate::core::settle::{Ledger, Outcome, RunEvent};
use crate::ports::StreamMessage;

/// How long the message of a successful run is left alone for its worker to ack, in milliseconds.
const CLOSE_AFTER_MS: i64 = 2000;
/// Longest wait before a replacement, in milliseconds, whatever the backoff says; longer waits are the worker's NAK.
const MAX_REPLACE_DELAY_MS: i64 = 300_000;

/// Wait before a run is published again that was handed back twice in a row, in milliseconds.
const RELEASED_AGAIN_MS: u64 = 5000;

/// Wait before a run is published again whose message was lost, in milliseconds.
const LOST_MS: u64 = 2000;

/// How far ahead the clock of an earlier leader may have been for its successor to wait for the instant all the same, in
/// milliseconds.
const CLOCKS_DIFFER_MS: i64 = 10_000;

/// Signals whose message nobody has claimed by then never will be, in milliseconds.
pub const SIGNAL_LIFE_MS: i64 = 10 * 60 * 1000;

/// What a message of AX_EVENTS did, for metrics and the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Applied {
    /// It moved a run.
    Run(RunId, Outcome),
    /// It is about a message that no run owns yet, and is kept.
    Kept,
    /// It changed nothing.
    Nothing,
    /// It could not be understood.
    Malformed(String),
}

impl Shard {
    /// Applies the next message of AX_EVENTS, in stream order. Waits that follow from it are counted from `now`: the
    /// clocks of workers and of the server may be others.
    pub fn apply_event(&mut self, message: &StreamMessage, now: Timestamp) -> Applied {
        self.note_now(now);
        let applied = match events::read(&self.prefix, message) {
            // Rights are given by subject: a worker of one group must not settle the runs of another.
            Told::Worker { run, .. } if !self.may_tell_of(&run) => {
                Applied::Malformed("the subject is not that of the run".into())
            }
            Told::Worker { run, event } => Applied::Run(run.run_id, self.apply(run.run_id, event)),
            // The same sequence in a stream that was there before.
            Told::Server { at, .. } if self.triggers_made_at.is_some_and(|made_at| at < made_at) => Applied::Nothing,
            Told::Server { seq, at, .. } if self.is_of_the_lost_tail(seq, at) => Applied::Nothing,
            Told::Server { seq, kind, deliveries, at, delivered_at } => match self.by_seq.get(&seq) {
                Some(&run_id) => Applied::Run(run_id, self.apply_signal(run_id, kind, deliveries, at, delivered_at)),
                // Its run has long been gone; the stream is being read anew.
                None if at < now.plus_millis(-SIGNAL_LIFE_MS) => Applied::Nothing,
                None => {
                    self.keep_signal(Signal {
                        incarnation: self.triggers_incarnation.clone(),
                        seq,
                        kind,
                        deliveries,
                        at,
                        delivered_at,
                    });
                    Applied::Kept
                }
            },
            Told::Unknown => Applied::Nothing,
            Told::Malformed(why) => Applied::Malformed(why),
        };
        self.settled.seq = self.settled.seq.max(message.seq);
        self.settled_dirty = true;
        applied
    }

    /// Whether this is the address that the run's messages have. A run that a leader before us handed over, and could
    /// not record that, went to the group of the definition of that moment: it is bound to it now.
    fn may_tell_of(&mut self, told: &RunAddress) -> bool {
        let Some(live) = self.runs.get_mut(&told.run_id) else { return true };
        let run = &mut live.ledger.run;
        if run.address() == *told {
            return true;
        }
        let moved = run.decision.is_none() && !run.state.is_final() && run.task_id == told.task_id;
        let moved =
            moved && self.tasks.get(&told.task_id).is_some_and(|t| t.row.definition.executor_group == told.group);
        if moved {
            run.group = told.group.clone();
        }
        moved
    }

    pub(super) fn apply_signal(
        &mut self,
        run_id: RunId,
        kind: SignalKind,
        deliveries: u32,
        at: Timestamp,
        delivered_at: Option<Timestamp>,
    ) -> Outcome {
        let event = match kind {
            SignalKind::Acked => RunEvent::Acked { deliveries, delivered_at, at },
            SignalKind::Naked => RunEvent::Naked { deliveries, at },
            SignalKind::Terminated => RunEvent::Terminated { deliveries, at },
            SignalKind::MaxDeliveries => RunEvent::Exhausted { deliveries, at },
        };
        self.apply(run_id, event)
    }

    fn keep_signal(&mut self, signal: Signal) {
        let kept = self.signals.entry(signal.seq).or_default();
        if !kept.contains(&signal) {
            kept.push(signal.clone());
            self.signals_add.push(signal);
        }
    }

    /// Forgets signals of sequences that AX_TRIGGERS, asked after they were told, has not given yet: they are about a tail
    /// that it has lost, and would be taken for news of whatever is stored under those sequences next. Answers how many.
    pub fn forget_signals_above(&mut self, last_seq: u64) -> usize {
        let lost: Vec<u64> = self.signals.keys().copied().filter(|seq| *seq > last_seq).collect();
        let before = self.signals_remove.len();
        for seq in lost {
            self.signals_remove.extend(self.signals.remove(&seq).unwrap_or_default());
        }
        self.signals_remove.len() - before
    }

    /// Forgets signals told before `before`: their message's run has long been gone. Answers how many.
    pub fn expire_signals(&mut self, before: Timestamp) -> usize {
        let mut expired = Vec::new();
        self.signals.retain(|_, kept| {
            kept.retain(|s| {
                let keep = s.at >= before;
                if !keep {
                    expired.push(s.clone());
                }
                keep
            });
            !kept.is_empty()
        });
        let count = expired.len();
        self.signals_remove.extend(expired);
        count
    }

    /// Applies an event to a run and sees to what follows from it.
    pub fn apply(&mut self, run_id: RunId, event: RunEvent) -> Outcome {
        let Some(live) = self.runs.get_mut(&run_id) else { return Outcome::Ignored };
        let is_loss = matches!(event, RunEvent::Lost { .. });
        let is_start = matches!(event, RunEvent::Started { .. });
        let before = live.ledger.run.state;
        let outcome = live.ledger.apply(event);
        match outcome {
            Outcome::Ignored => return outcome,
            Outcome::Moved => {
                let run = live.run();
                let (group, state) = (run.group.clone(), run.state);
                if is_start {
                    // Without a known message it stays where it is: publishing it again yields the sequence.
                    if run.message.is_some() {
                        live.phase = Phase::Out;
                        self.queues.begin(&group, run_id);
                    }
                    live.ledger.run.decision = Some(Decision::HandOver);
                    self.mark_busy(run_id);
                }
                if state != before {
                    self.effects.push(Effect::Notice { run_id });
                }
            }
            Outcome::BackingOff => {
                // Without a known message it stays where it is, see above.
                if live.run().message.is_some() {
                    live.phase = Phase::BackingOff;
                    let group = live.run().group.clone();
                    self.queues.end(&group, run_id);
                }
                self.effects.push(Effect::Notice { run_id });
            }
            Outcome::Replace => self.replace(run_id, is_loss),
            Outcome::Final => self.ended(run_id),
            Outcome::Closed => {}
        }
        self.touch(run_id);
        outcome
    }

    /// The run's message is of no more use, attempts are left: commit the next message number, then publish it.
    fn replace(&mut self, run_id: RunId, is_loss: bool) {
        let Some(live) = self.runs.get_mut(&run_id) else { return };
        let old = live.ledger.run.message.clone();
        let delay = replace_delay_ms(&live.ledger, live.spec.as_deref());
        live.ledger.replace_message(is_loss);
        live.phase = Phase::Replacing;
        let group = live.run().group.clone();
        self.queues.end(&group, run_id);
        if let Some(old) = old {
            self.disown(old.seq, run_id);
            if old.open {
                self.effects.push(Effect::Delete { run_id, seq: old.seq, incarnation: old.incarnation, bury: false });
            }
        }
        self.effects.push(Effect::Requeue { run_id, not_before: self.latest.plus_millis(delay) });
        self.effects.push(Effect::Notice { run_id });
    }

    /// The run became final just now.
    fn ended(&mut self, run_id: RunId) {
        let Some(live) = self.runs.get_mut(&run_id) else { return };
        live.phase = Phase::Ended;
        let run = &live.ledger.run;
        let (group, task, priority, publish_at) =
            (run.group.clone(), run.task_id.clone(), run.priority, run.publish_at);
        if let Some(message) = run.message.as_ref().filter(|m| m.open) {
            if run.state == RunState::Succeeded {
                // Its worker acks right after the event; deleting at once would only cost a request.
                self.closing.push(Reverse((self.latest.plus_millis(CLOSE_AFTER_MS), run_id)));
            } else {
                let bury = is_buried(run.state);
                let (seq, incarnation) = (message.seq, message.incarnation.clone());
                self.effects.push(Effect::Delete { run_id, seq, incarnation, bury });
            }
        }
        self.queues.remove(&group, priority, publish_at, run_id);
        self.queues.end(&group, run_id);
        self.clear_busy(&task, run_id);
        self.effects.push(Effect::Notice { run_id });
        // Whoever was held back by this run can be judged now.
        for blocked in self.blocked.remove(&run_id).unwrap_or_default() {
            if let Some(other) = self.runs.get_mut(&blocked).filter(|l| l.phase == Phase::Blocked) {
                other.phase = Phase::Planned;
                self.due.push(Reverse((other.ledger.run.publish_at, blocked)));
            }
        }
    }

    /// Messages of ended runs whose ack has not been seen in time.
    pub(super) fn close_due(&mut self, now: Timestamp) {
        while let Some(Reverse((_, id))) = self.closing.peek().copied().filter(|Reverse((at, _))| *at <= now) {
            self.closing.pop();
            if let Some(live) = self.runs.get(&id)
                && let Some(message) = live.run().message.as_ref().filter(|m| m.open)
            {
                let bury = is_buried(live.run().state);
                let (seq, incarnation) = (message.seq, message.incarnation.clone());
                self.effects.push(Effect::Delete { run_id: id, seq, incarnation, bury });
            }
        }
    }

    /// A deletion was answered: the message of this sequence is gone.
    pub fn message_closed(&mut self, run_id: RunId, seq: u64) {
        // Its PubAck may have named another one meanwhile.
        if self.run(run_id).and_then(|run| run.message.as_ref()).is_some_and(|m| m.seq == seq) {
            self.apply(run_id, RunEvent::Closed);
        }
    }

    /// A deletion was not answered: try again later.
    pub fn close_again(&mut self, run_id: RunId, at: Timestamp) {
        self.closing.push(Reverse((at, run_id)));
    }
}

/// How long a run waits for the message that takes the place of one whose last attempt ended as it did.
fn replace_delay_ms(ledger: &Ledger, spec: Option<&TaskDefinition>) -> i64 {
    let ended = || ledger.attempts.iter().rev().skip_while(|a| a.attempt > ledger.run.attempt).map(|a| a.outcome);
    // A stopping worker's run goes on at once; one that nobody wants to keep must not spin.
    let released = ended().take_while(|outcome| *outcome == Some(AttemptOutcome::Released)).count();
    let delay = match (released, ended().next().flatten()) {
        // News of the old message may still be on its way.
        (_, None | Some(AttemptOutcome::Lost)) => LOST_MS,
        // The jitter spreads many tasks; one replacement needs none.
        (0, _) => spec.map_or(0, |s| s.retry_backoff.delay_ms(ledger.run.attempt, 0.0)),
        (1, _) => 0,
        _ => RELEASED_AGAIN_MS,
    };
    i64::try_from(delay).unwrap_or(i64::MAX).min(MAX_REPLACE_DELAY_MS)
}

/// When a run that has no message may be handed over: at its instant, or when the wait for its next message is over.
/// What workers told by clocks of their own cannot make it longer than the wait itself, from now on.
pub(super) fn not_before(ledger: &Ledger, spec: Option<&TaskDefinition>, now: Timestamp) -> Timestamp {
    let run = &ledger.run;
    // An instant at which it was handed over has come once; a clock that has stepped back since does not bring it again.
    let due_at = match run.decision {
        Some(_) => run.publish_at.min(now.plus_millis(CLOCKS_DIFFER_MS)),
        None => run.publish_at,
    };
    let ended_at = ledger.attempts.iter().filter_map(|a| a.finished_at).max();
    match ended_at.filter(|_| run.message_no > 1) {
        Some(at) => due_at.max(at.min(now).plus_millis(replace_delay_ms(ledger, spec))),
        None => due_at,
    }
}

/// Whether operators get a copy of the message of a run that ended like this.
fn is_buried(state: RunState) -> bool {
    matches!(state, RunState::Failed | RunState::TimedOut)
}
