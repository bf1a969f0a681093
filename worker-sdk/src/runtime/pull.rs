//! Takes messages, never more than there is room for.
//!
//! A message whose ack deadline runs while it waits in a worker is a message that times out unexecuted, so nothing is
//! fetched ahead. All consumers of the group are asked in turn without waiting; when all are empty, as many are waited
//! on as there is room for, and the others get their turn soon.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use async_nats::StatusCode;
use ax_shared::Profile;
use ax_shared::wire::{GroupConfig, GroupConsumer};
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::capacity::Slot;
use super::execute::{Delivery, execute};
use super::{ANSWER_WITHIN, Shared};
use crate::clock::Boot;

/// How long an empty consumer is waited on. Stopping waits for open pulls, so that none takes a message to its grave.
const WAIT: Duration = Duration::from_secs(1);
/// The same when there are more consumers than room.
const ROTATE: Duration = Duration::from_millis(250);
/// Pause after a pull that nobody answered.
const UNANSWERED: Duration = Duration::from_secs(1);
/// Largest number of messages in one pull.
const BATCH: u64 = 256;

/// What is known about a consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mood {
    /// It may have messages.
    Ask,
    /// It had none.
    Empty,
    /// A pull is open.
    Open,
}

struct Source {
    consumer: GroupConsumer,
    mood: Mood,
}

/// How a pull ended.
struct Pulled {
    name: String,
    /// Messages came.
    some: bool,
    /// It had waited.
    waited: bool,
}

/// Pulls and spawns executions on `runs` until `shutdown`, and then until the last open pull has ended.
pub(super) async fn pull(
    shared: &Arc<Shared>,
    mut consumers: watch::Receiver<GroupConfig>,
    runs: &TaskTracker,
    shutdown: &CancellationToken,
) {
    let mut sources: VecDeque<Source> = VecDeque::new();
    let mut open: FuturesUnordered<BoxFuture<'static, Pulled>> = FuturesUnordered::new();
    let pause = shared.pause.subscribe();
    refresh(&mut sources, &consumers.borrow_and_update());
    while !shutdown.is_cancelled() {
        // A run of this worker has just failed: others come first.
        let pause = *pause.borrow();
        let paused = tokio::time::Instant::now() < pause;
        if !paused {
            start(shared, &mut sources, &mut open, runs);
        }
        tokio::select! {
            biased;
            () = shutdown.cancelled() => break,
            changed = consumers.changed() => {
                if changed.is_err() {
                    break;
                }
                refresh(&mut sources, &consumers.borrow_and_update());
            }
            Some(pulled) = open.next() => note(&mut sources, &pulled),
            () = tokio::time::sleep_until(pause), if paused => {}
            () = shared.capacity.freed() => {}
        }
    }
    while open.next().await.is_some() {}
}

/// Takes over which consumers there are, keeping what is known of those that were there.
fn refresh(sources: &mut VecDeque<Source>, config: &GroupConfig) {
    let wanted: &[GroupConsumer] = if config.paused { &[] } else { &config.consumers };
    sources.retain_mut(|source| match wanted.iter().find(|consumer| consumer.name == source.consumer.name) {
        Some(consumer) => {
            source.consumer = consumer.clone();
            true
        }
        None => false,
    });
    for consumer in wanted {
        if !sources.iter().any(|source| source.consumer.name == consumer.name) {
            sources.push_back(Source { consumer: consumer.clone(), mood: Mood::Ask });
        }
    }
}

fn note(sources: &mut VecDeque<Source>, pulled: &Pulled) {
    if let Some(source) = sources.iter_mut().find(|source| source.consumer.name == pulled.name) {
        source.mood = if pulled.some { Mood::Ask } else { Mood::Empty };
    }
    // While one was waited on, others may have got messages.
    if pulled.waited && sources.iter().any(|source| source.mood == Mood::Empty) {
        for source in sources.iter_mut().filter(|source| source.mood == Mood::Empty) {
            if source.consumer.name != pulled.name {
                source.mood = Mood::Ask;
            }
        }
    }
}

