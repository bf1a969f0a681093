//! The connection that publishes to and deletes from AX_TRIGGERS and never comes back.
//!
//! A client that resends its buffer after a reconnect would publish past the fence: another leader may have taken over
//! in between. So this connection ends with its first interruption, and what it had not confirmed stays unconfirmed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::header::HeaderValue;
use async_trait::async_trait;
use serde::Deserialize;
use serde_json::json;

use super::api::{Api, ApiError, Failure, answer, code, order};
use super::{NatsConfig, connect, triggers};
use crate::ports::{BusError, Outgoing, PubAck, PublishError, Publisher};

/// What a PubAck may take: longer than a busy server needs, short against an election (4–9 s), in which the first
/// publish hangs.
const PUBLISHED_WITHIN: Duration = Duration::from_secs(2);
/// What ending the connection may take before it is left to itself.
const CLOSED_WITHIN: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct NatsPublisher {
    api: Api,
    stream: String,
    closed: AtomicBool,
}

#[derive(Deserialize)]
struct Ack {
    seq: u64,
    #[serde(default)]
    duplicate: bool,
}

impl NatsPublisher {
    pub(super) async fn open(config: &NatsConfig) -> Result<Self, BusError> {
        let client = connect::unrepeatable(config).await?;
        Ok(Self { api: Api::new(client), stream: config.prefix.triggers_stream(), closed: AtomicBool::new(false) })
    }
}

fn headers(list: Vec<(&'static str, String)>) -> Result<HeaderMap, PublishError> {
    let mut headers = HeaderMap::new();
    for (name, value) in list {
        let value: HeaderValue = value
            .parse()
            .map_err(|_| PublishError::Refused(format!("the header {name} would hold a line break: {value:?}")))?;
        headers.insert(name, value);
    }
    Ok(headers)
}

fn unanswered(failure: Failure) -> PublishError {
    match failure {
        Failure::Disconnected => PublishError::Closed,
        Failure::NoResponders => PublishError::Transient("no stream listens, or it has no leader".into()),
        Failure::TimedOut => PublishError::Transient("no answer in time".into()),
        Failure::Invalid(why) => PublishError::Refused(why),
    }
}

fn refused(error: &ApiError) -> PublishError {
    if error.is_transient() {
        PublishError::Transient(error.to_string())
    } else {
        PublishError::Refused(error.to_string())
    }
}

#[async_trait]
impl Publisher for NatsPublisher {
    async fn publish(&self, message: Outgoing) -> Result<PubAck, PublishError> {
        if self.is_closed() {
            return Err(PublishError::Closed);
        }
        let headers = headers(message.headers)?;
        let reply = self
            .api
            .request("publish", message.subject, Some(headers), message.payload, PUBLISHED_WITHIN)
            .await
            .map_err(unanswered)?;
        match answer::<Ack>(&reply.payload) {
            Ok(Ok(ack)) => Ok(PubAck { seq: ack.seq, duplicate: ack.duplicate }),
            Ok(Err(error)) => Err(refused(&error)),
            // Stored or not: the same id tells next time.
            Err(_) => Err(PublishError::Transient("the answer is not a PubAck".into())),
        }
    }

    async fn delete(&self, seq: u64) -> Result<bool, PublishError> {
        if self.is_closed() {
            return Err(PublishError::Closed);
        }
        // The block is not overwritten with random bytes: nothing here is secret, and it is slow.
        let body = json!({ "seq": seq, "no_erase": true });
        match order(&self.api, "delete", format!("STREAM.MSG.DELETE.{}", self.stream), &body).await {
            Ok(Ok(())) => Ok(true),
            Ok(Err(error)) if error.is(code::SEQUENCE_NOT_FOUND) || error.is(code::MESSAGE_NOT_FOUND) => Ok(false),
            // On a replicated stream the store's own words come wrapped, and absence has several of them.
            Ok(Err(error)) if error.is(code::MESSAGE_DELETE_FAILED) => {
                match triggers::message(&self.api, &self.stream, &json!({ "seq": seq })).await {
                    Ok(None) => Ok(false),
                    _ => Err(PublishError::Transient(error.to_string())),
                }
            }
            Ok(Err(error)) => Err(refused(&error)),
            Err(failure) => Err(unanswered(failure)),
        }
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire) || !self.api.is_connected()
    }

    async fn close(&self) {
        self.closed.store(true, Ordering::Release);
        let client = self.api.client();
        let ended = async {
            // Nothing else ends a connection; it has ended when a flush can no longer be handed over.
            if client.drain().await.is_ok() {
                while client.flush().await.is_ok() {}
            }
        };
        if tokio::time::timeout(CLOSED_WITHIN, ended).await.is_err() {
            tracing::warn!("the publishing connection did not end in time");
        }
    }
}
