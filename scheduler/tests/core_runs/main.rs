//! What each event does to a run, through the shard as the loops use it: no I/O, no clock.

mod doubts;
mod misfires;

use std::sync::Arc;

use ax_scheduler::core::definitions::TaskRow;
use ax_scheduler::core::run::{AttemptOutcome, Run, RunState};
use ax_scheduler::core::shard::{Applied, Effect, Fired, Shard};
use ax_scheduler::ports::{EventsPosition, Outgoing, PubAck, ShardState, StreamMessage};
use ax_shared::{Prefix, RunId, RunKind, TaskDefinition, Timestamp};
use serde_json::{Value, json};

const T0: i64 = 1_800_000_000_000;

fn at(ms: i64) -> Timestamp {
    Timestamp::from_millis(T0 + ms)
}

fn row(definition: Value) -> TaskRow {
    let definition = TaskDefinition::from_json(&definition).expect("a valid definition").definition;
    TaskRow {
        definition: Arc::new(definition),
        version: 1,
        rev: 1,
        anchor_at: at(0),
        effective_at: at(0),
        delay_run_id: None,
        created_at: at(0),
        updated_at: at(0),
        deleted_at: None,
    }
}

/// A shard with a stream that is written by hand.
struct World {
    shard: Shard,
    sent: Vec<Outgoing>,
    event_seq: u64,
    effects: Vec<(Effect, Run)>,
}

impl World {
    fn new(definitions: &[Value]) -> Self {
        let state = ShardState {
            epoch: 7,
            definitions_rev: 1,
            planned_until: at(0),
            planned_rev: 0,
            settled: EventsPosition { incarnation: "e1".into(), seq: 0 },
        };
        let mut shard = Shard::new(Prefix::default(), &state);
        shard.set_triggers_incarnation("t1", 0);
        let broken = shard.load_tasks(1, definitions.iter().cloned().map(row).collect(), at(0));
        assert!(broken.is_empty(), "{broken:?}");
        Self { shard, sent: Vec::new(), event_seq: 0, effects: Vec::new() }
    }

    fn plan(&mut self, until: i64, now: i64) -> Vec<Run> {
        let pass = self.shard.plan(at(until), at(now), &[]);
        self.shard.add_runs(pass.rows.clone());
        self.shard.planned(pass.until);
        pass.rows
    }

    /// Fires what is due, publishes everything that the queues yield and acknowledges it.
    fn run_until(&mut self, now: i64) -> Vec<Fired> {
        let fired = self.shard.fire(at(now)).fired.into_iter().map(|(_, _, f)| f).collect();
        self.publish(now);
        fired
    }

    fn publish(&mut self, now: i64) {
        while let Some(publish) = self.shard.pop_publish() {
            self.sent.push(publish.message);
            let seq = self.sent.len() as u64;
            self.shard.published(publish.run_id, PubAck { seq, duplicate: false }, at(now));
        }
    }

    fn flush(&mut self) {
        while let Some(flush) = self.shard.take_flush() {
            self.effects.extend(self.shard.committed(flush));
        }
    }

    fn event(&mut self, kind: &str, run: &Run, now: i64, more: Value) -> Applied {
        let mut body = json!({"run_id": run.run_id, "attempt": 1});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let subject = Prefix::default().event(kind, &run.address());
        self.told(subject, body, now)
    }

    fn server(&mut self, kind: &str, seq: u64, deliveries: u32, now: i64) -> Applied {
        let body = json!({"stream_seq": seq, "deliveries": deliveries, "timestamp": at(now)});
        self.told(format!("$JS.EVENT.{kind}.AX_TRIGGERS.c"), body, now)
    }

    fn told(&mut self, subject: String, body: Value, now: i64) -> Applied {
        self.event_seq += 1;
        self.shard.apply_event(
            &StreamMessage {
                seq: self.event_seq,
                subject,
                headers: Default::default(),
                payload: body.to_string().into(),
                at: at(now),
            },
            at(now),
        )
    }

