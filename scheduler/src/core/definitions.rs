//! Accepting a definition: which version it becomes, whether its phase moves, which run it sets off.
//!
//! Invariant: every instant of a schedule is accounted for. Instants after `effective_at` are owed by the row; when a
//! change takes the row's place, instants that nobody will judge any more become one row of the history.

use std::sync::Arc;

use ax_shared::definition::Status;
use ax_shared::{RunId, RunKind, TaskDefinition, TaskId, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::core::run::{Run, RunState, Stretch};
use crate::core::schedule::Schedule;

/// Why a stretch of instants was missed.
pub const NOBODY_RAN: &str = "no scheduler could fire";

/// A stored definition; the row `task` in SQL. Deleted tasks stay as a tombstone, so that every node hears of it and
/// versions go on where they were.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskRow {
    /// The definition.
    pub definition: Arc<TaskDefinition>,
    /// Counts accepted changes, from 1.
    pub version: u64,
    /// `definitions_rev` of the change that wrote this row; set by the store.
    pub rev: u64,
    /// Phase of `EVERY`: the moment at which this schedule was accepted.
    pub anchor_at: Timestamp,
    /// From when on (exclusive) instants of this schedule are owed: acceptance of the schedule, pause or resume, never
    /// earlier than what had been planned by then.
    pub effective_at: Timestamp,
    /// The run that `delay_seconds` set off; a changed delay sets off another and takes the place of this one.
    pub delay_run_id: Option<RunId>,
    /// When the task was first accepted.
    pub created_at: Timestamp,
    /// When this version was accepted.
    pub updated_at: Timestamp,
    /// When the task was deleted.
    pub deleted_at: Option<Timestamp>,
}

/// What became of one definition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// There was none of that id.
    Created,
    /// It differs from the one before.
    Updated,
    /// It is equal to the one before; nothing was written.
    Unchanged,
    /// It was deleted.
    Deleted,
}

/// One line of the audit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AuditEntry {
    /// When.
    pub at: Timestamp,
    /// Who: the token's name, or the address of the caller.
    pub actor: String,
    /// What: `task.created`, `task.updated`, `task.deleted`, `task.paused`, `task.resumed`, `run.triggered` …
    pub action: String,
    /// On what: the task or run id.
    pub subject: String,
    /// Before and after, or further facts.
    pub detail: Value,
}

/// Rows that a change of definitions writes, in one transaction that ends with `definitions_rev + 1`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DefinitionWrite {
    /// Whole task rows, new or changed (`rev` is set by the store).
    pub tasks: Vec<TaskRow>,
    /// Runs that come with them (delayed runs, skipped stretches).
    pub runs: Vec<Run>,
    /// Who changed what.
    pub audit: Vec<AuditEntry>,
}

/// What a change of definitions is decided on, read under the lock that orders such changes.
#[derive(Debug, Clone, Default)]
pub struct DefinitionView {
    /// The rows of the ids asked for that exist, tombstones included.
    pub tasks: std::collections::HashMap<TaskId, TaskRow>,
    /// The planning watermark.
    pub planned_until: Timestamp,
    /// The revision that it was last moved on: rows of later ones are not planned up to there.
    pub planned_rev: u64,
}

impl TaskRow {
    /// A run of this task, owed at `publish_at`, with what the definition says now.
    #[must_use]
    pub fn new_run(
        &self,
        run_id: RunId,
        kind: RunKind,
        trigger_at: Timestamp,
        publish_at: Timestamp,
        now: Timestamp,
    ) -> Run {
        let d = &self.definition;
        Run {
            run_id,
            task_id: d.task_id.clone(),
            kind,
            flow_id: run_id,
            trigger_at,
            publish_at,
            payload: None,
            stretch: None,
            created_at: now,
            group: d.executor_group.clone(),
            queue: d.queue_label.clone(),
            handler: d.handler.clone(),
            priority: d.priority,
            profile: None,
            state: RunState::Pending,
            reason: None,
            adopted: kind.is_scheduled(),
            decision: None,
            intent: None,
            message_no: 1,
            message: None,
            attempt_base: 0,
            attempt: 0,
            max_attempts: d.max_attempts(),
            worker_id: None,
            lateness_ms: None,
            published_at: None,
            started_at: None,
            finished_at: None,
            result: None,
        }
    }
}

