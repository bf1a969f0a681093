//! One shard as its leader holds it: tasks, runs that have not ended, delivery queues, what is not yet in SQL.
//!
//! Everything the leader decides is decided here, synchronously, on arguments alone. The loops bring in what happened
//! and carry out what comes out: planned rows, messages to publish, batches to commit, effects to do after a commit.
//!
//! Invariants:
//! - An effect (deletion, notice, replacement) leaves [`Shard::committed`] only after the batch that holds its cause.
//! - `settled` in a batch never passes an event whose consequences are not in that batch or an earlier one.
//! - A run is in memory from its insertion or adoption until it is final, committed and its message is closed.

mod apply;
mod commands;
mod fire;
mod flush;
mod incarnation;
mod publish;

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap, HashSet};
use std::sync::Arc;

use ax_shared::{ConsumerName, Group, Prefix, RunId, TaskDefinition, TaskId, Timestamp};
use uuid::Uuid;

use crate::core::definitions::TaskRow;
use crate::core::delivery::{DeliveryQueues, QueueLength};
use crate::core::run::{Attempt, AttemptOutcome, Decision, Intent, Run, RunState, Signal};
use crate::core::schedule::ScheduleError;
use crate::core::settle::{Ledger, Outcome, RunEvent};
use crate::core::tasks::{PlanPass, Tasks};
use crate::core::trace::Sampler;
use crate::ports::{EventsPosition, ShardState};

pub use apply::{Applied, SIGNAL_LIFE_MS};
pub use fire::{FireReport, Fired};
pub use flush::{Effect, Flush};
pub use publish::{LookedUp, Publish};

/// A clock that is this much earlier than before has stepped, in milliseconds.
const STEP_BACK_MS: i64 = 1000;

/// Where a run is on the leader's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Not due yet.
    Planned,
    /// Due, held back until the run that blocks it has been reconciled.
    Blocked,
    /// In its group's delivery queue.
    Queued,
    /// Published, PubAck awaited.
    Publishing,
    /// In the stream.
    Out,
    /// Its attempt failed; the stream will deliver the message again.
    BackingOff,
    /// A new message is owed once the replacement is committed and its wait is over.
    Replacing,
    /// Final.
    Ended,
}

#[derive(Debug)]
struct Live {
    ledger: Ledger,
    phase: Phase,
    /// The definition that it is published with; bound at the decision.
    spec: Option<Arc<TaskDefinition>>,
    /// A publish of its current message was not answered: it may be in the stream.
    unanswered: bool,
    /// Its PubAck is awaited: it stays in memory until that is here, whatever happens to the run.
    in_flight: bool,
    /// It was in doubt when it was last published: if the stream then stores a message, that one is not.
    sent_in_doubt: bool,
    /// AX_TRIGGERS became another stream while its PubAck was awaited: whose sequence that names is not known.
    ack_is_stale: bool,
    /// The highest sequence that was known when it was published: its own is higher, unless the stream is another one.
    floor: u64,
    dirty: bool,
}

impl Live {
    fn run(&self) -> &Run {
        &self.ledger.run
    }
}

/// A run that is in the stream without having ended, as the reconciliation sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outstanding {
    /// The run.
    pub run_id: RunId,
    /// Sequence of its message.
    pub seq: u64,
    /// Incarnation of the stream of that sequence.
    pub incarnation: String,
    /// The consumer that delivers it.
    pub consumer: ConsumerName,
    /// What is being done to it.
    pub intent: Option<Intent>,
    /// Whether an attempt of the current message failed or was handed back, or events about it were lost: its absence
    /// is then no success.
    pub speaks_against: bool,
    /// When it was published.
    pub published_at: Timestamp,
}

