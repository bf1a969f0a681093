//! Reading AX_EVENTS: what a message of the stream tells about a run.
//!
//! Nothing that a worker or a server sends may stop the reader: what cannot be understood is [`Told::Malformed`],
//! counted and passed over.

use ax_shared::subjects::parse_address;
use ax_shared::wire::{EventBody, WireError};
use ax_shared::{Prefix, RunAddress, Timestamp};
use serde::Deserialize;

use crate::core::run::SignalKind;
use crate::core::settle::RunEvent;
use crate::ports::StreamMessage;

/// Longest error text that is kept, in characters.
const MAX_ERROR_CHARS: usize = 4000;

/// What a message tells.
#[derive(Debug, Clone, PartialEq)]
pub enum Told {
    /// A worker about its run.
    Worker {
        /// The run, as the subject names it.
        run: RunAddress,
        /// What.
        event: RunEvent,
    },
    /// The server about a message of AX_TRIGGERS.
    Server {
        /// Its sequence there.
        seq: u64,
        /// What.
        kind: SignalKind,
        /// Deliveries so far.
        deliveries: u32,
        /// When.
        at: Timestamp,
        /// When the delivery was made that was acked, if told.
        delivered_at: Option<Timestamp>,
    },
    /// A kind that this version does not know: passed over, as every reader must.
    Unknown,
    /// Not understood.
    Malformed(String),
}

#[derive(Deserialize)]
struct ServerEvent {
    stream_seq: u64,
    #[serde(default)]
    deliveries: u32,
    /// Nanoseconds from delivery to ack.
    #[serde(default)]
    ack_time: i64,
    timestamp: Timestamp,
}

/// Reads one message.
#[must_use]
pub fn read(prefix: &Prefix, message: &StreamMessage) -> Told {
    if let Some(rest) = message.subject.strip_prefix("$JS.EVENT.") {
        return read_server(rest, message);
    }
    let rest = message.subject.strip_prefix(prefix.as_str()).and_then(|s| s.strip_prefix(".event."));
    let Some((kind, rest)) = rest.and_then(|s| s.split_once('.')) else { return Told::Unknown };
    let Some(address) = parse_address(rest) else {
        return Told::Malformed("the subject does not end in group, task id and run id".into());
    };
    let body: EventBody = match serde_json::from_slice(&message.payload) {
        Ok(body) => body,
        Err(e) => return Told::Malformed(format!("{kind}: {e}")),
    };
    if body.run_id != address.run_id {
        return Told::Malformed(format!("{kind}: run_id of subject and body differ"));
    }
    if body.attempt == 0 || body.attempt > 1_000_000 {
        return Told::Malformed(format!("{kind}: attempt {} is out of range", body.attempt));
    }
    match event_of(kind, body, message.at) {
        Some(event) => Told::Worker { run: address, event },
        None => Told::Unknown,
    }
}

fn event_of(kind: &str, body: EventBody, stored_at: Timestamp) -> Option<RunEvent> {
    let attempt = body.attempt;
    let at = body.finished_at.or(body.at).unwrap_or(stored_at);
    let timed_out = matches!(&body.error, Some(WireError::Kinded { kind, .. }) if kind == "timeout");
    Some(match kind {
        "started" => RunEvent::Started { attempt, worker_id: body.worker_id, at: body.at.unwrap_or(stored_at) },
        "progress" => RunEvent::Progress { attempt },
        "succeeded" => RunEvent::Succeeded {
            attempt,
            result: body.result,
            worker_id: body.worker_id,
            started_at: body.started_at,
            at,
        },
        "failed" => RunEvent::Failed {
            attempt,
            error: short(body.error.map_or_else(|| "failed".to_owned(), |e| e.text())),
            retry: body.retry.unwrap_or(true),
            timed_out,
            worker_id: body.worker_id,
            at,
        },
        "released" => RunEvent::Released { attempt, reason: body.reason.map(short), at },
        "cancelled" => RunEvent::Cancelled { attempt, at },
        _ => return None,
    })
}

fn short(text: String) -> String {
    if text.chars().count() <= MAX_ERROR_CHARS {
        return text;
    }
    text.chars().take(MAX_ERROR_CHARS).chain(['…']).collect()
}

