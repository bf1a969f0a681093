//! How a run moves: one table of what each event does to a run and its attempts.
//!
//! Guards are (run, attempt, not final), never the previous state: any event proves that the run was published, so an
//! outcome may arrive for a run that was thought to be pending.
//!
//! Invariants: a final state is never left here. Attempt numbers are never reused. An outcome of an attempt below the
//! current one changes nothing, except that an ack of the run's current message is success, whoever sent it.

use std::borrow::Cow;

use ax_shared::Timestamp;
use serde_json::Value;

use crate::core::run::{Attempt, AttemptOutcome, Intent, Message, Run, RunState};

/// A run that has not ended, or whose message may still be open, with its attempts in order.
#[derive(Debug, Clone, PartialEq)]
pub struct Ledger {
    /// The run.
    pub run: Run,
    /// Its attempts, by number.
    pub attempts: Vec<Attempt>,
    /// Numbers of attempts that differ from what SQL has.
    pub dirty_attempts: Vec<u32>,
}

/// Something that happened to a run.
#[derive(Debug, Clone, PartialEq)]
pub enum RunEvent {
    /// The stream has its message.
    Published {
        /// Where.
        message: Message,
        /// When.
        at: Timestamp,
    },
    /// A worker began an attempt.
    Started {
        /// Which.
        attempt: u32,
        /// Who.
        worker_id: Option<String>,
        /// When.
        at: Timestamp,
    },
    /// A worker is at it.
    Progress {
        /// Which attempt.
        attempt: u32,
    },
    /// A worker said that its handler succeeded.
    Succeeded {
        /// Which attempt.
        attempt: u32,
        /// The handler's answer.
        result: Option<Value>,
        /// Who.
        worker_id: Option<String>,
        /// When the attempt began.
        started_at: Option<Timestamp>,
        /// When it ended.
        at: Timestamp,
    },
    /// A worker said that its handler failed.
    Failed {
        /// Which attempt.
        attempt: u32,
        /// What went wrong.
        error: String,
        /// Whether another attempt may help.
        retry: bool,
        /// Whether it was the timeout that ended it: the error's kind is `timeout`.
        timed_out: bool,
        /// Who.
        worker_id: Option<String>,
        /// When it ended.
        at: Timestamp,
    },
    /// A stopping worker hands the attempt back.
    Released {
        /// Which attempt.
        attempt: u32,
        /// Why.
        reason: Option<String>,
        /// When.
        at: Timestamp,
    },
    /// A worker stopped because it was asked to.
    Cancelled {
        /// Which attempt.
        attempt: u32,
        /// When.
        at: Timestamp,
    },
    /// The server told that the message was acked.
    Acked {
        /// Deliveries of the message so far.
        deliveries: u32,
        /// When the acked delivery was made, if known.
        delivered_at: Option<Timestamp>,
        /// When.
        at: Timestamp,
    },
    /// The server told that the message was NAKed.
    Naked {
        /// Deliveries of the message so far.
        deliveries: u32,
        /// When.
        at: Timestamp,
    },
    /// The server told that the message was TERMed.
    Terminated {
        /// Deliveries of the message so far.
        deliveries: u32,
        /// When.
        at: Timestamp,
    },
    /// The server told that the deliveries of the message are used up.
    Exhausted {
        /// Deliveries of the message.
        deliveries: u32,
        /// When.
        at: Timestamp,
    },
    /// The message is absent, everything that was told before has been read, and nothing speaks against an ack.
    Reconciled {
        /// When.
        at: Timestamp,
    },
    /// Its message is gone, or will not be delivered again, and nobody told what became of it.
    Lost {
        /// When that was found out.
        at: Timestamp,
    },
    /// The stream refused the message for good.
    Refused {
        /// Why.
        reason: String,
        /// When.
        at: Timestamp,
    },
    /// The leader ends it unexecuted.
    Ended {
        /// As what.
        state: RunState,
        /// Why.
        reason: Cow<'static, str>,
        /// When.
        at: Timestamp,
    },
    /// Its message was deleted, or was found to be gone after the run had ended.
    Closed,
}

