//! One delivery, from receipt to ack.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use async_nats::jetstream::AckKind;
use async_nats::{HeaderMap, Message, Subject};
use ax_shared::wire::EventBody;
use ax_shared::{RunId, Timestamp};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::capacity::Slot;
use super::outbox::Earlier;
use super::{ANSWER_WITHIN, Shared};
use crate::Failure;
use crate::job::{Job, Trigger};
use crate::worker::Run;

/// How long a handler may take to stop by itself before it is dropped. With an ack deadline two seconds past the
/// timeout, as much is left to tell the outcome.
const STOP_WITHIN: Duration = Duration::from_secs(1);
/// Wait before a run that this worker cannot execute is delivered again, perhaps to another.
const UNKNOWN_HANDLER_AFTER: Duration = Duration::from_secs(5);
/// Attempts after which nobody is expected to know the handler any more.
const UNKNOWN_HANDLER_ATTEMPTS: u32 = 10;
/// Wait before a run is delivered again of which nobody could say whether it has succeeded.
const DOUBT_AFTER: Duration = Duration::from_secs(5);

/// How an attempt ended.
enum End {
    Succeeded(Value),
    Failed(Failure),
    Cancelled,
    /// The worker stops.
    Released,
}

/// A message that was delivered to this worker.
pub(super) struct Delivery {
    pub(super) headers: HeaderMap,
    pub(super) payload: bytes::Bytes,
    pub(super) ack: Option<Subject>,
    pub(super) deliveries: u32,
}

impl Delivery {
    pub(super) fn of(message: Message) -> Self {
        let deliveries = message.reply.as_deref().and_then(deliveries).unwrap_or(1);
        let headers = message.headers.unwrap_or_default();
        Self { headers, payload: message.payload, ack: message.reply, deliveries }
    }
}

/// Reads the number of deliveries out of
/// `$JS.ACK.[<domain>.<account>.]<stream>.<consumer>.<deliveries>.<seq>.<delivery>.<nanoseconds>.<pending>`.
fn deliveries(reply: &str) -> Option<u32> {
    let rest = reply.strip_prefix("$JS.ACK.")?;
    let before = if rest.split('.').count() == 7 { 2 } else { 4 };
    rest.split('.').nth(before)?.parse().ok()
}

/// Entry in the list of what runs, removed when dropped.
struct Running {
    shared: Arc<Shared>,
    run_id: RunId,
}

impl Running {
    fn enter(shared: &Arc<Shared>, run_id: RunId, cancel: CancellationToken) -> Self {
        shared.running().insert(run_id, cancel);
        Self { shared: shared.clone(), run_id }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.shared.running().remove(&self.run_id);
    }
}

pub(super) async fn execute(shared: Arc<Shared>, delivery: Delivery, mut slot: Slot) {
    let received = Instant::now();
    let ack = delivery.ack.as_ref();
    let trigger = match Trigger::read(&delivery.headers, &delivery.payload, delivery.deliveries, &shared.group) {
        Ok(trigger) => trigger,
        Err(error) => {
            tracing::warn!(%error, "a message is not a trigger and is ended");
            return shared.answer(ack, AckKind::Term).await;
        }
    };
    slot.shrink(trigger.weight);
    let job = &trigger.job;
    let run = job.address();
    let cancel = CancellationToken::new();
    let _running = Running::enter(&shared, job.run_id, cancel.clone());

    let highest = shared.epoch.fetch_max(trigger.epoch, Ordering::Relaxed);
    if delivery.deliveries > 1 || trigger.republished || trigger.epoch < highest {
        match shared.earlier_success(&run).await {
            Earlier::None => {}
            Earlier::Success(told) => {
                // Its first telling may have been lost with a stream, or never been read: told again as it was.
                if shared.insist("succeeded", &run, &told, ack).await {
                    shared.answer(ack, AckKind::Ack).await;
                }
                return;
            }
            Earlier::Unknown => return shared.answer(ack, AckKind::Nak(Some(DOUBT_AFTER))).await,
        }
    }

    let Some(handler) = shared.handlers.get(&job.handler).cloned() else {
        return refuse(&shared, &trigger, &delivery).await;
    };

    let mut event = EventBody::new(job.run_id, job.attempt);
    event.worker_id = Some(shared.worker_id.clone());
    let started_at = now();
    event.at = Some(started_at);
    let started = serde_json::to_vec(&event).unwrap_or_default();
    tracing::info!(run_id = %job.run_id, task_id = %job.task_id, attempt = job.attempt, "run started");
    // Told beside the work, which does not wait for it; but confirmed or lost before the outcome is told.
    let (_, end) = tokio::join!(
        shared.tell("started", &run, job.attempt, started.into()),
        attempt(&shared, handler, job.clone(), &cancel)
    );
    event.at = None;
    let finished_at = now();
    if received.elapsed() + ANSWER_WITHIN >= job.timeout {
        // The deadline is near, and the outcome is not told yet.
        shared.hold(ack).await;
    }
    let (kind, answer) = match end {
        End::Succeeded(result) => match shared.result(&run, result).await {
            Ok(result) => {
                (event.started_at, event.finished_at) = (Some(started_at), Some(finished_at));
                event.result = Some(result);
                ("succeeded", AckKind::Ack)
            }
            Err(why) => {
                let failure = Failure::retry(format!("the result cannot be stored: {why}"));
                failed(&trigger, &mut event, failure, finished_at)
            }
        },
        End::Failed(failure) => failed(&trigger, &mut event, failure, finished_at),
        End::Cancelled => {
            event.at = Some(finished_at);
            ("cancelled", AckKind::Term)
        }
        End::Released => {
            event.reason = Some("the worker stops".into());
            ("released", AckKind::Nak(None))
        }
    };
    tracing::info!(run_id = %job.run_id, task_id = %job.task_id, attempt = job.attempt, outcome = kind, "run ended");
    if shared.insist(kind, &run, &event, ack).await {
        shared.answer(ack, answer).await;
    }
}

