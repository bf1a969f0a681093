//! What is outside of the nodes: true time, the server, the database, and the book of what must hold.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use ax_scheduler::bus::memory::MemoryServer;
use ax_scheduler::core::definitions::{DefinitionWrite, TaskRow};
use ax_scheduler::core::run::{Attempt, AttemptOutcome, Run};
use ax_scheduler::ports::{Batch, Clock};
use ax_scheduler::store::memory::Memory;
use ax_shared::{Prefix, RunId, TaskId, Timestamp};
use tokio::time::Instant;
use uuid::Uuid;

/// The true time at which a simulation begins: 2026-11-30T23:59:50Z.
const BEGIN_MS: i64 = 1_796_083_190_000;
/// How many of the last events are kept.
const KEPT: usize = 400;

/// True time: as much has passed as tokio's paused clock was moved.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TrueTime(pub(crate) Instant);

impl Clock for TrueTime {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(BEGIN_MS + self.0.elapsed().as_millis() as i64)
    }

    fn boot(&self) -> Duration {
        Duration::from_secs(1000) + self.0.elapsed()
    }
}

/// What happened, hashed, and the end of it in words.
#[derive(Debug)]
struct Log {
    hash: u64,
    events: u64,
    last: VecDeque<String>,
    /// Whether everything is printed as it happens.
    print: bool,
}

/// One accepted state of a definition, in the order of acceptance.
#[derive(Debug, Clone)]
pub(crate) struct Version {
    pub(crate) row: TaskRow,
}

/// What was seen of the runs, for the oracle.
#[derive(Debug, Default)]
pub(crate) struct Book {
    pub(crate) history: BTreeMap<TaskId, Vec<Version>>,
    pub(crate) epoch: u64,
    /// The node that had it last.
    pub(crate) leader: String,
    /// Nodes that died, and how many of them led.
    pub(crate) deaths: (u64, u64),
    pub(crate) one_offs: BTreeSet<RunId>,
    /// What all clocks showed after they had stepped back: later instants have come twice.
    pub(crate) turned_back: Option<Timestamp>,
    /// The highest attempt of each run that was delivered to a worker.
    pub(crate) delivered: BTreeMap<RunId, u32>,
    /// Runs of which a success was confirmed while that attempt was the last one delivered, in time.
    pub(crate) must_succeed: BTreeMap<RunId, u32>,
    /// Runs that somebody said to be done: by a success event, by an ack, or by TERM, whose advisory may get lost.
    pub(crate) may_succeed: BTreeSet<RunId>,
    /// Runs that a worker's event ended without success.
    pub(crate) failed_for_good: BTreeSet<RunId>,
    /// Runs that a frozen leader had on its way to the stream when another one took over: nothing can hold those back.
    pub(crate) past_the_fence: BTreeSet<RunId>,
    /// Runs that a worker told something about, with the highest attempt that it was about.
    pub(crate) told_of: BTreeMap<RunId, u32>,
    /// Times that a handler went through, by run.
    pub(crate) executed: BTreeMap<RunId, u32>,
    ids: BTreeMap<RunId, RunId>,
    made: BTreeSet<RunId>,
}

/// Everything that nodes and workers share.
pub(crate) struct World {
    pub(crate) time: TrueTime,
    pub(crate) server: MemoryServer,
    pub(crate) store: Arc<Memory>,
    log: Mutex<Log>,
    book: Mutex<Book>,
    violations: Mutex<Vec<String>>,
}

impl World {
    pub(crate) fn new(lease_ttl: Duration, print: bool) -> Arc<Self> {
        let time = TrueTime(Instant::now());
        Arc::new(Self {
            time,
            server: MemoryServer::new(Arc::new(time), Prefix::default(), lease_ttl),
            store: Arc::new(Memory::new()),
            log: Mutex::new(Log { hash: 0xcbf2_9ce4_8422_2325, events: 0, last: VecDeque::new(), print }),
            book: Mutex::default(),
            violations: Mutex::default(),
        })
    }