/// The state of one shard.
#[derive(Debug)]
pub struct Shard {
    prefix: Prefix,
    epoch: u64,
    /// Which runs' traces are kept: told to workers with each message.
    sampler: Sampler,
    definitions_rev: u64,
    /// The revision that the leader before us last moved the watermark on.
    planned_rev: u64,
    tasks: Tasks,
    runs: HashMap<RunId, Live>,
    /// Runs by the sequence of their message in the present incarnation of AX_TRIGGERS.
    by_seq: HashMap<u64, RunId>,
    triggers_incarnation: String,
    /// When that was made, by the server's clock: what the server told before is about another one.
    triggers_made_at: Option<Timestamp>,
    /// The highest sequence of it that is known.
    triggers_last: u64,
    /// Where it lost its tail, and when that was noticed: what was told before about sequences after that is about others.
    triggers_cut: Option<(u64, Timestamp)>,
    /// How often runs were found to have lost their message with a tail, and up to which time that is in SQL: before it is,
    /// nothing may take their sequences, or a successor would take those for theirs.
    cuts: u64,
    cuts_written: u64,
    due: BinaryHeap<Reverse<(Timestamp, RunId)>>,
    /// Runs to put into their queue at an instant: replacements and publishes to try again.
    later: BinaryHeap<Reverse<(Timestamp, RunId)>>,
    /// Successful runs whose message is deleted at an instant unless its ack is seen before.
    closing: BinaryHeap<Reverse<(Timestamp, RunId)>>,
    queues: DeliveryQueues,
    /// Handed-over runs, per task, that count for its overlap policy.
    busy: HashMap<TaskId, Vec<RunId>>,
    /// Runs held back, by the run that blocks them.
    blocked: HashMap<RunId, Vec<RunId>>,
    signals: HashMap<u64, Vec<Signal>>,
    /// Commands that were carried out, to be ended with the next flush.
    commands_done: Vec<Uuid>,
    signals_add: Vec<Signal>,
    signals_remove: Vec<Signal>,
    dirty: Vec<RunId>,
    effects: Vec<Effect>,
    settled: EventsPosition,
    settled_dirty: bool,
    /// The present instant, as last told by a caller; no other clock is trusted with waits.
    latest: Timestamp,
}

impl Shard {
    /// An empty shard of a leader with the epoch of `state`.
    #[must_use]
    pub fn new(prefix: Prefix, state: &ShardState) -> Self {
        Self {
            prefix,
            epoch: state.epoch,
            sampler: Sampler::ALWAYS,
            definitions_rev: 0,
            planned_rev: state.planned_rev,
            tasks: Tasks::new(state.planned_until, state.planned_rev == 0),
            runs: HashMap::new(),
            by_seq: HashMap::new(),
            triggers_incarnation: String::new(),
            triggers_made_at: None,
            triggers_last: 0,
            triggers_cut: None,
            cuts: 0,
            cuts_written: 0,
            due: BinaryHeap::new(),
            later: BinaryHeap::new(),
            closing: BinaryHeap::new(),
            queues: DeliveryQueues::default(),
            busy: HashMap::new(),
            blocked: HashMap::new(),
            signals: HashMap::new(),
            commands_done: Vec::new(),
            signals_add: Vec::new(),
            signals_remove: Vec::new(),
            dirty: Vec::new(),
            effects: Vec::new(),
            settled: state.settled.clone(),
            settled_dirty: false,
            latest: state.planned_until,
        }
    }

    /// The leader's fencing number.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The revision of the definitions that are loaded.
    #[must_use]
    pub fn definitions_rev(&self) -> u64 {
        self.definitions_rev
    }

    /// The tasks.
    #[must_use]
    pub fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    /// Runs in memory.
    #[must_use]
    pub fn live_runs(&self) -> usize {
        self.runs.len()
    }

    /// Messages of AX_TRIGGERS that runs in memory own.
    #[must_use]
    pub fn owned_messages(&self) -> usize {
        self.by_seq.len()
    }

    /// Ids of the runs in memory.
    #[must_use]
    pub fn run_ids(&self) -> HashSet<RunId> {
        self.runs.keys().copied().collect()
    }

    /// A run in memory.
    #[must_use]
    pub fn run(&self, id: RunId) -> Option<&Run> {
        self.runs.get(&id).map(Live::run)
    }

    /// What each group's queue holds.
    pub fn queue_lengths(&self) -> impl Iterator<Item = (&Group, QueueLength)> {
        self.queues.lengths()
    }

    /// Sets how many messages of a group may be outstanding.
    pub fn set_window(&mut self, group: &Group, window: Option<usize>) {
        self.queues.set_window(group, window);
    }

    /// The consumers that tasks and unfinished runs need.
    #[must_use]
    pub fn consumers(&self) -> BTreeSet<ConsumerName> {
        let mut names: BTreeSet<_> = self.tasks.iter().map(super::tasks::Task::consumer).collect();
        names.extend(self.runs.values().filter_map(|live| consumer_of(live.run())));
        names
    }

