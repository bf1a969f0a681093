//! The tasks that a leader plans for: compiled definitions and the wheel of their next fires.

use std::collections::HashMap;

use ax_shared::definition::Status;
use ax_shared::{ConsumerName, Profile, RunId, RunKind, TaskId, Timestamp};

use crate::core::definitions::{NOBODY_RAN, TaskRow};
use crate::core::run::{Run, RunState, Stretch};
use crate::core::schedule::{Schedule, ScheduleError};
use crate::core::wheel::{Due, EntryId, Wheel};

/// A compiled definition.
#[derive(Debug, Clone)]
pub struct Task {
    /// The row as accepted.
    pub row: TaskRow,
    schedule: Option<Schedule>,
    entry: Option<EntryId>,
    /// The last instant that this leader has put into a stretch.
    missed_until: Timestamp,
}

impl Task {
    fn compile(row: TaskRow) -> Result<Self, ScheduleError> {
        let d = &row.definition;
        let schedule = d.cron_expr.as_deref().map(|e| Schedule::parse(e, &d.timezone)).transpose()?;
        Ok(Self { row, schedule, entry: None, missed_until: Timestamp::MIN })
    }

    /// Whether `at` is an instant of the schedule as it is now.
    #[must_use]
    pub fn owes(&self, at: Timestamp) -> bool {
        self.schedule.as_ref().is_some_and(|s| s.contains(at, self.row.anchor_at))
    }

    /// The first instant after `after`.
    #[must_use]
    pub fn next_after(&self, after: Timestamp) -> Option<Timestamp> {
        self.schedule.as_ref()?.next_after(after, self.row.anchor_at)
    }

    /// The consumer that its triggers go to.
    #[must_use]
    pub fn consumer(&self) -> ConsumerName {
        let d = &self.row.definition;
        ConsumerName {
            group: d.executor_group.clone(),
            queue: d.queue_label.clone(),
            profile: Profile::of(d.timeout_ms, d.max_retry),
        }
    }

    fn is_planned(&self) -> bool {
        self.schedule.is_some() && self.row.definition.status == Status::Enabled
    }

    /// Rows for the instants in (`after`, `until`]. Those before `now` by more than the grace are missed: the newest
    /// of them is owed, the others become one row.
    fn plan(&self, after: Timestamp, until: Timestamp, now: Timestamp, rows: &mut Vec<Run>) -> bool {
        let Some(schedule) = self.schedule.as_ref().filter(|_| self.is_planned()) else { return false };
        let anchor = self.row.anchor_at;
        let kind = if schedule.is_every() { RunKind::Every } else { RunKind::Cron };
        let id = &self.row.definition.task_id;
        let owed = |at| self.row.new_run(RunId::scheduled(id, at), kind, at, at, now);
        let grace = i64::try_from(self.row.definition.misfire_grace_ms).unwrap_or(i64::MAX);
        // Exactly the grace late is merely late.
        let missed_until = now.plus_millis(-grace.saturating_add(1));
        let mut from = after;
        let mut recovers = false;
        if after < missed_until
            && let Some(missed) = schedule.stretch(after, missed_until.min(until), anchor)
        {
            recovers = true;
            if missed.count > 1
                && let Some(to) = schedule.last_in(after, missed.last.plus_millis(-1), anchor)
            {
                rows.push(self.stretch_row(missed.first, to, missed.count - 1, now));
            }
            rows.push(owed(missed.last));
            from = missed.last;
        }
        self.plan_each(from, until, now, rows);
        recovers
    }

    /// A row for each instant in (`after`, `until`].
    fn plan_each(&self, after: Timestamp, until: Timestamp, now: Timestamp, rows: &mut Vec<Run>) {
        let Some(schedule) = self.schedule.as_ref().filter(|_| self.is_planned()) else { return };
        let kind = if schedule.is_every() { RunKind::Every } else { RunKind::Cron };
        let mut from = after;
        while let Some(at) = schedule.next_after(from, self.row.anchor_at).filter(|at| *at <= until) {
            debug_assert!(at > from, "a schedule must advance");
            if at <= from {
                break;
            }
            rows.push(self.row.new_run(RunId::scheduled(&self.row.definition.task_id, at), kind, at, at, now));
            from = at;
        }
    }

    fn stretch_row(&self, first: Timestamp, to: Timestamp, count: u64, now: Timestamp) -> Run {
        let id = RunId::stretch(&self.row.definition.task_id, first);
        let mut row = self.row.new_run(id, RunKind::Missed, first, first, now);
        row.stretch = Some(Stretch { from: first, to, count });
        row.state = RunState::Skipped;
        row.reason = Some(NOBODY_RAN.into());
        row.finished_at = Some(now);
        row.adopted = true;
        row
    }
}

/// Rows of one planning pass.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanPass {
    /// Rows to insert, in no order.
    pub rows: Vec<Run>,
    /// Where the watermark goes with the last of them.
    pub until: Timestamp,
    /// Whether missed stretches are among them: such a pass is written in one transaction, so that its ranges and the
    /// watermark that they were computed from are never told apart by a crash.
    pub recovers: bool,
}

