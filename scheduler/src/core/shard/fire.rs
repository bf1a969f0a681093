//! The decision at the due instant, on the definition of that moment.

use std::cmp::Reverse;

use ax_shared::definition::{OverlapPolicy, Status};
use ax_shared::{Profile, RunId, RunKind, Timestamp};

use super::{Phase, Shard};
use crate::core::run::{Decision, Run, RunState};
use crate::core::settle::RunEvent;
use crate::core::tasks::Task;

/// What was decided about a due run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fired {
    /// It is in its group's delivery queue.
    HandedOver,
    /// It ended unexecuted, for this reason.
    Skipped(&'static str),
    /// It waits until the runs that block it have been reconciled.
    Blocked(Vec<RunId>),
}

/// What one call of [`Shard::fire`] decided.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FireReport {
    /// Each due run with its decision.
    pub fired: Vec<(RunId, RunKind, Fired)>,
}

impl Shard {
    /// When the next run is due, or has to be put into its queue again, or closed.
    #[must_use]
    pub fn next_due(&self) -> Option<Timestamp> {
        [&self.due, &self.later, &self.closing].into_iter().filter_map(|heap| heap.peek().map(|r| r.0.0)).min()
    }

    /// Decides about every run that is due at `now`.
    pub fn fire(&mut self, now: Timestamp) -> FireReport {
        self.note_now(now);
        let mut report = FireReport::default();
        while let Some(Reverse((_, id))) = self.due.peek().copied().filter(|Reverse((at, _))| *at <= now) {
            self.due.pop();
            if self.runs.get(&id).is_some_and(|live| live.phase == Phase::Planned) {
                self.decide_and_note(id, now, true, &mut report);
            }
        }
        while let Some(Reverse((_, id))) = self.later.peek().copied().filter(|Reverse((at, _))| *at <= now) {
            self.later.pop();
            if self.runs.get(&id).is_some_and(|live| matches!(live.phase, Phase::Replacing)) {
                self.queue(id);
            }
        }
        self.close_due(now);
        report
    }

    /// Decides again about the runs that `blocker` held back, now that it has been reconciled: if it still has not
    /// ended, they overlap.
    pub fn judge_blocked(&mut self, blocker: RunId, now: Timestamp) -> FireReport {
        self.note_now(now);
        let mut report = FireReport::default();
        for id in self.blocked.remove(&blocker).unwrap_or_default() {
            if self.runs.get(&id).is_some_and(|live| live.phase == Phase::Blocked) {
                self.decide_and_note(id, now, false, &mut report);
            }
        }
        report
    }

    /// Runs that hold others back.
    #[must_use]
    pub fn blockers(&self) -> Vec<RunId> {
        self.blocked.keys().copied().collect()
    }

    fn decide_and_note(&mut self, id: RunId, now: Timestamp, may_wait: bool, report: &mut FireReport) {
        let Some(live) = self.runs.get(&id) else { return };
        let run = live.run();
        let kind = run.kind;
        let task = self.tasks.get(&run.task_id);
        // A decision that was taken stands.
        let mut fired = match (run.decision, task) {
            (Some(Decision::HandOver), Some(_)) => Fired::HandedOver,
            (_, None) => Fired::Skipped("task_deleted"),
            (None, Some(task)) => decide(run, task, now),
        };
        if fired == Fired::HandedOver
            && run.decision.is_none()
            && let Some(task) = task
            && kind.is_bound_by_overlap()
            && task.row.definition.overlap_policy == OverlapPolicy::Skip
            && let Some(ids) = self.busy.get(&run.task_id)
        {
            fired = if may_wait { Fired::Blocked(ids.clone()) } else { Fired::Skipped("overlap") };
        }
        match &fired {
            Fired::HandedOver => self.hand_over(id),
            Fired::Skipped(reason) => {
                let reason = (*reason).into();
                // What has been executed in vain is not a run that never was.
                let begun = self.runs.get(&id).is_some_and(|live| live.run().attempt > 0);
                let state = if begun { RunState::Cancelled } else { RunState::Skipped };
                self.apply(id, RunEvent::Ended { state, reason, at: now });
            }
            Fired::Blocked(blockers) => {
                if let Some(live) = self.runs.get_mut(&id) {
                    live.phase = Phase::Blocked;
                }
                // The last one started is the one most likely to be running still.
                if let Some(blocker) = blockers.last() {
                    self.blocked.entry(*blocker).or_default().push(id);
                }
            }
        }
        report.fired.push((id, kind, fired));
    }

    /// Binds the present definition to the run and puts it into its group's queue.
    fn hand_over(&mut self, id: RunId) {
        let Some(live) = self.runs.get_mut(&id) else { return };
        let run = &mut live.ledger.run;
        if let Some(task) = self.tasks.get(&run.task_id) {
            let d = &task.row.definition;
            run.group.clone_from(&d.executor_group);
            run.queue.clone_from(&d.queue_label);
            run.handler.clone_from(&d.handler);
            run.priority = d.priority;
            run.profile = Some(Profile::of(d.timeout_ms, d.max_retry));
            if run.attempt == 0 && run.attempt_base == 0 {
                run.max_attempts = d.max_attempts();
            }
            live.spec = Some(d.clone());
        }
        run.decision = Some(Decision::HandOver);
        self.touch(id);
        self.mark_busy(id);
        self.queue(id);
    }

    /// Puts a run into its group's queue.
    pub(super) fn queue(&mut self, id: RunId) {
        if let Some(live) = self.runs.get_mut(&id) {
            live.phase = Phase::Queued;
            let run = live.run();
            let (group, priority, publish_at) = (run.group.clone(), run.priority, run.publish_at);
            self.queues.push(&group, priority, publish_at, id);
        }
    }
}

/// Judges a due run without regard to other runs.
fn decide(run: &Run, task: &Task, now: Timestamp) -> Fired {
    let d = &task.row.definition;
    if d.status == Status::Paused {
        return Fired::Skipped("paused");
    }
    match run.kind {
        RunKind::Cron | RunKind::Every => {
            if !task.owes(run.trigger_at) {
                return Fired::Skipped("schedule_changed");
            }
            let missed_before = now.plus_millis(-i64::try_from(d.misfire_grace_ms).unwrap_or(i64::MAX));
            // fire_once: of the missed instants only the newest is executed.
            if run.publish_at < missed_before && task.next_after(run.trigger_at).is_some_and(|t| t < missed_before) {
                return Fired::Skipped("misfire");
            }
            Fired::HandedOver
        }
        RunKind::Delay if task.row.delay_run_id != Some(run.run_id) => Fired::Skipped("schedule_changed"),
        RunKind::Delay | RunKind::Manual | RunKind::Enqueue => Fired::HandedOver,
        // Rows for stretches are final from the start and never become due.
        RunKind::Missed | RunKind::Skipped => Fired::Skipped("not_a_run"),
    }
}
