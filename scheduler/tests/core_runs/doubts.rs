//! Faults that the simulator found: messages and news that are lost, and what a takeover makes of them.

use super::*;
use ax_scheduler::core::run::{Attempt, Intent, Message};

/// A message as the stream holds it.
fn stored(sent: &Outgoing, seq: u64) -> StreamMessage {
    let headers = sent.headers.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect();
    StreamMessage { seq, subject: sent.subject.clone(), headers, payload: sent.payload.clone(), at: at(1000) }
}

#[test]
fn a_lost_message_is_published_again_above_every_number_it_may_have_used() {
    let (mut world, run) = one(json!({"max_retry": 2}));
    world.event("started", &run, 1010, json!({}));
    assert!(world.shard.lost(run.run_id, 1, at(1500)));
    let r = world.run(run.run_id);
    assert_eq!((r.state, r.attempt, r.attempt_base, r.max_attempts), (RunState::Pending, 1, 3, 5));
    assert!(!world.shard.lost(run.run_id, 1, at(1500)), "once is enough");
    world.flush();
    world.run_until(1600);
    assert_eq!(world.sent.len(), 1, "news of the old message may be on its way");
    world.run_until(4000);
    let headers: std::collections::HashMap<_, _> = world.sent[1].headers.iter().cloned().collect();
    assert_eq!(
        (headers["Nats-Msg-Id"].clone(), headers["Ax-Attempt-Base"].as_str()),
        (format!("{}:2", run.run_id), "3")
    );
}

#[test]
fn a_lost_last_attempt_has_another_one() {
    let (mut world, run) = one(json!({}));
    world.event("started", &run, 1010, json!({}));
    assert!(world.shard.lost(run.run_id, 1, at(1500)));
    let r = world.run(run.run_id);
    assert_eq!((r.attempt_base, r.max_attempts), (1, 2), "in doubt it is never taken to have succeeded or failed");
}

#[test]
fn losses_in_a_row_do_not_multiply_the_attempts() {
    let (mut world, run) = one(json!({}));
    for loss in 1..4 {
        let seq = world.sent.len() as u64;
        assert!(world.shard.lost(run.run_id, seq, at(loss * 10_000)));
        let r = world.run(run.run_id);
        assert_eq!(r.max_attempts - r.attempt_base, 1, "after loss {loss}");
        world.flush();
        world.run_until(loss * 10_000 + 3_000);
    }
}

#[test]
fn a_replacement_waits_also_when_nothing_else_has_happened_for_long() {
    let (mut world, run) = one(json!({}));
    world.flush();
    assert!(world.shard.lost(run.run_id, 1, at(900_000)));
    world.flush();
    world.run_until(900_500);
    assert_eq!(world.sent.len(), 1, "news of the old message may be on its way");
    world.run_until(903_000);
    assert_eq!(world.sent.len(), 2);
}

#[test]
fn what_has_ended_in_another_stream_does_not_take_the_sequence_of_a_run_in_this_one() {
    let mut world = World::new(&[every(1000, json!({"overlap_policy": "allow"}))]);
    let rows = world.plan(2000, 0);
    world.run_until(1000);
    world.shard.set_triggers_incarnation("t2", 0);
    // The next run gets the sequence that the first one had in the stream before.
    world.shard.fire(at(2000));
    let publish = world.shard.pop_publish().unwrap();
    world.shard.published(publish.run_id, PubAck { seq: 1, duplicate: false }, at(2000));
    assert!(world.shard.lost(rows[0].run_id, 1, at(2500)));
    world.server(TERM, 1, 1, 2600);
    assert_eq!(world.run(publish.run_id).state, RunState::Failed);
}

#[test]
fn a_success_of_a_lost_attempt_counts_until_a_later_one_has_begun() {
    let (mut world, run) = one(json!({}));
    world.event("started", &run, 1010, json!({}));
    world.shard.lost(run.run_id, 1, at(1500));
    world.event("succeeded", &run, 1600, json!({"result": 1}));
    assert_eq!(world.run(run.run_id).state, RunState::Succeeded);

    let (mut world, run) = one(json!({}));
    world.event("started", &run, 1010, json!({}));
    world.shard.lost(run.run_id, 1, at(1500));
    world.flush();
    world.run_until(4000);
    world.event("started", &run, 4010, json!({"attempt": 2}));
    world.event("succeeded", &run, 4020, json!({}));
    assert_eq!(world.run(run.run_id).state, RunState::Running);
}