impl RunEvent {
    /// When it happened, if that is told.
    #[must_use]
    pub fn at(&self) -> Option<Timestamp> {
        match self {
            Self::Published { at, .. }
            | Self::Started { at, .. }
            | Self::Succeeded { at, .. }
            | Self::Failed { at, .. }
            | Self::Released { at, .. }
            | Self::Cancelled { at, .. }
            | Self::Acked { at, .. }
            | Self::Naked { at, .. }
            | Self::Terminated { at, .. }
            | Self::Exhausted { at, .. }
            | Self::Reconciled { at }
            | Self::Lost { at }
            | Self::Refused { at, .. }
            | Self::Ended { at, .. } => Some(*at),
            Self::Progress { .. } | Self::Closed => None,
        }
    }
}

/// What an event did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing: the run is final, or the attempt is not the current one.
    Ignored,
    /// The run or its attempts changed; it goes on.
    Moved,
    /// The attempt failed or was handed back; the same message will be delivered again.
    BackingOff,
    /// The attempt ended and its message is or will be of no more use, but attempts are left: a new message is owed.
    Replace,
    /// The run became final just now.
    Final,
    /// The run had been final; its message is closed now.
    Closed,
}

impl Ledger {
    /// A ledger of a run with its attempts.
    #[must_use]
    pub fn new(run: Run, mut attempts: Vec<Attempt>) -> Self {
        attempts.sort_by_key(|a| a.attempt);
        Self { run, attempts, dirty_attempts: Vec::new() }
    }

    /// Applies an event at its own instant. Under a cancel nothing is tried again: what would be a failure or a further
    /// attempt is the end.
    pub fn apply(&mut self, event: RunEvent) -> Outcome {
        let cancelling = self.run.intent == Some(Intent::Cancel);
        let why = if cancelling { self.run.reason.clone() } else { None };
        let at = event.at();
        let outcome = self.transition(event);
        match outcome {
            Outcome::BackingOff | Outcome::Replace if cancelling => {
                self.finish(RunState::Cancelled, why, at.unwrap_or_default())
            }
            Outcome::Final if cancelling && self.run.state != RunState::Succeeded => {
                (self.run.state, self.run.reason) = (RunState::Cancelled, why);
                outcome
            }
            _ => outcome,
        }
    }

