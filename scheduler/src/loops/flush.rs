//! Writes what has changed in memory, coalesced per run, in one transaction under the epoch; then lets its effects
//! happen.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;

use super::{Chain, EndOfTerm, Term, pause, wait};
use crate::core::run::Run;
use crate::core::shard::Effect;
use crate::failpoint::die_at;
use crate::metrics as names;
use crate::ports::{Batch, StoreError};

/// Runs in one transaction.
const BATCH: usize = 1000;
/// How long the last flush of a term may try.
const LAST_FLUSH: Duration = Duration::from_secs(3);

/// Runs the loop. It ends last: after the other loops, with a flush of what they left.
pub(super) async fn run(term: Arc<Term>, effects: mpsc::UnboundedSender<(Effect, Run)>) -> EndOfTerm {
    // However this loop ends: without it nothing that the others do would be written.
    let _ends_the_term = term.ended.clone().drop_guard();
    let idle = term.cx.settings.lease_ttl / 2;
    let mut failures = 0u32;
    loop {
        let ending = !wait(&term.wake.flush, idle, &term.ended).await;
        if ending {
            return last_flush(&term).await;
        }
        tokio::time::sleep(term.cx.settings.flush_interval).await;
        match run_once(&term, Some(&effects)).await {
            Ok(wrote) => {
                failures = 0;
                // An idle leader proves that the database still takes its writes.
                if !wrote && term.since_commit() >= idle {
                    match term.cx.store.heartbeat(term.epoch).await {
                        Ok(()) => term.note_commit(),
                        Err(e @ StoreError::Fenced { .. }) => return EndOfTerm::Fenced(e),
                        Err(e) => tracing::warn!(error = %Chain(&e), "the database did not answer a heartbeat"),
                    }
                }
            }
            Err(e @ StoreError::Fenced { .. }) => return EndOfTerm::Fenced(e),
            Err(e) => {
                failures += 1;
                tracing::warn!(error = %Chain(&e), failures, "changes could not be written; trying again");
                tokio::time::sleep(Duration::from_millis(50 << failures.min(5))).await;
                term.wake.flush.notify_one();
            }
        }
    }
}

/// A leader whose writes the database has not taken for two lifetimes of the lease gives it up: another node may have
/// a working database.
pub(super) async fn watch(term: Arc<Term>) -> EndOfTerm {
    while pause(Duration::from_millis(500), &term.ended).await {
        if term.since_commit() > term.cx.settings.lease_ttl * 2 {
            return EndOfTerm::LeaseLost("the database has not taken a write for two lifetimes of the lease");
        }
    }
    EndOfTerm::Stopped
}

/// A term that ends writes what it knows, so that its successor need not find it out; what cannot be written, because
/// of the fence or because the database is away, is in AX_EVENTS.
async fn last_flush(term: &Arc<Term>) -> EndOfTerm {
    // The loops that change the shard have been told to end; the caller waits for them before it waits for this.
    let deadline = tokio::time::Instant::now() + LAST_FLUSH;
    while tokio::time::Instant::now() < deadline {
        match run_once(term, None).await {
            Ok(true) => {}
            Ok(false) => {
                tokio::time::sleep(Duration::from_millis(20)).await;
                if Arc::strong_count(term) <= 2 {
                    break;
                }
            }
            Err(e @ StoreError::Fenced { .. }) => return EndOfTerm::Fenced(e),
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
    EndOfTerm::Stopped
}

/// Writes everything that differs from SQL; true when there was something.
async fn run_once(
    term: &Arc<Term>,
    effects: Option<&mpsc::UnboundedSender<(Effect, Run)>>,
) -> Result<bool, StoreError> {
    let Some(flush) = term.shard().take_flush() else { return Ok(false) };
    die_at("flush.begin");
    for batch in split(&flush.batch) {
        if let Err(e) = term.cx.store.commit(term.epoch, &batch).await {
            term.shard().not_committed(flush);
            return Err(e);
        }
        term.note_commit();
    }
    metrics::histogram!(names::FLUSH_RUNS.name).record(flush.batch.runs.len() as f64);
    die_at("flush.committed");
    if term.cx.traces.is_on() {
        let endings = term.shard().endings(&flush);
        for (run, attempts) in endings {
            term.cx.traces.ended(run, &attempts);
        }
    }
    let done = term.shard().committed(flush);
    term.wake.fire.notify_one();
    if let Some(effects) = effects {
        for effect in done {
            let _ = effects.send(effect);
        }
    }
    Ok(true)
}

/// Cuts a batch into transactions of a good size. The position in AX_EVENTS goes with the last, so that it never
/// passes an event that is not written.
fn split(batch: &Batch) -> Vec<Batch> {
    if batch.runs.len() <= BATCH {
        return if batch.is_empty() { Vec::new() } else { vec![batch.clone()] };
    }
    let mut parts: Vec<Batch> =
        batch.runs.chunks(BATCH).map(|runs| Batch { runs: runs.to_vec(), ..Batch::default() }).collect();
    if let Some(first) = parts.first_mut() {
        first.signals_add.clone_from(&batch.signals_add);
    }
    if let Some(last) = parts.last_mut() {
        last.attempts.clone_from(&batch.attempts);
        last.signals_remove.clone_from(&batch.signals_remove);
        last.settled.clone_from(&batch.settled);
    }
    parts
}
