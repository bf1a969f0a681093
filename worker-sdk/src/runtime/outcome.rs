//! From the end of an attempt to what is told about it and how its message is answered. Pure.

use std::time::Duration;

use ax_shared::wire::EventBody;
use ax_shared::{RunAddress, Timestamp};
use serde::Serialize;
use serde_json::value::RawValue;

use super::attempt::End;
use super::trigger::Trigger;
use crate::Failure;

/// Wait before a run that this worker cannot execute is delivered again, perhaps to another.
const UNKNOWN_HANDLER_AFTER: Duration = Duration::from_secs(5);
/// Attempts in which nobody knew the handler before the run is ended.
const UNKNOWN_HANDLER_ATTEMPTS: u32 = 10;

/// How a message is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    Ack,
    /// Deliver again after this.
    Nak(Duration),
    /// Do not deliver again.
    Term,
}

/// What is told about an attempt, and how its message is answered once that is confirmed.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) kind: &'static str,
    pub(crate) body: EventBody,
    pub(crate) result: Option<Box<RawValue>>,
    pub(crate) answer: Answer,
}

/// When an attempt began and ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    pub(crate) started_at: Timestamp,
    pub(crate) finished_at: Timestamp,
}

impl Outcome {
    /// The outcome of an attempt; none when there is nothing to tell. `random` in 0.0..=1.0 chooses the jitter of a retry.
    pub(crate) fn of(trigger: &Trigger, worker_id: &str, end: End, span: Span, random: f64) -> Option<Self> {
        let mut body = body(trigger, worker_id);
        Some(match end {
            End::Succeeded(result) => {
                (body.started_at, body.finished_at) = (Some(span.started_at), Some(span.finished_at));
                Self { kind: "succeeded", body, result: Some(result), answer: Answer::Ack }
            }
            End::Failed(failure) => Self::failed(trigger, worker_id, failure, span.finished_at, random),
            End::TimedOut => {
                let text = format!("no result within {} ms", trigger.facts.timeout.as_millis());
                let failure = Failure::retry(text).of_kind("timeout");
                Self::failed(trigger, worker_id, failure, span.finished_at, random)
            }
            End::Cancelled => {
                body.at = Some(span.finished_at);
                Self { kind: "cancelled", body, result: None, answer: Answer::Term }
            }
            End::Released => Self::released(trigger, worker_id, "the worker stops".into(), Duration::ZERO),
            End::Superseded => return None,
        })
    }

    /// A failure. Whether it is tried again is the scheduler's word; after the last attempt the message is ended.
    pub(crate) fn failed(
        trigger: &Trigger,
        worker_id: &str,
        failure: Failure,
        finished_at: Timestamp,
        random: f64,
    ) -> Self {
        let facts = &trigger.facts;
        let mut body = body(trigger, worker_id);
        body.finished_at = Some(finished_at);
        body.error = Some(failure.error);
        body.retry = Some(failure.retry);
        body.retry_after_ms = failure.retry_after.map(|wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
        let answer = if !failure.retry || facts.attempt >= facts.max_attempts {
            Answer::Term
        } else {
            let backoff = || Duration::from_millis(trigger.backoff.delay_ms(facts.attempt, random));
            Answer::Nak(failure.retry_after.unwrap_or_else(backoff))
        };
        Self { kind: "failed", body, result: None, answer }
    }

    /// Handed back: the attempt does not count.
    pub(crate) fn released(trigger: &Trigger, worker_id: &str, reason: String, wait: Duration) -> Self {
        let mut body = body(trigger, worker_id);
        body.reason = Some(reason);
        Self { kind: "released", body, result: None, answer: Answer::Nak(wait) }
    }

    /// This worker cannot execute the run, another one perhaps can; when nobody could ten times, it fails.
    pub(crate) fn refused(trigger: &Trigger, worker_id: &str, kind: &str, why: String, at: Timestamp) -> Self {
        if trigger.facts.attempt <= UNKNOWN_HANDLER_ATTEMPTS {
            return Self::released(trigger, worker_id, why, UNKNOWN_HANDLER_AFTER);
        }
        Self::failed(trigger, worker_id, Failure::give_up(why).of_kind(kind), at, 0.0)
    }

    /// The run should have begun earlier.
    pub(crate) fn expired(trigger: &Trigger, worker_id: &str, deadline: Timestamp, at: Timestamp) -> Self {
        let failure = Failure::give_up(format!("not started by {deadline}")).of_kind("expired");
        Self::failed(trigger, worker_id, failure, at, 0.0)
    }

    /// The event's body.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        #[derive(Serialize)]
        struct Told<'a> {
            #[serde(flatten)]
            body: &'a EventBody,
            #[serde(skip_serializing_if = "Option::is_none")]
            result: Option<&'a RawValue>,
        }
        serde_json::to_vec(&Told { body: &self.body, result: self.result.as_deref() }).unwrap_or_default()
    }
}

/// The event `started`.
pub(crate) fn started(trigger: &Trigger, worker_id: &str, at: Timestamp) -> EventBody {
    EventBody { at: Some(at), ..body(trigger, worker_id) }
}

/// The event `failed` of a run whose trigger cannot be read.
pub(crate) fn unreadable(
    run: &RunAddress,
    attempt: u32,
    worker_id: &str,
    failure: Failure,
    at: Timestamp,
) -> EventBody {
    let mut body = EventBody::new(run.run_id, attempt);
    body.worker_id = Some(worker_id.to_owned());
    body.finished_at = Some(at);
    body.error = Some(failure.error);
    body.retry = Some(false);
    body
}

fn body(trigger: &Trigger, worker_id: &str) -> EventBody {
    let mut body = EventBody::new(trigger.facts.run.run_id, trigger.facts.attempt);
    body.worker_id = Some(worker_id.to_owned());
    body
}
