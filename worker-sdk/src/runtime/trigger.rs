//! A trigger message, read.

use std::collections::BTreeMap;
use std::time::Duration;

use async_nats::HeaderMap;
use ax_shared::definition::RetryBackoff;
use ax_shared::subjects::header;
use ax_shared::wire::WIRE_VERSION;
use ax_shared::{Group, Handler, RunAddress, RunId, TaskId, Timestamp};
use serde::Deserialize;
use serde_json::value::{RawValue, to_raw_value};

use crate::context::Facts;
use crate::trace::Parent;

/// A trigger message.
#[derive(Debug)]
pub(crate) struct Trigger {
    pub(crate) facts: Facts,
    pub(crate) payload: Box<RawValue>,
    pub(crate) backoff: RetryBackoff,
    pub(crate) weight: f64,
    pub(crate) epoch: u64,
    pub(crate) republished: bool,
    /// Version of the wire format; what a later one means is not known here.
    pub(crate) version: u32,
    /// Not to be begun after this.
    pub(crate) start_deadline: Option<Timestamp>,
    pub(crate) parent: Parent,
}

/// The body. Its kind is a word, since a later scheduler may have kinds that this worker has never heard of.
#[derive(Deserialize)]
struct Body {
    run_id: RunId,
    task_id: TaskId,
    handler: Handler,
    trigger_time: Timestamp,
    kind: String,
    #[serde(default)]
    payload: Option<Box<RawValue>>,
    #[serde(default)]
    upstream: Option<BTreeMap<String, Box<RawValue>>>,
    #[serde(default)]
    attempt_base: u32,
}

impl Trigger {
    /// Reads a message that has been delivered `deliveries` times, this one included.
    pub(crate) fn read(headers: &HeaderMap, payload: &[u8], deliveries: u32, group: &Group) -> Result<Self, String> {
        let text = |name: &str| headers.get(name).map(async_nats::HeaderValue::as_str);
        let number = |name: &str| text(name).and_then(|value| value.parse::<u64>().ok());
        let small = |name: &str| number(name).and_then(|value| u32::try_from(value).ok());
        let body: Body = serde_json::from_slice(payload).map_err(|error| error.to_string())?;
        let attempt = small(header::ATTEMPT_BASE).unwrap_or(body.attempt_base).saturating_add(deliveries);
        let timeout = Duration::from_millis(number(header::TIMEOUT_MS).ok_or("no Ax-Timeout-Ms")?.max(1));
        let null = || to_raw_value(&()).map_err(|error| error.to_string());
        Ok(Self {
            facts: Facts {
                run: RunAddress { group: group.clone(), task_id: body.task_id, run_id: body.run_id },
                handler: body.handler,
                kind: body.kind,
                trigger_time: body.trigger_time,
                attempt,
                max_attempts: small(header::MAX_ATTEMPTS).unwrap_or(attempt),
                timeout,
                upstream: body.upstream.unwrap_or_default(),
            },
            payload: body.payload.map_or_else(null, Ok)?,
            backoff: text(header::RETRY_BACKOFF).and_then(read_backoff).unwrap_or_default(),
            weight: text(header::WEIGHT)
                .and_then(|w| w.parse().ok())
                .filter(|w| (0.1..=100.0).contains(w))
                .unwrap_or(1.0),
            epoch: number(header::EPOCH).unwrap_or(0),
            republished: text(header::REPUBLISHED).is_some(),
            version: small(header::VERSION).unwrap_or(WIRE_VERSION),
            start_deadline: text(header::START_DEADLINE).and_then(|at| at.parse().ok()),
            parent: text(header::TRACEPARENT).and_then(Parent::parse).unwrap_or_default(),
        })
    }
}