    fn run(&self, id: RunId) -> &Run {
        self.shard.run(id).expect("the run is in memory")
    }
}

const ACK: &str = "METRIC.CONSUMER.ACK";
const NAK: &str = "ADVISORY.CONSUMER.MSG_NAKED";
const TERM: &str = "ADVISORY.CONSUMER.MSG_TERMINATED";
const MAX: &str = "ADVISORY.CONSUMER.MAX_DELIVERIES";

fn every(ms: u64, more: Value) -> Value {
    let mut d = json!({"task_id": "t", "executor_group": "g", "cron_expr": format!("EVERY {ms}ms")});
    d.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    d
}

/// One run of a task in the stream.
fn one(more: Value) -> (World, Run) {
    let mut world = World::new(&[every(1000, more)]);
    let rows = world.plan(1000, 0);
    assert_eq!(rows.len(), 1);
    assert_eq!(world.run_until(1000), [Fired::HandedOver]);
    let run = world.run(rows[0].run_id).clone();
    assert_eq!(run.state, RunState::Triggered);
    (world, run)
}

#[test]
fn an_ack_alone_is_success_with_the_lateness_of_its_delivery() {
    let (mut world, run) = one(json!({}));
    let body = json!({"stream_seq": 1, "deliveries": 1, "timestamp": at(1500), "ack_time": 480_000_000});
    world.told("$JS.EVENT.METRIC.CONSUMER.ACK.AX_TRIGGERS.c".into(), body, 1500);
    let ended = world.run(run.run_id);
    assert_eq!((ended.state, ended.attempt, ended.lateness_ms), (RunState::Succeeded, 1, Some(20)));
    world.flush();
    assert!(world.shard.run(run.run_id).is_none(), "it is final, committed and its message is gone");
}

#[test]
fn an_ack_that_overtakes_its_puback_is_kept_and_applied() {
    let mut world = World::new(&[every(1000, json!({}))]);
    let id = world.plan(1000, 0)[0].run_id;
    world.shard.fire(at(1000));
    let publish = world.shard.pop_publish().unwrap();
    let body = json!({"stream_seq": 9, "deliveries": 1, "timestamp": at(1001), "ack_time": 400_000});
    assert_eq!(world.told(format!("$JS.EVENT.{ACK}.AX_TRIGGERS.c"), body, 1001), Applied::Kept);
    let flush = world.shard.take_flush().unwrap();
    assert_eq!(flush.batch.signals_add.len(), 1, "it is in the transaction that moves past it");
    assert_eq!(flush.batch.settled.as_ref().unwrap().seq, 1);
    world.shard.committed(flush);
    world.shard.published(publish.run_id, PubAck { seq: 9, duplicate: false }, at(1002));
    assert_eq!((world.run(id).state, world.run(id).lateness_ms), (RunState::Succeeded, Some(1)));
    assert_eq!(world.shard.take_flush().unwrap().batch.signals_remove.len(), 1);
}

#[test]
fn an_event_that_overtakes_its_puback_proves_the_publication() {
    let mut world = World::new(&[every(1000, json!({}))]);
    let planned = world.plan(1000, 0).remove(0);
    world.shard.fire(at(1000));
    world.shard.pop_publish().unwrap();
    world.event("succeeded", &planned, 1001, json!({"result": {"rows": 3}}));
    assert_eq!(world.run(planned.run_id).state, RunState::Succeeded);
    world.shard.published(planned.run_id, PubAck { seq: 1, duplicate: false }, at(1002));
    world.flush();
    world.shard.fire(at(10_000));
    world.flush();
    assert!(
        world.effects.iter().any(|(e, _)| matches!(e, Effect::Delete { seq: 1, bury: false, .. })),
        "its message is closed although the outcome came first"
    );
}

