//! Finds out about messages that nobody told anything about: ack metrics are sent at most once.
//!
//! An absent message means success only if (1) the stream's incarnation is the row's, (2) its consumer has delivered
//! it, (3) AX_EVENTS has been read past the last sequence that it had after the absence was seen, (4) no failure,
//! release or TERM of this message was read, and (5) the row carries no intent of ours. In doubt ax publishes again: a
//! new message takes the place of the lost one, after a wait in which news of the old one still counts.

use std::sync::Arc;
use std::time::Duration;

use ax_shared::RunId;
use futures::StreamExt;
use tokio::sync::{Semaphore, mpsc};

use super::effects::any_trigger;
use super::settle::look_at_triggers;
use super::{Blocked, EndOfTerm, Term, fire, pause};
use crate::core::run::Intent;
use crate::core::settle::{Outcome, RunEvent};
use crate::core::shard::{LookedUp, Outstanding};
use crate::metrics as names;
use crate::ports::BusError;

/// Runs looked at at once.
const AT_ONCE: usize = 16;
/// Longest wait for the event reader to catch up.
const CATCH_UP: Duration = Duration::from_secs(5);

/// Between two looks at a message that seems to be used up: longer than an ack takes to be carried out.
const SECOND_LOOK: Duration = Duration::from_secs(2);
/// Looks without an answer after which a sweep gives up.
const MOST_FAILURES: u32 = 16;

/// What looking at a run's message showed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Finding {
    /// It is in the stream.
    Present,
    /// It is gone and nothing speaks against an ack: the run succeeded.
    Succeeded,
    /// The run is not outstanding (any more).
    Settled,
    /// It is in the stream, and its deliveries are used up, which nobody told.
    Exhausted,
    /// It is gone, and something speaks against an ack, or nothing speaks for it: a new message takes its place.
    Lost,
    /// It is gone, and being taken back.
    Doubt,
}

impl Finding {
    fn as_str(self) -> &'static str {
        match self {
            Self::Present => "present",
            Self::Succeeded => "succeeded",
            Self::Settled => "settled",
            Self::Exhausted => "exhausted",
            Self::Lost => "lost",
            Self::Doubt => "doubt",
        }
    }
}

/// Runs the loop: reconciles what blocks a due run, then has that run judged.
pub(super) async fn run(term: Arc<Term>, mut blocked: mpsc::UnboundedReceiver<Blocked>) -> EndOfTerm {
    let slots = Arc::new(Semaphore::new(AT_ONCE));
    loop {
        let next = tokio::select! {
            biased;
            () = term.ended.cancelled() => return EndOfTerm::Stopped,
            next = blocked.recv() => next,
        };
        let Some((_, blockers)) = next else { return EndOfTerm::Stopped };
        let (term, slots) = (term.clone(), slots.clone());
        tokio::spawn(async move {
            for blocker in blockers {
                // Not known is no overlap: look until there is an answer. A slot is held for one look only, so that one
                // that cannot be looked at keeps nobody from theirs.
                while let Err(e) = look_in_turn(&term, blocker, &slots).await {
                    tracing::warn!(run_id = %blocker, error = %e, "a blocking run could not be looked at; trying again");
                    if !pause(Duration::from_millis(500), &term.ended).await {
                        return;
                    }
                }
                let report = term.shard().judge_blocked(blocker, term.cx.clock.now());
                fire::note(&term, report);
            }
            term.wake.deliver.notify_one();
            term.wake.flush.notify_one();
            term.wake.fire.notify_one();
        });
    }
}

/// Looks at everything that has been outstanding for `older_than`.
pub(super) async fn sweep(term: &Arc<Term>, older_than: Duration) {
    let before = term.cx.clock.now() - older_than;
    let outstanding = term.shard().outstanding(before);
    let (mut doubts, mut failures) = (0u64, 0u32);
    let mut looked = futures::stream::iter(outstanding)
        .map(|o| async move { (o.run_id, look(term, o.run_id, Care::Sweep).await) })
        .buffer_unordered(AT_ONCE);
    while let Some((run_id, finding)) = looked.next().await {
        match finding {
            Ok(Finding::Doubt) => doubts += 1,
            Ok(Finding::Lost) => {
                doubts += 1;
                tracing::warn!(%run_id, "its message is gone without a proof of success; publishing it again");
            }
            Ok(Finding::Exhausted) => {
                tracing::warn!(%run_id, "the deliveries of its message are used up, which the server has not told");
            }
            Ok(_) => {}
            Err(e) => {
                tracing::warn!(%run_id, error = %e, "a run could not be looked at; the next sweep tries again");
                failures += 1;
                if failures == MOST_FAILURES {
                    break;
                }
            }
        }
    }
    metrics::gauge!(names::IN_DOUBT.name).set(doubts as f64);
    term.wake.flush.notify_one();
    term.wake.deliver.notify_one();
    term.wake.fire.notify_one();
}