    pub(crate) fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().expect("no check panics")
    }

    /// Notes what happened.
    pub(crate) fn say(&self, what: fmt::Arguments<'_>) {
        let line = format!("{} {what}", short(self.time.now()));
        let mut log = self.log.lock().expect("log");
        for byte in line.bytes() {
            log.hash = (log.hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        log.events += 1;
        if log.print {
            eprintln!("{line}");
        }
        if log.last.len() == KEPT {
            log.last.pop_front();
        }
        log.last.push_back(line);
    }

    /// Hash and number of everything that happened.
    pub(crate) fn trace(&self) -> (u64, u64) {
        let log = self.log.lock().expect("log");
        (log.hash, log.events)
    }

    pub(crate) fn last_events(&self) -> Vec<String> {
        self.log.lock().expect("log").last.iter().cloned().collect()
    }

    /// Notes that something does not hold.
    pub(crate) fn violate(&self, what: String) {
        self.say(format_args!("VIOLATION {what}"));
        self.violations.lock().expect("violations").push(what);
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        self.violations.lock().expect("violations").clone()
    }

    /// The id of this simulation for a random id of the API: the same in every life of a seed.
    pub(crate) fn id(&self, id: RunId) -> RunId {
        let mut book = self.book();
        if id.0.get_version_num() != 7 || book.made.contains(&id) {
            return id;
        }
        if let Some(known) = book.ids.get(&id) {
            return *known;
        }
        let ms = id.0.as_u128() >> 80;
        let number = book.ids.len() as u128 + 1;
        let made = RunId(Uuid::from_u128(ms << 80 | 7 << 76 | 0b10 << 62 | number));
        book.ids.insert(id, made);
        book.made.insert(made);
        made
    }

    /// A change of definitions is about to be written.
    pub(crate) fn defined(&self, planned_until: Timestamp, write: &DefinitionWrite) {
        for row in &write.tasks {
            let d = &row.definition;
            self.say(format_args!(
                "defined {} v{} {:?} {} at {} planned until {}{}",
                d.task_id,
                row.version,
                d.status,
                d.cron_expr.as_deref().unwrap_or("-"),
                short(row.updated_at),
                short(planned_until),
                if row.deleted_at.is_some() { " DELETED" } else { "" },
            ));
            let version = Version { row: row.clone() };
            self.book().history.entry(d.task_id.clone()).or_default().push(version);
        }
        for run in &write.runs {
            if run.kind.is_scheduled() || run.stretch.is_some() {
                continue;
            }
            self.book().one_offs.insert(run.run_id);
        }
    }

    /// A leader has written its epoch.
    pub(crate) fn acquired(&self, node: &str, epoch: u64) {
        self.say(format_args!("{node} has epoch {epoch}"));
        node.clone_into(&mut self.book().leader);
        let before = std::mem::replace(&mut self.book().epoch, epoch);
        if epoch <= before {
            self.violate(format!("epoch {epoch} of {node} does not grow from {before}"));
        }
    }

    /// A node was killed.
    pub(crate) fn died(&self, node: &str) {
        self.say(format_args!("{node} is killed"));
        let mut book = self.book();
        book.deaths.0 += 1;
        if book.leader == node {
            book.deaths.1 += 1;
            book.leader.clear();
        }
    }

    /// A write under an epoch was accepted.
    pub(crate) fn accepted(&self, node: &str, what: &str, epoch: u64) {
        let current = self.book().epoch;
        if epoch != current {
            self.violate(format!("{what} of {node} under epoch {epoch} was accepted while {current} leads"));
        }
    }

    pub(crate) fn planned(&self, node: &str, before: Timestamp, after: Timestamp, latest: Timestamp) {
        if after < before {
            self.violate(format!("the watermark went back from {before} to {after}"));
        }
        if after > before && after > latest {
            self.violate(format!("{node} planned until {after}, beyond {latest}"));
        }
    }

    /// A batch was committed; `before` has the rows that it replaced.
    pub(crate) fn committed(&self, node: &str, before: &[(Option<Run>, Vec<Attempt>)], batch: &Batch) {
        for ((old, attempts), new) in before.iter().zip(&batch.runs) {
            let Some(old) = old else {
                self.violate(format!("{node} writes a run that is not there: {}", new.run_id));
                continue;
            };
            if old.state != new.state || old.attempt != new.attempt || old.message_no != new.message_no {
                self.say(format_args!(
                    "{node} {} {} {} {}→{} attempt {} (base {}, max {}) message {}:{:?} {}",
                    new.task_id,
                    new.kind.as_str(),
                    name(new),
                    old.state.as_str(),
                    new.state.as_str(),
                    new.attempt,
                    new.attempt_base,
                    new.max_attempts,
                    new.message_no,
                    new.message.as_ref().map(|m| m.seq),
                    new.reason.as_deref().unwrap_or(""),
                ));
            }
            if old.state.is_final()
                && (old.state, &old.reason, old.attempt, old.finished_at, old.max_attempts)
                    != (new.state, &new.reason, new.attempt, new.finished_at, new.max_attempts)
            {
                self.violate(format!("the final run {} changed: {old:?} → {new:?}", name(new)));
            }
            if new.attempt < old.attempt
                || new.message_no < old.message_no
                || new.attempt_base < old.attempt_base
                // A message that is found was published with what the definition said by then.
                || new.max_attempts < old.max_attempts && old.attempt > 0 && old.message.is_some()
            {
                self.violate(format!("numbers of run {} went back: {old:?} → {new:?}", name(new)));
            }
            for changed in batch.attempts.iter().filter(|a| a.run_id == new.run_id) {
                let known = attempts.iter().find(|a| a.attempt == changed.attempt);
                if known.is_some_and(|a| {
                    a.outcome == Some(AttemptOutcome::Succeeded) && changed.outcome != Some(AttemptOutcome::Succeeded)
                }) {
                    self.violate(format!("a successful attempt changed: {changed:?}"));
                }
            }
        }
    }
}

/// A run as people find it in the log.
pub(crate) fn name(run: &Run) -> String {
    format!("{}@{}", run.task_id, short(run.trigger_at))
}

/// An instant without its day.
pub(crate) fn short(at: Timestamp) -> String {
    let text = at.to_string();
    text.get(8..23).map(str::to_owned).unwrap_or(text)
}