#[test]
fn a_negative_acknowledgement_is_retried_until_the_attempts_are_used_up() {
    let (mut world, run) = one(json!({"max_retry": 1}));
    world.server(NAK, 1, 1, 1100);
    let r = world.run(run.run_id);
    assert_eq!((r.state, r.attempt), (RunState::Triggered, 1));
    world.server(NAK, 1, 2, 1200);
    let r = world.run(run.run_id);
    assert_eq!((r.state, r.attempt), (RunState::Failed, 2));
    world.flush();
    let delete =
        world.effects.iter().find(|(e, _)| matches!(e, Effect::Delete { .. })).expect("its message is removed");
    assert!(matches!(delete.0, Effect::Delete { seq: 1, bury: true, .. }));
    world.shard.message_closed(run.run_id, 1);
    world.flush();
    assert!(world.shard.run(run.run_id).is_none());
}

#[test]
fn a_passed_ack_deadline_is_an_attempt_that_timed_out() {
    let (mut world, run) = one(json!({"max_retry": 1}));
    world.server(ACK, 1, 2, 9000);
    let flush = world.shard.take_flush().unwrap();
    let outcomes: Vec<_> = flush.batch.attempts.iter().map(|a| (a.attempt, a.outcome.unwrap())).collect();
    assert_eq!(outcomes, [(1, AttemptOutcome::TimedOut), (2, AttemptOutcome::Succeeded)]);
    assert_eq!(world.run(run.run_id).state, RunState::Succeeded);
}

#[test]
fn used_up_deliveries_end_as_timed_out_or_failed_by_the_last_attempt() {
    let (mut world, run) = one(json!({}));
    world.server(MAX, 1, 1, 9000);
    assert_eq!(world.run(run.run_id).state, RunState::TimedOut);

    let (mut world, run) = one(json!({"max_retry": 1}));
    world.server(NAK, 1, 1, 1100);
    world.server(MAX, 1, 2, 9000);
    assert_eq!(world.run(run.run_id).state, RunState::TimedOut, "the second attempt was never answered");
}

#[test]
fn a_termination_fails_for_good() {
    let (mut world, run) = one(json!({"max_retry": 5}));
    world.server(TERM, 1, 1, 1100);
    assert_eq!(world.run(run.run_id).state, RunState::Failed);
}

#[test]
fn events_outrank_the_ack() {
    // Failed for good, then acked.
    let (mut world, run) = one(json!({"max_retry": 5}));
    world.event("failed", &run, 1100, json!({"error": "no", "retry": false}));
    world.server(ACK, 1, 1, 1101);
    let r = world.run(run.run_id);
    assert_eq!((r.state, r.reason.as_deref()), (RunState::Failed, Some("no")));

    // Failed with retries left, then acked: the message is gone, another one is owed after the backoff.
    let (mut world, run) = one(json!({"max_retry": 1, "retry_backoff": {"initial_ms": 700}}));
    world.event("failed", &run, 1100, json!({"error": "later"}));
    world.server(ACK, 1, 1, 1101);
    world.flush();
    world.run_until(1500);
    assert_eq!(world.sent.len(), 1, "the backoff is kept");
    world.run_until(1801);
    assert_eq!(world.sent.len(), 2);
    let headers: std::collections::HashMap<_, _> = world.sent[1].headers.iter().cloned().collect();
    assert_eq!(headers["Nats-Msg-Id"], format!("{}:2", run.run_id));
    assert_eq!((headers["Ax-Attempt-Base"].as_str(), headers["Ax-Republished"].as_str()), ("1", "true"));
    world.server(ACK, 2, 1, 1900);
    let r = world.run(run.run_id);
    assert_eq!((r.state, r.attempt), (RunState::Succeeded, 2));
}

#[test]
fn a_replacement_is_published_only_after_it_is_committed() {
    let (mut world, run) = one(json!({"max_retry": 1, "retry_backoff": {"initial_ms": 0, "jitter_ms": 0}}));
    world.event("failed", &run, 1100, json!({}));
    world.server(ACK, 1, 1, 1101);
    world.run_until(5000);
    assert_eq!(world.sent.len(), 1);
    world.flush();
    world.run_until(5001);
    assert_eq!(world.sent.len(), 2);
}