/// Reads which run a message is about, and which attempt, when only its headers can be read.
pub(super) fn address(headers: &HeaderMap, deliveries: u32, group: &Group) -> Option<(RunAddress, u32)> {
    let text = |name: &str| headers.get(name).map(async_nats::HeaderValue::as_str);
    let run_id = text(header::RUN_ID)?.parse().ok()?;
    let task_id = TaskId::new(text(header::TASK_ID)?).ok()?;
    let base: u32 = text(header::ATTEMPT_BASE).and_then(|base| base.parse().ok()).unwrap_or(0);
    Some((RunAddress { group: group.clone(), task_id, run_id }, base.saturating_add(deliveries)))
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

/// Reads the number of deliveries out of
/// `$JS.ACK.[<domain>.<account>.]<stream>.<consumer>.<deliveries>.<seq>.<delivery>.<nanoseconds>.<pending>`.
pub(super) fn deliveries(reply: &str) -> Option<u32> {
    let rest = reply.strip_prefix("$JS.ACK.")?;
    let before = if rest.split('.').count() == 7 { 2 } else { 4 };
    rest.split('.').nth(before)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(given: &[(&str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in given {
            headers.insert(*name, *value);
        }
        headers
    }

    #[test]
    fn attempts_are_counted_across_messages() {
        let run_id = RunId(uuid::Uuid::now_v7());
        let body = serde_json::json!({
            "run_id": run_id, "task_id": "t", "handler": "h", "trigger_time": "2026-11-30T00:00:00Z",
            "kind": "of_a_later_version", "payload": {"n": 9_007_199_254_740_993_u64}, "new_field": true
        });
        let headers = headers(&[
            (header::ATTEMPT_BASE, "3"),
            (header::MAX_ATTEMPTS, "7"),
            (header::TIMEOUT_MS, "1500"),
            (header::RETRY_BACKOFF, "100,2.5,60000,0"),
            (header::WEIGHT, "2.5"),
            (header::START_DEADLINE, "2026-11-30T00:05:00Z"),
        ]);
        let group = Group::new("g").unwrap();
        let trigger = Trigger::read(&headers, body.to_string().as_bytes(), 2, &group).unwrap();
        assert_eq!((trigger.facts.attempt, trigger.facts.max_attempts), (5, 7));
        assert_eq!(trigger.facts.timeout, Duration::from_millis(1500));
        assert_eq!(trigger.backoff.delay_ms(3, 0.0), 625);
        assert!((trigger.weight - 2.5).abs() < f64::EPSILON && !trigger.republished && trigger.version == 1);
        assert_eq!(trigger.start_deadline.unwrap().to_string(), "2026-11-30T00:05:00.000Z");
        assert_eq!(trigger.payload.get(), r#"{"n":9007199254740993}"#);
        assert!(Trigger::read(&HeaderMap::new(), body.to_string().as_bytes(), 1, &group).is_err());
        assert!(Trigger::read(&headers, b"{}", 1, &group).is_err());
    }

    #[test]
    fn a_payload_that_is_not_there_is_null() {
        let body = serde_json::json!({
            "run_id": RunId(uuid::Uuid::now_v7()), "task_id": "t", "handler": "h", "kind": "manual",
            "trigger_time": "2026-11-30T00:00:00Z", "upstream": null
        });
        let headers = headers(&[(header::TIMEOUT_MS, "1")]);
        let trigger = Trigger::read(&headers, body.to_string().as_bytes(), 1, &Group::new("g").unwrap()).unwrap();
        assert_eq!(trigger.payload.get(), "null");
        assert!(trigger.facts.upstream.is_empty());
    }

    #[test]
    fn deliveries_are_read_from_both_forms_of_a_reply_subject() {
        assert_eq!(deliveries("$JS.ACK.AX_TRIGGERS.c.3.42.7.1790000000123456789.0"), Some(3));
        assert_eq!(deliveries("$JS.ACK._.hash.AX_TRIGGERS.c.3.42.7.1790000000123456789.0.x"), Some(3));
        assert_eq!(deliveries("_INBOX.x"), None);
    }
}