#[test]
fn lost_events_are_remembered_over_a_takeover() {
    let (mut world, run) = one(json!({}));
    world.flush();
    world.shard.restart_events("e2".into(), 0);
    let flush = world.shard.take_flush().unwrap();
    assert_eq!(flush.batch.settled.as_ref().unwrap().incarnation, "e2");
    assert_eq!(flush.batch.runs[0].intent, Some(Intent::Doubt), "in the transaction that moves past the gap");

    let mut next = World::new(&[every(1000, json!({}))]);
    next.shard.load_runs(flush.batch.runs.clone(), vec![], at(2000));
    assert!(next.shard.outstanding_run(run.run_id).unwrap().speaks_against);
}

/// A leader published a run and died before it could record that; what its worker then told was lost, too.
#[test]
fn an_absent_message_that_was_published_before_events_were_lost_is_no_success() {
    let run = World::new(&[every(1000, json!({}))]).plan(1000, 0).remove(0);
    let speaks_against = |duplicate| {
        let mut next = World::new(&[every(1000, json!({}))]);
        next.shard.load_runs(vec![run.clone()], vec![], at(1000));
        next.shard.restart_events("e2".into(), 0);
        next.shard.fire(at(1000));
        let publish = next.shard.pop_publish().unwrap();
        next.shard.published(publish.run_id, PubAck { seq: 1, duplicate }, at(1000));
        next.shard.outstanding_run(run.run_id).unwrap().speaks_against
    };
    assert!(speaks_against(true));
    assert!(!speaks_against(false), "it was stored after that");
}

#[test]
fn a_deleted_task_takes_back_a_run_that_is_in_doubt() {
    let (mut world, run) = one(json!({}));
    world.shard.restart_events("e2".into(), 0);
    let mut gone = row(every(1000, json!({})));
    gone.deleted_at = Some(at(1500));
    world.shard.load_tasks(2, vec![gone], at(1500));
    assert_eq!(world.run(run.run_id).intent, Some(Intent::Cancel));
    assert!(!world.shard.lost(run.run_id, 1, at(1600)), "it is being cancelled");
}

#[test]
fn a_failure_that_overtakes_its_puback_does_not_lose_the_publish() {
    let mut world = World::new(&[every(1000, json!({"max_retry": 1}))]);
    let planned = world.plan(1000, 0).remove(0);
    world.shard.fire(at(1000));
    world.shard.pop_publish().unwrap();
    world.event("failed", &planned, 1001, json!({}));
    world.shard.publish_unanswered(planned.run_id, at(3000), false);
    world.shard.fire(at(3300));
    assert!(world.shard.pop_publish().is_some(), "only another publish yields its sequence");
}

#[test]
fn a_puback_that_does_not_grow_is_of_another_stream() {
    let (mut world, first) = one(json!({"overlap_policy": "allow"}));
    world.plan(2000, 1500);
    world.shard.fire(at(2000));
    let next = world.shard.pop_publish().unwrap();
    assert!(!world.shard.published(next.run_id, PubAck { seq: 1, duplicate: false }, at(2001)));
    assert_eq!(world.run(first.run_id).message.as_ref().unwrap().seq, 1);
    assert!(world.run(next.run_id).message.is_none());
    assert_eq!(world.shard.set_triggers_incarnation("t2", 1), 1, "the first one's message is lost");
    world.shard.fire(at(2300));
    let again = world.shard.pop_publish().unwrap();
    assert_eq!(again.message.headers[1], next.message.headers[1]);
    assert!(world.shard.published(next.run_id, PubAck { seq: 1, duplicate: true }, at(2301)));
    assert_eq!(world.run(next.run_id).message.as_ref().unwrap().incarnation, "t2");
}

#[test]
fn a_puback_awaited_while_the_stream_changed_is_not_believed() {
    let mut world = World::new(&[every(1000, json!({}))]);
    world.plan(1000, 0);
    world.shard.fire(at(1000));
    let publish = world.shard.pop_publish().unwrap();
    world.shard.set_triggers_incarnation("t2", 0);
    world.shard.published(publish.run_id, PubAck { seq: 5, duplicate: false }, at(1001));
    assert!(world.run(publish.run_id).message.is_none(), "the old stream may have stored it");
    world.shard.fire(at(1300));
    assert!(world.shard.pop_publish().is_some());
}