#[test]
fn a_released_attempt_is_not_counted() {
    let (mut world, run) = one(json!({}));
    world.event("released", &run, 1100, json!({"reason": "stopping"}));
    world.server(NAK, 1, 1, 1101);
    world.flush();
    world.run_until(1200);
    assert_eq!(world.sent.len(), 2, "its deliveries were used up, so a new message takes its place at once");
    world.event("succeeded", &run, 1300, json!({"attempt": 2}));
    let r = world.run(run.run_id);
    assert_eq!((r.state, r.attempt, r.max_attempts), (RunState::Succeeded, 2, 2));
}

/// What a worker took for the last attempt was not: the one that was handed back before does not count.
#[test]
fn a_released_attempt_costs_no_retry_when_the_last_delivery_fails() {
    let (mut world, run) = one(json!({"max_retry": 1, "retry_backoff": {"initial_ms": 0, "jitter_ms": 0}}));
    world.event("released", &run, 1100, json!({"reason": "stopping"}));
    world.server(NAK, 1, 1, 1101);
    world.event("failed", &run, 1200, json!({"attempt": 2, "error": "no"}));
    world.server(TERM, 1, 2, 1201);
    world.flush();
    world.run_until(1300);
    assert_eq!(world.sent.len(), 2, "a retry is left");
    world.event("failed", &run, 1400, json!({"attempt": 3, "error": "no"}));
    world.server(TERM, 2, 1, 1401);
    let r = world.run(run.run_id);
    assert_eq!((r.state, r.attempt, r.max_attempts), (RunState::Failed, 3, 3));

    // A worker that ends the message earlier means it.
    let (mut world, run) = one(json!({"max_retry": 5}));
    world.event("failed", &run, 1200, json!({"error": "no"}));
    world.server(TERM, 1, 1, 1201);
    assert_eq!(world.run(run.run_id).state, RunState::Failed);
}

#[test]
fn late_outcomes_of_superseded_attempts_and_of_final_runs_change_nothing() {
    let (mut world, run) = one(json!({"max_retry": 2}));
    world.event("started", &run, 1010, json!({"attempt": 2, "worker_id": "b"}));
    world.event("failed", &run, 1020, json!({"attempt": 1, "retry": false}));
    world.event("succeeded", &run, 1020, json!({"attempt": 1}));
    assert_eq!(world.run(run.run_id).state, RunState::Running);
    world.event("succeeded", &run, 1030, json!({"attempt": 2, "result": 1}));
    world.event("failed", &run, 1040, json!({"attempt": 3, "retry": false}));
    world.server(MAX, 1, 3, 1050);
    let r = world.run(run.run_id);
    assert_eq!((r.state, r.attempt, r.result.clone()), (RunState::Succeeded, 2, Some(json!(1))));
}

#[test]
fn a_run_that_overlaps_is_skipped_unless_its_blocker_has_ended() {
    let mut world = World::new(&[every(1000, json!({}))]);
    let rows = world.plan(3000, 0);
    world.run_until(1000);
    let fired = world.run_until(2000);
    assert_eq!(fired, [Fired::Blocked(vec![rows[0].run_id])], "the blocker is reconciled first");
    let report = world.shard.judge_blocked(rows[0].run_id, at(2001));
    assert_eq!(report.fired[0].2, Fired::Skipped("overlap"));

    world.run_until(3000);
    world.server(ACK, 1, 1, 3001);
    assert_eq!(world.run_until(3002), [Fired::HandedOver], "the blocker ended meanwhile");
}

#[test]
fn overlap_allow_hands_over_everything() {
    let mut world = World::new(&[every(1000, json!({"overlap_policy": "allow"}))]);
    world.plan(3000, 0);
    assert_eq!(world.run_until(3000), [Fired::HandedOver, Fired::HandedOver, Fired::HandedOver]);
}

