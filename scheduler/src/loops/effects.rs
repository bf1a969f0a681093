//! Does what a commit has made permissible: notices, deletions of messages, cancellations.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::sync::{Semaphore, mpsc};

use super::{EndOfTerm, Term, reconcile};
use crate::core::run::{Run, RunState};
use crate::core::settle::RunEvent;
use crate::core::shard::Effect;
use crate::core::trace;
use crate::metrics as names;
use crate::ports::{Publisher, StreamMessage};

/// Effects under way at once.
const AT_ONCE: usize = 64;
/// Wait before a deletion that was not answered is tried again, in milliseconds.
const DELETE_AGAIN_MS: i64 = 1000;

/// Runs the loop.
pub(super) async fn run(term: Arc<Term>, mut effects: mpsc::UnboundedReceiver<(Effect, Run)>) -> EndOfTerm {
    let slots = Arc::new(Semaphore::new(AT_ONCE));
    loop {
        let next = tokio::select! {
            biased;
            () = term.ended.cancelled() => return EndOfTerm::Stopped,
            next = effects.recv() => next,
        };
        let Some((effect, run)) = next else { return EndOfTerm::Stopped };
        if let Effect::Notice { .. } = effect {
            // In the order of the commits: whoever watches sees `running` before `succeeded`.
            notice(&term, &run).await;
            continue;
        }
        let (term, slots) = (term.clone(), slots.clone());
        tokio::spawn(async move {
            let Ok(_slot) = slots.acquire_owned().await else { return };
            match effect {
                Effect::Delete { seq, incarnation, bury, .. } => delete(&term, &run, seq, &incarnation, bury).await,
                Effect::Cancel { .. } => cancel(&term, &run).await,
                Effect::Notice { .. } | Effect::Requeue { .. } => {}
            }
        });
    }
}

async fn notice(term: &Term, run: &Run) {
    if run.state.is_final() {
        metrics::counter!(names::RUNS.name, "state" => run.state.as_str()).increment(1);
        tracing::info!(
            target: "ax::run",
            run_id = %run.run_id, task_id = %run.task_id, trace_id = run.run_id.trace_id(),
            span_id = %trace::run_span(run.run_id), state = run.state.as_str(),
            attempt = run.attempt,
            "settled"
        );
    }
    let body = json!({
        "run_id": run.run_id, "task_id": run.task_id, "group": run.group, "queue": run.queue, "handler": run.handler,
        "kind": run.kind, "state": run.state, "reason": run.reason, "attempt": run.attempt,
        "max_attempts": run.max_attempts, "trigger_time": run.trigger_at, "lateness_ms": run.lateness_ms,
        "worker_id": run.worker_id, "started_at": run.started_at, "finished_at": run.finished_at,
    });
    let subject = term.cx.prefix.notice(run.state.as_str(), &run.address());
    term.cx.bus.tell(subject, body.to_string().into()).await;
}

/// Deletes a message; with `bury`, leaves a copy for operators if it is still there. Of a run that has ended, everything
/// that may be left under its subjects goes, too: an earlier message whose deletion failed, one whose PubAck is not known.
async fn delete(term: &Arc<Term>, run: &Run, seq: u64, incarnation: &str, bury: bool) {
    let current = run.message.as_ref().is_some_and(|m| m.seq == seq);
    let gone = async {
        let bus = &term.cx.bus;
        let publisher = term.publisher()?;
        if seq > 0 && bus.triggers().await.ok()?.incarnation == incarnation {
            // A stream that lost its tail gives the sequence again, to another run's message.
            if let Some(message) = bus.trigger_at(seq).await.ok()?.filter(|message| is_of(run, message)) {
                take_out(term, &publisher, run, seq, Some(message).filter(|_| bury)).await?;
            }
        }
        if current && run.state.is_final() && (seq == 0 || run.message_no > 1) {
            while let Some(message) = bus.last_trigger(&any_trigger(&term.cx.prefix, run)).await.ok()? {
                take_out(term, &publisher, run, message.seq, Some(message).filter(|_| bury)).await?;
            }
        }
        Some(())
    };
    let answered = gone.await.is_some();
    if !current {
        // A replaced message: if its deletion was not answered, it goes when the run ends.
        return;
    }
    let mut shard = term.shard();
    if answered {
        shard.message_closed(run.run_id, seq);
        drop(shard);
        term.wake.flush.notify_one();
    } else if run.state.is_final() {
        shard.close_again(run.run_id, term.cx.clock.now().plus_millis(DELETE_AGAIN_MS));
        drop(shard);
        term.wake.fire.notify_one();
    }
}

/// Deletes one message, after leaving a copy where one is given. None = not known.
async fn take_out(
    term: &Term,
    publisher: &Arc<dyn Publisher>,
    run: &Run,
    seq: u64,
    copy: Option<StreamMessage>,
) -> Option<()> {
    if let Some(message) = copy.filter(|message| is_of(run, message))
        && term.may_act()
    {
        let outgoing = crate::ports::Outgoing {
            subject: term.cx.prefix.dead(&run.address()),
            headers: vec![
                (ax_shared::subjects::header::MSG_ID, format!("{}:{}:dead", run.run_id, run.message_no)),
                ("Ax-Dead-Reason", run.reason.clone().unwrap_or_default().replace(['\r', '\n'], " ")),
                ("Ax-Dead-Subject", message.subject.clone()),
                ("Ax-Dead-Attempts", run.attempt.to_string()),
            ],
            payload: message.payload,
        };
        publisher.publish(outgoing).await.ok()?;
    }
    if !term.may_act() {
        return None;
    }
    publisher.delete(seq).await.ok().map(drop)
}

/// Whether a message is one of this run.
fn is_of(run: &Run, message: &StreamMessage) -> bool {
    message.subject.ends_with(&run.run_id.to_string())
}

/// The subjects that a run's messages have, whatever its definition was when they were published.
pub(super) fn any_trigger(prefix: &ax_shared::Prefix, run: &Run) -> String {
    format!("{}.trigger.*.*.*.{}.{}", prefix.as_str(), run.task_id, run.run_id)
}

/// Takes a run's message back, reads past everything that was told before that, then ends it: a success that was
/// told counts, otherwise it is cancelled. Tried until it succeeds or the term ends; the intent is in SQL.
async fn cancel(term: &Arc<Term>, run: &Run) {
    let subject = term.cx.prefix.cancel(&run.group, run.run_id);
    term.cx.bus.tell(subject, json!({"run_id": run.run_id, "reason": run.reason}).to_string().into()).await;
    loop {
        if term.ended.is_cancelled() {
            return;
        }
        let Some(o) = term.shard().outstanding_run(run.run_id) else { return };
        let taken_back = async {
            if term.cx.bus.triggers().await.ok()?.incarnation == o.incarnation {
                let message = term.cx.bus.trigger_at(o.seq).await.ok()?;
                if message.is_some_and(|message| is_of(run, &message)) {
                    term.publisher()?.delete(o.seq).await.ok()?;
                }
            }
            reconcile::read_past_now(term).await.ok()?.then_some(())
        };
        if taken_back.await.is_some() {
            let at = term.cx.clock.now();
            let reason = run.reason.clone().unwrap_or_default().into();
            term.shard().apply(run.run_id, RunEvent::Ended { state: RunState::Cancelled, reason, at });
            term.shard().message_closed(run.run_id, o.seq);
            term.wake.flush.notify_one();
            return;
        }
        if !super::pause(Duration::from_millis(500), &term.ended).await {
            return;
        }
    }
}
