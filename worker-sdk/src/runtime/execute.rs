//! One delivery, from receipt to ack.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_nats::jetstream::AckKind;
use async_nats::{HeaderMap, Message};
use ax_shared::RunId;
use ax_shared::subjects::header;
use ax_shared::wire::WIRE_VERSION;
use tokio_util::sync::CancellationToken;

use super::attempt::{self, End, STOP_WITHIN, Stops};
use super::capacity::Slot;
use super::hold::Hold;
use super::outbox::Earlier;
use super::outcome::{self, Answer, Outcome, Span};
use super::trigger::{self, Trigger, deliveries};
use super::{ANSWER_WITHIN, Shared};
use crate::Failure;
use crate::clock::{self, Boot};
use crate::context::Attempt;
use crate::handler::Run;

/// Wait before a run is delivered again of which nobody could say whether it has succeeded, or which could not be read.
const DOUBT_AFTER: Duration = Duration::from_secs(5);

/// A message that was delivered to this worker.
pub(super) struct Delivery {
    headers: HeaderMap,
    payload: bytes::Bytes,
    deliveries: u32,
    hold: Hold,
}

impl Delivery {
    /// The answer to a pull that was sent at `asked`.
    pub(super) fn of(message: Message, asked: Boot, ack_wait: Duration) -> Self {
        Self {
            deliveries: message.reply.as_deref().and_then(deliveries).unwrap_or(1),
            headers: message.headers.unwrap_or_default(),
            payload: message.payload,
            hold: Hold::new(message.reply, asked, ack_wait),
        }
    }
}

/// What is known about a run that this worker executes.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    /// Tells attempts of one run apart.
    number: u64,
    pub(super) cancel: CancellationToken,
    supersede: CancellationToken,
    /// Cancelled when its handler has stopped.
    stopped: CancellationToken,
}

/// Entry in the list of what runs, removed when dropped.
struct Running {
    shared: Arc<Shared>,
    run_id: RunId,
    entry: Entry,
}

impl Running {
    /// Enters a run, unless an earlier attempt of it is still listed: that one is answered.
    fn enter(shared: &Arc<Shared>, run_id: RunId) -> Result<Self, Entry> {
        let mut running = shared.running();
        if let Some(earlier) = running.get(&run_id) {
            return Err(earlier.clone());
        }
        let number = shared.attempts.fetch_add(1, Ordering::Relaxed);
        let token = CancellationToken::new;
        let entry = Entry { number, cancel: token(), supersede: token(), stopped: token() };
        running.insert(run_id, entry.clone());
        drop(running);
        Ok(Self { shared: shared.clone(), run_id, entry })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut running = self.shared.running();
        if running.get(&self.run_id).is_some_and(|there| there.number == self.entry.number) {
            running.remove(&self.run_id);
        }
        drop(running);
        self.entry.stopped.cancel();
    }
}