/// All tasks, by id and by next fire.
#[derive(Debug)]
pub struct Tasks {
    slots: Vec<Option<Task>>,
    free: Vec<u32>,
    by_id: HashMap<TaskId, u32>,
    wheel: Wheel,
    planned_until: Timestamp,
    /// No leader has planned anything in this database: what the tasks owe up to the watermark was missed.
    never_planned: bool,
    due: Vec<Due>,
}

impl Tasks {
    /// No tasks, planned until `planned_until`, or `never_planned` at all.
    #[must_use]
    pub fn new(planned_until: Timestamp, never_planned: bool) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            by_id: HashMap::new(),
            wheel: Wheel::new(planned_until.as_millis()),
            planned_until,
            never_planned,
            due: Vec::new(),
        }
    }

    /// Every instant up to here has its row.
    #[must_use]
    pub fn planned_until(&self) -> Timestamp {
        self.planned_until
    }

    /// Entries in the wheel.
    #[must_use]
    pub fn scheduled(&self) -> usize {
        self.wheel.len()
    }

    /// The task of an id.
    #[must_use]
    pub fn get(&self, id: &TaskId) -> Option<&Task> {
        self.slots[*self.by_id.get(id)? as usize].as_ref()
    }

    /// All tasks.
    pub fn iter(&self) -> impl Iterator<Item = &Task> {
        self.slots.iter().flatten()
    }

    /// Takes up a row: new, changed or deleted. A row that does not compile (written by a newer version) is left out
    /// and its error answered; it must not stop the others.
    ///
    /// # Errors
    /// Why the schedule does not compile.
    pub fn put(&mut self, row: TaskRow) -> Result<(), ScheduleError> {
        let id = row.definition.task_id.clone();
        let missed_until = self.get(&id).map(|task| task.missed_until);
        self.remove(&id);
        if row.deleted_at.is_some() {
            return Ok(());
        }
        let mut task = Task::compile(row)?;
        task.missed_until = missed_until.unwrap_or(Timestamp::MIN);
        let key = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            u32::try_from(self.slots.len() - 1).expect("fewer than 2^32 tasks")
        });
        self.slots[key as usize] = Some(task);
        self.by_id.insert(id, key);
        self.schedule(key, self.planned_until);
        Ok(())
    }

    fn remove(&mut self, id: &TaskId) {
        let Some(key) = self.by_id.remove(id) else { return };
        if let Some(entry) = self.slots[key as usize].take().and_then(|t| t.entry) {
            self.wheel.remove(entry);
        }
        self.free.push(key);
    }

    /// Puts a task's first instant after `after` (and after it became effective) into the wheel.
    fn schedule(&mut self, key: u32, after: Timestamp) {
        let Some(task) = self.slots[key as usize].as_mut() else { return };
        let next = if task.is_planned() { task.next_after(after.max(task.row.effective_at)) } else { None };
        task.entry = next.map(|at| self.wheel.insert(key, at.as_millis()));
    }

    /// Rows of every instant in (planned until, `until`], and, of the `changed` tasks, of what became effective before
    /// that. The wheel moves on; the watermark does when [`Self::planned`] confirms the pass.
    pub fn plan(&mut self, until: Timestamp, now: Timestamp, changed: &[TaskId]) -> PlanPass {
        let mut pass = PlanPass { rows: Vec::new(), until, recovers: false };
        for id in changed {
            if let Some(task) = self.get(id) {
                if self.never_planned {
                    pass.recovers |= task.plan(task.row.effective_at, self.planned_until, now, &mut pass.rows);
                    continue;
                }
                // Owed since the change was accepted, and before that already planned for the definition of then. Each
                // for itself: some may have rows already, and those must not lie in a stretch as well.
                // Accepted by a node whose clock is behind ours, a change may be older than the end of a stretch.
                let from = task.row.effective_at.max(task.row.updated_at).max(task.missed_until);
                task.plan_each(from, self.planned_until, now, &mut pass.rows);
            }
        }
        let mut due = std::mem::take(&mut self.due);
        self.wheel.advance(until.as_millis(), &mut due);
        for entry in due.drain(..) {
            let Some(task) = self.slots[entry.key as usize].as_mut() else { continue };
            task.entry = None;
            let from = self.planned_until.max(task.row.effective_at);
            let before = pass.rows.len();
            pass.recovers |= task.plan(from, until, now, &mut pass.rows);
            let missed = pass.rows[before..].iter().filter_map(|row| row.stretch.map(|s| s.to)).max();
            task.missed_until = missed.unwrap_or(task.missed_until);
            self.schedule(entry.key, until);
        }
        self.due = due;
        pass
    }

    /// A pass is in the database: the watermark has moved.
    pub fn planned(&mut self, until: Timestamp) {
        self.planned_until = self.planned_until.max(until);
        self.never_planned = false;
    }
}