    fn transition(&mut self, event: RunEvent) -> Outcome {
        if self.run.state.is_final() {
            return self.apply_to_final(&event);
        }
        match event {
            RunEvent::Published { message, at } => {
                self.run.message = Some(message);
                self.run.published_at.get_or_insert(at);
                if self.run.state == RunState::Pending {
                    self.run.state = RunState::Triggered;
                }
                Outcome::Moved
            }
            RunEvent::Started { attempt, worker_id, at } => {
                if self.outcome_of(attempt).is_some() || !self.enter(attempt, at) {
                    return Outcome::Ignored;
                }
                self.run.state = RunState::Running;
                self.run.started_at = Some(at);
                self.run.worker_id = worker_id.clone().or_else(|| self.run.worker_id.take());
                self.note_receipt(at);
                let row = self.row(attempt);
                row.started_at = Some(at);
                row.worker_id = worker_id;
                Outcome::Moved
            }
            RunEvent::Progress { attempt } => {
                if attempt < self.run.attempt {
                    return Outcome::Ignored;
                }
                if self.run.state == RunState::Pending {
                    self.run.state = RunState::Triggered;
                    return Outcome::Moved;
                }
                Outcome::Ignored
            }
            RunEvent::Succeeded { attempt, result, worker_id, started_at, at } => {
                if !self.enter(attempt, at) && !self.is_lost_success(attempt) {
                    return Outcome::Ignored;
                }
                self.run.result = result;
                self.succeed(attempt, worker_id, started_at, at, None)
            }
            RunEvent::Failed { attempt, error, retry, timed_out, worker_id, at } => {
                if self.outcome_of(attempt).is_some() || !self.enter(attempt, at) {
                    return Outcome::Ignored;
                }
                let (outcome, state) = if timed_out {
                    (AttemptOutcome::TimedOut, RunState::TimedOut)
                } else {
                    (AttemptOutcome::Failed, RunState::Failed)
                };
                self.close_attempt(attempt, outcome, worker_id, Some(error), at);
                if retry && attempt < self.run.max_attempts {
                    self.run.state = RunState::Triggered;
                    Outcome::BackingOff
                } else {
                    self.finish(state, self.error_of(attempt), at)
                }
            }
            RunEvent::Released { attempt, reason, at } => {
                if self.outcome_of(attempt).is_some() || !self.enter(attempt, at) {
                    return Outcome::Ignored;
                }
                self.close_attempt(attempt, AttemptOutcome::Released, None, reason, at);
                // The attempt is not counted; its number is not reused either, so the last number moves.
                self.run.max_attempts += 1;
                self.run.state = RunState::Triggered;
                Outcome::BackingOff
            }
            RunEvent::Cancelled { attempt, at } => {
                if self.outcome_of(attempt).is_some() || !self.enter(attempt, at) {
                    return Outcome::Ignored;
                }
                self.close_attempt(attempt, AttemptOutcome::Cancelled, None, None, at);
                self.finish(RunState::Cancelled, self.run.reason.clone(), at)
            }
            RunEvent::Acked { deliveries, delivered_at, at } => {
                let attempt = self.attempt_of(deliveries);
                self.message_is_gone();
                match self.outcome_of(attempt) {
                    // The event outranks the ack: this attempt did not succeed, and its message is gone.
                    Some(AttemptOutcome::Failed | AttemptOutcome::TimedOut | AttemptOutcome::Released)
                        if attempt >= self.run.attempt =>
                    {
                        Outcome::Replace
                    }
                    _ => {
                        self.enter(attempt, at);
                        if let Some(t) = delivered_at {
                            self.note_receipt(t);
                        }
                        self.succeed(attempt, None, delivered_at, at, None)
                    }
                }
            }
            RunEvent::Naked { deliveries, at } => {
                let attempt = self.attempt_of(deliveries);
                if !self.enter(attempt, at) {
                    return Outcome::Ignored;
                }
                if self.outcome_of(attempt).is_none() {
                    let error = "the worker sent a negative acknowledgement".to_owned();
                    self.close_attempt(attempt, AttemptOutcome::Failed, None, Some(error), at);
                }
                self.run.state = RunState::Triggered;
                if attempt >= self.run.max_attempts {
                    self.finish(self.end_of(attempt), self.error_of(attempt), at)
                } else if self.deliveries_left(deliveries) {
                    Outcome::BackingOff
                } else {
                    Outcome::Replace
                }
            }
            RunEvent::Terminated { deliveries, at } => {
                let attempt = self.attempt_of(deliveries);
                self.message_is_gone();
                self.enter(attempt, at);
                if self.run.intent == Some(Intent::Cancel) {
                    // The server says so of a message that ax deletes while a worker has it.
                    if self.outcome_of(attempt).is_none() {
                        self.close_attempt(attempt, AttemptOutcome::Cancelled, None, None, at);
                    }
                    return self.finish(RunState::Cancelled, self.run.reason.clone(), at);
                }
                if self.outcome_of(attempt).is_none() {
                    let error = "the worker terminated the message".to_owned();
                    self.close_attempt(attempt, AttemptOutcome::Failed, None, Some(error), at);
                } else if self.seems_last(attempt) {
                    return Outcome::Replace;
                }
                self.finish(self.end_of(attempt), self.error_of(attempt), at)
            }
            RunEvent::Exhausted { deliveries, at } => {
                let attempt = self.attempt_of(deliveries);
                self.enter(attempt, at);
                if self.outcome_of(attempt).is_none() {
                    let error = "no acknowledgement within the ack deadline".to_owned();
                    self.close_attempt(attempt, AttemptOutcome::TimedOut, None, Some(error), at);
                }
                if attempt < self.run.max_attempts {
                    return Outcome::Replace;
                }
                self.finish(self.end_of(attempt), self.error_of(attempt), at)
            }
            RunEvent::Reconciled { at } => {
                self.message_is_gone();
                let attempt = self.run.attempt.max(self.run.attempt_base + 1);
                self.enter(attempt, at);
                self.succeed(attempt, None, None, at, Some("reconciled: its message was acknowledged"))
            }
            RunEvent::Lost { at } => {
                if self.run.attempt > self.run.attempt_base && self.outcome_of(self.run.attempt).is_none() {
                    let error = "its message was lost, and nobody told what became of it".to_owned();
                    self.close_attempt(self.run.attempt, AttemptOutcome::Lost, None, Some(error), at);
                }
                Outcome::Replace
            }
            RunEvent::Refused { reason, at } => {
                self.finish(RunState::Failed, Some(format!("the trigger could not be published: {reason}")), at)
            }
            RunEvent::Ended { state, reason, at } => {
                if self.run.attempt > 0 && self.outcome_of(self.run.attempt).is_none() {
                    self.close_attempt(self.run.attempt, AttemptOutcome::Cancelled, None, None, at);
                }
                self.finish(state, Some(reason.into_owned()), at)
            }
            RunEvent::Closed => Outcome::Ignored,
        }
    }