    /// Takes up definition rows of revision `rev`: at first load all, later what changed. Answers the ids of rows that
    /// do not compile, which are left out, with the reason.
    pub fn load_tasks(&mut self, rev: u64, rows: Vec<TaskRow>, now: Timestamp) -> Vec<(TaskId, ScheduleError)> {
        let mut broken = Vec::new();
        for row in rows {
            let id = row.definition.task_id.clone();
            if row.deleted_at.is_some() {
                self.cancel_runs_of(&id, now);
            }
            if let Err(e) = self.tasks.put(row) {
                broken.push((id, e));
            }
        }
        self.definitions_rev = rev;
        broken
    }

    /// Ends what a deleted task has queued; what is in the stream is taken back first.
    fn cancel_runs_of(&mut self, task: &TaskId, now: Timestamp) {
        let mut ids: Vec<RunId> =
            self.runs.values().filter(|l| l.run().task_id == *task).map(|l| l.run().run_id).collect();
        ids.sort_unstable();
        for id in ids {
            // The others are decided at the due instant, on the definition of that moment.
            if self.runs.get(&id).is_some_and(|live| !matches!(live.phase, Phase::Planned | Phase::Blocked)) {
                self.withdraw(id, "task_deleted".into(), now);
            }
        }
    }

    /// Ends a run as cancelled, for this reason: at once if nothing of it can be in the stream, else its message is taken
    /// back first, and a success that was told before that counts. Nothing happens to one that has ended or is being
    /// taken back already.
    pub fn withdraw(&mut self, id: RunId, reason: Cow<'static, str>, now: Timestamp) {
        let Some(live) = self.runs.get_mut(&id) else { return };
        match live.phase {
            Phase::Ended => return,
            Phase::Planned | Phase::Blocked | Phase::Queued | Phase::Replacing if !live.unanswered => {
                self.apply(id, RunEvent::Ended { state: RunState::Cancelled, reason, at: now });
                return;
            }
            _ => {}
        }
        if !matches!(live.ledger.run.intent, None | Some(Intent::Doubt)) {
            return;
        }
        live.ledger.run.intent = Some(Intent::Cancel);
        live.ledger.run.reason = Some(reason.into_owned());
        // While the PubAck is awaited there is no sequence to delete: `published` goes on from the intent.
        if matches!(live.phase, Phase::Out | Phase::BackingOff) {
            self.effects.push(Effect::Cancel { run_id: id });
        }
        self.touch(id);
    }

    /// Takes up runs from SQL, at takeover: unfinished ones and final ones whose message may be open. Answers those
    /// that are due or decided and have no known message: they are to be looked up in the stream before anything is
    /// published for them.
    pub fn load_runs(&mut self, runs: Vec<Run>, attempts: Vec<Attempt>, now: Timestamp) -> Vec<RunId> {
        self.note_now(now);
        let mut attempts_of: HashMap<RunId, Vec<Attempt>> = HashMap::new();
        for attempt in attempts {
            attempts_of.entry(attempt.run_id).or_default().push(attempt);
        }
        let mut unknown = Vec::new();
        for run in runs {
            let id = run.run_id;
            if self.runs.contains_key(&id) {
                continue;
            }
            let attempts = attempts_of.remove(&id).unwrap_or_default();
            let spec = self.tasks.get(&run.task_id).map(|t| t.row.definition.clone());
            let phase = if run.state.is_final() {
                Phase::Ended
            } else if run.message.is_some() {
                Phase::Out
            } else {
                Phase::Planned
            };
            if phase == Phase::Planned && (run.decision.is_some() || run.publish_at <= now) {
                unknown.push(id);
            }
            if let Some(message) = &run.message
                && message.incarnation == self.triggers_incarnation
            {
                self.by_seq.insert(message.seq, id);
            }
            if run.kind.is_bound_by_overlap() && run.decision.is_some() && !run.state.is_final() {
                self.busy.entry(run.task_id.clone()).or_default().push(id);
            }
            match phase {
                Phase::Out => self.queues.begin(&run.group, id),
                Phase::Ended => self.closing.push(Reverse((now, id))),
                _ => {}
            }
            let ledger = Ledger::new(run, attempts);
            if phase == Phase::Planned {
                self.due.push(Reverse((apply::not_before(&ledger, spec.as_deref(), now), id)));
            }
            self.runs.insert(
                id,
                Live {
                    ledger,
                    phase,
                    spec,
                    unanswered: false,
                    in_flight: false,
                    sent_in_doubt: false,
                    ack_is_stale: false,
                    floor: 0,
                    dirty: false,
                },
            );
            self.check_recorded(id, now);
            let live = &self.runs[&id];
            if live.run().intent == Some(Intent::Cancel) {
                self.effects.push(Effect::Cancel { run_id: id });
            } else if phase == Phase::Out && self.tasks.get(&live.run().task_id).is_none() {
                // Its task was deleted while nobody led.
                self.withdraw(id, "task_deleted".into(), now);
            }
        }
        unknown
    }

