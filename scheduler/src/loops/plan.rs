//! Commits runs ahead of their due instants, and takes up changed definitions.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ax_shared::TaskId;

use super::settle::look_at_triggers;
use super::term::{ensure_consumers, group_configs, publish_group_configs};
use super::{EndOfTerm, Term, wait};
use crate::core::tasks::PlanPass;
use crate::core::trace;
use crate::failpoint::die_at;
use crate::metrics as names;
use crate::ports::{Planned, Watermark};

/// Rows in one transaction of an ordinary pass.
const BATCH: usize = 1000;

/// Runs the loop: a pass every quarter of the horizon, or when definitions changed.
pub(super) async fn run(term: Arc<Term>) -> EndOfTerm {
    let every = term.cx.settings.plan_horizon / 4;
    let mut changed = term.shard().changed_since_planned();
    loop {
        match run_once(&term, std::mem::take(&mut changed)).await {
            Ok(()) => {}
            Err(end) => return end,
        }
        if !wait(&term.wake.plan, every, &term.ended).await {
            return EndOfTerm::Stopped;
        }
    }
}

async fn run_once(term: &Arc<Term>, changed: Vec<TaskId>) -> Result<(), EndOfTerm> {
    let now = term.cx.clock.now();
    let until = (now + term.cx.settings.plan_horizon).max(term.shard().tasks().planned_until());
    let mut pass = term.shard().plan(until, now, &changed);
    loop {
        let seen_rev = term.shard().definitions_rev();
        match write(term, &mut pass, seen_rev).await? {
            Planned::Done { .. } => {
                term.shard().planned(until);
                take_up_missing(term).await?;
                metrics::gauge!(names::PLANNED_UNTIL.name).set(until.as_millis() as f64 / 1000.0);
                term.wake.fire.notify_one();
                return Ok(());
            }
            Planned::RevChanged { .. } => {
                let changed = reload(term, seen_rev).await?;
                let mut shard = term.shard();
                let ids: HashSet<&TaskId> = changed.iter().collect();
                pass.rows.retain(|row| !ids.contains(&row.task_id));
                let more = shard.plan(until, now, &changed);
                pass.rows.extend(more.rows);
                pass.recovers |= more.recovers;
            }
        }
    }
}

/// Writes a pass; rows that are in are taken out of it, so that a repetition goes on where it stopped.
async fn write(term: &Arc<Term>, pass: &mut PlanPass, seen_rev: u64) -> Result<Planned, EndOfTerm> {
    let store = &term.cx.store;
    while !pass.recovers && pass.rows.len() > BATCH {
        let at = pass.rows.len() - BATCH;
        let rows = &pass.rows[at..];
        let Some(planned) = term.done("plan", store.plan(term.epoch, rows, None).await).await? else { continue };
        let rows = pass.rows.split_off(at);
        take_up(term, rows, &planned);
    }
    die_at("plan.computed");
    let watermark = Watermark { until: pass.until, seen_rev };
    let planned = loop {
        let answer = store.plan(term.epoch, &pass.rows, Some(watermark)).await;
        if let Some(planned) = term.done("plan", answer).await? {
            break planned;
        }
    };
    if matches!(planned, Planned::Done { .. }) {
        die_at("plan.committed");
        take_up(term, std::mem::take(&mut pass.rows), &planned);
    }
    Ok(planned)
}

fn take_up(term: &Term, rows: Vec<crate::core::run::Run>, planned: &Planned) {
    let Planned::Done { inserted } = planned else { return };
    let rows: Vec<_> = rows.into_iter().zip(inserted).filter(|(_, new)| **new).map(|(row, _)| row).collect();
    for row in &rows {
        match &row.stretch {
            None => tracing::info!(
                target: "ax::run",
                run_id = %row.run_id, task_id = %row.task_id, trace_id = row.run_id.trace_id(),
                    span_id = %trace::plan_span(row.run_id), trigger_time = %row.trigger_at,
                "planned"
            ),
            Some(s) => {
                metrics::counter!(names::MISSED.name, "reason" => "downtime").increment(s.count);
                tracing::warn!(
                    target: "ax::run",
                    run_id = %row.run_id, task_id = %row.task_id, from = %s.from, to = %s.to, count = s.count,
                    "instants were missed"
                );
            }
        }
    }
    let mut shard = term.shard();
    shard.add_runs(rows);
    metrics::gauge!(names::WHEEL_ENTRIES.name).set(shard.tasks().scheduled() as f64);
}

/// After a write whose answer was lost: takes up rows that are in SQL and not in memory. What was in memory before SQL
/// was read may have ended since, and is left alone.
async fn take_up_missing(term: &Arc<Term>) -> Result<(), EndOfTerm> {
    if !term.rows_in_doubt.swap(false, Ordering::Relaxed) {
        return Ok(());
    }
    let taking_up = term.taking_up.lock().await;
    let known = term.shard().run_ids();
    let Some(rows) = term.done("unfinished", term.cx.store.unfinished(term.epoch).await).await? else {
        return Ok(());
    };
    let Some(state) = term.done("definitions_rev", term.cx.store.shard().await).await? else { return Ok(()) };
    if state.definitions_rev > term.shard().definitions_rev() {
        // One of them may be of a task that is not known yet: the next pass has loaded it.
        term.rows_in_doubt.store(true, Ordering::Relaxed);
        return Ok(());
    }
    let missing: Vec<_> = rows
        .into_iter()
        .filter(|run| !known.contains(&run.run_id) && !run.state.is_final() && run.message.is_none())
        .collect();
    if !missing.is_empty() {
        tracing::warn!(
            runs = missing.len(),
            "rows of a write that was not answered are in the database; taking them up"
        );
        term.shard().add_runs(missing);
    }
    drop(taking_up);
    Ok(())
}

/// Takes up the definitions that changed after `seen_rev`. Their consumers are there before anything is planned for
/// them. Answers which tasks changed.
async fn reload(term: &Arc<Term>, seen_rev: u64) -> Result<Vec<TaskId>, EndOfTerm> {
    let store = &term.cx.store;
    let (rev, rows) = loop {
        if let Some(found) = term.done("definitions", store.definitions(seen_rev).await).await? {
            break found;
        }
    };
    let changed: Vec<TaskId> = rows.iter().map(|r| r.definition.task_id.clone()).collect();
    let groups = {
        let mut shard = term.shard();
        for (id, e) in shard.load_tasks(rev, rows, term.cx.clock.now()) {
            tracing::error!(task_id = %id, error = %e, "a stored schedule does not compile; its task is left out");
        }
        group_configs(&shard)
    };
    term.wake.flush.notify_one();
    let names: Vec<_> = {
        let ids: HashSet<&TaskId> = changed.iter().collect();
        let shard = term.shard();
        ids.into_iter().filter_map(|id| shard.tasks().get(id).map(crate::core::tasks::Task::consumer)).collect()
    };
    let names: std::collections::BTreeSet<_> = names.into_iter().collect();
    // Without NATS the lease runs out and the next leader makes them; planning must not wait for that.
    let made = async {
        look_at_triggers(term).await?;
        ensure_consumers(&term.cx, names).await?;
        publish_group_configs(&term.cx, groups).await
    };
    if let Err(e) = made.await {
        tracing::warn!(error = %e, "consumers of changed tasks could not be made; the next sweep tries again");
    }
    term.definitions.set(rev);
    tracing::info!(rev, tasks = changed.len(), "definitions reloaded");
    Ok(changed)
}