#[test]
fn enqueued_runs_neither_block_nor_are_blocked() {
    let mut world = World::new(&[every(1000, json!({}))]);
    world.plan(1000, 0);
    world.run_until(1000);
    let task = world.shard.tasks().get(&"t".parse().unwrap()).unwrap().row.clone();
    let new = |n: u128, kind| task.new_run(RunId(uuid::Uuid::from_u128(n)), kind, at(1500), at(1500), at(1500));
    world.shard.add_runs([new(1, RunKind::Enqueue), new(2, RunKind::Manual)]);
    let fired = world.run_until(1500);
    assert!(matches!(fired[..], [Fired::HandedOver, Fired::Blocked(_)]), "{fired:?}");
}

#[test]
fn the_decision_is_taken_on_the_definition_of_the_due_instant() {
    for (change, reason) in
        [(json!({"status": "paused"}), "paused"), (json!({"cron_expr": "EVERY 7s"}), "schedule_changed")]
    {
        let mut world = World::new(&[every(1000, json!({}))]);
        world.plan(1000, 0);
        world.shard.load_tasks(2, vec![row(every(1000, change))], at(500));
        assert_eq!(world.run_until(1000), [Fired::Skipped(reason)]);
    }
    let mut world = World::new(&[every(1000, json!({}))]);
    let id = world.plan(1000, 0)[0].run_id;
    let mut gone = row(every(1000, json!({})));
    gone.deleted_at = Some(at(500));
    world.shard.load_tasks(2, vec![gone], at(500));
    assert_eq!(world.run_until(1000), [Fired::Skipped("task_deleted")]);
    assert_eq!(world.run(id).reason.as_deref(), Some("task_deleted"));
}

#[test]
fn deleting_a_task_takes_back_what_is_in_the_stream() {
    let (mut world, run) = one(json!({}));
    let mut gone = row(every(1000, json!({})));
    gone.deleted_at = Some(at(1500));
    world.shard.load_tasks(2, vec![gone], at(1500));
    assert_eq!(world.run(run.run_id).state, RunState::Triggered, "not before its message is deleted");
    world.flush();
    let cancel = world.effects.iter().find(|(e, _)| matches!(e, Effect::Cancel { .. })).expect("an effect");
    assert!(cancel.1.intent.is_some(), "the intent is in SQL before the message is touched");
}

#[test]
fn a_missed_stretch_is_one_row_and_its_newest_instant_fires() {
    let mut world = World::new(&[every(1000, json!({"misfire_grace_ms": 5000}))]);
    // Down for an hour: instants 1 s … 3600 s; those up to 3594 s are missed, the last six merely late.
    let rows = world.plan(3_600_000, 3_600_000);
    let stretch: Vec<_> = rows.iter().filter_map(|r| r.stretch).collect();
    assert_eq!(stretch.len(), 1);
    assert_eq!((stretch[0].from, stretch[0].to, stretch[0].count), (at(1000), at(3_593_000), 3593));
    let owed: Vec<_> = rows.iter().filter(|r| r.stretch.is_none()).map(|r| r.trigger_at).collect();
    assert_eq!(owed.first(), Some(&at(3_594_000)));
    assert_eq!(owed.len() as u64 + stretch[0].count, 3600, "every instant is accounted for");
    assert_eq!(world.run_until(3_600_000)[0], Fired::HandedOver);
}

#[test]
fn of_planned_runs_that_became_missed_only_the_newest_is_executed() {
    let mut world = World::new(&[every(1000, json!({"misfire_grace_ms": 1000, "overlap_policy": "allow"}))]);
    world.plan(3000, 0);
    // Nothing could be handed over for a while; the next instant, 4 s, is within the grace at 4.5 s.
    assert_eq!(world.run_until(4500), [Fired::Skipped("misfire"), Fired::Skipped("misfire"), Fired::HandedOver]);
}