fn read_server(rest: &str, message: &StreamMessage) -> Told {
    let kind = if rest.starts_with("METRIC.CONSUMER.ACK.") {
        SignalKind::Acked
    } else if rest.starts_with("ADVISORY.CONSUMER.MAX_DELIVERIES.") {
        SignalKind::MaxDeliveries
    } else if rest.starts_with("ADVISORY.CONSUMER.MSG_NAKED.") {
        SignalKind::Naked
    } else if rest.starts_with("ADVISORY.CONSUMER.MSG_TERMINATED.") {
        SignalKind::Terminated
    } else {
        return Told::Unknown;
    };
    match serde_json::from_slice::<ServerEvent>(&message.payload) {
        Ok(e) => Told::Server {
            seq: e.stream_seq,
            kind,
            deliveries: e.deliveries,
            at: e.timestamp,
            delivered_at: (e.ack_time > 0).then(|| e.timestamp.plus_millis(-(e.ack_time / 1_000_000))),
        },
        Err(e) => Told::Malformed(format!("{}: {e}", kind.as_str())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn message(subject: &str, body: &serde_json::Value) -> StreamMessage {
        StreamMessage {
            seq: 1,
            subject: subject.into(),
            headers: Default::default(),
            payload: body.to_string().into(),
            at: Timestamp::from_millis(5),
        }
    }

    const RUN: &str = "018f0000-0000-7000-8000-000000000001";

    #[test]
    fn a_workers_event_is_read_with_defaults() {
        let subject = format!("ax.event.failed.g.a.b.{RUN}");
        let told = read(&Prefix::default(), &message(&subject, &json!({"run_id": RUN, "attempt": 2, "new": 1})));
        let Told::Worker { run, event: RunEvent::Failed { attempt, error, retry, at, .. } } = told else {
            panic!("{told:?}")
        };
        assert_eq!((run.run_id.to_string().as_str(), attempt, error.as_str(), retry), (RUN, 2, "failed", true));
        assert_eq!(at.as_millis(), 5);
    }

    #[test]
    fn nothing_that_is_sent_can_do_more_than_be_counted() {
        let good = format!("ax.event.started.g.a.{RUN}");
        for (subject, body) in [
            (good.as_str(), json!({"run_id": RUN})),
            (&good, json!({"run_id": RUN, "attempt": 0})),
            (&good, json!({"run_id": RUN, "attempt": -1})),
            (&good, json!({"run_id": "018f0000-0000-7000-8000-000000000002", "attempt": 1})),
            (&good, json!("text")),
            ("ax.event.started.g.a.x", json!({"run_id": RUN, "attempt": 1})),
            ("ax.event.started.g", json!({"run_id": RUN, "attempt": 1})),
            ("$JS.EVENT.METRIC.CONSUMER.ACK.AX_TRIGGERS.c", json!({"stream_seq": "x"})),
        ] {
            assert!(
                matches!(read(&Prefix::default(), &message(subject, &body)), Told::Malformed(_)),
                "{subject} {body}"
            );
        }
        let unknown = format!("ax.event.dreamt.g.a.{RUN}");
        assert_eq!(read(&Prefix::default(), &message(&unknown, &json!({"run_id": RUN, "attempt": 1}))), Told::Unknown);
    }

    #[test]
    fn an_ack_metric_tells_when_the_delivery_was_made() {
        let body = json!({"type": "io.nats.jetstream.metric.v1.consumer_ack", "stream_seq": 7, "deliveries": 2,
            "ack_time": 1_500_000_000i64, "timestamp": "2026-11-30T22:00:10.5Z", "consumer_seq": 3});
        let told = read(&Prefix::default(), &message("$JS.EVENT.METRIC.CONSUMER.ACK.AX_TRIGGERS.g-q-t1r0", &body));
        let Told::Server { seq, kind, deliveries, delivered_at, .. } = told else { panic!("{told:?}") };
        assert_eq!((seq, kind, deliveries), (7, SignalKind::Acked, 2));
        assert_eq!(delivered_at.unwrap().to_string(), "2026-11-30T22:00:09.000Z");
    }
}
