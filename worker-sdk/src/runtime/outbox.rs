//! What a worker tells: events, confirmed by the stream, and acks, confirmed by the consumer.
//!
//! Everything is told again until it is confirmed; events carry an id, so that the stream keeps one of them.

use std::time::Duration;

use async_nats::jetstream::AckKind;
use async_nats::jetstream::stream::LastRawMessageErrorKind;
use async_nats::{HeaderMap, Request, Subject};
use ax_shared::RunAddress;
use ax_shared::subjects::header;
use ax_shared::wire::{EventBody, MAX_INLINE_RESULT_BYTES};
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{ANSWER_WITHIN, Shared};

/// How long an outcome is told again before the message is left to be delivered anew.
const INSIST_FOR: Duration = Duration::from_secs(120);
/// The same in a worker whose grace is over.
const INSIST_WHEN_STOPPING: Duration = Duration::from_secs(5);
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(250);
/// Attempts to have an ack confirmed; the event has told the outcome already.
const ACK_ATTEMPTS: u32 = 5;

/// What is known about an earlier success of a run.
pub(super) enum Earlier {
    None,
    /// It succeeded: what was told.
    Success(Box<EventBody>),
    /// Nobody says.
    Unknown,
}

impl Shared {
    /// Tells an event once; whether it was confirmed.
    pub(super) async fn tell(&self, kind: &str, run: &RunAddress, attempt: u32, body: Bytes) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(header::MSG_ID, format!("{}:{attempt}:{kind}", run.run_id));
        let subject = self.prefix.event(kind, run);
        let told = async { self.jetstream.publish_with_headers(subject, headers, body).await?.await };
        match tokio::time::timeout(ANSWER_WITHIN, told).await {
            Ok(Ok(_)) => true,
            Ok(Err(error)) => {
                tracing::debug!(run_id = %run.run_id, kind, %error, "an event was not stored");
                false
            }
            Err(_) => false,
        }
    }

    /// Tells an outcome until it is confirmed, and keeps the message from being delivered again meanwhile. False when
    /// it was not to be had.
    pub(super) async fn insist(&self, kind: &str, run: &RunAddress, body: &EventBody, ack: Option<&Subject>) -> bool {
        let Ok(bytes) = serde_json::to_vec(body) else { return false };
        let bytes = Bytes::from(bytes);
        let mut until = Instant::now() + INSIST_FOR;
        let mut stopping = false;
        loop {
            if self.tell(kind, run, body.attempt, bytes.clone()).await {
                return true;
            }
            if self.release.is_cancelled() && !std::mem::replace(&mut stopping, true) {
                until = until.min(Instant::now() + INSIST_WHEN_STOPPING);
            }
            if Instant::now() > until {
                tracing::warn!(run_id = %run.run_id, kind, "the outcome could not be told; the run comes again");
                return false;
            }
            self.hold(ack).await;
            tokio::time::sleep(TRY_AGAIN_AFTER).await;
        }
    }

    /// Lets the ack deadline begin anew.
    pub(super) async fn hold(&self, ack: Option<&Subject>) {
        if let Some(ack) = ack {
            // Unconfirmed: should it be lost, the message is delivered again, and the success found.
            let held = self.client.publish(ack.clone(), AckKind::Progress.into());
            let _ = tokio::time::timeout(ANSWER_WITHIN, held).await;
        }
    }

    /// Answers a delivery and waits for the confirmation. (async-nats' `double_ack` takes "no responders" for one.)
    pub(super) async fn answer(&self, ack: Option<&Subject>, kind: AckKind) {
        let Some(ack) = ack else { return };
        for _ in 0..ACK_ATTEMPTS {
            let request = Request::new().payload(kind.into()).timeout(Some(ANSWER_WITHIN));
            let answered = tokio::time::timeout(ANSWER_WITHIN, self.client.send_request(ack.clone(), request)).await;
            match answered {
                Ok(Ok(_)) => return,
                Ok(Err(error)) => tracing::debug!(%error, "an ack was not confirmed"),
                Err(_) => tracing::debug!("an ack was not answered"),
            }
            tokio::time::sleep(TRY_AGAIN_AFTER).await;
        }
    }

    /// Looks for a success of the run that was told before.
    pub(super) async fn earlier_success(&self, run: &RunAddress) -> Earlier {
        let subject = self.prefix.event("succeeded", run);
        // From the stream's leader: a replica may not have it yet.
        let look = async {
            let stream = self.jetstream.get_stream_no_info(self.prefix.events_stream()).await.ok()?;
            Some(stream.get_last_raw_message_by_subject(&subject).await)
        };
        match tokio::time::timeout(2 * ANSWER_WITHIN, look).await {
            Ok(Some(Ok(message))) => match serde_json::from_slice(&message.payload) {
                Ok(body) => Earlier::Success(Box::new(body)),
                // Not what a worker of ours tells: nothing to rely on.
                Err(_) => Earlier::None,
            },
            Ok(Some(Err(error))) if error.kind() == LastRawMessageErrorKind::NoMessageFound => Earlier::None,
            _ => Earlier::Unknown,
        }
    }

    /// The result as it goes into the event: itself, or where it is in the object store when it is large.
    pub(super) async fn result(&self, run: &RunAddress, result: Value) -> Result<Value, String> {
        let bytes = serde_json::to_vec(&result).map_err(|error| error.to_string())?;
        if bytes.len() <= MAX_INLINE_RESULT_BYTES {
            return Ok(result);
        }
        let name = run.run_id.to_string();
        let put = async {
            let store =
                self.jetstream.get_object_store(self.prefix.bucket("results")).await.map_err(|e| e.to_string())?;
            store.put(name.as_str(), &mut bytes.as_slice()).await.map_err(|e| e.to_string())
        };
        let info = tokio::time::timeout(Duration::from_secs(60), put).await.map_err(|_| "no answer in time")??;
        Ok(json!({ "$object": name, "size": info.size, "digest": info.digest }))
    }
}
