//! Workers: one kind that sends events as an SDK does, and one that only acks, NAKs, TERMs or falls silent.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ax_scheduler::bus::memory::{Delivery, Hands};
use ax_scheduler::ports::Clock as _;
use ax_shared::subjects::header;
use ax_shared::wire::{EventBody, WireError};
use ax_shared::{Group, Prefix, Profile, RunAddress, RunId, TaskId};
use serde_json::json;
use tokio::time::{Instant, sleep, sleep_until};

use crate::rng::Rng;
use crate::world::World;

/// How workers fare. Rates are of a thousand attempts.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Manners {
    pub(crate) fail: u64,
    pub(crate) give_up: u64,
    /// The handler does not end, and is stopped by its timeout.
    pub(crate) hang: u64,
    /// The worker dies in mid-run, and says nothing.
    pub(crate) die: u64,
    /// The worker dies between its event and its ack.
    pub(crate) die_late: u64,
    pub(crate) release: u64,
    /// It acks after its deadline.
    pub(crate) late: u64,
    /// It acks although it told of a failure.
    pub(crate) ack_failure: u64,
}

/// What all workers share.
#[derive(Debug, Default)]
pub(crate) struct Fleet {
    /// NATS is away.
    pub(crate) away: AtomicBool,
    /// Attempts go well from now on.
    pub(crate) calm: AtomicBool,
    /// Nobody pulls until this instant, in ms since the beginning.
    pub(crate) idle_until: AtomicU64,
}

/// One worker.
#[derive(Clone)]
pub(crate) struct Worker {
    pub(crate) world: Arc<World>,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) name: String,
    pub(crate) manners: Manners,
    /// Whether it sends events.
    pub(crate) sdk: bool,
}

struct Job {
    delivery: Delivery,
    run: RunAddress,
    attempt: u32,
    max_attempts: u32,
    timeout: Duration,
    /// When its ack deadline passes.
    deadline: Instant,
    suspicious: bool,
    backoff: Duration,
}

impl Worker {
    /// Pulls for ever.
    pub(crate) async fn run(self, mut rng: Rng) {
        let hands = self.world.server.hands();
        loop {
            sleep(Duration::from_millis(rng.between(30, 150))).await;
            let now = self.world.time.0.elapsed().as_millis() as u64;
            if self.fleet.away.load(Ordering::Relaxed) || self.fleet.idle_until.load(Ordering::Relaxed) > now {
                continue;
            }
            let groups = hands.groups();
            for consumer in groups.values().flat_map(|group| &group.consumers) {
                let mut left = 3;
                while left > 0
                    && let Some(delivery) = hands.pull(&consumer.name)
                {
                    left -= 1;
                    let Some(job) = self.take(delivery) else { continue };
                    let (worker, hands, rng) = (self.clone(), hands.clone(), rng.fork());
                    tokio::spawn(async move {
                        if worker.sdk {
                            worker.with_events(&hands, job, rng).await;
                        } else {
                            worker.raw(&hands, job, rng).await;
                        }
                    });
                }
            }
        }
    }

    fn take(&self, delivery: Delivery) -> Option<Job> {
        let text = |name: &str| delivery.message.headers.get(name).map(String::as_str).unwrap_or_default();
        let run = RunAddress {
            group: Group::new(text(header::GROUP)).ok()?,
            task_id: TaskId::new(text(header::TASK_ID)).ok()?,
            run_id: text(header::RUN_ID).parse::<RunId>().ok()?,
        };
        let base: u32 = text(header::ATTEMPT_BASE).parse().ok()?;
        let attempt = base + delivery.number;
        let profile = Profile::parse(delivery.consumer.rsplit('-').next()?)?;
        let backoff: u64 = text(header::RETRY_BACKOFF).split(',').next()?.parse().ok()?;
        self.world.say(format_args!(
            "{} takes {} {} attempt {attempt} ({})",
            self.name, run.task_id, run.run_id, delivery.message.seq
        ));
        let mut book = self.world.book();
        let known = book.delivered.entry(run.run_id).or_default();
        *known = attempt.max(*known);
        // Of a delivery that nobody told of, to a raw worker, out of a stream that is gone, no leader can know.
        let reused = book.told_of.get(&run.run_id).is_some_and(|told| attempt <= *told);
        let reused = reused && !book.past_the_fence.contains(&run.run_id);
        drop(book);
        if reused {
            self.world.violate(format!("attempt {attempt} of {} {} was delivered twice", run.task_id, run.run_id));
        }
        Some(Job {
            attempt,
            max_attempts: text(header::MAX_ATTEMPTS).parse().ok()?,
            timeout: Duration::from_millis(text(header::TIMEOUT_MS).parse().ok()?),
            deadline: Instant::now() + Duration::from_secs(profile.ack_wait_s().into()),
            suspicious: delivery.number > 1 || !text(header::REPUBLISHED).is_empty(),
            backoff: Duration::from_millis(backoff),
            run,
            delivery,
        })
    }