/// Opens as many pulls as there is room for.
fn start(
    shared: &Arc<Shared>,
    sources: &mut VecDeque<Source>,
    open: &mut FuturesUnordered<BoxFuture<'static, Pulled>>,
    runs: &TaskTracker,
) {
    for asking in [Mood::Ask, Mood::Empty] {
        // Nobody is waited on while there is somebody to ask.
        if asking == Mood::Empty && sources.iter().any(|source| source.mood == Mood::Ask) {
            return;
        }
        let idle = sources.iter().filter(|source| source.mood == asking).count();
        let mut served = VecDeque::new();
        let mut passed = VecDeque::new();
        for mut source in sources.drain(..) {
            let weight = source.consumer.max_weight.max(0.1);
            let room = shared.capacity.room(weight);
            if source.mood != asking || room == 0 {
                passed.push_back(source);
                continue;
            }
            let share = if asking == Mood::Ask { (room / idle.max(1) as u64).clamp(1, BATCH) } else { 1 };
            let slots: Vec<Slot> = (0..share).map_while(|_| shared.capacity.reserve(weight)).collect();
            let wait = match asking {
                Mood::Empty if room < idle as u64 => Some(ROTATE),
                Mood::Empty => Some(WAIT),
                Mood::Ask | Mood::Open => None,
            };
            source.mood = Mood::Open;
            open.push(Box::pin(fetch(shared.clone(), source.consumer.clone(), slots, wait, runs.clone())));
            served.push_back(source);
        }
        // Whoever had a turn goes behind those that had none.
        passed.append(&mut served);
        *sources = passed;
    }
}

/// One pull: a message for each slot at most. Executions begin as the messages come.
async fn fetch(
    shared: Arc<Shared>,
    consumer: GroupConsumer,
    slots: Vec<Slot>,
    wait: Option<Duration>,
    runs: TaskTracker,
) -> Pulled {
    let name = consumer.name;
    let ack_wait = ack_wait(&consumer.profile);
    let waited = wait.is_some();
    let batch = slots.len();
    let mut slots = slots.into_iter();
    let mut some = false;
    let subject = format!("$JS.API.CONSUMER.MSG.NEXT.{}.{name}", shared.prefix.triggers_stream());
    let body = match wait {
        Some(wait) => json!({ "batch": batch, "expires": u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX) }),
        None => json!({ "batch": batch, "no_wait": true }),
    };
    let inbox = shared.client.new_inbox();
    let asked = Boot::now();
    let opened = async {
        let messages = shared.client.subscribe(inbox.clone()).await.ok()?;
        shared.client.publish_with_reply(subject, inbox.clone(), body.to_string().into()).await.ok()?;
        Some(messages)
    };
    let mut answered = false;
    // Without a connection the pull would leave when it comes back, and what it brings would go to nobody.
    if shared.is_connected()
        && let Ok(Some(mut messages)) = tokio::time::timeout(ANSWER_WITHIN, opened).await
    {
        let within = wait.unwrap_or_default() + ANSWER_WITHIN;
        while slots.len() > 0 {
            let Ok(Some(message)) = tokio::time::timeout(within, messages.next()).await else { break };
            match message.status {
                None => {
                    let Some(slot) = slots.next() else { break };
                    some = true;
                    answered = true;
                    runs.spawn(execute(shared.clone(), Delivery::of(message, asked, ack_wait), slot));
                }
                // Shows that the pull is alive; it is short enough without.
                Some(StatusCode::IDLE_HEARTBEAT) => {}
                Some(status) => {
                    // Nothing there, or no more in time.
                    answered |= status == StatusCode::NOT_FOUND || status == StatusCode::TIMEOUT;
                    break;
                }
            }
        }
    }
    drop(slots);
    if !answered {
        // No leader, no such consumer any more, or no connection.
        tokio::time::sleep(UNANSWERED).await;
    }
    Pulled { name, some, waited }
}

/// The ack deadline of a consumer with this profile; that of the shortest profile when it is not understood.
fn ack_wait(profile: &str) -> Duration {
    let profile = Profile::parse(profile).unwrap_or_else(|| Profile::of(1, 0));
    Duration::from_secs(profile.ack_wait_s().into())
}