#[test]
fn an_interval_that_was_missed_keeps_its_phase() {
    let mut definition = row(every(30_000, json!({})));
    definition.anchor_at = at(1000);
    definition.effective_at = at(1000);
    let mut world = World::new(&[]);
    world.shard.load_tasks(1, vec![definition], at(1000));
    let rows = world.plan(61_500, 36_000);
    assert_eq!(rows.iter().map(|r| r.trigger_at).collect::<Vec<_>>(), [at(31_000), at(61_000)]);
}

#[test]
fn a_failed_commit_loses_nothing() {
    let (mut world, run) = one(json!({}));
    world.event("started", &run, 1010, json!({"worker_id": "w"}));
    let flush = world.shard.take_flush().unwrap();
    let (runs, attempts) = (flush.batch.runs.len(), flush.batch.attempts.clone());
    world.shard.not_committed(flush);
    world.event("succeeded", &run, 1020, json!({}));
    let again = world.shard.take_flush().unwrap();
    assert_eq!((again.batch.runs.len(), again.batch.attempts.len()), (runs, attempts.len()));
    assert_eq!(again.batch.runs[0].state, RunState::Succeeded);
    assert!(!world.shard.committed(again).is_empty(), "and its effects still happen");
}

#[test]
fn a_publish_without_an_answer_is_sent_again_with_the_same_id() {
    let mut world = World::new(&[every(1000, json!({}))]);
    world.plan(1000, 0);
    world.shard.fire(at(1000));
    let first = world.shard.pop_publish().unwrap();
    world.shard.publish_unanswered(first.run_id, at(1000), false);
    assert!(world.shard.pop_publish().is_none());
    world.shard.fire(at(1200));
    assert_eq!(world.shard.pop_publish().unwrap().message.headers[1], first.message.headers[1]);
}

#[test]
fn a_refused_publish_fails_the_run_with_its_reason() {
    let mut world = World::new(&[every(1000, json!({}))]);
    world.plan(1000, 0);
    world.shard.fire(at(1000));
    let publish = world.shard.pop_publish().unwrap();
    world.shard.publish_refused(publish.run_id, "maximum payload exceeded".into(), at(1001));
    let run = world.run(publish.run_id);
    assert_eq!(run.state, RunState::Failed);
    assert!(run.reason.as_deref().unwrap().contains("maximum payload exceeded"));
}

#[test]
fn a_successor_adopts_what_was_published_without_a_record() {
    let (world, run) = one(json!({}));
    let sent = &world.sent[0];
    let headers = sent.headers.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect();
    let found =
        StreamMessage { seq: 1, subject: sent.subject.clone(), headers, payload: sent.payload.clone(), at: at(1000) };

    let mut next = World::new(&[every(1000, json!({}))]);
    let mut planned = run.clone();
    planned.state = RunState::Pending;
    planned.decision = None;
    planned.message = None;
    let unknown = next.shard.load_runs(vec![planned], vec![], at(2000));
    assert_eq!(unknown, [run.run_id]);
    next.shard.adopt_message(run.run_id, &found);
    next.run_until(2000);
    assert!(next.sent.is_empty(), "it is not published twice");
    next.server(ACK, 1, 1, 2001);
    assert_eq!(next.run(run.run_id).state, RunState::Succeeded);
}

#[test]
fn headers_and_body_are_as_documented() {
    let (world, run) = one(json!({"payload": {"db": "orders"}, "max_retry": 3, "timeout_ms": 30_000}));
    let message = &world.sent[0];
    assert_eq!(message.subject, format!("ax.trigger.g.default.t30r3.t.{}", run.run_id));
    let headers: std::collections::HashMap<_, _> = message.headers.iter().cloned().collect();
    assert_eq!(headers["Nats-Msg-Id"], format!("{}:1", run.run_id));
    assert_eq!(headers["Ax-Retry-Backoff"], "5000,5,300000,2000");
    assert_eq!(headers["Ax-Epoch"], "7");
    assert!(headers["traceparent"].starts_with(&format!("00-{}-", run.run_id.trace_id())));
    let body: Value = serde_json::from_slice(&message.payload).unwrap();
    assert_eq!(body["payload"], json!({"db": "orders"}));
    assert_eq!(body["kind"], "every");
    assert_eq!(body["upstream"], json!({}));
}

