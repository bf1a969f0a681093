//! Which stream AX_TRIGGERS is: one that was made anew, or the same one without its tail.
//!
//! A stream that was deleted and made again has another creation time. One whose server was killed before its last blocks
//! were on disk keeps its creation time and gives the lost sequences again, to other messages. That shows in a last
//! sequence below one that is known, and in a PubAck that does not grow.
//!
//! Invariant: a run owns a sequence only in the incarnation that its row names. What was lost with the tail gets a name
//! that no stream has, and that is in SQL before anything is published that may take its sequence.

use ax_shared::{RunId, Timestamp};

use super::{Shard, has_begun_unpublished};

/// What the incarnation of a message is called that went with the tail of its stream.
fn cut_off(incarnation: &str) -> String {
    format!("{incarnation} without its tail")
}

impl Shard {
    /// The highest sequence of AX_TRIGGERS that is known. To be read before the stream is asked for its own: what is
    /// published meanwhile makes the answer old, not the stream short.
    #[must_use]
    pub fn triggers_last(&self) -> u64 {
        self.triggers_last
    }

    /// The incarnation of AX_TRIGGERS that is known.
    #[must_use]
    pub fn triggers_incarnation(&self) -> &str {
        &self.triggers_incarnation
    }

    /// Names the incarnation of AX_TRIGGERS and its last sequence; sequences of another one mean nothing any more, nor do
    /// those above `last_seq` that were known of this one. Answers how many runs have lost their message.
    pub fn set_triggers_incarnation(&mut self, incarnation: &str, last_seq: u64) -> usize {
        if self.triggers_incarnation == incarnation {
            if last_seq < self.triggers_last {
                return self.cut_triggers(last_seq);
            }
            self.triggers_last = last_seq;
            return 0;
        }
        self.triggers_last = last_seq;
        self.triggers_cut = None;
        self.cuts_written = self.cuts;
        self.triggers_incarnation = incarnation.to_owned();
        self.triggers_made_at = incarnation.parse().ok();
        self.signals.clear();
        self.by_seq.clear();
        let mut lost = 0;
        let mut begun = Vec::new();
        for live in self.runs.values_mut() {
            if has_begun_unpublished(live.run()) {
                begun.push(live.run().run_id);
            }
            live.ack_is_stale = live.in_flight;
            if let Some(message) = &live.run().message {
                if message.incarnation == incarnation {
                    self.by_seq.insert(message.seq, live.run().run_id);
                } else if !live.run().state.is_final() {
                    lost += 1;
                }
            }
        }
        begun.sort_unstable();
        for id in begun {
            self.not_found(id, self.latest);
        }
        lost
    }

    /// AX_TRIGGERS has lost everything after `last_seq` and goes on from there. Answers how many runs have lost their
    /// message: they are looked for by subject, and published again if that is not there.
    pub(super) fn cut_triggers(&mut self, last_seq: u64) -> usize {
        self.triggers_last = last_seq;
        self.triggers_cut = Some((last_seq, self.latest));
        self.by_seq.retain(|seq, _| *seq <= last_seq);
        for (_, kept) in self.signals.extract_if(|seq, _| *seq > last_seq) {
            self.signals_remove.extend(kept);
        }
        let mut ids: Vec<RunId> = Vec::new();
        for live in self.runs.values_mut() {
            // Stored before or after the cut: published again, the stream tells.
            live.ack_is_stale |= live.in_flight;
            let message = live.ledger.run.message.as_mut();
            if let Some(message) = message.filter(|m| m.seq > last_seq && m.incarnation == self.triggers_incarnation) {
                message.incarnation = cut_off(&self.triggers_incarnation);
                ids.push(live.run().run_id);
            }
        }
        self.cuts += u64::from(!ids.is_empty());
        ids.sort_unstable();
        ids.iter().for_each(|id| self.touch(*id));
        ids.iter().filter(|id| self.run(**id).is_some_and(|run| !run.state.is_final())).count()
    }

    /// A run that was taken up from SQL may be recorded with a sequence that the stream has never reached: then its message
    /// went with the tail.
    pub(super) fn check_recorded(&mut self, id: RunId, now: Timestamp) {
        let last_seq = self.triggers_last;
        let Some(live) = self.runs.get_mut(&id) else { return };
        let message = live.ledger.run.message.as_mut();
        let Some(message) = message.filter(|m| m.seq > last_seq && m.incarnation == self.triggers_incarnation) else {
            return;
        };
        message.incarnation = cut_off(&self.triggers_incarnation);
        let seq = message.seq;
        self.triggers_cut = Some((last_seq, now));
        self.cuts += 1;
        self.disown(seq, id);
        self.touch(id);
    }

    /// Whether news of a sequence, told at an instant of the server's clock, is about a message that went with the tail.
    pub(super) fn is_of_the_lost_tail(&self, seq: u64, at: Timestamp) -> bool {
        self.triggers_cut.is_some_and(|(last_seq, noticed_at)| seq > last_seq && at < noticed_at)
    }
}
