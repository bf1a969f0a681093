//! What has changed in memory, written in batches; what may be done once it is written.

use std::cmp::Reverse;
use std::collections::HashSet;

use ax_shared::{RunId, Timestamp};

use super::{Phase, Shard, unique};
use crate::core::run::{Attempt, Message, Run};
use crate::ports::Batch;

/// Something to do after the commit of its cause.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// Tell the run's new state to whoever listens.
    Notice {
        /// The run.
        run_id: RunId,
    },
    /// Delete the run's message.
    Delete {
        /// The run.
        run_id: RunId,
        /// The message.
        seq: u64,
        /// The stream that has it: in another one of that name the sequence is somebody else's.
        incarnation: String,
        /// Keep a copy in AX_DEAD if it is still there: its deliveries were used up without success.
        bury: bool,
    },
    /// Take the message back, then end the run as cancelled.
    Cancel {
        /// The run.
        run_id: RunId,
    },
    /// Publish the run's next message, not before an instant.
    Requeue {
        /// The run.
        run_id: RunId,
        /// When.
        not_before: Timestamp,
    },
}

/// A batch on its way to SQL, with what it lets happen.
#[derive(Debug, Clone, PartialEq)]
pub struct Flush {
    /// What to commit.
    pub batch: Batch,
    /// What to do then.
    effects: Vec<Effect>,
    /// How many losses of a tail of AX_TRIGGERS it tells of, with all before.
    cuts: u64,
}

impl Shard {
    /// Everything that differs from SQL. None when nothing does and no effect waits.
    pub fn take_flush(&mut self) -> Option<Flush> {
        let mut batch = Batch::default();
        for id in std::mem::take(&mut self.dirty) {
            let Some(live) = self.runs.get_mut(&id) else { continue };
            live.dirty = false;
            batch.runs.push(live.ledger.run.clone());
            for number in std::mem::take(&mut live.ledger.dirty_attempts) {
                batch.attempts.extend(live.ledger.attempts.iter().find(|a| a.attempt == number).cloned());
            }
        }
        batch.signals_add = std::mem::take(&mut self.signals_add);
        batch.signals_remove = std::mem::take(&mut self.signals_remove);
        // A signal that came and went between two flushes was never in SQL; adding it after its removal would keep it.
        let gone = batch.signals_remove.clone();
        batch.signals_add.retain(|s| !gone.contains(s));
        batch.commands_done = std::mem::take(&mut self.commands_done);
        if self.settled_dirty {
            self.settled_dirty = false;
            batch.settled = Some(self.settled.clone());
        }
        let effects = std::mem::take(&mut self.effects);
        (!batch.is_empty() || !effects.is_empty()).then_some(Flush { batch, effects, cuts: self.cuts })
    }

    /// The runs that end with this batch, each with all its attempts. To be asked before [`Shard::committed`], which lets
    /// go of them.
    #[must_use]
    pub fn endings<'a>(&self, flush: &'a Flush) -> Vec<(&'a Run, Vec<Attempt>)> {
        let told = |effect: &Effect| match effect {
            Effect::Notice { run_id } => Some(*run_id),
            _ => None,
        };
        let told: HashSet<RunId> = flush.effects.iter().filter_map(told).collect();
        let ended = flush.batch.runs.iter().filter(|run| run.state.is_final() && told.contains(&run.run_id));
        ended.filter_map(|run| Some((run, self.runs.get(&run.run_id)?.ledger.attempts.clone()))).collect()
    }

    /// The batch is in SQL. Answers the effects that may happen now, each with the run as it is, and lets go of runs
    /// that have ended.
    pub fn committed(&mut self, flush: Flush) -> Vec<(Effect, Run)> {
        self.cuts_written = self.cuts_written.max(flush.cuts);
        let mut effects = Vec::with_capacity(flush.effects.len());
        let mut noticed = HashSet::new();
        for effect in flush.effects {
            let run_id = match &effect {
                Effect::Notice { run_id }
                | Effect::Delete { run_id, .. }
                | Effect::Cancel { run_id }
                | Effect::Requeue { run_id, .. } => *run_id,
            };
            if let Effect::Requeue { not_before, .. } = effect {
                self.later.push(Reverse((not_before, run_id)));
                continue;
            }
            // Several changes between two flushes are one piece of news: the run as it is.
            let is_notice = matches!(effect, Effect::Notice { .. });
            if is_notice && !noticed.insert(run_id) {
                continue;
            }
            // Told is what was written, not what has happened since.
            let written = flush.batch.runs.iter().find(|r| r.run_id == run_id);
            if let Some(run) = written.or_else(|| self.runs.get(&run_id).map(super::Live::run)) {
                effects.push((effect, run.clone()));
            }
        }
        for id in unique(flush.batch.runs.iter().map(|r| r.run_id)) {
            let done = self.runs.get(&id).is_some_and(|live| {
                live.phase == Phase::Ended
                    && !live.dirty
                    && !live.in_flight
                    && live.run().message.as_ref().is_none_or(|m| !m.open)
            });
            if done
                && let Some(live) = self.runs.remove(&id)
                && let Some(Message { seq, .. }) = live.run().message
            {
                self.disown(seq, id);
            }
        }
        effects
    }

    /// The batch is not in SQL: its contents count as changed again. What has changed since is kept.
    pub fn not_committed(&mut self, flush: Flush) {
        for run in flush.batch.runs {
            self.touch(run.run_id);
        }
        for attempt in flush.batch.attempts {
            if let Some(live) = self.runs.get_mut(&attempt.run_id)
                && !live.ledger.dirty_attempts.contains(&attempt.attempt)
            {
                live.ledger.dirty_attempts.push(attempt.attempt);
            }
            self.touch(attempt.run_id);
        }
        let mut added = flush.batch.signals_add;
        added.append(&mut self.signals_add);
        self.signals_add = added;
        let mut removed = flush.batch.signals_remove;
        removed.append(&mut self.signals_remove);
        self.signals_remove = removed;
        self.commands_done.extend(flush.batch.commands_done);
        self.settled_dirty |= flush.batch.settled.is_some();
        let mut effects = flush.effects;
        effects.append(&mut self.effects);
        self.effects = effects;
    }
}