#[test]
fn what_was_told_of_a_replaced_message_does_not_count_against_its_successor() {
    let mut world = World::new(&[every(1000, json!({}))]);
    let planned = world.plan(1000, 0).remove(0);
    world.shard.fire(at(1000));
    world.shard.pop_publish().unwrap();
    // All of it overtakes the PubAck: handed back, NAKed, deliveries used up.
    world.event("released", &planned, 1001, json!({"reason": "stopping"}));
    world.server(NAK, 9, 1, 1002);
    world.server(MAX, 9, 1, 1003);
    world.shard.published(planned.run_id, PubAck { seq: 9, duplicate: false }, at(1004));
    world.flush();
    let run = world.run(planned.run_id);
    assert_eq!((run.state, run.attempt, run.attempt_base), (RunState::Pending, 1, 1));
    world.run_until(1010);
    assert_eq!(world.sent.len(), 1, "its next message is published");
}

#[test]
fn a_start_whose_message_is_not_known_is_still_published_again_and_its_run_blocks_others() {
    let mut world = World::new(&[every(1000, json!({}))]);
    let planned = world.plan(2000, 0).remove(0);
    world.shard.fire(at(1000));
    world.shard.pop_publish().unwrap();
    world.event("started", &planned, 1001, json!({"worker_id": "w"}));
    world.shard.publish_unanswered(planned.run_id, at(1002), false);
    assert!(matches!(world.run_until(2000)[..], [Fired::Blocked(_)]), "it is running");
    assert_eq!(world.sent.len(), 1, "the same message again: a duplicate PubAck yields its sequence");
    world.server(ACK, 1, 1, 2001);
    assert_eq!(world.run(planned.run_id).state, RunState::Succeeded);
}

#[test]
fn an_event_of_a_replaced_attempt_does_not_lose_the_replacement() {
    for late in ["failed", "started", "released", "succeeded"] {
        let (mut world, run) = one(json!({"max_retry": 2, "retry_backoff": {"initial_ms": 0, "jitter_ms": 0}}));
        world.event("failed", &run, 1100, json!({}));
        world.server(ACK, 1, 1, 1101);
        world.event(late, &run, 1102, json!({}));
        world.flush();
        world.run_until(1200);
        assert_eq!(world.sent.len(), 2, "after a late {late}");
    }
}

#[test]
fn a_message_found_at_takeover_does_not_revive_a_run_that_has_ended() {
    let (world, run) = one(json!({}));
    let sent = &world.sent[0];
    let headers = sent.headers.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect();
    let found =
        StreamMessage { seq: 1, subject: sent.subject.clone(), headers, payload: sent.payload.clone(), at: at(1000) };
    let mut next = World::new(&[every(1000, json!({}))]);
    let mut planned = run.clone();
    planned.state = RunState::Pending;
    planned.message = None;
    next.shard.load_runs(vec![planned], vec![], at(2000));
    next.event("succeeded", &run, 1500, json!({}));
    next.shard.adopt_message(run.run_id, &found);
    assert_eq!(next.run(run.run_id).state, RunState::Succeeded);
    next.shard.fire(at(5000));
    next.flush();
    assert!(next.effects.iter().any(|(e, _)| matches!(e, Effect::Delete { seq: 1, .. })), "its message is removed");
    next.plan(6000, 5000);
    assert!(!next.run_until(6000).contains(&Fired::Skipped("overlap")));
}

#[test]
fn an_attempt_that_cannot_exist_is_passed_over() {
    let (mut world, run) = one(json!({"max_retry": 1}));
    for attempt in [3, 1000, 1_000_000] {
        world.event("started", &run, 1010, json!({"attempt": attempt}));
        world.event("succeeded", &run, 1010, json!({"attempt": attempt}));
    }
    assert_eq!((world.run(run.run_id).state, world.run(run.run_id).attempt), (RunState::Triggered, 0));
    world.server(ACK, 1, 4_000_000_000, 1020);
    assert_eq!(world.run(run.run_id).attempt, 2);
}