    /// The current message is not in the stream any more. Of a run that had others the deletion may have failed: it
    /// stays open until everything under its subjects is known to be gone.
    fn message_is_gone(&mut self) {
        let only = self.run.message_no == 1;
        if let Some(message) = self.run.message.as_mut().filter(|_| only) {
            message.open = false;
        }
    }

    /// A final run only learns whether its message is still open.
    fn apply_to_final(&mut self, event: &RunEvent) -> Outcome {
        if let RunEvent::Published { message, at } = event
            && self.run.message.as_ref().is_none_or(|m| m.seq == 0)
        {
            // The outcome overtook the PubAck.
            self.run.message = Some(message.clone());
            self.run.published_at.get_or_insert(*at);
            return Outcome::Moved;
        }
        let only = self.run.message_no == 1;
        let Some(message) = self.run.message.as_mut().filter(|m| m.open) else { return Outcome::Ignored };
        let closed = match event {
            RunEvent::Acked { .. } | RunEvent::Terminated { .. } => only,
            RunEvent::Closed => true,
            _ => false,
        };
        if !closed {
            return Outcome::Ignored;
        }
        message.open = false;
        Outcome::Closed
    }

    /// A new message is to take the place of the old one: the attempts made so far are its base. Of a lost one nobody
    /// knows how many there were: its base is what there can have been, and at least one attempt is left, since in
    /// doubt ax publishes again.
    pub fn replace_message(&mut self, is_loss: bool) {
        if is_loss {
            let used = self.run.attempt.max(self.run.attempt_base);
            let left = self.run.max_attempts.saturating_sub(used).max(1);
            let deliveries = self.run.profile.map_or(1, ax_shared::Profile::max_deliver);
            self.run.attempt_base = self.run.attempt.max(self.run.attempt_base.saturating_add(deliveries));
            self.run.max_attempts = self.run.attempt_base.saturating_add(left);
        } else {
            self.run.attempt_base = self.run.attempt;
        }
        self.run.message_no += 1;
        self.run.message = None;
        self.run.intent = self.run.intent.filter(|intent| *intent != Intent::Doubt);
        self.run.state = RunState::Pending;
    }

    /// Whether a success of an attempt below the base counts: it was given up for lost, and no later one has begun.
    fn is_lost_success(&self, attempt: u32) -> bool {
        attempt > 0
            && attempt <= self.run.attempt_base
            && self.run.attempt <= self.run.attempt_base
            && matches!(self.outcome_of(attempt), None | Some(AttemptOutcome::Lost))
    }

    /// Whether the attempt may still decide the run; if it is a later one, what lies before it has timed out.
    fn enter(&mut self, attempt: u32, at: Timestamp) -> bool {
        if attempt < self.run.attempt || attempt <= self.run.attempt_base || attempt > self.last_possible() {
            return false;
        }
        for earlier in self.run.attempt.max(self.run.attempt_base + 1)..attempt {
            if self.outcome_of(earlier).is_none() {
                let error = "no acknowledgement within the ack deadline".to_owned();
                self.close_attempt(earlier, AttemptOutcome::TimedOut, None, Some(error), at);
            }
        }
        self.run.attempt = attempt;
        self.row(attempt);
        true
    }

