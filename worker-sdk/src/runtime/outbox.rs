//! What a worker tells: events, confirmed by the stream, and acks, confirmed by the consumer.
//!
//! Everything is told again until it is confirmed; events carry an id, so that the stream keeps one of them. Log lines
//! and progress are told once.

use std::sync::atomic::Ordering;
use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::Request;
use async_nats::jetstream::stream::LastRawMessageErrorKind;
use async_nats::jetstream::{AckKind, Context};
use ax_shared::subjects::header;
use ax_shared::wire::{EventBody, MAX_INLINE_RESULT_BYTES};
use ax_shared::{Prefix, RunAddress};
use bytes::Bytes;
use serde_json::json;
use serde_json::value::{RawValue, to_raw_value};
use tokio::io::AsyncReadExt as _;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::hold::Hold;
use super::trigger::Trigger;
use super::{ANSWER_WITHIN, Shared};
use crate::context::{ASIDE, Aside, Attempt, LogLine, line};

/// How long an outcome is told again before the message is left to be delivered anew.
const INSIST_FOR: Duration = Duration::from_secs(120);
/// The same in a worker whose grace is over.
const INSIST_WHEN_STOPPING: Duration = Duration::from_secs(5);
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(250);
/// Attempts to have an ack confirmed; the event has told the outcome already.
const ACK_ATTEMPTS: u32 = 5;
/// How often progress is told at most.
const PROGRESS_EVERY: Duration = Duration::from_millis(500);
/// How long storing or loading a large result may take.
const OBJECT_WITHIN: Duration = Duration::from_secs(60);

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
        self.tell_as(kind, run, format!("{}:{attempt}:{kind}", run.run_id), body).await
    }

    async fn tell_as(&self, kind: &str, run: &RunAddress, id: String, body: Bytes) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(header::MSG_ID, id);
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
    /// it was not to be had, or when the run has gone to somebody else: then only a success is still news.
    pub(super) async fn insist(&self, kind: &str, run: &RunAddress, attempt: u32, body: Vec<u8>, hold: &Hold) -> bool {
        let body = Bytes::from(body);
        let mut until = Instant::now() + INSIST_FOR;
        let mut stopping = false;
        loop {
            if self.tell(kind, run, attempt, body.clone()).await {
                return true;
            }
            if self.release.is_cancelled() && !std::mem::replace(&mut stopping, true) {
                until = until.min(Instant::now() + INSIST_WHEN_STOPPING);
            }
            hold.extend(self).await;
            if Instant::now() > until || (kind != "succeeded" && !hold.is_ours()) {
                tracing::warn!(run_id = %run.run_id, kind, "the outcome could not be told; the run comes again");
                return false;
            }
            tokio::time::sleep(TRY_AGAIN_AFTER).await;
        }
    }

    /// Answers a delivery and waits for the confirmation. (async-nats' `double_ack` takes "no responders" for one.)
    pub(super) async fn answer(&self, hold: &Hold, kind: AckKind) {
        for _ in 0..ACK_ATTEMPTS {
            let Some(ack) = hold.ack() else { return };
            let request = Request::new().payload(kind.into()).timeout(Some(ANSWER_WITHIN));
            let answered = tokio::time::timeout(ANSWER_WITHIN, self.client.send_request(ack.clone(), request)).await;
            match answered {
                Ok(Ok(answer)) if answer.status.is_none() => return,
                Ok(Ok(answer)) => tracing::debug!(status = ?answer.status, "an ack was not confirmed"),
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
    pub(super) async fn result(
        &self,
        run: &RunAddress,
        result: Box<RawValue>,
        hold: &Hold,
    ) -> Result<Box<RawValue>, String> {
        let bytes = result.get().as_bytes();
        if bytes.len() <= MAX_INLINE_RESULT_BYTES {
            return Ok(result);
        }
        let name = run.run_id.to_string();
        let put = async {
            let store =
                self.jetstream.get_object_store(self.prefix.bucket("results")).await.map_err(|e| e.to_string())?;
            store.put(name.as_str(), &mut { bytes }).await.map_err(|e| e.to_string())
        };
        let put = tokio::time::timeout(OBJECT_WITHIN, put);
        let info = hold.during(self, put).await.map_err(|_| "no answer in time")??;
        to_raw_value(&json!({ "$object": name, "size": info.size, "digest": info.digest })).map_err(|e| e.to_string())
    }

    /// Tells log lines and progress of an attempt as they come, until it is `over` and everything has been told.
    pub(super) async fn tell_aside(
        &self,
        trigger: &Trigger,
        attempt: &Attempt,
        mut aside: mpsc::Receiver<Aside>,
        over: &CancellationToken,
    ) {
        let run = &trigger.facts.run;
        let mut progress = None;
        let mut told = 0_u64;
        let mut next = Instant::now();
        let mut some = Vec::new();
        let mut open = true;
        loop {
            tokio::select! {
                () = over.cancelled(), if open => {
                    aside.close();
                    open = false;
                }
                () = tokio::time::sleep_until(next), if progress.is_some() => {}
                count = aside.recv_many(&mut some, ASIDE) => open = open && count > 0,
            }
            for aside in some.drain(..) {
                match aside {
                    Aside::Log(line) => self.tell_line(run, &line).await,
                    Aside::Progress { percent, message } => progress = Some((percent, message)),
                }
            }
            let ended = !open && aside.is_empty();
            if (ended || Instant::now() >= next)
                && let Some((percent, message)) = progress.take()
            {
                told += 1;
                next = Instant::now() + PROGRESS_EVERY;
                let mut body = EventBody::new(run.run_id, trigger.facts.attempt);
                (body.percent, body.message) = (Some(percent), message);
                // An id of its own, lest the stream take the second for the first.
                let id = format!("{}:{}:progress:{told}", run.run_id, trigger.facts.attempt);
                let body = serde_json::to_vec(&body).unwrap_or_default();
                self.tell_as("progress", run, id, body.into()).await;
            }
            if ended {
                break;
            }
        }
        let dropped = attempt.dropped.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            self.tell_line(run, &line(format!("({dropped} lines came too fast and were dropped)"))).await;
        }
    }

    async fn tell_line(&self, run: &RunAddress, line: &LogLine) {
        let subject = self.prefix.log(&run.group, run.run_id);
        if let Ok(body) = serde_json::to_vec(line) {
            // Unconfirmed: a log is worth less than the time of its run.
            let told = self.client.publish(subject, body.into());
            let _ = tokio::time::timeout(ANSWER_WITHIN, told).await;
        }
    }
}

/// Loads a large result, checked against its digest.
pub(super) async fn fetch(jetstream: Context, prefix: Prefix, name: String) -> Result<Bytes, String> {
    let load = async {
        let store = jetstream.get_object_store(prefix.bucket("results")).await.map_err(|e| e.to_string())?;
        let mut object = store.get(&name).await.map_err(|e| e.to_string())?;
        let mut bytes = Vec::new();
        object.read_to_end(&mut bytes).await.map_err(|e| e.to_string())?;
        Ok(bytes.into())
    };
    tokio::time::timeout(OBJECT_WITHIN, load).await.map_err(|_| "no answer in time".to_owned())?
}
