//! Reads AX_EVENTS in order and applies it.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;

use super::term::{ensure_consumers, resume_at};
use super::{Context, EndOfTerm, Term, pause};
use crate::core::run::RunState;
use crate::core::settle::Outcome;
use crate::core::shard::Applied;
use crate::core::trace;
use crate::metrics as names;
use crate::ports::{BusError, StreamMessage, StreamState};

/// Events applied under one lock.
const CHUNK: usize = 256;
/// How often the streams are compared with what is known of them.
const COMPARE_EVERY: Duration = Duration::from_secs(10);
/// Between two looks at a stream that seems to have lost its end.
const SECOND_LOOK: Duration = Duration::from_millis(500);

/// Runs the loop: compare the streams, read, and after an error begin anew where it stopped.
pub(super) async fn run(term: Arc<Term>) -> EndOfTerm {
    loop {
        match read(&term).await {
            Ok(end) => return end,
            Err(e) => {
                metrics::counter!(names::EVENTS_READER_RESTARTS.name).increment(1);
                tracing::warn!(error = %e, "reading AX_EVENTS was interrupted; going on where it stopped");
            }
        }
        if !pause(Duration::from_millis(100), &term.ended).await {
            return EndOfTerm::Stopped;
        }
        // A stream that somebody deleted is made again, with its consumers; what it held is in doubt, and SQL knows what
        // is owed.
        if term.may_act()
            && let Ok(database_id) = term.cx.store.database_id().await
        {
            let consumers = term.shard().consumers();
            let made = async {
                term.cx.bus.prepare(database_id).await?;
                ensure_consumers(&term.cx, consumers).await
            };
            if let Err(e) = made.await {
                tracing::warn!(error = %e, "the streams could not be verified");
            }
        }
    }
}

async fn read(term: &Arc<Term>) -> Result<EndOfTerm, BusError> {
    compare(term).await?;
    let after = term.shard().settled().seq;
    let mut events = term.cx.bus.read_events(after).await?.ready_chunks(CHUNK);
    let mut compare_at = tokio::time::Instant::now() + COMPARE_EVERY;
    loop {
        let chunk = tokio::select! {
            biased;
            () = term.ended.cancelled() => return Ok(EndOfTerm::Stopped),
            () = tokio::time::sleep_until(compare_at) => {
                compare_at = tokio::time::Instant::now() + COMPARE_EVERY;
                if compare(term).await? {
                    return Err(BusError::Unavailable("a stream has changed".into()));
                }
                continue;
            }
            chunk = events.next() => chunk,
        };
        let Some(chunk) = chunk else {
            return Err(BusError::Unavailable("the reader ended".into()));
        };
        let mut failed = None;
        {
            let now = term.cx.clock.now();
            let mut shard = term.shard();
            for item in chunk {
                match item {
                    Ok(message) => {
                        let applied = shard.apply_event(&message, now);
                        note(&shard, &message, applied);
                    }
                    Err(e) => {
                        failed = Some(e);
                        break;
                    }
                }
            }
            term.applied.set(shard.settled().seq);
        }
        // Windows may have opened, blocked runs may go on, and there is something to write.
        term.wake.deliver.notify_one();
        term.wake.fire.notify_one();
        term.wake.flush.notify_one();
        if let Some(e) = failed {
            return Err(e);
        }
    }
}

/// Compares both streams with what is known of them; true when reading must begin anew.
async fn compare(term: &Arc<Term>) -> Result<bool, BusError> {
    look_at_triggers(term).await?;
    let events = term.cx.bus.events().await?;
    let mut shard = term.shard();
    match resume_at(shard.settled(), &events) {
        Some(position) => {
            shard.restart_events(position.incarnation, position.seq);
            term.applied.set(shard.settled().seq);
            Ok(true)
        }
        None => Ok(false),
    }
}

