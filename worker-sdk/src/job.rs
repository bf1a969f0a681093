//! One attempt of a run, as a handler sees it.

use std::time::Duration;

use async_nats::HeaderMap;
use ax_shared::definition::RetryBackoff;
use ax_shared::subjects::header;
use ax_shared::wire::TriggerBody;
use ax_shared::{Group, Handler, RunAddress, RunId, RunKind, TaskId, Timestamp};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use crate::Failure;

/// One attempt of a run.
#[derive(Debug, Clone)]
pub struct Job {
    /// The run, the same over all attempts: the key for idempotent handlers.
    pub run_id: RunId,
    /// The task.
    pub task_id: TaskId,
    /// The executor group.
    pub group: Group,
    /// What is to be executed.
    pub handler: Handler,
    /// Why the run exists.
    pub kind: RunKind,
    /// The instant for which the run is scheduled.
    pub trigger_time: Timestamp,
    /// Number of this attempt, from 1.
    pub attempt: u32,
    /// Number of the last attempt that may be made.
    pub max_attempts: u32,
    /// What the attempt may take.
    pub timeout: Duration,
    /// The task's payload, or the one that came with the trigger.
    pub payload: Value,
    /// Results of upstream tasks by task id.
    pub upstream: Value,
    /// W3C trace context, if the trigger carries one.
    pub traceparent: Option<String>,
    /// Cancelled when the attempt has timed out, was cancelled or has to be handed back; a moment later the handler is
    /// dropped at its next await.
    pub cancelled: CancellationToken,
}

impl Job {
    /// Reads the payload as a type of the handler's own.
    ///
    /// # Errors
    /// A failure that ends the run when the payload has another shape: the next attempt would find the same.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        T::deserialize(&self.payload)
            .map_err(|error| Failure::give_up(format!("the payload is not as expected: {error}")))
    }

    pub(crate) fn address(&self) -> RunAddress {
        RunAddress { group: self.group.clone(), task_id: self.task_id.clone(), run_id: self.run_id }
    }
}

/// A trigger message, read.
#[derive(Debug)]
pub(crate) struct Trigger {
    pub(crate) job: Job,
    pub(crate) backoff: RetryBackoff,
    pub(crate) weight: f64,
    pub(crate) epoch: u64,
    pub(crate) republished: bool,
}

impl Trigger {
    /// Reads a message that has been delivered `deliveries` times, this one included.
    pub(crate) fn read(headers: &HeaderMap, payload: &[u8], deliveries: u32, group: &Group) -> Result<Self, String> {
        let text = |name: &str| headers.get(name).map(async_nats::HeaderValue::as_str);
        let number = |name: &str| text(name).and_then(|value| value.parse::<u64>().ok());
        let body: TriggerBody = serde_json::from_slice(payload).map_err(|error| error.to_string())?;
        let base = number(header::ATTEMPT_BASE).and_then(|base| u32::try_from(base).ok()).unwrap_or(body.attempt_base);
        let attempt = base.saturating_add(deliveries);
        let max_attempts = number(header::MAX_ATTEMPTS).and_then(|max| u32::try_from(max).ok()).unwrap_or(attempt);
        let timeout = Duration::from_millis(number(header::TIMEOUT_MS).ok_or("no Ax-Timeout-Ms")?.max(1));
        Ok(Self {
            job: Job {
                run_id: body.run_id,
                task_id: body.task_id,
                group: group.clone(),
                handler: body.handler,
                kind: body.kind,
                trigger_time: body.trigger_time,
                attempt,
                max_attempts,
                timeout,
                payload: body.payload,
                upstream: body.upstream,
                traceparent: text(header::TRACEPARENT).map(ToOwned::to_owned),
                cancelled: CancellationToken::new(),
            },
            backoff: text(header::RETRY_BACKOFF).and_then(read_backoff).unwrap_or_default(),
            weight: text(header::WEIGHT)
                .and_then(|w| w.parse().ok())
                .filter(|w| (0.1..=100.0).contains(w))
                .unwrap_or(1.0),
            epoch: number(header::EPOCH).unwrap_or(0),
            republished: text(header::REPUBLISHED).is_some(),
        })
    }
}

/// Reads `initial,multiplier,max,jitter`.
fn read_backoff(value: &str) -> Option<RetryBackoff> {
    let mut parts = value.split(',').map(str::trim);
    Some(RetryBackoff {
        initial_ms: parts.next()?.parse().ok()?,
        multiplier: parts.next()?.parse().ok().filter(|m: &f64| *m >= 1.0)?,
        max_ms: parts.next()?.parse().ok()?,
        jitter_ms: parts.next()?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_are_counted_across_messages() {
        let run_id = RunId(uuid::Uuid::now_v7());
        let body = serde_json::json!({
            "run_id": run_id, "task_id": "t", "handler": "h", "trigger_time": "2026-11-30T00:00:00Z", "kind": "manual",
            "payload": {"n": 1}, "new_field": true
        });
        let mut headers = HeaderMap::new();
        for (name, value) in [
            (header::ATTEMPT_BASE, "3"),
            (header::MAX_ATTEMPTS, "7"),
            (header::TIMEOUT_MS, "1500"),
            (header::RETRY_BACKOFF, "100,2.5,60000,0"),
            (header::WEIGHT, "2.5"),
        ] {
            headers.insert(name, value);
        }
        let group = Group::new("g").unwrap();
        let trigger = Trigger::read(&headers, body.to_string().as_bytes(), 2, &group).unwrap();
        assert_eq!((trigger.job.attempt, trigger.job.max_attempts), (5, 7));
        assert_eq!(trigger.job.timeout, Duration::from_millis(1500));
        assert_eq!(trigger.backoff.delay_ms(3, 0.0), 625);
        assert!((trigger.weight - 2.5).abs() < f64::EPSILON && !trigger.republished);
        assert_eq!(trigger.job.parse::<std::collections::BTreeMap<String, u8>>().unwrap()["n"], 1);
        assert!(!trigger.job.parse::<Vec<u8>>().unwrap_err().retry);
        assert!(Trigger::read(&HeaderMap::new(), body.to_string().as_bytes(), 1, &group).is_err());
        assert!(Trigger::read(&headers, b"{}", 1, &group).is_err());
    }
}
