//! What must hold in the end, computed from the history of the definitions and from what workers did.

use std::collections::BTreeMap;

use ax_scheduler::core::run::{Run, RunState};
use ax_scheduler::core::schedule::Schedule;
use ax_shared::definition::Status;
use ax_shared::{RunId, RunKind, TaskId, Timestamp};

use crate::world::{Book, Version, World, name, short};

/// The most instants of one version that are counted one by one.
const MOST: usize = 200_000;

/// A version with its schedule, phase, and the instant from which another version takes its place.
struct Segment {
    schedule: Schedule,
    anchor: Timestamp,
    from: Timestamp,
    until: Timestamp,
    /// Whether instants of this segment have been decided by now; those of a task that is still paused have not.
    closed: bool,
}

impl Segment {
    fn instants(&self) -> impl Iterator<Item = Timestamp> {
        let mut at = self.from;
        std::iter::from_fn(move || {
            at = self.schedule.next_after(at, self.anchor).filter(|next| *next <= self.until)?;
            Some(at)
        })
        .take(MOST)
    }
}

/// The segments of a task. A version is in force from its acceptance until that of the next; `EVERY` counts from the
/// moment that its schedule was accepted, whatever else has changed since.
fn segments(versions: &[Version], end: Timestamp) -> Vec<Segment> {
    let mut segments = Vec::new();
    let mut anchor = Timestamp::MIN;
    for (i, version) in versions.iter().enumerate() {
        let (row, before) = (&version.row, i.checked_sub(1).map(|i| &versions[i].row));
        let d = &row.definition;
        let same = |a: &ax_scheduler::core::definitions::TaskRow| {
            a.deleted_at.is_none() && (&a.definition.cron_expr, &a.definition.timezone) == (&d.cron_expr, &d.timezone)
        };
        if !before.is_some_and(same) {
            anchor = row.updated_at;
        }
        let Some(expr) = d.cron_expr.as_deref().filter(|_| row.deleted_at.is_none()) else { continue };
        let after = &versions[i + 1..];
        let until = after.first().map_or(end, |next| next.row.updated_at);
        // A paused stretch is written when the task is resumed, gets another schedule, or is deleted.
        let goes_on = |next: &Version| next.row.definition.status == Status::Paused && same(&next.row);
        let closed = d.status == Status::Enabled || after.iter().any(|next| !goes_on(next));
        let schedule = Schedule::parse(expr, &d.timezone).expect("it was accepted");
        // After a step back of the clocks a later version may be accepted at an instant before its schedule was.
        segments.push(Segment { schedule, anchor, from: row.updated_at.max(anchor), until, closed });
    }
    segments
}

/// Every broken promise.
pub(crate) fn judge(world: &World, runs: &[Run], end: Timestamp) -> Vec<String> {
    let book = world.book();
    let mut broken = Vec::new();
    let mut by_task: BTreeMap<&TaskId, Vec<&Run>> = BTreeMap::new();
    for run in runs {
        by_task.entry(&run.task_id).or_default().push(run);
    }
    for (task, versions) in &book.history {
        let runs = by_task.get(task).map(Vec::as_slice).unwrap_or_default();
        instants(task, &segments(versions, end), runs, book.turned_back, &mut broken);
    }
    for id in &book.one_offs {
        if !runs.iter().any(|run| run.run_id == *id) {
            broken.push(format!("the one-off run {id} is gone"));
        }
    }
    for run in runs {
        outcome(&book, run, &mut broken);
    }
    broken
}

/// Every owed instant is decided exactly once, and nothing else is. One that comes again because the clocks stepped back
/// is still one run; but it may have passed while the task was paused, and then come while it was not.
fn instants(
    task: &TaskId,
    segments: &[Segment],
    runs: &[&Run],
    turned_back: Option<Timestamp>,
    broken: &mut Vec<String>,
) {
    let stretches: Vec<_> = runs.iter().filter_map(|run| run.stretch.map(|s| (s, *run))).collect();
    let scheduled: BTreeMap<RunId, &Run> =
        runs.iter().filter(|run| run.kind.is_scheduled()).map(|run| (run.run_id, *run)).collect();
    for segment in segments.iter().filter(|s| s.closed) {
        for at in segment.instants() {
            let row = scheduled.get(&RunId::scheduled(task, at));
            let within = stretches.iter().filter(|(s, _)| s.from <= at && at <= s.to).count();
            match (row, within) {
                (Some(_), 0) | (None, 1) => {}
                (Some(_), 1) if turned_back.is_some_and(|from| at > from) => {}
                (None, 0) => broken.push(format!("{task}: the instant {} was lost", short(at))),
                (Some(run), n) => broken.push(format!(
                    "{task}: the instant {} is in a run ({}) and in {n} stretches",
                    short(at),
                    run.state.as_str()
                )),
                (None, n) => broken.push(format!("{task}: the instant {} is in {n} stretches", short(at))),
            }
        }
    }
    for run in scheduled.values() {
        let at = run.trigger_at;
        if run.run_id != RunId::scheduled(task, at) {
            broken.push(format!("{} has the id of another instant", name(run)));
        }
        if !segments.iter().any(|s| s.schedule.contains(at, s.anchor)) {
            broken.push(format!("{} was never an instant of its task", name(run)));
        }
    }
    for (stretch, run) in &stretches {
        let counted = segments
            .iter()
            .filter_map(|s| s.schedule.stretch(stretch.from.plus_millis(-1), stretch.to, s.anchor))
            .any(|s| (s.first, s.last, s.count) == (stretch.from, stretch.to, stretch.count));
        if !counted {
            broken.push(format!("{}: the stretch {stretch:?} is not one of its schedule", name(run)));
        }
    }
}

fn outcome(book: &Book, run: &Run, broken: &mut Vec<String>) {
    let is_run = !matches!(run.kind, RunKind::Missed | RunKind::Skipped);
    if run.state == RunState::Succeeded && !book.may_succeed.contains(&run.run_id) {
        broken.push(format!("{} succeeded, which nobody said: {:?}", name(run), run.reason));
    }
    let deleted =
        book.history.get(&run.task_id).is_some_and(|versions| versions.iter().any(|v| v.row.deleted_at.is_some()));
    if let Some(attempt) = book.must_succeed.get(&run.run_id)
        && run.state != RunState::Succeeded
        && !(deleted && run.state == RunState::Cancelled)
        && !book.past_the_fence.contains(&run.run_id)
    {
        broken.push(format!(
            "{} is {} ({:?}), though its attempt {attempt} was confirmed to have succeeded",
            name(run),
            run.state.as_str(),
            run.reason
        ));
    }
    // What only a raw worker had, and whose publish could not be recorded, has left no trace.
    let has_a_trace = book.told_of.contains_key(&run.run_id) && !book.past_the_fence.contains(&run.run_id);
    if is_run && has_a_trace && run.state == RunState::Skipped {
        broken.push(format!("{} was executed and is skipped ({:?})", name(run), run.reason));
    }
}