#[test]
fn a_timeout_that_its_worker_told_is_no_success_when_the_message_is_gone() {
    let (mut world, run) = one(json!({"max_retry": 1}));
    world.event("failed", &run, 1100, json!({"error": {"kind": "timeout", "message": ""}}));
    assert!(world.shard.outstanding_run(run.run_id).unwrap().speaks_against);
}

#[test]
fn an_adopted_message_can_be_reconciled() {
    let (world, run) = one(json!({"max_retry": 2}));
    let mut next = World::new(&[every(1000, json!({}))]);
    let planned = Run { state: RunState::Pending, decision: None, message: None, profile: None, ..run.clone() };
    next.shard.load_runs(vec![planned], vec![], at(2000));
    next.shard.adopt_message(run.run_id, &stored(&world.sent[0], 1));
    let outstanding = next.shard.outstanding_run(run.run_id).expect("the sweep sees it");
    assert_eq!(outstanding.consumer.to_string(), "g-default-t60r2");
    assert_eq!(next.run(run.run_id).max_attempts, 3, "as it was published");
}

#[test]
fn a_wait_before_the_next_message_outlives_a_takeover() {
    let (mut world, run) = one(json!({"max_retry": 1, "retry_backoff": {"initial_ms": 9000, "jitter_ms": 0}}));
    world.event("failed", &run, 1100, json!({}));
    world.server(ACK, 1, 1, 1110);
    let replaced = world.run(run.run_id).clone();
    assert_eq!((replaced.state, replaced.message_no), (RunState::Pending, 2));
    let failed = |finished_at| Attempt {
        run_id: run.run_id,
        attempt: 1,
        outcome: Some(AttemptOutcome::Failed),
        worker_id: None,
        started_at: None,
        finished_at: Some(at(finished_at)),
        error: None,
    };
    // A worker whose clock is an hour ahead makes the wait no longer than it is.
    for (finished_at, due) in [(1100, 10_100), (3_600_000, 11_000)] {
        let mut next = World::new(&[every(1000, json!({"retry_backoff": {"initial_ms": 9000, "jitter_ms": 0}}))]);
        next.shard.load_runs(vec![replaced.clone()], vec![failed(finished_at)], at(2000));
        assert_eq!(next.shard.next_due(), Some(at(due)));
    }
}

#[test]
fn a_run_that_ends_before_its_puback_is_looked_for_in_the_stream() {
    let mut world = World::new(&[every(1000, json!({}))]);
    let planned = world.plan(1000, 0).remove(0);
    world.shard.fire(at(1000));
    world.shard.pop_publish().unwrap();
    world.event("failed", &planned, 1001, json!({"retry": false}));
    let flush = world.shard.take_flush().unwrap();
    let unknown = Message { incarnation: String::new(), seq: 0, open: true };
    assert_eq!(flush.batch.runs[0].message, Some(unknown), "a successor looks under its subjects");
    world.shard.committed(flush);
    world.shard.message_closed(planned.run_id, 7);
    assert!(world.run(planned.run_id).message.as_ref().unwrap().open, "that was another message");
    world.shard.published(planned.run_id, PubAck { seq: 3, duplicate: false }, at(1002));
    assert_eq!(world.run(planned.run_id).message.as_ref().unwrap().seq, 3);
}

#[test]
fn a_run_with_several_messages_is_closed_when_all_are_gone() {
    let (mut world, run) = one(json!({"max_retry": 1, "retry_backoff": {"initial_ms": 0, "jitter_ms": 0}}));
    world.event("failed", &run, 1100, json!({}));
    world.server(ACK, 1, 1, 1110);
    world.flush();
    world.run_until(1200);
    world.server(ACK, 2, 1, 1300);
    assert_eq!(world.run(run.run_id).state, RunState::Succeeded);
    world.flush();
    world.effects.clear();
    world.shard.fire(at(4000));
    world.flush();
    assert!(world.effects.iter().any(|(e, _)| matches!(e, Effect::Delete { seq: 2, .. })), "its first one may be left");
    world.shard.message_closed(run.run_id, 2);
    world.flush();
    assert!(world.shard.run(run.run_id).is_none());
}