/// Fills in a `failed` event and says how the message is answered: another attempt, or none.
fn failed(trigger: &Trigger, event: &mut EventBody, failure: Failure, at: Timestamp) -> (&'static str, AckKind) {
    let job = &trigger.job;
    event.finished_at = Some(at);
    event.error = Some(failure.error);
    event.retry = Some(failure.retry);
    event.retry_after_ms = failure.retry_after.map(|wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
    if !failure.retry || job.attempt >= job.max_attempts {
        return ("failed", AckKind::Term);
    }
    let wait =
        failure.retry_after.unwrap_or_else(|| Duration::from_millis(trigger.backoff.delay_ms(job.attempt, random())));
    ("failed", AckKind::Nak(Some(wait)))
}

/// Hands back a run whose handler this worker does not have; after many deliveries it is ended.
async fn refuse(shared: &Shared, trigger: &Trigger, delivery: &Delivery) {
    let job = &trigger.job;
    let mut event = EventBody::new(job.run_id, job.attempt);
    event.worker_id = Some(shared.worker_id.clone());
    let why = format!("this worker has no handler {}", job.handler);
    tracing::warn!(run_id = %job.run_id, task_id = %job.task_id, handler = %job.handler, "no such handler");
    let (kind, answer) = if job.attempt < UNKNOWN_HANDLER_ATTEMPTS {
        event.reason = Some(why);
        ("released", AckKind::Nak(Some(UNKNOWN_HANDLER_AFTER)))
    } else {
        let failure = Failure::give_up(why).of_kind("unknown_handler");
        failed(trigger, &mut event, failure, now())
    };
    let ack = delivery.ack.as_ref();
    if shared.insist(kind, &job.address(), &event, ack).await {
        shared.answer(ack, answer).await;
    }
}

/// Runs the handler under its timeout.
async fn attempt(shared: &Shared, handler: Run, job: Job, cancel: &CancellationToken) -> End {
    let timeout = job.timeout;
    let flag = job.cancelled.clone();
    // A task of its own: a panic ends it alone.
    let mut task = tokio::spawn(async move { handler(job).await });
    let why = tokio::select! {
        biased;
        ended = &mut task => return finished(ended),
        () = tokio::time::sleep(timeout) => {
            End::Failed(Failure::retry(format!("no result within {} ms", timeout.as_millis())).of_kind("timeout"))
        }
        () = cancel.cancelled() => End::Cancelled,
        () = shared.release.cancelled() => End::Released,
    };
    flag.cancel();
    if let Ok(ended) = tokio::time::timeout(STOP_WITHIN, &mut task).await {
        // What it did in its last moment counts only if it is a success, and not after its time.
        if let (End::Released | End::Cancelled, end @ End::Succeeded(_)) = (&why, finished(ended)) {
            return end;
        }
        return why;
    }
    task.abort();
    // Until it is dropped it may still act; a handler that never awaits cannot be stopped.
    if tokio::time::timeout(STOP_WITHIN, task).await.is_err() {
        tracing::warn!("a handler does not stop: it blocks its thread");
    }
    why
}

fn finished(ended: Result<Result<Value, Failure>, tokio::task::JoinError>) -> End {
    match ended {
        Ok(Ok(result)) => End::Succeeded(result),
        Ok(Err(failure)) => End::Failed(failure),
        Err(error) => {
            let why = match error.try_into_panic() {
                Ok(panic) => panic
                    .downcast_ref::<&str>()
                    .map(|text| (*text).to_owned())
                    .or_else(|| panic.downcast_ref::<String>().cloned())
                    .unwrap_or_default(),
                Err(error) => error.to_string(),
            };
            End::Failed(Failure::retry(why).of_kind("panic"))
        }
    }
}

fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_millis(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}

/// 0.0..1.0, from the random half of a fresh UUID.
fn random() -> f64 {
    let bits = uuid::Uuid::now_v7().as_u128() as u32;
    f64::from(bits) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deliveries_are_read_from_both_forms_of_a_reply_subject() {
        assert_eq!(deliveries("$JS.ACK.AX_TRIGGERS.c.3.42.7.1790000000123456789.0"), Some(3));
        assert_eq!(deliveries("$JS.ACK._.hash.AX_TRIGGERS.c.3.42.7.1790000000123456789.0.x"), Some(3));
        assert_eq!(deliveries("_INBOX.x"), None);
    }
}
