//! The one ordered reader of AX_EVENTS.
//!
//! An ephemeral push consumer without acks, with flow control and heartbeats. Every delivery is numbered, so that a gap
//! is seen at the next message or heartbeat; then, and after any interruption of the connection, the stream ends with
//! an error and the caller begins anew from what it has settled. (async-nats' own ordered consumer mends such gaps by
//! itself, and restarts from the beginning of the stream when that happens before the first message.)

use std::sync::atomic::Ordering;
use std::time::Duration;

use async_nats::{Message, StatusCode, Subscriber};
use ax_shared::Timestamp;
use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt};
use serde_json::json;
use uuid::Uuid;

use super::NatsBus;
use super::api::{Api, order};
use crate::ports::{BusError, StreamMessage};

/// How often the server shows that an idle consumer lives.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Silence after which it is taken for dead: two heartbeats missed.
const SILENCE: Duration = Duration::from_millis(2500);
/// When the server removes a consumer that nobody reads.
const ABANDONED_AFTER: Duration = Duration::from_secs(5);

impl NatsBus {
    pub(super) async fn open_events(
        &self,
        after: u64,
    ) -> Result<BoxStream<'static, Result<StreamMessage, BusError>>, BusError> {
        let stream = self.config.prefix.events_stream();
        let name = format!("ax-settle-{}", Uuid::now_v7().simple());
        let inbox = self.api.client().new_inbox();
        let connects = connects(&self.api);
        let messages = self.api.subscribe(inbox.clone()).await?;
        let nanos = |span: Duration| u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        let body = json!({
            "stream_name": stream,
            "action": "create",
            "config": {
                "name": name,
                "description": "reads what workers and the server tell about runs",
                "deliver_subject": inbox,
                "deliver_policy": "by_start_sequence",
                "opt_start_seq": after + 1,
                "replay_policy": "instant",
                "ack_policy": "none",
                "max_deliver": 1,
                "flow_control": true,
                "idle_heartbeat": nanos(HEARTBEAT),
                "inactive_threshold": nanos(ABANDONED_AFTER),
                "num_replicas": 1,
                "mem_storage": true,
            },
        });
        order(&self.api, "events_open", format!("CONSUMER.CREATE.{stream}.{name}"), &body)
            .await?
            .map_err(|error| error.into_bus_error(&format!("read {stream}")))?;
        let reader = Reader { api: self.api.clone(), messages, connects, delivered: 0, after };
        Ok(stream::unfold(Some(reader), |reader| async {
            let mut reader = reader?;
            match reader.next().await {
                Ok(message) => Some((Ok(message), Some(reader))),
                Err(error) => Some((Err(error), None)),
            }
        })
        .boxed())
    }
}

fn connects(api: &Api) -> u64 {
    api.client().statistics().connects.load(Ordering::Relaxed)
}

struct Reader {
    api: Api,
    messages: Subscriber,
    /// Number of connections so far when reading began.
    connects: u64,
    /// Number of the last delivery.
    delivered: u64,
    after: u64,
}

impl Reader {
    async fn next(&mut self) -> Result<StreamMessage, BusError> {
        loop {
            // While messages are there, no timer is set.
            let next = match self.messages.next().now_or_never() {
                Some(next) => next,
                None => tokio::time::timeout(SILENCE, self.messages.next())
                    .await
                    .map_err(|_| lost("the server has been silent"))?,
            };
            let message = next.ok_or_else(|| lost("the connection has ended"))?;
            if connects(&self.api) != self.connects {
                return Err(lost("the connection was interrupted"));
            }
            match message.status {
                None => {}
                Some(StatusCode::IDLE_HEARTBEAT) => {
                    self.beat(message).await?;
                    continue;
                }
                Some(status) => return Err(lost(&format!("the server ended it with status {status}"))),
            }
            let place = message.reply.as_deref().and_then(Place::parse);
            let place = place.ok_or_else(|| lost("a message has no place in the stream"))?;
            if place.delivery != self.delivered + 1 {
                return Err(lost("messages are missing"));
            }
            self.delivered = place.delivery;
            if place.seq > self.after {
                return Ok(read(message, place));
            }
        }
    }

    async fn beat(&self, message: Message) -> Result<(), BusError> {
        let header = |name: &str| message.headers.as_ref().and_then(|headers| headers.get(name));
        if let Some(reply) = &message.reply {
            // Flow control: tells the server that everything before it has been taken.
            self.api.send(reply.to_string(), bytes::Bytes::new()).await;
        } else if let Some(stalled) = header("Nats-Consumer-Stalled") {
            self.api.send(stalled.as_str().to_owned(), bytes::Bytes::new()).await;
        }
        let last = header("Nats-Last-Consumer").and_then(|value| value.as_str().parse::<u64>().ok());
        if last.is_some_and(|last| last > self.delivered) {
            return Err(lost("messages are missing at the end"));
        }
        Ok(())
    }
}

fn lost(why: &str) -> BusError {
    BusError::Unavailable(format!("reading AX_EVENTS has to begin anew: {why}"))
}

fn read(message: Message, place: Place) -> StreamMessage {
    let headers = message.headers.map(|headers| {
        let first = headers.iter().filter_map(|(name, values)| Some((name.to_string(), values.first()?.to_string())));
        first.collect()
    });
    StreamMessage {
        seq: place.seq,
        subject: message.subject.to_string(),
        headers: headers.unwrap_or_default(),
        payload: message.payload,
        at: place.at,
    }
}

/// What the reply subject of a delivery says.
#[derive(Debug, PartialEq)]
struct Place {
    seq: u64,
    delivery: u64,
    at: Timestamp,
}

impl Place {
    /// Reads `$JS.ACK.[<domain>.<account>.]<stream>.<consumer>.<deliveries>.<seq>.<delivery>.<nanoseconds>.<pending>`;
    /// further tokens may follow the long form (ADR-15 of NATS).
    fn parse(reply: &str) -> Option<Self> {
        let rest = reply.strip_prefix("$JS.ACK.")?;
        let before = if rest.split('.').count() == 7 { 3 } else { 5 };
        let mut tokens = rest.split('.').skip(before);
        let seq = tokens.next()?.parse().ok()?;
        let delivery = tokens.next()?.parse().ok()?;
        let nanos: i64 = tokens.next()?.parse().ok()?;
        Some(Self { seq, delivery, at: Timestamp::from_millis(nanos.div_euclid(1_000_000)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_a_reply_subject_are_read() {
        let place = Some(Place { seq: 42, delivery: 7, at: Timestamp::from_millis(1_790_000_000_123) });
        assert_eq!(Place::parse("$JS.ACK.AX_EVENTS.name.1.42.7.1790000000123456789.0"), place);
        assert_eq!(Place::parse("$JS.ACK._.hash.AX_EVENTS.name.1.42.7.1790000000123456789.0"), place);
        assert_eq!(Place::parse("$JS.ACK.hub.hash.AX_EVENTS.name.1.42.7.1790000000123456789.0.x.y"), place);
        assert_eq!(Place::parse("_INBOX.a"), None);
    }
}