#[test]
fn a_takeover_does_not_plan_again_what_lies_in_a_stretch() {
    let state = ShardState {
        epoch: 7,
        definitions_rev: 4,
        planned_until: at(60_000),
        planned_rev: 3,
        settled: EventsPosition { incarnation: "e1".into(), seq: 0 },
    };
    let mut shard = Shard::new(Prefix::default(), &state);
    let (mut planned, mut new) = (row(every(1000, json!({}))), row(every(1000, json!({"task_id": "u"}))));
    (planned.rev, planned.updated_at) = (3, at(30_000));
    (new.rev, new.updated_at, new.effective_at, new.anchor_at) = (4, at(58_500), at(58_500), at(58_500));
    shard.load_tasks(4, vec![planned, new], at(61_000));
    let changed = shard.changed_since_planned();
    assert_eq!(changed.iter().map(ax_shared::TaskId::as_str).collect::<Vec<_>>(), ["u"]);
    let rows = shard.plan(at(60_000), at(60_000), &changed).rows;
    assert_eq!(rows.iter().map(|r| r.trigger_at).collect::<Vec<_>>(), [at(59_500)]);
}

#[test]
fn a_clock_that_steps_back_makes_no_wait_longer() {
    let (mut world, run) = one(json!({"max_retry": 1, "retry_backoff": {"initial_ms": 500, "jitter_ms": 0}}));
    world.event("failed", &run, 1100, json!({}));
    world.server(ACK, 1, 1, 1110);
    world.flush();
    assert_eq!(world.shard.next_due(), Some(at(1610)));
    world.shard.fire(at(1110 - 3_600_000));
    assert_eq!(world.shard.next_due(), Some(at(1610 - 3_600_000)));
}

#[test]
fn numbers_of_a_message_that_went_with_its_stream_before_it_was_known_are_not_used_again() {
    let mut world = World::new(&[every(1000, json!({"max_retry": 1}))]);
    let planned = world.plan(1000, 0).remove(0);
    world.shard.fire(at(1000));
    world.shard.pop_publish().unwrap();
    world.event("started", &planned, 1001, json!({}));
    world.shard.set_triggers_incarnation("t2", 0);
    let r = world.run(planned.run_id);
    assert_eq!((r.message_no, r.attempt_base, r.max_attempts), (2, 2, 3));

    let (mut world, run) = one(json!({}));
    world.event("started", &run, 1001, json!({}));
    let unknown = Run { message: None, ..world.run(run.run_id).clone() };
    let mut next = World::new(&[every(1000, json!({}))]);
    assert_eq!(next.shard.load_runs(vec![unknown], vec![], at(2000)), [run.run_id]);
    next.shard.not_found(run.run_id, at(2000));
    assert_eq!(next.run(run.run_id).attempt_base, 1);
}

#[test]
fn a_message_deleted_under_a_worker_by_a_cancel_is_not_told_to_be_the_workers_doing() {
    let (mut world, run) = one(json!({}));
    world.event("started", &run, 1010, json!({}));
    let mut gone = row(every(1000, json!({})));
    gone.deleted_at = Some(at(1500));
    world.shard.load_tasks(2, vec![gone], at(1500));
    world.server(TERM, 1, 1, 1600);
    let r = world.run(run.run_id);
    assert_eq!((r.state, r.reason.as_deref()), (RunState::Cancelled, Some("task_deleted")));
    let flush = world.shard.take_flush().unwrap();
    assert_eq!(flush.batch.attempts[0].outcome, Some(AttemptOutcome::Cancelled));
}

#[test]
fn news_of_an_earlier_stream_is_not_taken_for_news_of_this_one() {
    let mut world = World::new(&[every(1000, json!({}))]);
    world.plan(1000, 0);
    world.shard.set_triggers_incarnation(&at(900).to_string(), 0);
    world.shard.fire(at(1000));
    let publish = world.shard.pop_publish().unwrap();
    assert_eq!(world.server(ACK, 1, 1, 800), Applied::Nothing, "acked before the stream was made");
    world.shard.published(publish.run_id, PubAck { seq: 1, duplicate: false }, at(1001));
    assert_eq!(world.run(publish.run_id).state, RunState::Triggered);
    world.server(ACK, 1, 1, 1100);
    assert_eq!(world.run(publish.run_id).state, RunState::Succeeded);
}

