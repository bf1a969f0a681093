//! Finds out about messages that nobody told anything about: ack metrics are sent at most once.
//!
//! An absent message means success only if (1) the stream's incarnation is the row's, (2) its consumer has delivered
//! it, (3) AX_EVENTS has been read past the last sequence that it had after the absence was seen, (4) no failure,
//! release or TERM of this message was read, and (5) the row carries no intent of ours. Everything else stays in doubt,
//! outstanding and counted.

use std::sync::Arc;
use std::time::Duration;

use ax_shared::RunId;
use futures::StreamExt;
use tokio::sync::{Semaphore, mpsc};

use super::{Blocked, EndOfTerm, Term, fire, pause};
use crate::core::settle::{Outcome, RunEvent};
use crate::metrics as names;
use crate::ports::BusError;

/// Runs looked at at once.
const AT_ONCE: usize = 16;
/// Longest wait for the event reader to catch up.
const CATCH_UP: Duration = Duration::from_secs(5);

/// What looking at a run's message showed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Finding {
    /// It is in the stream.
    Present,
    /// It is gone and nothing speaks against an ack: the run succeeded.
    Succeeded,
    /// The run is not outstanding (any more).
    Settled,
    /// It is gone, and something speaks against an ack.
    Doubt,
}

impl Finding {
    fn as_str(self) -> &'static str {
        match self {
            Self::Present => "present",
            Self::Succeeded => "succeeded",
            Self::Settled => "settled",
            Self::Doubt => "doubt",
        }
    }
}

/// Runs the loop: reconciles what blocks a due run, then has that run judged.
pub(super) async fn run(term: Arc<Term>, mut blocked: mpsc::UnboundedReceiver<Blocked>) -> EndOfTerm {
    let slots = Arc::new(Semaphore::new(AT_ONCE));
    loop {
        let next = tokio::select! {
            () = term.ended.cancelled() => return EndOfTerm::Stopped,
            next = blocked.recv() => next,
        };
        let Some((_, blockers)) = next else { return EndOfTerm::Stopped };
        let (term, slots) = (term.clone(), slots.clone());
        tokio::spawn(async move {
            let Ok(_slot) = slots.acquire_owned().await else { return };
            for blocker in blockers {
                // Not known is no overlap: look until there is an answer.
                while let Err(e) = look(&term, blocker).await {
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
    let mut doubts = 0u64;
    let mut looked = futures::stream::iter(outstanding)
        .map(|o| async move { (o.run_id, look(term, o.run_id).await) })
        .buffer_unordered(AT_ONCE);
    while let Some((run_id, finding)) = looked.next().await {
        match finding {
            Ok(Finding::Doubt) => {
                doubts += 1;
                tracing::warn!(%run_id, "its message is gone without a proof of success; it stays outstanding");
            }
            Ok(_) => {}
            Err(e) => {
                tracing::warn!(error = %e, "the sweep was interrupted; the next one goes on");
                break;
            }
        }
    }
    metrics::gauge!(names::IN_DOUBT.name).set(doubts as f64);
    term.wake.flush.notify_one();
    term.wake.deliver.notify_one();
    term.wake.fire.notify_one();
}

/// Looks at one run.
pub(super) async fn look(term: &Arc<Term>, run_id: RunId) -> Result<Finding, BusError> {
    let Some(o) = term.shard().outstanding_run(run_id) else { return Ok(Finding::Settled) };
    let finding = async {
        let triggers = term.cx.bus.triggers().await?;
        if triggers.incarnation != o.incarnation {
            return Ok(Finding::Doubt);
        }
        if term.cx.bus.trigger_at(o.seq).await?.is_some() {
            return Ok(Finding::Present);
        }
        if term.cx.bus.consumer(&o.consumer).await?.is_none_or(|c| c.delivered_seq < o.seq) {
            return Ok(Finding::Doubt);
        }
        let last = term.cx.bus.events().await?.last_seq;
        if !read_past(term, last).await {
            return Err(BusError::Unavailable("AX_EVENTS could not be read to its end".into()));
        }
        let at = term.cx.clock.now();
        let mut shard = term.shard();
        match shard.outstanding_run(run_id) {
            None => Ok(Finding::Settled),
            Some(now) if now.seq != o.seq => Ok(Finding::Settled),
            Some(now) if now.intent.is_some() || now.speaks_against => Ok(Finding::Doubt),
            Some(_) => match shard.apply(run_id, RunEvent::Reconciled { at }) {
                Outcome::Final => Ok(Finding::Succeeded),
                _ => Ok(Finding::Settled),
            },
        }
    };
    let finding = finding.await?;
    metrics::counter!(names::RECONCILED.name, "result" => finding.as_str()).increment(1);
    Ok(finding)
}

/// Waits until AX_EVENTS has been applied through `seq`; false when that takes too long or the term ends.
pub(super) async fn read_past(term: &Term, seq: u64) -> bool {
    let mut applied = term.applied.subscribe();
    let reached = async { applied.wait_for(|at| *at >= seq).await.is_ok() };
    tokio::select! {
        () = term.ended.cancelled() => false,
        reached = tokio::time::timeout(CATCH_UP, reached) => reached.unwrap_or(false),
    }
}
