//! Instants that were missed under `misfire_policy` `skip`: none is executed, each is accounted for.

use std::time::{Duration, Instant};

use super::*;

fn skipping(ms: u64, more: Value) -> Value {
    let mut definition = every(ms, more);
    definition["misfire_policy"] = json!("skip");
    definition
}

#[test]
fn forty_days_of_downtime_of_a_task_that_skips_are_one_row_and_start_nothing_that_was_missed() {
    const DAYS_40: i64 = 40 * 24 * 3_600_000;
    let mut world = World::new(&[skipping(1000, json!({"misfire_grace_ms": 5000, "overlap_policy": "allow"}))]);
    let began = Instant::now();
    let rows = world.plan(DAYS_40 + 2000, DAYS_40);
    assert!(began.elapsed() < Duration::from_millis(500), "counted one by one: {:?}", began.elapsed());

    let (stretches, owed): (Vec<&Run>, Vec<&Run>) = rows.iter().partition(|run| run.stretch.is_some());
    let [missed] = stretches[..] else { panic!("{stretches:?}") };
    assert_eq!((missed.kind, missed.state), (RunKind::Missed, RunState::Skipped));
    assert_eq!(missed.reason.as_deref(), Some("no scheduler could fire"));
    let stretch = missed.stretch.unwrap();
    assert_eq!((stretch.from, stretch.to), (at(1000), at(DAYS_40 - 6000)));
    let owed: Vec<Timestamp> = owed.iter().map(|run| run.trigger_at).collect();
    assert_eq!(owed.iter().min(), Some(&at(DAYS_40 - 5000)), "exactly the grace late is merely late");
    assert_eq!(stretch.count + owed.len() as u64, (DAYS_40 as u64 + 2000) / 1000, "every instant is accounted for");
}

#[test]
fn planned_runs_of_a_task_that_skips_are_not_executed_once_they_were_missed() {
    let more = json!({"misfire_grace_ms": 1000, "overlap_policy": "allow"});
    let mut world = World::new(&[skipping(1000, more)]);
    world.plan(3000, 0);
    // Nothing could be handed over for a while. With `fire_once` the newest of them would be executed.
    let fired = world.run_until(4500);
    assert_eq!(fired, [Fired::Skipped("misfire"), Fired::Skipped("misfire"), Fired::Skipped("misfire")]);
}

#[test]
fn a_task_that_skips_still_executes_what_is_late_by_no_more_than_the_grace() {
    let more = json!({"misfire_grace_ms": 1000, "overlap_policy": "allow"});
    let mut world = World::new(&[skipping(1000, more)]);
    world.plan(1000, 0);
    assert_eq!(world.run_until(2000), [Fired::HandedOver]);
}

#[test]
fn an_interval_that_was_skipped_keeps_its_phase() {
    let mut definition = row(skipping(30_000, json!({"misfire_grace_ms": 1000})));
    definition.anchor_at = at(1000);
    definition.effective_at = at(1000);
    let mut world = World::new(&[]);
    world.shard.load_tasks(1, vec![definition], at(1000));
    let rows = world.plan(61_500, 36_000);
    let told: Vec<_> = rows.iter().map(|run| (run.trigger_at, run.stretch.map(|s| s.count))).collect();
    assert_eq!(told, [(at(31_000), Some(1)), (at(61_000), None)]);
}