    /// Runs that were just planned or adopted, in SQL already.
    pub fn add_runs(&mut self, runs: impl IntoIterator<Item = Run>) {
        let ids = self.hold_runs(runs);
        self.release_runs(&ids);
    }

    /// Lets held runs become due.
    pub fn release_runs(&mut self, ids: &[RunId]) {
        for id in ids {
            if let Some(live) = self.runs.get(id).filter(|live| live.phase == Phase::Planned) {
                self.due.push(Reverse((live.run().publish_at, *id)));
            }
        }
    }

    /// Takes up runs that must not become due before they are released. Answers those that were not here already.
    pub fn hold_runs(&mut self, runs: impl IntoIterator<Item = Run>) -> Vec<RunId> {
        let mut held = Vec::new();
        for run in runs {
            let id = run.run_id;
            if run.state.is_final() || self.runs.contains_key(&id) {
                continue;
            }
            held.push(id);
            self.runs.insert(
                id,
                Live {
                    ledger: Ledger::new(run, Vec::new()),
                    phase: Phase::Planned,
                    spec: None,
                    unanswered: false,
                    in_flight: false,
                    sent_in_doubt: false,
                    ack_is_stale: false,
                    floor: 0,
                    dirty: false,
                },
            );
        }
        held
    }

    /// Signals from SQL, at takeover.
    pub fn load_signals(&mut self, signals: Vec<Signal>) {
        for signal in signals {
            if signal.seq > self.triggers_last {
                // Of the tail that the stream has lost: the sequence will be another message's.
                self.signals_remove.push(signal);
                continue;
            }
            self.signals.entry(signal.seq).or_default().push(signal);
        }
    }

    /// Rows of a planning pass up to `until`; `changed` tasks are planned from their acceptance on.
    pub fn plan(&mut self, until: Timestamp, now: Timestamp, changed: &[TaskId]) -> PlanPass {
        self.tasks.plan(until, now, changed)
    }

    /// Tasks that changed after the watermark was last moved: what they owe up to there is not planned yet. Exactly
    /// those: what was planned once may lie in a stretch by now, and must not be planned again.
    #[must_use]
    pub fn changed_since_planned(&self) -> Vec<TaskId> {
        let changed = self.tasks.iter().filter(|t| t.row.rev > self.planned_rev);
        changed.map(|t| t.row.definition.task_id.clone()).collect()
    }

    /// A planning pass is in SQL.
    pub fn planned(&mut self, until: Timestamp) {
        self.tasks.planned(until);
    }

    /// Which runs' traces are kept from now on. Defaults to all.
    pub fn set_sampler(&mut self, sampler: Sampler) {
        self.sampler = sampler;
    }

    /// The stream has no message of a run, and none is known. If a worker has told of it all the same, there was one,
    /// and its numbers must not be used again.
    pub fn not_found(&mut self, id: RunId, at: Timestamp) {
        self.note_now(at);
        if self.runs.get(&id).is_some_and(|live| has_begun_unpublished(live.run())) {
            self.apply(id, RunEvent::Lost { at });
        }
    }

    /// How far AX_EVENTS has been applied (not necessarily committed).
    #[must_use]
    pub fn settled(&self) -> &EventsPosition {
        &self.settled
    }

    /// AX_EVENTS is another stream now, or begins anew: read from `seq` + 1.
    pub fn restart_events(&mut self, incarnation: String, seq: u64) {
        self.settled = EventsPosition { incarnation, seq };
        self.settled_dirty = true;
        self.events_were_lost();
    }

    /// Events that were not settled are gone: an absent message of what is outstanding now proves nothing. It is
    /// written with the place from which reading goes on, so that a successor knows it too.
    fn events_were_lost(&mut self) {
        let latest = self.latest;
        // Of what is due a leader before us may have published more than it could record.
        let may_be_out = |l: &&mut Live| {
            let run = l.run();
            !run.state.is_final() && (run.decision.is_some() || run.publish_at <= latest)
        };
        let mut ids = Vec::new();
        for live in self.runs.values_mut().filter(may_be_out) {
            live.ledger.run.intent.get_or_insert(Intent::Doubt);
            ids.push(live.run().run_id);
        }
        ids.sort_unstable();
        for id in ids {
            self.touch(id);
        }
    }