    /// The highest number that an attempt can have: whatever is above it was made up.
    fn last_possible(&self) -> u32 {
        let deliveries = self.run.profile.map_or(101, ax_shared::Profile::max_deliver);
        self.run.max_attempts.max(self.run.attempt_base.saturating_add(deliveries))
    }

    /// Whether a worker had to take this attempt for the last one, since the trigger does not know of attempts that were
    /// handed back after it was published, and that count for nothing.
    fn seems_last(&self, attempt: u32) -> bool {
        let released = |a: &&Attempt| a.attempt > self.run.attempt_base && a.outcome == Some(AttemptOutcome::Released);
        let released = self.attempts.iter().filter(released).count();
        let told = self.run.max_attempts.saturating_sub(u32::try_from(released).unwrap_or(u32::MAX));
        (told..self.run.max_attempts).contains(&attempt)
    }

    fn attempt_of(&self, deliveries: u32) -> u32 {
        self.run.attempt_base.saturating_add(deliveries.max(1)).min(self.last_possible())
    }

    fn deliveries_left(&self, deliveries: u32) -> bool {
        self.run.profile.is_none_or(|p| deliveries < p.max_deliver())
    }

    fn note_receipt(&mut self, at: Timestamp) {
        let lateness = at.millis_since(self.run.publish_at);
        self.run.lateness_ms.get_or_insert(lateness);
    }

    fn succeed(
        &mut self,
        attempt: u32,
        worker_id: Option<String>,
        started_at: Option<Timestamp>,
        at: Timestamp,
        reason: Option<&str>,
    ) -> Outcome {
        let row = self.row(attempt);
        row.started_at = row.started_at.or(started_at);
        self.run.started_at = self.run.started_at.or(started_at);
        if worker_id.is_some() {
            self.run.worker_id.clone_from(&worker_id);
        }
        self.close_attempt(attempt, AttemptOutcome::Succeeded, worker_id, None, at);
        self.finish(RunState::Succeeded, reason.map(str::to_owned), at)
    }

    fn finish(&mut self, state: RunState, reason: Option<String>, at: Timestamp) -> Outcome {
        self.run.state = state;
        self.run.reason = reason;
        self.run.finished_at = Some(at);
        self.run.intent = None;
        if self.run.message.is_none() && self.run.decision.is_some() {
            // It may be in the stream all the same: the outcome overtook the PubAck, or an earlier message was left.
            self.run.message = Some(Message { incarnation: String::new(), seq: 0, open: true });
        }
        Outcome::Final
    }

    fn close_attempt(
        &mut self,
        attempt: u32,
        outcome: AttemptOutcome,
        worker_id: Option<String>,
        error: Option<String>,
        at: Timestamp,
    ) {
        let row = self.row(attempt);
        row.outcome = Some(outcome);
        row.finished_at = Some(at);
        row.error = error;
        if worker_id.is_some() {
            row.worker_id = worker_id;
        }
    }

    fn outcome_of(&self, attempt: u32) -> Option<AttemptOutcome> {
        self.attempts.iter().rev().find(|a| a.attempt == attempt).and_then(|a| a.outcome)
    }

    /// How a run ends whose last attempt was this one, without success.
    fn end_of(&self, attempt: u32) -> RunState {
        match self.outcome_of(attempt) {
            Some(AttemptOutcome::TimedOut) | None => RunState::TimedOut,
            Some(_) => RunState::Failed,
        }
    }

    fn error_of(&self, attempt: u32) -> Option<String> {
        self.attempts.iter().rev().find(|a| a.attempt == attempt).and_then(|a| a.error.clone())
    }

    /// The row of an attempt, made if need be, and marked as different from SQL.
    fn row(&mut self, attempt: u32) -> &mut Attempt {
        if !self.dirty_attempts.contains(&attempt) {
            self.dirty_attempts.push(attempt);
        }
        let place = self.attempts.partition_point(|a| a.attempt < attempt);
        if self.attempts.get(place).is_none_or(|a| a.attempt != attempt) {
            let row = Attempt {
                run_id: self.run.run_id,
                attempt,
                outcome: None,
                worker_id: None,
                started_at: None,
                finished_at: None,
                error: None,
            };
            self.attempts.insert(place, row);
        }
        &mut self.attempts[place]
    }
}
