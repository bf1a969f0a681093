//! Publishes what the delivery queues yield, pipelined, over a connection of its own.
//!
//! The connection never reconnects. When it is lost, everything without a PubAck is driven again over a new one, with
//! the same message ids, after a look at the lease: a leader that was cut off for longer than its lease must not
//! publish, and its client must not do so for it.

use std::sync::Arc;
use std::time::Duration;

use ax_shared::RunId;
use futures::StreamExt;
use futures::stream::FuturesUnordered;

use super::settle::look_at_triggers;
use super::{EndOfTerm, Term, pause};
use crate::core::{trace, trigger};
use crate::failpoint::die_at;
use crate::metrics as names;
use crate::ports::{PubAck, PublishError, Publisher};
use crate::telemetry::Publishing;

/// Publishes under way at once; more buys nothing on one connection.
const IN_FLIGHT: usize = 256;
/// A publish that waited this long for nothing.
const STALLED: Duration = Duration::from_millis(1900);

/// Runs the loop.
pub(super) async fn run(term: Arc<Term>) -> EndOfTerm {
    loop {
        let publisher = match open(&term).await {
            Ok(publisher) => publisher,
            Err(end) => return end,
        };
        term.publisher.send_replace(Some(publisher.clone()));
        term.wake.fire.notify_one();
        let end = publish(&term, &publisher).await;
        term.publisher.send_replace(None);
        publisher.close().await;
        if let Some(end) = end {
            return end;
        }
        metrics::counter!(names::PUBLISHER_LOST.name).increment(1);
        tracing::warn!("the publishing connection was lost; opening another");
    }
}

/// Opens a connection, then looks at the stream and at the lease.
async fn open(term: &Arc<Term>) -> Result<Arc<dyn Publisher>, EndOfTerm> {
    let mut wait = Duration::from_millis(20);
    loop {
        if term.ended.is_cancelled() {
            return Err(EndOfTerm::Stopped);
        }
        let opened = async {
            let publisher = term.cx.bus.publisher().await?;
            // Before anything takes a sequence that the stream has lost.
            look_at_triggers(term).await?;
            let lease = term.cx.bus.lease().await?;
            Ok::<_, crate::ports::BusError>((publisher, lease))
        };
        match opened.await {
            Ok((publisher, lease)) => {
                let instance = term.lease.lock().expect("lease").value.instance;
                if lease.is_some_and(|l| l.value.instance == instance) {
                    return Ok(publisher);
                }
                return Err(EndOfTerm::LeaseLost("the key is not this node's any more"));
            }
            Err(e) => tracing::warn!(error = %e, "no publishing connection yet"),
        }
        if !pause(wait, &term.ended).await {
            return Err(EndOfTerm::Stopped);
        }
        wait = (wait * 2).min(Duration::from_secs(1));
    }
}

/// Publishes until the connection is lost (None) or the term ends.
async fn publish(term: &Arc<Term>, publisher: &Arc<dyn Publisher>) -> Option<EndOfTerm> {
    let mut in_flight = FuturesUnordered::new();
    loop {
        let stopping = term.ended.is_cancelled();
        if stopping && in_flight.is_empty() {
            return Some(EndOfTerm::Stopped);
        }
        while !stopping && in_flight.len() < IN_FLIGHT && term.may_act() && !publisher.is_closed() {
            let Some(next) = term.shard().pop_publish() else { break };
            let publisher = publisher.clone();
            let told = term.cx.traces.publishing(next.run_id, &next.message, || term.cx.clock.now());
            in_flight.push(async move {
                let run_id = next.run_id;
                let began = tokio::time::Instant::now();
                let answer = publisher.publish(next.message).await;
                (run_id, answer, began.elapsed(), told)
            });
        }
        if publisher.is_closed() && in_flight.is_empty() {
            return None;
        }
        tokio::select! {
            biased;
            Some((run_id, answer, took, told)) = in_flight.next(), if !in_flight.is_empty() => {
                // Neither a yes nor a no within its time: the connection has stalled. A new one begins with a look at
                // the lease; this one must not send its buffer when it thaws.
                if took >= STALLED && matches!(answer, Err(PublishError::Transient(_))) && !publisher.is_closed() {
                    tracing::warn!("the publishing connection has stalled");
                    publisher.close().await;
                }
                if !answered(term, run_id, answer, told) {
                    // Nothing is taken for news of this stream before it is known which one it is.
                    if look_at_triggers(term).await.is_err() {
                        publisher.close().await;
                    }
                }
            }
            () = term.wake.deliver.notified(), if !stopping => {}
            () = term.ended.cancelled(), if !stopping => {}
            () = tokio::time::sleep(Duration::from_millis(200)) => {}
        }
    }
}

/// Takes note of an answer; false when it cannot be one of the stream that is known.
fn answered(term: &Term, run_id: RunId, answer: Result<PubAck, PublishError>, told: Option<Publishing>) -> bool {
    let mut is_known_stream = true;
    let now = term.cx.clock.now();
    let mut shard = term.shard();
    if let Some(told) = told {
        // A worker may have ended the run before the answer was here; no part of a run outlasts it.
        let at = shard.run(run_id).and_then(|run| run.finished_at).map_or(now, |ended| ended.min(now));
        match &answer {
            Ok(_) => term.cx.traces.published(told, at, None),
            Err(PublishError::Refused(why)) => term.cx.traces.published(told, at, Some(why)),
            // It is published again, under the same span id.
            Err(PublishError::Transient(_) | PublishError::Closed) => {}
        }
    }
    let result = match answer {
        Ok(ack) => {
            die_at("publish.acked");
            is_known_stream = shard.published(run_id, ack, now);
            if let Some(run) = shard.run(run_id) {
                tracing::info!(
                    target: "ax::run",
                    %run_id, task_id = %run.task_id, trace_id = run_id.trace_id(),
                    span_id = %trace::publish_span(&trigger::message_id(run)), seq = ack.seq,
                    late_ms = now.millis_since(run.publish_at),
                    "published"
                );
            }
            if ack.duplicate { "duplicate" } else { "ok" }
        }
        Err(PublishError::Transient(why)) => {
            shard.publish_unanswered(run_id, now, false);
            tracing::warn!(%run_id, why, "a publish was not answered; publishing again with the same id");
            "unanswered"
        }
        Err(PublishError::Closed) => {
            shard.publish_unanswered(run_id, now, true);
            "closed"
        }
        Err(PublishError::Refused(why)) => {
            tracing::error!(%run_id, why, "the stream refused a trigger");
            shard.publish_refused(run_id, why, now);
            "refused"
        }
    };
    drop(shard);
    metrics::counter!(names::PUBLISH.name, "result" => result).increment(1);
    term.wake.flush.notify_one();
    if result != "ok" {
        term.wake.fire.notify_one();
    }
    is_known_stream
}