    /// A run's message is gone, or will never be delivered again, and nobody told what became of it: a new one takes
    /// its place. False when that is not so any more, or something else is being done to it.
    pub fn lost(&mut self, id: RunId, seq: u64, at: Timestamp) -> bool {
        self.note_now(at);
        let lost = self.outstanding_run(id).is_some_and(|o| o.seq == seq && o.intent != Some(Intent::Cancel));
        lost && self.apply(id, RunEvent::Lost { at }) != Outcome::Ignored
    }

    /// Runs that are in the stream and were published before `before`, earliest first.
    #[must_use]
    pub fn outstanding(&self, before: Timestamp) -> Vec<Outstanding> {
        let mut outstanding: Vec<Outstanding> = self
            .runs
            .values()
            .filter(|l| matches!(l.phase, Phase::Out | Phase::BackingOff))
            .filter_map(|l| self.outstanding_of(&l.ledger))
            // What was published after now was published before the clock stepped back.
            .filter(|o| o.published_at < before || o.published_at > self.latest)
            .collect();
        outstanding.sort_unstable_by_key(|o| (o.published_at, o.run_id));
        outstanding
    }

    /// One run as the reconciliation sees it, if it is in the stream.
    #[must_use]
    pub fn outstanding_run(&self, id: RunId) -> Option<Outstanding> {
        let live = self.runs.get(&id)?;
        matches!(live.phase, Phase::Out | Phase::BackingOff).then(|| self.outstanding_of(&live.ledger)).flatten()
    }

    fn outstanding_of(&self, ledger: &Ledger) -> Option<Outstanding> {
        let run = &ledger.run;
        let message = run.message.as_ref()?;
        Some(Outstanding {
            run_id: run.run_id,
            seq: message.seq,
            incarnation: message.incarnation.clone(),
            consumer: consumer_of(run)?,
            intent: run.intent,
            speaks_against: run.intent == Some(Intent::Doubt)
                || ledger.attempts.iter().filter(|a| a.attempt > run.attempt_base).any(|a| match a.outcome {
                    None => false,
                    // Of an earlier attempt that is a conclusion, of the last one its worker's word.
                    Some(AttemptOutcome::TimedOut) => a.attempt >= run.attempt,
                    Some(_) => true,
                }),
            published_at: run.published_at.unwrap_or(run.publish_at),
        })
    }

    /// Takes notice of the present instant. When the clock has stepped back, waits that are under way do not grow.
    fn note_now(&mut self, now: Timestamp) {
        let back = now.millis_since(self.latest).min(0);
        self.latest = now;
        if back < -STEP_BACK_MS {
            for heap in [&mut self.later, &mut self.closing] {
                let moved = heap.drain().map(|Reverse((at, id))| Reverse((at.plus_millis(back), id)));
                *heap = moved.collect::<Vec<_>>().into();
            }
        }
    }

    /// The sequence is not the run's any more; in a stream that was made anew it may be another run's by now.
    fn disown(&mut self, seq: u64, id: RunId) {
        if self.by_seq.get(&seq) == Some(&id) {
            self.by_seq.remove(&seq);
        }
    }

    fn touch(&mut self, id: RunId) {
        if let Some(live) = self.runs.get_mut(&id)
            && !live.dirty
        {
            live.dirty = true;
            self.dirty.push(id);
        }
    }

    /// The run was handed over: it blocks others of its task until it has ended.
    fn mark_busy(&mut self, id: RunId) {
        if let Some(live) = self.runs.get(&id)
            && live.run().kind.is_bound_by_overlap()
            && live.run().decision == Some(Decision::HandOver)
        {
            let ids = self.busy.entry(live.run().task_id.clone()).or_default();
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
    }

    fn clear_busy(&mut self, task: &TaskId, id: RunId) {
        if let Some(ids) = self.busy.get_mut(task) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.busy.remove(task);
            }
        }
    }
}

/// Whether a worker has told of the current message of a run, of which nothing else is known.
fn has_begun_unpublished(run: &Run) -> bool {
    !run.state.is_final() && run.message.is_none() && run.attempt > run.attempt_base
}

fn consumer_of(run: &Run) -> Option<ConsumerName> {
    Some(ConsumerName { group: run.group.clone(), queue: run.queue.clone(), profile: run.profile? })
}

/// Ids without repetition, in order.
fn unique(ids: impl IntoIterator<Item = RunId>) -> Vec<RunId> {
    let mut seen = HashSet::new();
    ids.into_iter().filter(|id| seen.insert(*id)).collect()
}