#[test]
fn a_worker_of_another_group_cannot_settle_a_run() {
    let (mut world, run) = one(json!({}));
    let mut foreign = run.clone();
    foreign.group = "other".parse().unwrap();
    assert!(matches!(world.event("succeeded", &foreign, 1010, json!({})), Applied::Malformed(_)));
    assert_eq!(world.run(run.run_id).state, RunState::Triggered);
}

#[test]
fn a_changed_description_makes_no_missed_rows() {
    let mut world = World::new(&[every(1000, json!({}))]);
    world.plan(30_000, 28_000);
    let mut edited = row(every(1000, json!({"description": "new", "misfire_grace_ms": 0})));
    edited.updated_at = at(1000);
    let id = edited.definition.task_id.clone();
    world.shard.load_tasks(2, vec![edited], at(29_000));
    let pass = world.shard.plan(at(31_000), at(29_000), &[id]);
    assert!(pass.rows.iter().all(|r| r.stretch.is_none()), "those instants have their rows");
}

#[test]
fn notices_tell_what_was_written_and_a_final_state_once() {
    let (mut world, run) = one(json!({}));
    let first = world.shard.take_flush().unwrap();
    world.event("succeeded", &run, 1010, json!({}));
    let told = world.shard.committed(first);
    assert!(told.iter().all(|(_, r)| r.state == RunState::Triggered), "{told:?}");
    world.flush();
    let ends = world.effects.iter().filter(|(e, r)| matches!(e, Effect::Notice { .. }) && r.state.is_final()).count();
    assert_eq!(ends, 1);
}

#[test]
fn a_failure_under_cancel_is_cancelled() {
    for (kind, event) in [("failed", json!({"retry": true})), ("failed", json!({"retry": false}))] {
        let (mut world, run) = one(json!({"max_retry": 3}));
        let mut gone = row(every(1000, json!({})));
        gone.deleted_at = Some(at(1500));
        world.shard.load_tasks(2, vec![gone], at(1500));
        world.event(kind, &run, 1600, event);
        assert_eq!(world.run(run.run_id).state, RunState::Cancelled);
    }
}

#[test]
fn lost_events_leave_what_was_outstanding_in_doubt() {
    let (mut world, run) = one(json!({}));
    assert!(!world.shard.outstanding_run(run.run_id).unwrap().speaks_against);
    world.shard.restart_events("e2".into(), 0);
    assert!(world.shard.outstanding_run(run.run_id).unwrap().speaks_against);
}

#[test]
fn a_timeout_that_the_worker_noticed_ends_in_timed_out() {
    let (mut world, run) = one(json!({}));
    world.event("failed", &run, 1100, json!({"error": {"kind": "timeout", "message": "60000 ms"}}));
    assert_eq!(world.run(run.run_id).state, RunState::TimedOut);
    world.server(TERM, 1, 1, 1101);
    assert_eq!(world.run(run.run_id).state, RunState::TimedOut);
}

#[test]
fn a_run_that_is_handed_back_again_and_again_does_not_spin() {
    let (mut world, run) = one(json!({}));
    for attempt in 1..=3u32 {
        let now = 1100 + i64::from(attempt) * 10;
        world.event("released", &run, now, json!({"attempt": attempt}));
        world.server(NAK, u64::from(attempt), 1, now);
        world.flush();
        world.run_until(now + 1);
        if attempt == 1 {
            assert_eq!(world.sent.len(), 2, "the first time it goes on at once");
        } else {
            assert_eq!(world.sent.len(), attempt as usize, "then it waits");
            world.run_until(now + 5001);
            assert_eq!(world.sent.len(), attempt as usize + 1);
        }
    }
}