pub(super) async fn execute(shared: Arc<Shared>, delivery: Delivery, mut slot: Slot) {
    let hold = &delivery.hold;
    if !hold.is_ours() {
        // This process was frozen with an open pull: somebody else has the message by now.
        return tracing::warn!("a message was received after its ack deadline; it is left to others");
    }
    let trigger = match Trigger::read(&delivery.headers, &delivery.payload, delivery.deliveries, &shared.group) {
        Ok(trigger) => trigger,
        Err(error) => {
            let later = delivery.headers.get(header::VERSION).is_some_and(|v| v.as_str() != WIRE_VERSION.to_string());
            tracing::warn!(error, "a message cannot be read as a trigger");
            if later {
                return shared.answer(hold, AckKind::Nak(Some(DOUBT_AFTER))).await;
            }
            return end_unreadable(&shared, &delivery, error).await;
        }
    };
    slot.shrink(trigger.weight);
    log(&trigger, "received", None);
    let Some(running) = hold.during(&shared, enter(&shared, trigger.facts.run.run_id)).await else {
        let why = "an earlier attempt in this worker has not stopped yet".to_owned();
        let outcome = Outcome::released(&trigger, &shared.worker_id, why, DOUBT_AFTER);
        return conclude(&shared, &trigger, &outcome, hold).await;
    };

    let highest = shared.epoch.fetch_max(trigger.epoch, Ordering::Relaxed);
    if delivery.deliveries > 1 || trigger.republished || trigger.epoch < highest {
        match hold.during(&shared, shared.earlier_success(&trigger.facts.run)).await {
            Earlier::None => {}
            Earlier::Success(told) => {
                // Its first telling may have been lost with a stream, or never been read: told again as it was.
                log(&trigger, "finished", Some("succeeded before"));
                let attempt = told.attempt;
                let Ok(told) = serde_json::to_vec(&told) else { return };
                if shared.insist("succeeded", &trigger.facts.run, attempt, told, hold).await {
                    shared.answer(hold, AckKind::Ack).await;
                }
                return;
            }
            Earlier::Unknown => return shared.answer(hold, AckKind::Nak(Some(DOUBT_AFTER))).await,
        }
    }

    // All this may have taken a while; from here on nothing is sent until the handler has ended or has to stop.
    if !hold.lasts(trigger.facts.timeout + STOP_WITHIN) {
        hold.extend(&shared).await;
    }
    if !hold.is_ours() {
        return tracing::warn!(
            run_id = %trigger.facts.run.run_id, task_id = %trigger.facts.run.task_id, attempt = trigger.facts.attempt,
            "the ack deadline has passed before the work began; the run is left to others"
        );
    }
    let outcome = match shared.handlers.get(&trigger.facts.handler) {
        _ if trigger.version != WIRE_VERSION => {
            let why = format!("this worker does not know version {} of the wire format", trigger.version);
            Some(Outcome::refused(&trigger, &shared.worker_id, "version", why, clock::wall()))
        }
        None => {
            let why = format!("this worker has no handler {}", trigger.facts.handler);
            Some(Outcome::refused(&trigger, &shared.worker_id, "unknown_handler", why, clock::wall()))
        }
        Some(handler) => match trigger.start_deadline {
            Some(deadline) if clock::wall() > deadline => {
                Some(Outcome::expired(&trigger, &shared.worker_id, deadline, clock::wall()))
            }
            _ => {
                let (outcome, still) = work(&shared, &trigger, handler, &running, hold).await;
                if let Some(still) = still {
                    tracing::warn!(
                        run_id = %trigger.facts.run.run_id, task_id = %trigger.facts.run.task_id,
                        "a handler does not stop: it blocks its thread; its place stays taken until it does"
                    );
                    tokio::spawn(async move {
                        let _ = still.await;
                        drop((running, slot));
                    });
                }
                outcome
            }
        },
    };
    let told = outcome.as_ref().map_or("superseded", |outcome| outcome.kind);
    log(&trigger, "finished", Some(told));
    if let Some(outcome) = outcome {
        conclude(&shared, &trigger, &outcome, hold).await;
    }
}

/// Enters the run in the list of what runs. An earlier attempt of it in this very worker, whose message has been given to
/// it again, is stopped first; none when it does not stop.
async fn enter(shared: &Arc<Shared>, run_id: RunId) -> Option<Running> {
    for _ in 0..2 {
        match Running::enter(shared, run_id) {
            Ok(running) => return Some(running),
            Err(earlier) => {
                earlier.supersede.cancel();
                let _ = tokio::time::timeout(2 * STOP_WITHIN, earlier.stopped.cancelled()).await;
            }
        }
    }
    // It may have stopped in the last of these moments.
    Running::enter(shared, run_id).ok()
}

/// Ends a message that nobody can read. Its headers may say which run it was: that has failed, and is told first.
async fn end_unreadable(shared: &Shared, delivery: &Delivery, error: String) {
    let hold = &delivery.hold;
    if let Some((run, attempt)) = trigger::address(&delivery.headers, delivery.deliveries, &shared.group) {
        let failure = Failure::give_up(format!("the trigger cannot be read: {error}")).of_kind("trigger");
        let body = outcome::unreadable(&run, attempt, &shared.worker_id, failure, clock::wall());
        if !shared.insist("failed", &run, attempt, serde_json::to_vec(&body).unwrap_or_default(), hold).await {
            return;
        }
    }
    shared.answer(hold, AckKind::Term).await;
}

