//! Decides about runs at their due instant.

use std::sync::Arc;
use std::time::Duration;

use super::{EndOfTerm, Term, wait};
use crate::core::shard::{FireReport, Fired};
use crate::core::trace;
use crate::failpoint::die_at;
use crate::metrics as names;

/// Longest sleep: what else becomes due is signalled, this is only a belt for the braces.
const LONGEST: Duration = Duration::from_millis(500);

/// Runs the loop. While the publishing connection is away nothing is handed over: what is due then is judged when it
/// is back.
pub(super) async fn run(term: Arc<Term>) -> EndOfTerm {
    loop {
        let mut sleep = LONGEST;
        if term.publisher().is_some() && term.may_act() {
            let now = term.cx.clock.now();
            let (report, next) = {
                let mut shard = term.shard();
                if shard.next_due().is_some_and(|at| at <= now) {
                    (Some(shard.fire(now)), shard.next_due())
                } else {
                    (None, shard.next_due())
                }
            };
            if let Some(report) = report {
                die_at("fire.decided");
                term.wake.deliver.notify_one();
                term.wake.flush.notify_one();
                note(&term, report);
            }
            if let Some(next) = next {
                let until = next.millis_since(term.cx.clock.now()).max(0);
                sleep = sleep.min(Duration::from_millis(until as u64));
            }
        } else {
            sleep = Duration::from_millis(50);
        }
        if term.ended.is_cancelled() {
            return EndOfTerm::Stopped;
        }
        if sleep > Duration::ZERO && !wait(&term.wake.fire, sleep, &term.ended).await {
            return EndOfTerm::Stopped;
        }
    }
}

/// Counts and logs decisions, and has blockers reconciled.
pub(super) fn note(term: &Term, report: FireReport) {
    for (run_id, kind, fired) in report.fired {
        match fired {
            Fired::HandedOver => {
                metrics::counter!(names::FIRES.name, "kind" => kind.as_str()).increment(1);
            }
            Fired::Skipped(reason) => {
                metrics::counter!(names::SKIPPED.name, "reason" => reason).increment(1);
                tracing::info!(target: "ax::run", %run_id, trace_id = run_id.trace_id(), span_id = %trace::run_span(run_id), reason, "skipped");
            }
            Fired::Blocked(blockers) => {
                let _ = term.blocked.send((run_id, blockers));
            }
        }
    }
}