#[test]
fn an_event_of_a_run_that_was_handed_over_to_another_group_and_not_recorded_counts() {
    let mut world = World::new(&[every(1000, json!({}))]);
    let planned = world.plan(1000, 0).remove(0);
    world.shard.load_tasks(2, vec![row(every(1000, json!({"executor_group": "h"})))], at(500));
    // A leader that could not record it published it to the new group and died; this one has read the old row.
    let told = Run { group: ax_shared::Group::new("h").unwrap(), ..planned.clone() };
    assert!(matches!(world.event("succeeded", &told, 1010, json!({})), Applied::Run(..)));
    let r = world.run(planned.run_id);
    assert_eq!((r.state, r.group.as_str()), (RunState::Succeeded, "h"));
    let stranger = Run { group: ax_shared::Group::new("x").unwrap(), ..planned };
    assert!(matches!(world.event("succeeded", &stranger, 1020, json!({})), Applied::Malformed(_)));
}

#[test]
fn a_run_that_was_executed_in_vain_is_cancelled_and_not_skipped_when_its_task_is_deleted() {
    let (mut world, run) = one(json!({"max_retry": 1}));
    world.event("started", &run, 1010, json!({}));
    assert!(world.shard.lost(run.run_id, 1, at(1500)));
    world.flush();
    // A successor takes the run up while it waits for its next message, and the task is gone.
    let state = ShardState {
        epoch: 8,
        definitions_rev: 2,
        planned_until: at(2000),
        planned_rev: 1,
        settled: EventsPosition { incarnation: "e1".into(), seq: 1 },
    };
    let left = world.run(run.run_id).clone();
    let mut shard = Shard::new(Prefix::default(), &state);
    shard.set_triggers_incarnation("t1", 1);
    assert_eq!(shard.load_runs(vec![left], Vec::new(), at(1600)), [run.run_id]);
    shard.fire(at(9000));
    let r = shard.run(run.run_id).expect("not written yet");
    assert_eq!((r.state, r.reason.as_deref()), (RunState::Cancelled, Some("task_deleted")));
}

#[test]
fn a_decided_run_does_not_wait_for_its_instant_again_when_the_clock_has_stepped_back() {
    let (world, run) = one(json!({}));
    let decided = Run { state: RunState::Pending, message: None, published_at: None, ..world.run(run.run_id).clone() };
    let state = ShardState {
        epoch: 8,
        definitions_rev: 1,
        planned_until: at(2000),
        planned_rev: 1,
        settled: EventsPosition { incarnation: "e1".into(), seq: 0 },
    };
    let mut shard = Shard::new(Prefix::default(), &state);
    shard.set_triggers_incarnation("t1", 1);
    shard.load_tasks(1, vec![row(every(1000, json!({})))], at(0));
    let an_hour_ago = at(1000 - 3_600_000);
    shard.load_runs(vec![decided], Vec::new(), an_hour_ago);
    assert!(shard.fire(an_hour_ago).fired.is_empty(), "clocks differ by a little, and nothing is early by that");
    let fired = shard.fire(at(11_000 - 3_600_000)).fired;
    assert_eq!(
        fired.iter().map(|(id, _, fired)| (*id, fired.clone())).collect::<Vec<_>>(),
        [(run.run_id, Fired::HandedOver)]
    );
}

#[test]
fn an_instant_in_a_stretch_is_not_planned_again_for_a_change_that_was_accepted_by_a_clock_behind() {
    let mut world = World::new(&[every(1000, json!({}))]);
    world.plan(2000, 0);
    let missed = world.plan(122_000, 120_000).into_iter().find_map(|row| row.stretch).expect("a minute is missed");
    let mut edited = row(every(1000, json!({"description": "new"})));
    (edited.rev, edited.updated_at) = (2, missed.to.plus_millis(-5500));
    world.shard.load_tasks(2, vec![edited], at(120_000));
    let again = world.shard.plan(at(122_000), at(120_000), &[ax_shared::TaskId::new("t").unwrap()]).rows;
    assert!(again.iter().all(|row| row.trigger_at > missed.to), "{:?}", again.first().map(|row| row.trigger_at));
}

/// Two runs in the stream, with sequences 1 and 2.
fn two() -> (World, Run, Run) {
    let mut world = World::new(&[every(1000, json!({"overlap_policy": "allow"}))]);
    let rows = world.plan(2000, 0);
    world.run_until(2000);
    world.flush();
    (world, rows[0].clone(), rows[1].clone())
}