/// What a change is decided with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AcceptContext {
    /// The moment of acceptance.
    pub now: Timestamp,
    /// The planning watermark: every instant up to here has its row.
    pub planned_until: Timestamp,
    /// The revision that it was last moved on: rows of later ones are not planned up to there.
    pub planned_rev: u64,
    /// The id of the run that `delay_seconds` may set off.
    pub fresh_run_id: RunId,
}

/// What a change of one definition comes to.
#[derive(Debug, Clone, PartialEq)]
pub struct Accepted {
    /// What became of it.
    pub change: Change,
    /// The row to write; none when unchanged.
    pub row: Option<TaskRow>,
    /// Runs to insert with it: a delayed one, a stretch that nobody will judge any more.
    pub runs: Vec<Run>,
}

impl Accepted {
    /// The stretch of instants that is put into the history as skipped or missed, if there is one.
    #[must_use]
    pub fn stretch(&self) -> Option<Stretch> {
        self.runs.iter().find_map(|run| run.stretch)
    }
}

/// Decides what a new definition of a task does to the row that there is. A tombstone counts as none, but versions go
/// on from it.
#[must_use]
pub fn accept(existing: Option<&TaskRow>, new: TaskDefinition, cx: AcceptContext) -> Accepted {
    let live = existing.filter(|row| row.deleted_at.is_none());
    if live.is_some_and(|row| *row.definition == new) {
        return Accepted { change: Change::Unchanged, row: None, runs: Vec::new() };
    }
    let now = cx.now;
    let mut row = TaskRow {
        version: existing.map_or(0, |row| row.version) + 1,
        rev: existing.map_or(0, |row| row.rev),
        anchor_at: now,
        effective_at: now,
        delay_run_id: None,
        created_at: live.map_or(now, |row| row.created_at),
        updated_at: now,
        deleted_at: None,
        definition: Arc::new(new),
    };
    let mut runs = Vec::new();

    if let Some(old) = live {
        let status = (old.definition.status, row.definition.status);
        // Rows up to the watermark are taken to exist below, and the leader will only see the new row.
        runs.extend(unplanned(old, if status.1 == Status::Paused { cx.planned_until } else { now }, cx));
        if !same_schedule(&old.definition, &row.definition) {
            runs.extend(unjudged(old, cx));
        } else {
            row.anchor_at = old.anchor_at;
            row.effective_at = match status {
                (Status::Enabled, Status::Paused) => {
                    runs.extend(unjudged(old, cx));
                    // Rows up to the watermark exist and are judged one by one.
                    now.max(cx.planned_until)
                }
                (Status::Paused, Status::Enabled) => {
                    runs.extend(unjudged(old, cx));
                    now.max(old.effective_at)
                }
                (Status::Enabled, Status::Enabled) | (Status::Paused, Status::Paused) => old.effective_at,
            };
        }
    }

    if let Some(seconds) = row.definition.delay_seconds {
        let unchanged = live.filter(|old| old.definition.delay_seconds == Some(seconds));
        if let Some(old) = unchanged {
            row.delay_run_id = old.delay_run_id;
        } else {
            let run = delayed_run(&row, seconds, cx);
            row.delay_run_id = Some(run.run_id);
            runs.push(run);
        }
    }
    let change = if live.is_some() { Change::Updated } else { Change::Created };
    Accepted { change, row: Some(row), runs }
}

/// Decides what deleting a task does: its row becomes a tombstone. None when there is no task to delete.
#[must_use]
pub fn delete(existing: Option<&TaskRow>, cx: AcceptContext) -> Option<Accepted> {
    let live = existing.filter(|row| row.deleted_at.is_none())?;
    let row = TaskRow { version: live.version + 1, updated_at: cx.now, deleted_at: Some(cx.now), ..live.clone() };
    let runs = unplanned(live, cx.now, cx).into_iter().chain(unjudged(live, cx)).collect();
    Some(Accepted { change: Change::Deleted, row: Some(row), runs })
}

fn same_schedule(a: &TaskDefinition, b: &TaskDefinition) -> bool {
    (&a.cron_expr, &a.timezone) == (&b.cron_expr, &b.timezone)
}