/// Takes notice of which stream AX_TRIGGERS is, and how far it goes. To be done before consumers are made in it: what they
/// deliver must not be taken for what an earlier stream had under the same sequence.
pub(super) async fn look_at_triggers(term: &Term) -> Result<StreamState, BusError> {
    let (incarnation, known) = {
        let shard = term.shard();
        (shard.triggers_incarnation().to_owned(), shard.triggers_last())
    };
    let triggers = triggers_with_end(&term.cx, &incarnation, known).await?;
    let lost = {
        let mut shard = term.shard();
        // What was published since is no part of the answer.
        let goes_on = triggers.last_seq >= known && triggers.incarnation == shard.triggers_incarnation();
        let last = if goes_on { triggers.last_seq.max(shard.triggers_last()) } else { triggers.last_seq };
        shard.set_triggers_incarnation(&triggers.incarnation, last)
    };
    if lost > 0 {
        // Nothing is published before this is in SQL.
        term.wake.flush.notify_one();
        metrics::counter!(names::MESSAGES_LOST.name).increment(lost as u64);
        tracing::error!(
            lost,
            "AX_TRIGGERS is another stream than before or has lost its end; what it held is looked for and published again"
        );
    }
    Ok(triggers)
}

/// AX_TRIGGERS as its leader tells it. That it has lost what was known of it is believed from two looks: a leader that was
/// elected just now may not have come to the end of what it holds.
pub(super) async fn triggers_with_end(cx: &Context, incarnation: &str, known: u64) -> Result<StreamState, BusError> {
    let triggers = cx.bus.triggers().await?;
    if triggers.incarnation != incarnation || triggers.last_seq >= known {
        return Ok(triggers);
    }
    tokio::time::sleep(SECOND_LOOK).await;
    cx.bus.triggers().await
}

fn note(shard: &crate::core::shard::Shard, message: &StreamMessage, applied: Applied) {
    match applied {
        Applied::Run(run_id, outcome) => {
            let Some(run) = shard.run(run_id) else { return };
            match outcome {
                Outcome::Moved if run.state == RunState::Running => {
                    if let Some(lateness) = run.lateness_ms
                        && run.attempt == 1
                    {
                        metrics::histogram!(names::LATENESS.name).record(lateness as f64 / 1000.0);
                    }
                    tracing::info!(
                        target: "ax::run",
                        %run_id, task_id = %run.task_id, trace_id = run_id.trace_id(),
                        span_id = %trace::attempt_span(run_id, run.attempt), attempt = run.attempt,
                        worker_id = run.worker_id, lateness_ms = run.lateness_ms,
                        "started"
                    );
                }
                Outcome::Final | Outcome::BackingOff | Outcome::Replace => {
                    tracing::info!(
                        target: "ax::run",
                        %run_id, task_id = %run.task_id, trace_id = run_id.trace_id(),
                        span_id = %trace::attempt_span(run_id, run.attempt), attempt = run.attempt,
                        state = run.state.as_str(), reason = run.reason,
                        "finished"
                    );
                }
                Outcome::Ignored | Outcome::Moved | Outcome::Closed => {}
            }
        }
        Applied::Malformed(why) => {
            metrics::counter!(names::EVENTS_MALFORMED.name).increment(1);
            tracing::warn!(
                seq = message.seq,
                subject = message.subject,
                why,
                "an event was not understood; passed over"
            );
        }
        Applied::Kept | Applied::Nothing => {}
    }
    metrics::counter!(names::EVENTS.name, "kind" => kind_of(&message.subject)).increment(1);
}

/// What a message of the stream is, for its metric: one of a few words, whatever somebody publishes there.
fn kind_of(subject: &str) -> &'static str {
    const WORKERS: [&str; 6] = ["started", "progress", "succeeded", "failed", "released", "cancelled"];
    const SERVERS: [(&str, &str); 4] = [
        (".METRIC.CONSUMER.ACK.", "acked"),
        (".MSG_NAKED.", "naked"),
        (".MSG_TERMINATED.", "terminated"),
        (".MAX_DELIVERIES.", "max_deliveries"),
    ];
    if subject.starts_with("$JS.") {
        return SERVERS.iter().find(|(part, _)| subject.contains(part)).map_or("other", |(_, word)| word);
    }
    let kind = subject.split_once(".event.").and_then(|(_, rest)| rest.split('.').next());
    WORKERS.into_iter().find(|word| kind == Some(word)).unwrap_or("other")
}