#[test]
fn what_went_with_the_tail_of_the_stream_is_in_another_one() {
    let (mut world, first, second) = two();
    assert_eq!(world.shard.set_triggers_incarnation("t1", 1), 1);
    assert_eq!(world.run(first.run_id).message.as_ref().unwrap().incarnation, "t1");
    assert_ne!(world.run(second.run_id).message.as_ref().unwrap().incarnation, "t1");
    let flush = world.shard.take_flush().unwrap();
    assert_eq!(flush.batch.runs.len(), 1, "a successor knows it, too");
    assert_eq!(world.shard.set_triggers_incarnation("t1", 1), 0, "once is enough");
}

#[test]
fn the_sequence_of_a_lost_message_is_not_the_lost_ones_any_more() {
    let (mut world, _, second) = two();
    world.shard.set_triggers_incarnation("t1", 1);
    let third = world.plan(3000, 2500).remove(0);
    world.shard.fire(at(3000));
    assert!(
        world.shard.pop_publish().is_none(),
        "a successor must know of the loss before anything takes the sequence"
    );
    world.flush();
    let publish = world.shard.pop_publish().unwrap();
    assert!(world.shard.published(publish.run_id, PubAck { seq: 2, duplicate: false }, at(3001)));
    assert_eq!(world.server(ACK, 2, 1, 1900), Applied::Nothing, "it was told about the lost one");
    world.server(ACK, 2, 1, 3100);
    assert_eq!(world.run(third.run_id).state, RunState::Succeeded);
    assert_eq!(world.run(second.run_id).state, RunState::Triggered);
}

#[test]
fn a_puback_that_does_not_grow_shows_that_the_tail_is_lost() {
    let (mut world, first, second) = two();
    world.plan(3000, 2500);
    world.shard.fire(at(3000));
    let publish = world.shard.pop_publish().unwrap();
    assert!(!world.shard.published(publish.run_id, PubAck { seq: 2, duplicate: false }, at(3001)));
    assert_eq!(world.run(first.run_id).message.as_ref().unwrap().incarnation, "t1");
    assert_ne!(world.run(second.run_id).message.as_ref().unwrap().incarnation, "t1");
    // Published again, the stream names it.
    world.flush();
    world.shard.fire(at(3300));
    assert!(world.shard.pop_publish().is_some());
    assert!(world.shard.published(publish.run_id, PubAck { seq: 2, duplicate: true }, at(3301)));
    assert_eq!(world.run(publish.run_id).message.as_ref().unwrap().seq, 2);
}

#[test]
fn a_recorded_sequence_that_the_stream_never_reached_is_lost_at_a_takeover() {
    let (world, first, second) = two();
    let recorded = vec![world.run(first.run_id).clone(), world.run(second.run_id).clone()];
    let mut next = World::new(&[every(1000, json!({"overlap_policy": "allow"}))]);
    next.shard.set_triggers_incarnation("t1", 1);
    next.shard.load_runs(recorded, vec![], at(3000));
    assert_eq!(next.shard.outstanding_run(first.run_id).unwrap().incarnation, "t1");
    assert_ne!(next.shard.outstanding_run(second.run_id).unwrap().incarnation, "t1");
    assert_eq!(next.server(ACK, 2, 1, 1900), Applied::Nothing);
    next.server(ACK, 1, 1, 1900);
    assert_eq!(next.run(first.run_id).state, RunState::Succeeded);
    assert!(next.shard.lost(second.run_id, 2, at(4000)), "it is published again");
}

#[test]
fn an_ack_out_of_a_tail_that_was_lost_before_anything_was_recorded_is_not_that_of_the_next_message() {
    let mut world = World::new(&[every(1000, json!({}))]);
    let planned = world.plan(1000, 0).remove(0);
    assert_eq!(world.server(ACK, 1, 1, 500), Applied::Kept);
    assert_eq!(world.shard.forget_signals_above(0), 1);
    world.run_until(1000);
    assert_eq!(world.run(planned.run_id).state, RunState::Triggered);
    let signals = world.shard.take_flush().expect("changes").batch;
    assert!(signals.signals_add.is_empty() && signals.signals_remove.len() == 1, "a successor does not read it either");
}
