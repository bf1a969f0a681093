//! What a worker tells: events, confirmed by the stream, and acks, confirmed by the consumer.
//!
//! Events are told again until they are confirmed; they carry an id, so that the stream keeps one of them. An answer to a
//! delivery is repeated only while it cannot be taken for one to the next delivery. Log lines and progress are told once.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_nats::jetstream::stream::LastRawMessageErrorKind;
use async_nats::jetstream::{AckKind, Context};
use async_nats::{HeaderMap, Request, RequestErrorKind};
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
use crate::clock::Boot;
use crate::context::{ASIDE, Aside, Attempt, LogLine, line};

/// How long an outcome is told again before the message is left to be delivered anew.
const INSIST_FOR: Duration = Duration::from_secs(120);
/// The same in a worker whose grace is over.
const INSIST_WHEN_STOPPING: Duration = Duration::from_secs(5);
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(250);
/// How long an answer is sent again; the event has told the outcome already.
const ANSWER_FOR: Duration = Duration::from_secs(10);
/// How long log lines and progress are told after the end of an attempt; the rest is dropped.
const DRAIN_WITHIN: Duration = Duration::from_millis(1500);
/// How long it may take to tell how many were dropped.
const COUNT_WITHIN: Duration = Duration::from_millis(500);
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
    ///
    /// An answer whose confirmation is lost has perhaps been heard. After an ACK or a TERM there is no next delivery, so
    /// it is sent again; after a NAK there may be one, which a repetition would hit: that is left to the ack deadline.
    pub(super) async fn answer(&self, hold: &Hold, kind: AckKind) {
        let until = Instant::now() + ANSWER_FOR;
        let mut perhaps_heard: Option<Boot> = None;
        while Instant::now() < until {
            let Some(ack) = hold.ack() else { return };
            if !perhaps_heard.is_none_or(|first| may_repeat(&kind, first.elapsed())) {
                return;
            }
            if self.is_connected() {
                let sent = Boot::now();
                let request = Request::new().payload(kind.into()).timeout(Some(ANSWER_WITHIN));
                let answered = self.client.send_request(ack.clone(), request);
                match tokio::time::timeout(ANSWER_WITHIN, answered).await {
                    Ok(Ok(answer)) if answer.status.is_none() => return,
                    Ok(Ok(answer)) => {
                        perhaps_heard.get_or_insert(sent);
                        tracing::debug!(status = ?answer.status, "an answer was not confirmed");
                    }
                    // There was nobody to hear it.
                    Ok(Err(error)) if error.kind() == RequestErrorKind::NoResponders => {
                        tracing::debug!(%error, "an answer was not confirmed");
                    }
                    Ok(Err(error)) => {
                        perhaps_heard.get_or_insert(sent);
                        tracing::debug!(%error, "an answer was not confirmed");
                    }
                    Err(_) => {
                        perhaps_heard.get_or_insert(sent);
                        tracing::debug!("an answer was not confirmed in time");
                    }
                }
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

    /// Tells log lines and progress of an attempt as they come, until it is `over` and what waits has been told, or was
    /// not to be told in a short time.
    pub(super) async fn tell_aside(
        &self,
        trigger: &Trigger,
        attempt: &Attempt,
        mut aside: mpsc::Receiver<Aside>,
        over: &CancellationToken,
    ) {
        let mut some = VecDeque::new();
        let enough = async {
            over.cancelled().await;
            tokio::time::sleep(DRAIN_WITHIN).await;
        };
        tokio::select! {
            biased;
            () = self.tell_all_aside(trigger, &mut aside, &mut some, over) => {}
            () = enough => {}
        }
        aside.close();
        while let Ok(one) = aside.try_recv() {
            some.push_back(one);
        }
        let left = some.iter().filter(|one| matches!(one, Aside::Log(_))).count();
        let dropped = attempt.dropped.swap(0, Ordering::Relaxed) + left as u64;
        if dropped > 0 {
            let count = line(format!("({dropped} lines came too fast and were dropped)"));
            let _ = tokio::time::timeout(COUNT_WITHIN, self.tell_line(&trigger.facts.run, &count)).await;
        }
    }

    /// The same, however long it takes. What was received and not told yet stays in `some`.
    async fn tell_all_aside(
        &self,
        trigger: &Trigger,
        aside: &mut mpsc::Receiver<Aside>,
        some: &mut VecDeque<Aside>,
        over: &CancellationToken,
    ) {
        let run = &trigger.facts.run;
        let mut progress = None;
        let mut told = 0_u64;
        let mut next = Instant::now();
        let mut received = Vec::new();
        let mut open = true;
        loop {
            tokio::select! {
                () = over.cancelled(), if open => {
                    aside.close();
                    open = false;
                }
                () = tokio::time::sleep_until(next), if progress.is_some() => {}
                count = aside.recv_many(&mut received, ASIDE) => open = open && count > 0,
            }
            some.extend(received.drain(..));
            while let Some(one) = some.front() {
                match one {
                    Aside::Log(line) => self.tell_line(run, line).await,
                    Aside::Progress { percent, message } => progress = Some((*percent, message.clone())),
                }
                some.pop_front();
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
                return;
            }
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

/// Whether an answer that was perhaps heard `ago` may be sent once more: not when it may arrive after the next delivery.
fn may_repeat(kind: &AckKind, ago: Duration) -> bool {
    match kind {
        AckKind::Ack | AckKind::Term => true,
        AckKind::Nak(Some(wait)) => ago + ANSWER_WITHIN < *wait,
        AckKind::Nak(None) | AckKind::Progress | AckKind::Next => false,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_repeated_only_while_there_can_be_no_next_delivery() {
        let long_ago = Duration::from_secs(3600);
        assert!(may_repeat(&AckKind::Ack, long_ago) && may_repeat(&AckKind::Term, long_ago));
        assert!(!may_repeat(&AckKind::Nak(None), Duration::ZERO));
        let in_five = AckKind::Nak(Some(Duration::from_secs(5)));
        assert!(may_repeat(&in_five, Duration::from_millis(2900)));
        assert!(!may_repeat(&in_five, Duration::from_secs(3)));
    }
}
