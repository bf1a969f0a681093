//! Takes up one-off runs that any node has inserted: at once when hinted, within a second in any case.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;

use super::{EndOfTerm, Term, pause, wait};
use crate::core::trace;
use crate::ports::Hint;

/// Rows taken up at once.
const BATCH: u32 = 1000;
/// How often to look without a hint.
const EVERY: Duration = Duration::from_secs(1);

/// Runs the loop.
pub(super) async fn run(term: Arc<Term>) -> EndOfTerm {
    let store = &term.cx.store;
    loop {
        loop {
            let due_before = term.cx.clock.now() + term.cx.settings.plan_horizon;
            let taking_up = term.taking_up.lock().await;
            let answer = store.adopt_runs(term.epoch, due_before, BATCH).await;
            let held = answer.as_ref().map_or(Vec::new(), |runs| term.shard().hold_runs(runs.iter().cloned()));
            drop(taking_up);
            let runs = match term.done("adopt", answer).await {
                Ok(Some(runs)) => runs,
                Ok(None) => continue,
                Err(end) => return end,
            };
            let count = runs.len();
            if count > 0
                && let Err(end) = definitions_as_new(&term).await
            {
                return end;
            }
            for run in &runs {
                tracing::info!(
                    target: "ax::run",
                    run_id = %run.run_id, task_id = %run.task_id, trace_id = run.run_id.trace_id(),
                    span_id = %trace::plan_span(run.run_id), trigger_time = %run.trigger_at,
                    "planned"
                );
            }
            term.shard().release_runs(&held);
            if count > 0 {
                term.wake.fire.notify_one();
            }
            if count < BATCH as usize {
                break;
            }
        }
        if let Err(end) = super::command::run_once(&term).await {
            return end;
        }
        if !wait(&term.wake.adopt, EVERY, &term.ended).await {
            return EndOfTerm::Stopped;
        }
    }
}

/// Waits until the definitions in memory are as new as those that are in SQL now, and so as new as the runs that were
/// just taken up: whoever defines, changes or resumes a task and triggers it at once means the task as it is then.
async fn definitions_as_new(term: &Arc<Term>) -> Result<(), EndOfTerm> {
    let wanted = loop {
        if let Some(shard) = term.done("definitions_rev", term.cx.store.shard().await).await? {
            break shard.definitions_rev;
        }
    };
    if term.definitions.get() < wanted {
        term.wake.plan.notify_one();
    }
    tokio::select! {
        biased;
        () = term.ended.cancelled() => Err(EndOfTerm::Stopped),
        () = term.definitions.reached(wanted) => Ok(()),
    }
}

/// Hears hints of other nodes and wakes the loop that they are for.
pub(super) async fn hints(term: Arc<Term>) -> EndOfTerm {
    loop {
        match term.cx.bus.hints().await {
            Ok(mut hints) => loop {
                let hint = tokio::select! {
                    biased;
                    () = term.ended.cancelled() => return EndOfTerm::Stopped,
                    hint = hints.next() => hint,
                };
                match hint {
                    Some(Hint::Runs | Hint::Commands) => term.wake.adopt.notify_one(),
                    Some(Hint::Definitions) => term.wake.plan.notify_one(),
                    None => break,
                }
            },
            Err(e) => tracing::warn!(error = %e, "hints of other nodes cannot be heard; looking every second"),
        }
        if !pause(Duration::from_secs(1), &term.ended).await {
            return EndOfTerm::Stopped;
        }
    }
}