/// The run that `delay_seconds` sets off.
fn delayed_run(row: &TaskRow, seconds: u64, cx: AcceptContext) -> Run {
    let ms = i64::try_from(seconds).unwrap_or(i64::MAX).saturating_mul(1000);
    let due = cx.now.plus_millis(ms);
    row.new_run(cx.fresh_run_id, RunKind::Delay, due, due, cx.now)
}

/// Rows of instants up to `until` that `row` owes and that nobody has planned: the leader has not taken it up yet, and
/// now another takes its place. They are pending, and judged at their instant on the definition of then.
fn unplanned(row: &TaskRow, until: Timestamp, cx: AcceptContext) -> Vec<Run> {
    let definition = &row.definition;
    if definition.status == Status::Paused || row.rev <= cx.planned_rev {
        return Vec::new();
    }
    let expr = definition.cron_expr.as_deref();
    let Some(Ok(schedule)) = expr.map(|expr| Schedule::parse(expr, &definition.timezone)) else { return Vec::new() };
    let kind = if schedule.is_every() { RunKind::Every } else { RunKind::Cron };
    // What lies after the watermark is nobody's yet, and told by `unjudged` or owed by the new row.
    let until = until.min(cx.planned_until);
    let mut at = row.effective_at.max(row.updated_at);
    let mut runs = Vec::new();
    while let Some(next) = schedule.next_after(at, row.anchor_at).filter(|next| *next <= until) {
        let run_id = RunId::scheduled(&definition.task_id, next);
        runs.push(Run { adopted: false, ..row.new_run(run_id, kind, next, next, cx.now) });
        at = next;
    }
    runs
}