    async fn with_events(&self, hands: &Hands, job: Job, mut rng: Rng) {
        let prefix = Prefix::default();
        let body = EventBody { worker_id: Some(self.name.clone()), ..EventBody::new(job.run.run_id, job.attempt) };
        if job.suspicious && hands.last_event(&prefix.event("succeeded", &job.run)).is_some() {
            if self.tell(hands, &job, "succeeded", body).await {
                self.ack(hands, &job).await;
            }
            return;
        }
        let at = Some(self.world.time.now());
        if !self.tell(hands, &job, "started", EventBody { at, ..body.clone() }).await {
            return;
        }
        let manners = self.manners();
        if rng.permille(manners.die) {
            return;
        }
        let began = Instant::now();
        let room = job.timeout.as_millis() as u64;
        let length = if rng.permille(100) { rng.between(0, room) } else { rng.between(0, room.min(200)) };
        let hangs = rng.permille(manners.hang);
        sleep(Duration::from_millis(if hangs { room } else { length })).await;
        if rng.permille(manners.release) {
            if self.tell(hands, &job, "released", EventBody { reason: Some("stopping".into()), ..body }).await {
                self.nak(hands, &job, Duration::ZERO).await;
            }
            return;
        }
        let (fails, gives_up) = (rng.permille(manners.fail), rng.permille(manners.give_up));
        let timed_out = hangs || began.elapsed() > job.timeout;
        if timed_out || fails || gives_up {
            let error = if timed_out {
                WireError::Kinded { kind: "timeout".into(), message: String::new() }
            } else {
                WireError::Text("it failed".into())
            };
            let retry = !gives_up;
            let told = EventBody { error: Some(error), retry: Some(retry), ..body };
            if !self.tell(hands, &job, "failed", told).await || rng.permille(manners.die_late) {
                return;
            }
            if rng.permille(manners.ack_failure) {
                self.answer(hands, &job, Hands::ack, "acks its failure").await;
            } else if !retry || job.attempt >= job.max_attempts {
                self.term(hands, &job).await;
            } else {
                self.nak(hands, &job, job.backoff).await;
            }
            return;
        }
        *self.world.book().executed.entry(job.run.run_id).or_default() += 1;
        let told = EventBody { result: Some(json!({"by": self.name})), ..body };
        if self.tell(hands, &job, "succeeded", told).await && !rng.permille(manners.die_late) {
            self.ack(hands, &job).await;
        }
    }

    async fn raw(&self, hands: &Hands, job: Job, mut rng: Rng) {
        let manners = self.manners();
        if rng.permille(manners.die + manners.hang) {
            return;
        }
        if rng.permille(manners.late) {
            sleep_until(job.deadline + Duration::from_millis(rng.between(0, 3000))).await;
        } else {
            sleep(Duration::from_millis(rng.between(0, 300))).await;
        }
        if rng.permille(manners.give_up) {
            self.term(hands, &job).await;
        } else if rng.permille(manners.fail) {
            let delay = if rng.permille(500) { job.backoff } else { Duration::ZERO };
            self.nak(hands, &job, delay).await;
        } else {
            *self.world.book().executed.entry(job.run.run_id).or_default() += 1;
            self.ack(hands, &job).await;
        }
    }

    fn manners(&self) -> Manners {
        if self.fleet.calm.load(Ordering::Relaxed) {
            Manners { fail: self.manners.fail.min(100), ..Manners::default() }
        } else {
            self.manners
        }
    }

    /// Waits until NATS is there; false when the attempt is over by then.
    async fn connected(&self, job: &Job) -> bool {
        while self.fleet.away.load(Ordering::Relaxed) {
            sleep(Duration::from_millis(100)).await;
        }
        Instant::now() < job.deadline
    }

    /// Publishes an event and waits for its confirmation; false when the attempt is not the last one any more.
    async fn tell(&self, hands: &Hands, job: &Job, kind: &str, body: EventBody) -> bool {
        if !self.connected(job).await {
            return false;
        }
        let run_id = job.run.run_id;
        let id = format!("{run_id}:{}:{kind}", job.attempt);
        self.world.say(format_args!("{} {kind} {} {run_id} attempt {}", self.name, job.run.task_id, job.attempt));
        {
            let mut book = self.world.book();
            let last = book.delivered.get(&run_id) == Some(&job.attempt);
            let told = book.told_of.entry(run_id).or_default();
            *told = job.attempt.max(*told);
            match kind {
                "succeeded" => {
                    book.may_succeed.insert(run_id);
                    // A delivery too many, taken before the message of a failed run was deleted, counts for nothing.
                    let counts = last && job.attempt <= job.max_attempts;
                    if counts && !book.failed_for_good.contains(&run_id) {
                        book.must_succeed.insert(run_id, job.attempt);
                    }
                }
                "failed" if body.retry == Some(false) || job.attempt >= job.max_attempts => {
                    book.failed_for_good.insert(run_id);
                }
                _ => {}
            }
        }
        let body = serde_json::to_vec(&body).expect("an event is plain data");
        hands.event(&Prefix::default().event(kind, &job.run), Some(&id), body);
        true
    }

    async fn ack(&self, hands: &Hands, job: &Job) {
        self.world.book().may_succeed.insert(job.run.run_id);
        self.answer(hands, job, Hands::ack, "acks").await;
    }

    async fn nak(&self, hands: &Hands, job: &Job, delay: Duration) {
        self.answer(hands, job, |hands, delivery| hands.nak(delivery, delay), "naks").await;
    }

    async fn term(&self, hands: &Hands, job: &Job) {
        if !self.sdk {
            // Should its advisory get lost, the run reads as succeeded.
            self.world.book().may_succeed.insert(job.run.run_id);
        }
        self.answer(hands, job, Hands::term, "terms").await;
    }

    async fn answer(&self, hands: &Hands, job: &Job, how: impl FnOnce(&Hands, &Delivery), what: &str) {
        while self.fleet.away.load(Ordering::Relaxed) {
            sleep(Duration::from_millis(100)).await;
        }
        self.world
            .say(format_args!("{} {what} {} {} attempt {}", self.name, job.run.task_id, job.run.run_id, job.attempt));
        how(hands, &job.delivery);
    }
}