/// Lets the handler work. Answers what to tell, and the handler if it does not stop.
async fn work(
    shared: &Arc<Shared>,
    trigger: &Trigger,
    handler: &Run,
    running: &Running,
    hold: &Hold,
) -> (Option<Outcome>, Option<attempt::Still>) {
    let facts = &trigger.facts;
    let started = outcome::started(trigger, &shared.worker_id, clock::wall());
    let started = serde_json::to_vec(&started).unwrap_or_default();
    let span = trigger.parent.span(facts, &shared.worker_id);
    log(trigger, "started", None);
    let stops = Stops {
        cancel: running.entry.cancel.clone(),
        release: shared.release.clone(),
        supersede: running.entry.supersede.clone(),
    };
    let (attempt, aside) = Attempt::begin(facts.clone(), shared.fetch.clone());
    let (over, flushed) = (CancellationToken::new(), CancellationToken::new());
    // `started` is told beside the work, which does not wait for it; but it is confirmed or lost before the outcome is
    // told, and so are log lines and progress. Meanwhile the run, which has ended, is kept.
    let ((), ended) = tokio::join!(
        async {
            tokio::join!(
                shared.tell("started", &facts.run, facts.attempt, started.into()),
                shared.tell_aside(trigger, &attempt, aside, &over),
            );
            flushed.cancel();
        },
        async {
            let payload = trigger.payload.clone();
            let stopping = hold.extend(shared);
            let made = attempt::make(&shared.runtime, handler, attempt.clone(), payload, span, &stops, stopping).await;
            over.cancel();
            hold.during(shared, flushed.cancelled()).await;
            made
        }
    );
    let times = Span { started_at: ended.started_at, finished_at: ended.finished_at };
    let end = match ended.end {
        End::Succeeded(result) => match shared.result(&facts.run, result, hold).await {
            Ok(result) => End::Succeeded(result),
            Err(why) => End::Failed(Failure::retry(format!("the result cannot be stored: {why}"))),
        },
        end => end,
    };
    (Outcome::of(trigger, &shared.worker_id, end, times, random()), ended.still)
}

/// Tells an outcome and answers the message.
async fn conclude(shared: &Shared, trigger: &Trigger, outcome: &Outcome, hold: &Hold) {
    let facts = &trigger.facts;
    let success = outcome.kind == "succeeded";
    if !success && !hold.is_ours() {
        // Somebody else makes the next attempt already.
        return tracing::warn!(
            run_id = %facts.run.run_id, task_id = %facts.run.task_id, attempt = facts.attempt, outcome = outcome.kind,
            "the ack deadline has passed: nothing is told about this attempt"
        );
    }
    if !hold.lasts(ANSWER_WITHIN) {
        hold.extend(shared).await;
    }
    if !shared.insist(outcome.kind, &facts.run, facts.attempt, outcome.bytes(), hold).await {
        return;
    }
    if outcome.kind == "failed" {
        shared.pause_pulling();
    }
    let answer = match outcome.answer {
        Answer::Ack => AckKind::Ack,
        Answer::Nak(wait) => AckKind::Nak(Some(wait).filter(|wait| !wait.is_zero())),
        Answer::Term => AckKind::Term,
    };
    shared.answer(hold, answer).await;
}

/// One of the three lines that every attempt writes.
fn log(trigger: &Trigger, what: &'static str, outcome: Option<&str>) {
    let facts = &trigger.facts;
    tracing::info!(
        run_id = %facts.run.run_id, task_id = %facts.run.task_id, attempt = facts.attempt,
        trace_id = trigger.parent.trace_id, span_id = trigger.parent.span_id, outcome,
        "{what}"
    );
}

/// 0.0..=1.0, from the random half of a fresh UUID.
fn random() -> f64 {
    let bits = uuid::Uuid::now_v7().as_u128() as u32;
    f64::from(bits) / f64::from(u32::MAX)
}