/// The row of the history for the instants up to now that `row` owed and that will not be judged once it is replaced:
/// those of a paused task, and those that fell due while no scheduler ran to plan them.
fn unjudged(row: &TaskRow, cx: AcceptContext) -> Option<Run> {
    let definition = &row.definition;
    // A stored expression that is no longer understood fires never; there is nothing to account for.
    let schedule = Schedule::parse(definition.cron_expr.as_deref()?, &definition.timezone).ok()?;
    let (kind, reason, after) = match definition.status {
        Status::Paused => (RunKind::Skipped, "paused", row.effective_at),
        Status::Enabled => (RunKind::Missed, NOBODY_RAN, row.effective_at.max(cx.planned_until)),
    };
    let stretch = schedule.stretch(after, cx.now, row.anchor_at)?;
    let id = RunId::stretch(&definition.task_id, stretch.first);
    Some(Run {
        state: RunState::Skipped,
        reason: Some(reason.to_owned()),
        stretch: Some(Stretch { from: stretch.first, to: stretch.last, count: stretch.count }),
        adopted: true,
        finished_at: Some(cx.now),
        ..row.new_run(id, kind, stretch.first, stretch.first, cx.now)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const HOUR: i64 = 3_600_000;

    fn at(hours: i64) -> Timestamp {
        Timestamp::from_millis(1_790_000_000_000 / HOUR * HOUR + hours * HOUR)
    }

    fn cx(now: Timestamp, planned_until: Timestamp) -> AcceptContext {
        AcceptContext {
            now,
            planned_until,
            planned_rev: u64::MAX,
            fresh_run_id: RunId(uuid::Uuid::from_u128(now.as_millis() as u128)),
        }
    }

    fn definition(more: Value) -> TaskDefinition {
        let mut object = json!({"task_id": "a", "executor_group": "g"});
        for (key, value) in more.as_object().unwrap() {
            object[key] = value.clone();
        }
        TaskDefinition::from_json(&object).unwrap().definition
    }

    fn hourly(more: Value) -> TaskDefinition {
        let mut all = json!({"cron_expr": "0 * * * *"});
        for (key, value) in more.as_object().unwrap() {
            all[key] = value.clone();
        }
        definition(all)
    }

    /// Accepts in order, each `(definition, now, planned_until)`, and answers the last outcome with its row.
    fn after(steps: &[(TaskDefinition, Timestamp, Timestamp)]) -> (Accepted, TaskRow) {
        let mut row: Option<TaskRow> = None;
        let mut last = None;
        for (definition, now, planned_until) in steps {
            let accepted = accept(row.as_ref(), definition.clone(), cx(*now, *planned_until));
            row = accepted.row.clone().or(row);
            last = Some(accepted);
        }
        (last.unwrap(), row.unwrap())
    }

    #[test]
    fn a_new_task_is_owed_from_its_acceptance_on() {
        let (accepted, row) = after(&[(hourly(json!({})), at(0), at(5))]);
        assert_eq!(accepted.change, Change::Created);
        assert_eq!((row.version, row.anchor_at, row.effective_at, row.created_at), (1, at(0), at(0), at(0)));
        assert!(accepted.runs.is_empty() && row.delay_run_id.is_none());
    }

    #[test]
    fn an_equal_definition_writes_nothing() {
        let (accepted, row) = after(&[(hourly(json!({})), at(0), at(0)), (hourly(json!({})), at(9), at(9))]);
        assert_eq!(accepted, Accepted { change: Change::Unchanged, row: None, runs: Vec::new() });
        assert_eq!(row.updated_at, at(0));
    }

    #[test]
    fn a_description_keeps_the_phase_and_a_schedule_moves_it() {
        let every = |more: Value| {
            let mut all = json!({"cron_expr": "EVERY 30s"});
            for (key, value) in more.as_object().unwrap() {
                all[key] = value.clone();
            }
            definition(all)
        };
        let (accepted, row) =
            after(&[(every(json!({})), at(0), at(0)), (every(json!({"description": "x"})), at(1), at(1))]);
        assert_eq!((accepted.change, row.version), (Change::Updated, 2));
        assert_eq!((row.anchor_at, row.effective_at, row.created_at, row.updated_at), (at(0), at(0), at(0), at(1)));

        for other in [every(json!({"cron_expr": "EVERY 31s"})), every(json!({"timezone": "Asia/Shanghai"}))] {
            let (_, row) = after(&[(every(json!({})), at(0), at(0)), (other, at(1), at(2))]);
            assert_eq!((row.anchor_at, row.effective_at, row.created_at), (at(1), at(1), at(0)));
        }
    }

    #[test]
    fn a_pause_leaves_planned_rows_to_be_judged_one_by_one() {
        let paused = || hourly(json!({"status": "paused"}));
        let (accepted, row) = after(&[(hourly(json!({})), at(0), at(0)), (paused(), at(2), at(3))]);
        assert_eq!((row.effective_at, row.anchor_at), (at(3), at(0)));
        assert!(accepted.runs.is_empty());
    }

    #[test]
    fn a_resume_accounts_for_the_paused_stretch() {
        let paused = || hourly(json!({"status": "paused"}));
        let (accepted, row) =
            after(&[(hourly(json!({})), at(0), at(0)), (paused(), at(2), at(3)), (hourly(json!({})), at(6), at(7))]);
        assert_eq!(row.effective_at, at(6));
        let [run] = &accepted.runs[..] else { panic!("{:?}", accepted.runs) };
        assert_eq!((run.kind, run.state, run.reason.as_deref()), (RunKind::Skipped, RunState::Skipped, Some("paused")));
        assert_eq!(run.stretch, Some(Stretch { from: at(4), to: at(6), count: 3 }));
        assert_eq!((run.trigger_at, run.run_id), (at(4), RunId::stretch(&run.task_id, at(4))));
        assert_eq!(accepted.stretch(), run.stretch);
    }

    #[test]
    fn a_resume_before_the_watermark_of_the_pause_has_no_stretch() {
        let paused = hourly(json!({"status": "paused"}));
        let (accepted, row) =
            after(&[(hourly(json!({})), at(0), at(0)), (paused, at(2), at(5)), (hourly(json!({})), at(3), at(6))]);
        assert!(accepted.runs.is_empty());
        assert_eq!(row.effective_at, at(5), "rows up to the watermark of the pause exist already");
    }

    #[test]
    fn a_schedule_that_changes_while_paused_closes_the_stretch_of_the_old_one() {
        let paused = |expr: &str| definition(json!({"cron_expr": expr, "status": "paused"}));
        let (accepted, row) = after(&[(paused("0 * * * *"), at(0), at(0)), (paused("30 * * * *"), at(4), at(4))]);
        assert_eq!(accepted.stretch(), Some(Stretch { from: at(1), to: at(4), count: 4 }));
        assert_eq!(row.effective_at, at(4));
    }

    #[test]
    fn instants_of_a_downtime_are_not_lost_with_their_schedule() {
        let later = definition(json!({"cron_expr": "30 * * * *"}));
        let paused = hourly(json!({"status": "paused"}));
        for change in [later, paused] {
            let (accepted, _) = after(&[(hourly(json!({})), at(0), at(0)), (change, at(9), at(5))]);
            let [run] = &accepted.runs[..] else { panic!("{:?}", accepted.runs) };
            assert_eq!((run.kind, run.state), (RunKind::Missed, RunState::Skipped));
            assert_eq!(run.stretch, Some(Stretch { from: at(6), to: at(9), count: 4 }));
        }
    }

    #[test]
    fn what_nobody_has_planned_yet_is_not_lost_when_another_change_takes_its_place() {
        let paused = hourly(json!({"status": "paused"}));
        let described = hourly(json!({"description": "x"}));
        for (change, owed) in [
            (Some(paused), vec![at(2), at(3), at(4)]),
            (Some(described), vec![at(2), at(3)]),
            (None, vec![at(2), at(3)]),
        ] {
            let row = TaskRow { rev: 9, ..after(&[(hourly(json!({})), at(1), at(4))]).1 };
            let seen = |planned_rev| AcceptContext { planned_rev, ..cx(at(3), at(4)) };
            let decided = |cx| match &change {
                Some(change) => accept(Some(&row), change.clone(), cx).runs,
                None => delete(Some(&row), cx).unwrap().runs,
            };
            let runs = decided(seen(8));
            assert_eq!(runs.iter().map(|run| run.trigger_at).collect::<Vec<_>>(), owed);
            for run in runs {
                assert_eq!((run.state, run.adopted), (RunState::Pending, false), "any node may insert it");
                assert_eq!(run.run_id, RunId::scheduled(&run.task_id, run.trigger_at));
            }
            assert!(decided(seen(9)).is_empty(), "the leader has planned them");
        }
    }

    #[test]
    fn a_delay_sets_off_one_run_until_it_changes() {
        let delay = |seconds: u64, text: &str| definition(json!({"delay_seconds": seconds, "description": text}));
        let (accepted, row) = after(&[(delay(2_592_000, ""), at(0), at(0))]);
        let [run] = &accepted.runs[..] else { panic!("{:?}", accepted.runs) };
        assert_eq!((run.kind, run.state, run.adopted), (RunKind::Delay, RunState::Pending, false));
        assert_eq!((run.trigger_at, run.publish_at), (at(720), at(720)));
        assert_eq!(row.delay_run_id, Some(run.run_id));

        let (accepted, row) = after(&[(delay(5, ""), at(0), at(0)), (delay(5, "new text"), at(1), at(1))]);
        assert!(accepted.runs.is_empty());
        assert_eq!(row.delay_run_id, Some(cx(at(0), at(0)).fresh_run_id));

        let (accepted, row) = after(&[(delay(5, ""), at(0), at(0)), (delay(6, ""), at(1), at(1))]);
        assert_eq!(accepted.runs.len(), 1);
        assert_eq!(row.delay_run_id, Some(cx(at(1), at(1)).fresh_run_id));

        let (accepted, row) = after(&[(delay(5, ""), at(0), at(0)), (definition(json!({})), at(1), at(1))]);
        assert!(accepted.runs.is_empty() && row.delay_run_id.is_none());

        let century = delay(ax_shared::definition::MAX_DELAY_SECONDS, "");
        let due = after(&[(century, at(0), at(0))]).0.runs[0].trigger_at;
        assert_eq!(due.millis_since(at(0)), 3_155_760_000_000);
    }

    #[test]
    fn a_deleted_task_comes_back_as_new_with_the_next_version() {
        let (_, row) = after(&[(hourly(json!({})), at(0), at(0))]);
        let gone = delete(Some(&row), cx(at(1), at(2))).unwrap();
        assert_eq!((gone.change, gone.runs.len()), (Change::Deleted, 0));
        let tombstone = gone.row.unwrap();
        assert_eq!((tombstone.version, tombstone.deleted_at), (2, Some(at(1))));
        assert!(delete(Some(&tombstone), cx(at(2), at(2))).is_none());
        assert!(delete(None, cx(at(2), at(2))).is_none());

        let back = accept(Some(&tombstone), hourly(json!({})), cx(at(3), at(3)));
        let row = back.row.unwrap();
        assert_eq!((back.change, row.version), (Change::Created, 3));
        assert_eq!((row.anchor_at, row.effective_at, row.created_at, row.deleted_at), (at(3), at(3), at(3), None));
    }
}