/// Looks at one run.
pub(super) async fn look(term: &Arc<Term>, run_id: RunId, care: Care) -> Result<Finding, BusError> {
    let Some(o) = term.shard().outstanding_run(run_id) else { return Ok(Finding::Settled) };
    let finding = find(term, &o, care).await?;
    metrics::counter!(names::RECONCILED.name, "result" => finding.as_str()).increment(1);
    Ok(finding)
}

/// Looks at one run that blocks others, when a slot is free.
async fn look_in_turn(term: &Arc<Term>, blocker: RunId, slots: &Semaphore) -> Result<Finding, BusError> {
    let _slot = slots.acquire().await.expect("it is never closed");
    look(term, blocker, Care::Blocker).await
}

/// For whom a run is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Care {
    /// For one that it blocks: it may have been acked this very moment.
    Blocker,
    /// For itself; it has been out for a while.
    Sweep,
}

async fn find(term: &Arc<Term>, o: &Outstanding, care: Care) -> Result<Finding, BusError> {
    let bus = &term.cx.bus;
    let triggers = look_at_triggers(term).await?;
    // Its message may just have been found to have gone with the tail of the stream.
    let Some(o) = &term.shard().outstanding_run(o.run_id).filter(|now| now.seq == o.seq) else {
        return Ok(Finding::Settled);
    };
    let is_same_stream = triggers.incarnation == o.incarnation;
    if !is_same_stream {
        // Published just before or after the stream was made anew: which one has it is not known until it is found.
        if is_adopted(term, o).await? {
            return Ok(Finding::Present);
        }
    }
    let is_present = is_same_stream && is_there(term, o).await?;
    let consumer = bus.consumer(&o.consumer).await?;
    let is_delivered = consumer.as_ref().is_some_and(|c| c.delivered_seq >= o.seq);
    if is_present {
        // Nothing of this consumer waits for an answer or for another delivery: then what was delivered and is there
        // still will never be delivered again. An ack empties the consumer before it empties the stream, and is told after
        // both: so only the sweep concludes this, and only from two looks with a pause between them.
        let is_idle = is_delivered && consumer.is_some_and(|c| c.ack_pending == 0);
        if care == Care::Blocker || !is_idle || !pause(SECOND_LOOK, &term.ended).await || !is_there(term, o).await? {
            return Ok(Finding::Present);
        }
    }
    if !read_past_now(term).await? {
        return Err(BusError::Unavailable("AX_EVENTS could not be read to its end".into()));
    }
    let at = term.cx.clock.now();
    let mut shard = term.shard();
    let Some(now) = shard.outstanding_run(o.run_id).filter(|now| now.seq == o.seq) else { return Ok(Finding::Settled) };
    if now.intent == Some(Intent::Cancel) {
        return Ok(Finding::Doubt);
    }
    if is_present {
        let deliveries = o.consumer.profile.max_deliver();
        shard.apply(o.run_id, RunEvent::Exhausted { deliveries, at });
        return Ok(Finding::Exhausted);
    }
    if !is_same_stream || !is_delivered || now.speaks_against {
        return Ok(if shard.lost(o.run_id, o.seq, at) { Finding::Lost } else { Finding::Settled });
    }
    match shard.apply(o.run_id, RunEvent::Reconciled { at }) {
        Outcome::Final => Ok(Finding::Succeeded),
        _ => Ok(Finding::Settled),
    }
}

/// Whether the sequence is in the stream, and this run's.
async fn is_there(term: &Term, o: &Outstanding) -> Result<bool, BusError> {
    let found = term.cx.bus.trigger_at(o.seq).await?;
    Ok(found.is_some_and(|message| message.subject.ends_with(&o.run_id.to_string())))
}

/// Looks for the run's message in the present stream and takes it for its own if it is the current one.
async fn is_adopted(term: &Term, o: &Outstanding) -> Result<bool, BusError> {
    let subject = term.shard().run(o.run_id).map(|run| any_trigger(&term.cx.prefix, run));
    let Some(subject) = subject else { return Ok(false) };
    let Some(message) = term.cx.bus.last_trigger(&subject).await? else { return Ok(false) };
    Ok(term.shard().adopt_message(o.run_id, &message) == Some(LookedUp::Adopted))
}

/// Waits until everything that AX_EVENTS holds by now has been applied; false when that takes too long, or the stream is
/// not the one that is being read: then it has to be compared first.
pub(super) async fn read_past_now(term: &Term) -> Result<bool, BusError> {
    let events = term.cx.bus.events().await?;
    let is_read = {
        let shard = term.shard();
        let settled = shard.settled();
        settled.incarnation == events.incarnation && settled.seq <= events.last_seq
    };
    Ok(is_read && read_past(term, events.last_seq).await)
}

/// Waits until AX_EVENTS has been applied through `seq`; false when that takes too long or the term ends.
async fn read_past(term: &Term, seq: u64) -> bool {
    tokio::select! {
        biased;
        () = term.ended.cancelled() => false,
        reached = tokio::time::timeout(CATCH_UP, term.applied.reached(seq)) => reached.is_ok(),
    }
}
