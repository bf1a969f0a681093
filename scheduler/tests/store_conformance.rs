//! What every store does, tried on all of them: memory, SQLite, Postgres.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use ax_scheduler::core::command::{Command, CommandKind};
use ax_scheduler::core::definitions::{AuditEntry, DefinitionView, DefinitionWrite, TaskRow};
use ax_scheduler::core::run::{
    Attempt, AttemptOutcome, Decision, Intent, Message, Run, RunState, Signal, SignalKind, Stretch,
};
use ax_scheduler::core::token::{Role, Token, hash};
use ax_scheduler::ports::{
    Batch, EventsPosition, Planned, RunFilter, Store, StoreError, TaskFilter, TaskHistory, Watermark,
};
use ax_scheduler::store::{self, Memory};
use ax_shared::definition::Status;
use ax_shared::{Profile, RunId, RunKind, TaskDefinition, TaskId, Timestamp};
use serde_json::{Value, json};
use uuid::Uuid;

// ------------------------------------------------------------------------------------------------------- set-up ----

struct Db {
    store: Arc<dyn Store>,
    _folder: Option<tempfile::TempDir>,
}

async fn memory() -> Db {
    Db { store: Arc::new(Memory::new()), _folder: None }
}

async fn sqlite() -> Db {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}", folder.path().join("deep/ax.db").display());
    let store = store::open(&url).await.unwrap();
    store.migrate().await.unwrap();
    Db { store, _folder: Some(folder) }
}

async fn postgres() -> Db {
    let store = store::open(&ax_tests::postgres::database().await.unwrap()).await.unwrap();
    store.migrate().await.unwrap();
    Db { store, _folder: None }
}

/// One test per store for each function.
macro_rules! conformance {
    ($($test:ident)*) => {
        mod on_memory { $(#[tokio::test(flavor = "multi_thread")] async fn $test() {
            super::$test(&super::memory().await.store).await;
        })* }
        mod on_sqlite { $(#[tokio::test(flavor = "multi_thread")] async fn $test() {
            super::$test(&super::sqlite().await.store).await;
        })* }
        mod on_postgres { $(#[tokio::test(flavor = "multi_thread")] async fn $test() {
            super::$test(&super::postgres().await.store).await;
        })* }
    };
}

conformance! {
    every_field_of_a_task_comes_back
    every_field_of_a_run_and_an_attempt_comes_back
    json_is_kept_exactly
    nul_in_a_text_from_outside_stops_nothing
    a_change_of_definitions_counts_the_revision_once_and_a_void_one_does_not
    a_deleted_task_is_hidden_and_its_tombstone_is_heard_of
    tasks_are_listed_by_filter_in_pages
    runs_are_listed_by_every_filter_in_pages
    the_newest_run_and_success_of_a_task_are_found
    a_run_is_inserted_once
    an_empty_call_does_nothing
    an_epoch_grows_and_the_first_leader_starts_the_watermark
    every_method_of_the_leader_is_fenced
    nothing_of_an_old_leader_lands_after_a_takeover
    planning_inserts_what_is_missing_and_moves_the_watermark
    planning_on_old_definitions_writes_nothing
    no_change_of_definitions_slips_into_the_planned_window
    concurrent_changes_of_definitions_are_all_kept
    one_off_runs_are_adopted_once_and_in_order
    unfinished_runs_are_those_that_a_leader_has_to_do_with
    a_batch_changes_the_mutable_half_and_keeps_a_result
    a_batch_is_written_whole_or_not_at_all
    signals_are_kept_until_removed_or_their_stream_is_gone
    large_batches_are_written_whole
    a_token_is_kept_until_it_is_revoked
    of_tokens_with_one_name_one_is_added
}

const T0: i64 = 1_790_000_000_000;

fn at(ms: i64) -> Timestamp {
    Timestamp::from_millis(T0 + ms)
}

fn id(text: &str) -> TaskId {
    TaskId::new(text).unwrap()
}

fn definition(task: &str, more: Value) -> TaskDefinition {
    let mut object = json!({"task_id": task, "executor_group": "g", "cron_expr": "* * * * *"});
    object.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    TaskDefinition::from_json(&object).unwrap().definition
}

fn task(task: &str, more: Value) -> TaskRow {
    TaskRow {
        definition: Arc::new(definition(task, more)),
        version: 1,
        rev: 0,
        anchor_at: at(1),
        effective_at: at(2),
        delay_run_id: None,
        created_at: at(3),
        updated_at: at(4),
        deleted_at: None,
    }
}

/// A scheduled run of `t` at T0 + `ms`.
fn scheduled(t: &str, ms: i64) -> Run {
    let row = task(t, json!({}));
    row.new_run(RunId::scheduled(&id(t), at(ms)), RunKind::Cron, at(ms), at(ms), at(0))
}

/// A one-off run that is due at T0 + `ms`.
fn one_off(t: &str, ms: i64) -> Run {
    task(t, json!({})).new_run(RunId(Uuid::now_v7()), RunKind::Manual, at(ms), at(ms), at(0))
}

fn audit(subject: impl ToString) -> AuditEntry {
    AuditEntry {
        at: at(0),
        actor: "somebody".into(),
        action: "run.triggered".into(),
        subject: subject.to_string(),
        detail: json!({"a": 1}),
    }
}

async fn put(store: &Arc<dyn Store>, tasks: Vec<TaskRow>) {
    let ids: Vec<TaskId> = tasks.iter().map(|task| task.definition.task_id.clone()).collect();
    let write = DefinitionWrite { tasks, ..Default::default() };
    store.change_definitions(&ids, Box::new(move |_| Some(write))).await.unwrap();
}

async fn lead(store: &Arc<dyn Store>) -> u64 {
    store.acquire(0, at(0)).await.unwrap().epoch
}

async fn whole(store: &Arc<dyn Store>, run: &Run) -> Run {
    store.run(run.run_id).await.unwrap().expect("the run is there").0
}

fn batch(runs: Vec<Run>) -> Batch {
    Batch { runs, ..Default::default() }
}

/// A run with something in every field.
fn full_run() -> Run {
    Run {
        run_id: RunId(Uuid::now_v7()),
        task_id: id("a.b-c_D"),
        kind: RunKind::Missed,
        flow_id: RunId(Uuid::now_v7()),
        trigger_at: at(-1),
        publish_at: Timestamp::MAX,
        payload: Some(json!({"k": [1, "ä", null]})),
        stretch: Some(Stretch { from: Timestamp::MIN, to: at(7), count: 9_007_199_254_740_993 }),
        created_at: at(5),
        group: "data-sync".parse().unwrap(),
        queue: "q_1".parse().unwrap(),
        handler: "h.h".parse().unwrap(),
        priority: 10,
        profile: Profile::parse("t60r3"),
        state: RunState::TimedOut,
        reason: Some("a reason, 'quoted' \"twice\"\n🙂".into()),
        adopted: true,
        decision: Some(Decision::HandOver),
        intent: Some(Intent::Bury),
        message_no: u32::MAX,
        message: Some(Message {
            incarnation: "2026-11-30T22:12:15.123456789Z".into(),
            seq: i64::MAX as u64,
            open: false,
        }),
        attempt_base: 3,
        attempt: 4,
        max_attempts: 101,
        worker_id: Some("w/1".into()),
        lateness_ms: Some(-12),
        published_at: Some(at(8)),
        started_at: Some(at(9)),
        finished_at: Some(at(10)),
        result: Some(json!({"rows": 12})),
    }
}

// -------------------------------------------------------------------------------------------------------- values ----

async fn every_field_of_a_task_comes_back(store: &Arc<dyn Store>) {
    let row = TaskRow {
        version: 7,
        delay_run_id: Some(RunId(Uuid::now_v7())),
        ..task(
            "a.b",
            json!({"name": "订单数据同步到数仓", "description": "text", "payload": {"n": 9_007_199_254_740_993u64},
                   "labels": {"team": "data", "tier": "1=2"}, "status": "paused", "weight": 0.1, "priority": 10,
                   "max_retry": 3, "retry_backoff": {"initial_ms": 1, "multiplier": 1.5, "max_ms": 10, "jitter_ms": 0},
                   "source": "repo", "overlap_policy": "allow"}),
        )
    };
    put(store, vec![row.clone()]).await;
    let want = TaskRow { rev: 1, ..row };
    assert_eq!(store.task(&id("a.b")).await.unwrap(), Some(want.clone()));
    assert_eq!(store.tasks(&[id("a.b"), id("no"), id("a.b")]).await.unwrap(), vec![want.clone()]);
    assert_eq!(store.list_tasks(&TaskFilter { limit: 9, ..Default::default() }).await.unwrap(), vec![want.clone()]);
    assert_eq!(store.definitions(0).await.unwrap(), (1, vec![want.clone()]));
    let seen = want.clone();
    store
        .change_definitions(
            &[id("a.b"), id("no")],
            Box::new(move |view| {
                assert_eq!(view.tasks, HashMap::from([(id("a.b"), seen)]));
                None
            }),
        )
        .await
        .unwrap();
    assert_eq!(store.task(&id("A.b")).await.unwrap(), None, "ids are case-sensitive");
}

async fn every_field_of_a_run_and_an_attempt_comes_back(store: &Arc<dyn Store>) {
    let epoch = lead(store).await;
    let full = full_run();
    let bare = scheduled("t", 0);
    assert_eq!(store.insert_runs(&[full.clone(), bare.clone()], &[]).await.unwrap(), [true, true]);
    let attempts: Vec<Attempt> = (1..=7u32)
        .map(|n| Attempt {
            run_id: full.run_id,
            attempt: n,
            outcome: Some(AttemptOutcome::ALL[n as usize - 1]),
            worker_id: (n > 1).then(|| "w".into()),
            started_at: (n > 2).then(|| at(1)),
            finished_at: (n > 3).then(|| at(2)),
            error: (n > 4).then(|| "e\tr".into()),
        })
        .chain([Attempt {
            run_id: full.run_id,
            attempt: 300,
            outcome: None,
            worker_id: None,
            started_at: None,
            finished_at: None,
            error: None,
        }])
        .collect();
    let mut shuffled = attempts.clone();
    shuffled.reverse();
    store.commit(epoch, &Batch { attempts: shuffled, ..Default::default() }).await.unwrap();
    assert_eq!(store.run(full.run_id).await.unwrap(), Some((full.clone(), attempts.clone())));
    assert_eq!(store.run(bare.run_id).await.unwrap(), Some((bare.clone(), vec![])));
    assert_eq!(store.run(RunId(Uuid::nil())).await.unwrap(), None);
    assert_eq!(store.attempts(&[bare.run_id, full.run_id]).await.unwrap(), attempts);
    let listed = store.list_runs(&RunFilter { limit: 9, ..Default::default() }).await.unwrap();
    assert_eq!(listed, [bare.clone(), Run { payload: None, result: None, ..full.clone() }]);
    // Every word of every enum.
    let states: Vec<Run> = RunState::ALL.iter().map(|state| Run { state: *state, ..one_off("s", 1) }).collect();
    store.insert_runs(&states, &[]).await.unwrap();
    for run in &states {
        assert_eq!(whole(store, run).await, *run);
    }
}

async fn json_is_kept_exactly(store: &Arc<dyn Store>) {
    let epoch = lead(store).await;
    let texts = [
        "null",
        "false",
        "\"\"",
        "9007199254740993",
        "-9223372036854775808",
        "18446744073709551615",
        "-0.0",
        "1e300",
        "5e-324",
        "0.1",
        "0.30000000000000004",
        "435.43804806210164",
        "\"nul \\u0000, quote \\\", backslash \\\\, \\u0001 🙂 \u{e9} e\u{301}\"",
        "{\"\\u0000\":{\"\":[[],{}]}}",
    ];
    let runs: Vec<Run> = texts
        .iter()
        .map(|text| {
            let value: Value = serde_json::from_str(text).unwrap();
            Run { payload: Some(value.clone()), result: Some(value), ..one_off("t", 0) }
        })
        .collect();
    store.insert_runs(&runs, &[]).await.unwrap();
    for (run, text) in runs.iter().zip(texts) {
        let got = whole(store, run).await;
        let exact = |value: &Value| serde_json::to_string(value).unwrap();
        assert_eq!(got.payload.as_ref().map(exact), run.payload.as_ref().map(exact), "{text}");
        assert_eq!(got.result.as_ref().map(exact), run.result.as_ref().map(exact), "{text}");
    }
    // No result and the result null are two things.
    let without = Run { payload: None, result: None, ..one_off("t", 0) };
    store.insert_runs(std::slice::from_ref(&without), &[]).await.unwrap();
    assert_eq!(whole(store, &without).await.result, None);
    store.commit(epoch, &batch(vec![Run { result: Some(Value::Null), ..without.clone() }])).await.unwrap();
    assert_eq!(whole(store, &without).await.result, Some(Value::Null));
    // The same for the payload of a task.
    let payload: Value = serde_json::from_str(texts[13]).unwrap();
    put(store, vec![task("t", json!({"payload": payload, "labels": {"a": "b"}}))]).await;
    assert_eq!(store.task(&id("t")).await.unwrap().unwrap().definition.payload, payload);
    let labelled = TaskFilter { label: Some("a=b".into()), limit: 1, ..Default::default() };
    assert_eq!(store.list_tasks(&labelled).await.unwrap().len(), 1);
    // As large as they may be, several in one call.
    let large = json!("x\u{0}é".repeat(60_000));
    let runs: Vec<Run> = (0..30).map(|_| Run { payload: Some(large.clone()), ..one_off("t", 0) }).collect();
    assert_eq!(store.insert_runs(&runs, &[]).await.unwrap(), [true; 30]);
    assert_eq!(whole(store, &runs[29]).await.payload, Some(large));
}

async fn nul_in_a_text_from_outside_stops_nothing(store: &Arc<dyn Store>) {
    let epoch = lead(store).await;
    let run = Run { reason: Some("a\0b".into()), ..scheduled("t", 0) };
    store.plan(epoch, std::slice::from_ref(&run), None).await.unwrap();
    let attempt = Attempt {
        run_id: run.run_id,
        attempt: 1,
        outcome: None,
        worker_id: Some("w\0".into()),
        started_at: None,
        finished_at: None,
        error: Some("\0".into()),
    };
    let changed = Run { worker_id: Some("\0w".into()), ..run.clone() };
    store.commit(epoch, &Batch { runs: vec![changed], attempts: vec![attempt], ..Default::default() }).await.unwrap();
    let (got, attempts) = store.run(run.run_id).await.unwrap().unwrap();
    assert_eq!((got.reason.as_deref(), got.worker_id.as_deref()), (Some("a\u{fffd}b"), Some("\u{fffd}w")));
    assert_eq!(attempts[0].worker_id.as_deref(), Some("w\u{fffd}"));
    assert_eq!(attempts[0].error.as_deref(), Some("\u{fffd}"));
    let noted = AuditEntry { actor: "\0".into(), detail: json!("\0"), ..audit("\0") };
    store.insert_runs(&[], &[noted]).await.unwrap();
    for filter in [
        TaskFilter { q: Some("\0".into()), limit: 1, ..Default::default() },
        TaskFilter { label: Some("\0".into()), limit: 1, ..Default::default() },
    ] {
        assert_eq!(store.list_tasks(&filter).await.unwrap(), []);
    }
}

// --------------------------------------------------------------------------------------------------- definitions ----

async fn a_change_of_definitions_counts_the_revision_once_and_a_void_one_does_not(store: &Arc<dyn Store>) {
    put(store, vec![task("a", json!({})), task("b", json!({}))]).await;
    assert_eq!(store.definitions(0).await.unwrap().0, 1);
    store.change_definitions(&[id("a")], Box::new(|_| None)).await.unwrap();
    let run = scheduled("a", 0);
    let write = DefinitionWrite { runs: vec![run.clone()], audit: vec![audit("a")], ..Default::default() };
    store.change_definitions(&[], Box::new(move |_| Some(write))).await.unwrap();
    assert_eq!(store.shard().await.unwrap().definitions_rev, 1);
    assert_eq!(whole(store, &run).await, run);

    put(store, vec![TaskRow { version: 2, ..task("b", json!({"priority": 9})) }]).await;
    let (rev, changed) = store.definitions(1).await.unwrap();
    assert_eq!((rev, changed.len()), (2, 1));
    assert_eq!((changed[0].rev, changed[0].version, changed[0].definition.priority), (2, 2, 9));
    assert_eq!(store.task(&id("a")).await.unwrap().unwrap().rev, 1);
    assert_eq!(store.definitions(2).await.unwrap(), (2, vec![]));
    // A run that comes with a definition and is there already does no harm.
    let write = DefinitionWrite { tasks: vec![task("a", json!({}))], runs: vec![run], ..Default::default() };
    store.change_definitions(&[id("a")], Box::new(move |_| Some(write))).await.unwrap();
    assert_eq!(store.shard().await.unwrap().definitions_rev, 3);
}

async fn a_deleted_task_is_hidden_and_its_tombstone_is_heard_of(store: &Arc<dyn Store>) {
    put(store, vec![task("a", json!({})), task("b", json!({}))]).await;
    let tombstone = TaskRow { version: 2, deleted_at: Some(at(9)), ..task("a", json!({})) };
    put(store, vec![tombstone.clone()]).await;
    assert_eq!(store.task(&id("a")).await.unwrap(), None);
    assert_eq!(store.tasks(&[id("a"), id("b")]).await.unwrap().len(), 1);
    assert_eq!(store.list_tasks(&TaskFilter { limit: 9, ..Default::default() }).await.unwrap().len(), 1);
    let tombstone = TaskRow { rev: 2, ..tombstone };
    assert_eq!(store.definitions(1).await.unwrap(), (2, vec![tombstone.clone()]));
    assert_eq!(store.definitions(0).await.unwrap().1.len(), 1, "a node that starts does not need it");
    store
        .change_definitions(
            &[id("a")],
            Box::new(move |view| {
                assert_eq!(view.tasks[&id("a")], tombstone, "versions go on where they were");
                None
            }),
        )
        .await
        .unwrap();
}

async fn tasks_are_listed_by_filter_in_pages(store: &Arc<dyn Store>) {
    put(
        store,
        vec![
            task("b", json!({"name": "ÄPFEL und 100% Birnen", "labels": {"team": "data"}})),
            task("B", json!({"executor_group": "other", "labels": {"team": "web", "x": ""}})),
            task("a_1", json!({"status": "paused", "labels": {"data": "team"}})),
            task("a.1", json!({"name": "back\\slash_"})),
            task("a-1", json!({})),
            task("Z", json!({})),
        ],
    )
    .await;
    let list = async |filter: TaskFilter| {
        let filter = TaskFilter { limit: if filter.limit == 0 { 100 } else { filter.limit }, ..filter };
        let tasks = store.list_tasks(&filter).await.unwrap();
        tasks.iter().map(|task| task.definition.task_id.to_string()).collect::<Vec<_>>().join(" ")
    };
    let none = TaskFilter::default;
    let q = |text: &str| TaskFilter { q: Some(text.into()), ..none() };
    let label = |text: &str| TaskFilter { label: Some(text.into()), ..none() };
    assert_eq!(list(none()).await, "B Z a-1 a.1 a_1 b", "in the order of bytes");
    assert_eq!(list(TaskFilter { limit: 2, ..none() }).await, "B Z");
    assert_eq!(list(TaskFilter { limit: 2, after: Some(id("Z")), ..none() }).await, "a-1 a.1");
    assert_eq!(list(TaskFilter { after: Some(id("b")), ..none() }).await, "");
    assert_eq!(list(TaskFilter { group: Some("other".parse().unwrap()), ..none() }).await, "B");
    assert_eq!(list(TaskFilter { status: Some(Status::Paused), ..none() }).await, "a_1");
    assert_eq!(list(TaskFilter { status: Some(Status::Enabled), q: Some("A".into()), ..none() }).await, "a-1 a.1");
    assert_eq!(list(label("team")).await, "B b");
    assert_eq!(list(label("team=data")).await, "b");
    assert_eq!(list(label("team=")).await, "");
    assert_eq!(list(label("x=")).await, "B");
    assert_eq!(list(q("äpfel UND")).await, "b");
    assert_eq!(list(q("%")).await, "b", "no wildcards");
    assert_eq!(list(q("_1")).await, "a_1");
    assert_eq!(list(q("\\")).await, "a.1");
    assert_eq!(list(q("'; drop table task; --")).await, "");
    assert_eq!(list(TaskFilter { label: Some("team".into()), q: Some("b".into()), ..none() }).await, "B b");
}

async fn concurrent_changes_of_definitions_are_all_kept(store: &Arc<dyn Store>) {
    // Each of 8 callers counts one task's version up 10 times, on what it saw, and makes a task of its own.
    let callers = (0..8).map(|caller| {
        let store = store.clone();
        tokio::spawn(async move {
            for round in 0..10 {
                let own = format!("own-{caller}-{round}");
                store
                    .change_definitions(
                        &[id("shared")],
                        Box::new(move |view: DefinitionView| {
                            let version = view.tasks.get(&id("shared")).map_or(0, |task| task.version) + 1;
                            let shared = TaskRow { version, ..task("shared", json!({})) };
                            Some(DefinitionWrite { tasks: vec![shared, task(&own, json!({}))], ..Default::default() })
                        }),
                    )
                    .await
                    .unwrap();
            }
        })
    });
    for caller in callers.collect::<Vec<_>>() {
        caller.await.unwrap();
    }
    let (rev, tasks) = store.definitions(0).await.unwrap();
    assert_eq!((rev, tasks.len()), (80, 81));
    assert_eq!(store.task(&id("shared")).await.unwrap().unwrap().version, 80);
    let revs: BTreeSet<u64> = tasks.iter().filter(|t| t.definition.task_id != id("shared")).map(|t| t.rev).collect();
    assert_eq!(revs, (1..=80).collect(), "each change has its own revision");
}

// ---------------------------------------------------------------------------------------------------------- runs ----

/// Runs of few tasks, groups and trigger times, so that every filter finds some and trigger times are often equal.
fn assorted(n: usize) -> Vec<Run> {
    let mut seed = 0x2545_f491_4f6c_dd1du64;
    let mut random = move |below: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed % below
    };
    (0..n)
        .map(|_| {
            let state = RunState::ALL[random(11) as usize];
            let mut run = one_off(["a", "b", "c"][random(3) as usize], random(12) as i64 * 1000);
            run.group = ["g1", "g2"][random(2) as usize].parse().unwrap();
            run.state = state;
            run.adopted = random(2) == 0;
            run.finished_at = state.is_final().then(|| at(random(1000) as i64));
            run.message = (random(2) == 0).then(|| Message {
                incarnation: "i".into(),
                seq: 1 + random(1000),
                open: random(2) == 0,
            });
            run
        })
        .collect()
}

async fn runs_are_listed_by_every_filter_in_pages(store: &Arc<dyn Store>) {
    let runs = assorted(600);
    store.insert_runs(&runs, &[]).await.unwrap();
    let states: [&[RunState]; 8] = [
        &[],
        &[RunState::Succeeded],
        &[RunState::Failed],
        &[RunState::Running],
        &[RunState::Pending, RunState::Waiting],
        &[RunState::Running, RunState::Failed, RunState::Succeeded],
        &[RunState::Failed, RunState::TimedOut, RunState::Failed],
        &RunState::ALL,
    ];
    for task_id in [None, Some(id("b")), Some(id("none"))] {
        for group in [None, Some("g2".parse().unwrap())] {
            for states in states {
                for (from, to) in [(None, None), (Some(at(2000)), Some(at(9000))), (None, Some(at(5000)))] {
                    let mut want: Vec<(Timestamp, RunId)> = runs
                        .iter()
                        .filter(|run| {
                            task_id.as_ref().is_none_or(|id| *id == run.task_id)
                                && group.as_ref().is_none_or(|group| *group == run.group)
                                && (states.is_empty() || states.contains(&run.state))
                                && from.is_none_or(|from| run.trigger_at >= from)
                                && to.is_none_or(|to| run.trigger_at < to)
                        })
                        .map(|run| (run.trigger_at, run.run_id))
                        .collect();
                    want.sort_unstable();
                    want.reverse();
                    let mut filter = RunFilter {
                        task_id: task_id.clone(),
                        group: group.clone(),
                        states: states.to_vec(),
                        from,
                        to,
                        after: None,
                        limit: 37,
                    };
                    let mut got = Vec::new();
                    loop {
                        let page = store.list_runs(&filter).await.unwrap();
                        assert!(page.len() <= 37);
                        got.extend(page.iter().map(|run| (run.trigger_at, run.run_id)));
                        if page.len() < 37 {
                            break;
                        }
                        filter.after = got.last().copied();
                    }
                    assert_eq!(got, want, "{filter:?}");
                }
            }
        }
    }
}

async fn the_newest_run_and_success_of_a_task_are_found(store: &Arc<dyn Store>) {
    let mut runs = assorted(300);
    // One in the future, which is not the last run yet.
    runs.push(one_off("a", 1_000_000));
    let same = Memory::new();
    same.insert_runs(&runs, &[]).await.unwrap();
    store.insert_runs(&runs, &[]).await.unwrap();
    let ids = [id("a"), id("b"), id("c"), id("never")];
    for now in [at(-1), at(3000), at(20_000)] {
        let got = store.histories(&ids, now).await.unwrap();
        assert_eq!(got, same.histories(&ids, now).await.unwrap());
        assert_eq!(got[&id("never")], TaskHistory::default());
    }
    let got = store.histories(&ids, at(20_000)).await.unwrap();
    let newest = runs.iter().filter(|run| run.task_id == id("a") && run.trigger_at <= at(20_000));
    let newest = newest.max_by_key(|run| (run.trigger_at, run.run_id)).unwrap();
    assert_eq!(got[&id("a")].last_run.as_ref().unwrap().run_id, newest.run_id);
    assert!(got[&id("a")].last_success_at.is_some());
}

async fn a_run_is_inserted_once(store: &Arc<dyn Store>) {
    let (a, b, c) = (one_off("a", 1), one_off("b", 2), one_off("c", 3));
    let lines = |runs: &[&Run]| runs.iter().map(|run| audit(run.run_id)).collect::<Vec<_>>();
    assert_eq!(store.insert_runs(&[b.clone(), a.clone()], &lines(&[&b, &a])).await.unwrap(), [true, true]);
    let other = Run { reason: Some("another".into()), ..a.clone() };
    let again = [other, c.clone(), b.clone(), c.clone(), c.clone()];
    assert_eq!(store.insert_runs(&again, &lines(&[&a, &c])).await.unwrap(), [false, true, false, false, false]);
    assert_eq!(whole(store, &a).await, a, "the first stays as it is");

    // Several callers with the same runs in different orders: each run is written by one of them.
    let runs: Vec<Run> = (0..200).map(|i| one_off("x", i)).collect();
    let callers: Vec<_> = (0..6)
        .map(|i| {
            let (store, mut runs) = (store.clone(), runs.clone());
            if i % 2 == 0 {
                runs.reverse();
            }
            tokio::spawn(async move { store.insert_runs(&runs, &[]).await.unwrap().into_iter().filter(|w| *w).count() })
        })
        .collect();
    let mut sum = 0;
    for caller in callers {
        sum += caller.await.unwrap();
    }
    assert_eq!(sum, 200);
}

async fn an_empty_call_does_nothing(store: &Arc<dyn Store>) {
    let epoch = lead(store).await;
    assert_eq!(store.insert_runs(&[], &[]).await.unwrap(), Vec::<bool>::new());
    assert_eq!(store.plan(epoch, &[], None).await.unwrap(), Planned::Done { inserted: vec![] });
    store.commit(epoch, &Batch::default()).await.unwrap();
    assert_eq!(store.attempts(&[]).await.unwrap(), []);
    assert_eq!(store.tasks(&[]).await.unwrap(), []);
    assert_eq!(store.histories(&[], at(0)).await.unwrap(), BTreeMap::new());
    assert_eq!(store.adopt_runs(epoch, at(0), 0).await.unwrap(), []);
    assert_eq!(store.unfinished(epoch).await.unwrap(), []);
    assert_eq!(store.list_runs(&RunFilter::default()).await.unwrap(), []);
    store.ping().await.unwrap();
    assert_eq!(store.database_id().await.unwrap(), store.database_id().await.unwrap());
    assert_eq!(store.migrate().await.unwrap(), Vec::<String>::new(), "it was migrated before");
}

// -------------------------------------------------------------------------------------------------------- leader ----

async fn an_epoch_grows_and_the_first_leader_starts_the_watermark(store: &Arc<dyn Store>) {
    let new = store.shard().await.unwrap();
    assert_eq!((new.epoch, new.planned_until, new.settled), (0, Timestamp::default(), EventsPosition::default()));
    let first = store.acquire(0, at(5)).await.unwrap();
    assert_eq!((first.epoch, first.planned_until), (1, at(5)));
    let second = store.acquire(40, at(99)).await.unwrap();
    assert_eq!((second.epoch, second.planned_until), (41, at(5)), "the watermark is not the newcomer's to move");
    assert_eq!(store.acquire(7, at(99)).await.unwrap().epoch, 42);
    assert!(store.acquire(u64::MAX, at(99)).await.is_err());
    assert_eq!(store.shard().await.unwrap().epoch, 42);
}

async fn every_method_of_the_leader_is_fenced(store: &Arc<dyn Store>) {
    let old = lead(store).await;
    let run = scheduled("t", 0);
    let pending = one_off("t", 0);
    store.plan(old, std::slice::from_ref(&run), None).await.unwrap();
    store.insert_runs(std::slice::from_ref(&pending), &[]).await.unwrap();
    let signal = Signal {
        incarnation: "i".into(),
        seq: 1,
        kind: SignalKind::Acked,
        deliveries: 1,
        at: at(0),
        delivered_at: None,
    };
    store.commit(old, &Batch { signals_add: vec![signal.clone()], ..Default::default() }).await.unwrap();
    let [first, second] = [0, 1].map(|n| Command {
        id: Uuid::now_v7(),
        kind: CommandKind::Cancel,
        run_id: run.run_id,
        actor: "a".into(),
        reason: (n == 0).then(|| "why".to_owned()),
        at: at(n),
    });
    store.insert_command(&second, &audit(run.run_id)).await.unwrap();
    store.insert_command(&first, &audit(run.run_id)).await.unwrap();
    let new = lead(store).await;
    let before = store.shard().await.unwrap();
    let full = Batch {
        runs: vec![Run { state: RunState::Failed, ..run.clone() }],
        attempts: vec![],
        signals_add: vec![],
        signals_remove: vec![signal.clone()],
        commands_done: vec![first.id],
        settled: Some(EventsPosition { incarnation: "x".into(), seq: 9 }),
    };
    let more = [scheduled("t", 60_000)];
    let watermark = Some(Watermark { until: at(9000), seen_rev: 0 });
    for epoch in [old, new + 1, 0] {
        let fenced = |result: Result<(), StoreError>, what: &str| match result {
            Err(StoreError::Fenced { mine }) => assert_eq!(mine, epoch),
            other => panic!("{what} under epoch {epoch}: {other:?}"),
        };
        fenced(store.heartbeat(epoch).await, "heartbeat");
        fenced(store.plan(epoch, &more, None).await.map(drop), "plan");
        fenced(store.plan(epoch, &more, watermark).await.map(drop), "plan with watermark");
        let stale = Some(Watermark { until: at(9000), seen_rev: 77 });
        fenced(store.plan(epoch, &more, stale).await.map(drop), "plan with another revision");
        fenced(store.adopt_runs(epoch, at(99), 10).await.map(drop), "adopt_runs");
        fenced(store.unfinished(epoch).await.map(drop), "unfinished");
        fenced(store.signals(epoch, "another").await.map(drop), "signals");
        fenced(store.commit(epoch, &full).await, "commit");
        fenced(store.commit(epoch, &Batch::default()).await, "empty commit");
    }
    assert_eq!(store.shard().await.unwrap(), before);
    assert_eq!(whole(store, &run).await, run);
    assert_eq!(whole(store, &pending).await, pending);
    assert_eq!(store.run(more[0].run_id).await.unwrap(), None);
    assert_eq!(store.signals(new, "i").await.unwrap(), [signal]);
    assert_eq!(store.commands(1).await.unwrap(), std::slice::from_ref(&first), "the oldest first");
    store.commit(new, &Batch { commands_done: vec![first.id], ..Default::default() }).await.unwrap();
    assert_eq!(store.commands(9).await.unwrap(), [second]);
    store.heartbeat(new).await.unwrap();
}

async fn nothing_of_an_old_leader_lands_after_a_takeover(store: &Arc<dyn Store>) {
    for round in 0..15u64 {
        let mine = store.acquire(0, at(0)).await.unwrap();
        let mut settled = mine.settled.seq;
        let (first, old) = (Arc::new(tokio::sync::Notify::new()), store.clone());
        let started = first.clone();
        // The old leader commits as fast as it can until it is fenced.
        let zombie = tokio::spawn(async move {
            loop {
                let position = EventsPosition { incarnation: format!("r{round}"), seq: settled + 1 };
                match old.commit(mine.epoch, &Batch { settled: Some(position), ..Default::default() }).await {
                    Ok(()) => settled += 1,
                    Err(StoreError::Fenced { .. }) => return settled,
                    Err(other) => panic!("{other:?}"),
                }
                started.notify_one();
            }
        });
        first.notified().await;
        let new = store.acquire(0, at(0)).await.unwrap();
        let last = zombie.await.unwrap();
        assert_eq!(last, new.settled.seq, "what the old leader was told is written is what the new one sees");
        assert_eq!(store.shard().await.unwrap(), new, "and nothing came after");
    }
}

async fn planning_inserts_what_is_missing_and_moves_the_watermark(store: &Arc<dyn Store>) {
    let epoch = lead(store).await;
    let runs: Vec<Run> = (0..5).map(|i| scheduled("t", i * 1000)).collect();
    let first = store.plan(epoch, &runs[..3], None).await.unwrap();
    assert_eq!(first, Planned::Done { inserted: vec![true; 3] });
    assert_eq!(store.shard().await.unwrap().planned_until, at(0), "only a watermark moves it");
    let all = store.plan(epoch, &runs, Some(Watermark { until: at(5000), seen_rev: 0 })).await.unwrap();
    assert_eq!(all, Planned::Done { inserted: vec![false, false, false, true, true] });
    assert_eq!(store.shard().await.unwrap().planned_until, at(5000));
    let none = store.plan(epoch, &[], Some(Watermark { until: at(6000), seen_rev: 0 })).await.unwrap();
    assert_eq!(none, Planned::Done { inserted: vec![] });
    store.plan(epoch, &[], Some(Watermark { until: at(100), seen_rev: 0 })).await.unwrap();
    assert_eq!(store.shard().await.unwrap().planned_until, at(6000), "it never goes back");
    let seen = Arc::new(AtomicI64::new(0));
    let see = seen.clone();
    store
        .change_definitions(
            &[],
            Box::new(move |view| {
                see.store(view.planned_until.as_millis(), Ordering::Relaxed);
                None
            }),
        )
        .await
        .unwrap();
    assert_eq!(seen.load(Ordering::Relaxed), at(6000).as_millis());
}

async fn planning_on_old_definitions_writes_nothing(store: &Arc<dyn Store>) {
    let epoch = lead(store).await;
    put(store, vec![task("t", json!({}))]).await;
    let runs = [scheduled("t", 1000)];
    let planned = store.plan(epoch, &runs, Some(Watermark { until: at(5000), seen_rev: 0 })).await.unwrap();
    assert_eq!(planned, Planned::RevChanged { rev: 1 });
    assert_eq!(store.run(runs[0].run_id).await.unwrap(), None);
    let state = store.shard().await.unwrap();
    assert_eq!((state.planned_until, state.planned_rev), (at(0), 0));
    let planned = store.plan(epoch, &runs, Some(Watermark { until: at(5000), seen_rev: 1 })).await.unwrap();
    assert_eq!(planned, Planned::Done { inserted: vec![true] });
    // Who comes next, and who changes a task next, is told which revision has been planned.
    assert_eq!(store.acquire(0, at(6000)).await.unwrap().planned_rev, 1);
    let seen = Arc::new(AtomicI64::new(0));
    let see = seen.clone();
    let look = Box::new(move |view: DefinitionView| {
        see.store(view.planned_rev as i64, Ordering::Relaxed);
        None
    });
    store.change_definitions(&[], look).await.unwrap();
    assert_eq!(seen.load(Ordering::Relaxed), 1);
}

async fn no_change_of_definitions_slips_into_the_planned_window(store: &Arc<dyn Store>) {
    // For a change with revision R, decided on the watermark P: what was planned before it ended at or before P, and
    // what was planned to beyond P was planned on R or later.
    let epoch = lead(store).await;
    let stop = Arc::new(AtomicBool::new(false));
    let planned = Arc::new(AtomicI64::new(0));
    let planner = {
        let (store, stop, planned) = (store.clone(), stop.clone(), planned.clone());
        tokio::spawn(async move {
            let (mut rev, mut until, mut passes, mut refused) = (0, 0, Vec::new(), 0);
            while !stop.load(Ordering::Relaxed) {
                until += 1;
                let runs = [scheduled("p", until)];
                match store.plan(epoch, &runs, Some(Watermark { until: at(until), seen_rev: rev })).await.unwrap() {
                    Planned::Done { .. } => {
                        passes.push((rev, at(until)));
                        planned.fetch_add(1, Ordering::Relaxed);
                    }
                    Planned::RevChanged { rev: present } => {
                        assert!(present > rev);
                        rev = store.definitions(rev).await.unwrap().0;
                        refused += 1;
                    }
                }
            }
            (passes, refused)
        })
    };
    let changers: Vec<_> = (0..3)
        .map(|changer| {
            let (store, planned) = (store.clone(), planned.clone());
            tokio::spawn(async move {
                let mut changes = Vec::new();
                for round in 0..25 {
                    // Never two changes in a row without a pass in between, or the planner would never get through.
                    let before = planned.load(Ordering::Relaxed);
                    while planned.load(Ordering::Relaxed) == before {
                        tokio::task::yield_now().await;
                    }
                    let name = format!("t-{changer}-{round}");
                    // Some writes are long, to leave the planner time to overtake.
                    let mut tasks = vec![task(&name, json!({}))];
                    tasks.extend((0..round % 5 * 40).map(|i| task(&format!("t-{changer}-more-{i}"), json!({}))));
                    let (seen, new) = (Arc::new(AtomicI64::new(-1)), name.clone());
                    let see = seen.clone();
                    store
                        .change_definitions(
                            &[id(&new)],
                            Box::new(move |view| {
                                see.store(view.planned_until.as_millis(), Ordering::Relaxed);
                                Some(DefinitionWrite { tasks, ..Default::default() })
                            }),
                        )
                        .await
                        .unwrap();
                    let rev = store.task(&id(&name)).await.unwrap().unwrap().rev;
                    changes.push((rev, Timestamp::from_millis(seen.load(Ordering::Relaxed))));
                }
                changes
            })
        })
        .collect();
    let mut changes = Vec::new();
    for changer in changers {
        changes.extend(changer.await.unwrap());
    }
    stop.store(true, Ordering::Relaxed);
    let (passes, refused) = planner.await.unwrap();
    assert_eq!(changes.len(), 75);
    assert!(refused > 0 && passes.len() >= 25, "the two did meet: {refused} refused, {} passes", passes.len());
    for (rev, seen) in &changes {
        for (planned_on, until) in &passes {
            let before = planned_on < rev;
            assert_eq!(
                before,
                until <= seen,
                "change {rev} saw the watermark {seen}, but a pass on {planned_on} moved it to {until}"
            );
        }
    }
}

async fn one_off_runs_are_adopted_once_and_in_order(store: &Arc<dyn Store>) {
    let epoch = lead(store).await;
    let mut due: Vec<Run> = (0..400).map(|i| one_off("t", i * 7 % 400)).collect();
    due[3].result = Some(json!(1));
    due[3].payload = Some(json!({"p": 1}));
    let not_due = one_off("t", 400);
    let waiting = Run { state: RunState::Waiting, ..one_off("t", 1) };
    let over = Run { state: RunState::Cancelled, ..one_off("t", 1) };
    let planned = scheduled("t", 1);
    store.insert_runs(&due, &[]).await.unwrap();
    store.insert_runs(&[not_due.clone(), waiting, over, planned], &[]).await.unwrap();
    let first = store.adopt_runs(epoch, at(400), 10).await.unwrap();
    let order: Vec<i64> = first.iter().map(|run| run.publish_at.as_millis() - T0).collect();
    assert_eq!(order, (0..10).collect::<Vec<i64>>(), "the earliest first");
    let callers: Vec<_> = (0..2)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move {
                let mut mine = Vec::new();
                loop {
                    let runs = store.adopt_runs(epoch, at(400), 17).await.unwrap();
                    assert!(runs.is_sorted_by_key(|run| run.publish_at));
                    if runs.is_empty() {
                        return mine;
                    }
                    mine.extend(runs);
                }
            })
        })
        .collect();
    let mut got = first;
    for caller in callers {
        got.extend(caller.await.unwrap());
    }
    // A caller may have seen nothing while the other held the rest: nothing is left now.
    got.extend(store.adopt_runs(epoch, at(400), 1000).await.unwrap());
    let mut want: Vec<Run> = due.iter().map(|run| Run { adopted: true, result: None, ..run.clone() }).collect();
    want.sort_by_key(|run| run.run_id);
    got.sort_by_key(|run| run.run_id);
    assert_eq!(got, want);
    assert!(whole(store, &due[0]).await.adopted);
    assert_eq!(store.adopt_runs(epoch, at(401), 10).await.unwrap(), [Run { adopted: true, ..not_due }]);
}

async fn unfinished_runs_are_those_that_a_leader_has_to_do_with(store: &Arc<dyn Store>) {
    let epoch = lead(store).await;
    let runs: Vec<Run> = assorted(300).into_iter().map(|run| Run { result: Some(json!(1)), ..run }).collect();
    store.insert_runs(&runs, &[]).await.unwrap();
    let mut want: Vec<Run> = runs
        .iter()
        .filter(|run| run.adopted && (!run.state.is_final() || run.message.as_ref().is_some_and(|m| m.open)))
        .map(|run| Run { result: None, ..run.clone() })
        .collect();
    let mut got = store.unfinished(epoch).await.unwrap();
    want.sort_by_key(|run| run.run_id);
    got.sort_by_key(|run| run.run_id);
    assert_eq!(got, want);
}

async fn a_batch_changes_the_mutable_half_and_keeps_a_result(store: &Arc<dyn Store>) {
    let epoch = lead(store).await;
    let planned = Run { payload: Some(json!({"p": 1})), ..scheduled("t", 0) };
    store.plan(epoch, std::slice::from_ref(&planned), None).await.unwrap();
    let full = full_run();
    let changed = Run {
        run_id: planned.run_id,
        task_id: planned.task_id.clone(),
        kind: planned.kind,
        flow_id: planned.flow_id,
        trigger_at: planned.trigger_at,
        publish_at: planned.publish_at,
        payload: planned.payload.clone(),
        stretch: None,
        created_at: planned.created_at,
        ..full.clone()
    };
    // The fixed half of what is written does not count.
    store.commit(epoch, &batch(vec![Run { payload: None, publish_at: at(77), ..changed.clone() }])).await.unwrap();
    assert_eq!(whole(store, &planned).await, changed);
    // A run as `unfinished` loads it, without its result, and back to little.
    let reset = Run { message: None, worker_id: None, profile: None, result: None, ..changed.clone() };
    store.commit(epoch, &batch(vec![reset.clone()])).await.unwrap();
    assert_eq!(whole(store, &planned).await, Run { result: changed.result.clone(), ..reset });
    // A run that is not there is passed over.
    store.commit(epoch, &batch(vec![scheduled("gone", 0)])).await.unwrap();
    assert_eq!(store.run(scheduled("gone", 0).run_id).await.unwrap(), None);
    // An attempt is overwritten by its key; of two in one batch the last counts.
    let attempt = |error: &str| Attempt {
        run_id: planned.run_id,
        attempt: 1,
        outcome: Some(AttemptOutcome::Failed),
        worker_id: None,
        started_at: Some(at(1)),
        finished_at: None,
        error: Some(error.into()),
    };
    let attempts = vec![attempt("1"), attempt("2")];
    store.commit(epoch, &Batch { attempts, ..Default::default() }).await.unwrap();
    assert_eq!(store.attempts(&[planned.run_id]).await.unwrap(), [attempt("2")]);
    store.commit(epoch, &Batch { attempts: vec![attempt("3")], ..Default::default() }).await.unwrap();
    assert_eq!(store.attempts(&[planned.run_id]).await.unwrap(), [attempt("3")]);
}

async fn a_batch_is_written_whole_or_not_at_all(store: &Arc<dyn Store>) {
    let epoch = lead(store).await;
    let runs = [scheduled("t", 0), scheduled("t", 1000)];
    store.plan(epoch, &runs, None).await.unwrap();
    let impossible = Message { incarnation: "i".into(), seq: u64::MAX, open: true };
    let bad = Batch {
        runs: vec![
            Run { state: RunState::Running, ..runs[0].clone() },
            Run { message: Some(impossible), ..runs[1].clone() },
        ],
        settled: Some(EventsPosition { incarnation: "i".into(), seq: 5 }),
        ..Default::default()
    };
    assert!(matches!(store.commit(epoch, &bad).await, Err(StoreError::Corrupt(_))));
    assert_eq!(whole(store, &runs[0]).await, runs[0]);
    assert_eq!(store.shard().await.unwrap().settled, EventsPosition::default());
    let good = Batch {
        runs: vec![Run { state: RunState::Running, ..runs[0].clone() }],
        settled: Some(EventsPosition { incarnation: "i".into(), seq: 5 }),
        ..Default::default()
    };
    store.commit(epoch, &good).await.unwrap();
    assert_eq!(whole(store, &runs[0]).await.state, RunState::Running);
    assert_eq!(store.shard().await.unwrap().settled, EventsPosition { incarnation: "i".into(), seq: 5 });
}

async fn signals_are_kept_until_removed_or_their_stream_is_gone(store: &Arc<dyn Store>) {
    let epoch = lead(store).await;
    let signal = |incarnation: &str, seq: u64, kind: SignalKind, deliveries: u32| Signal {
        incarnation: incarnation.into(),
        seq,
        kind,
        deliveries,
        at: at(1),
        delivered_at: None,
    };
    let kept = [
        signal("i", 1, SignalKind::Acked, 1),
        signal("i", 1, SignalKind::Naked, 1),
        signal("i", 1, SignalKind::Naked, 2),
        signal("i", 2, SignalKind::MaxDeliveries, 3),
        signal("i", 3, SignalKind::Terminated, 1),
    ];
    let add = Batch { signals_add: kept.to_vec(), ..Default::default() };
    store.commit(epoch, &add).await.unwrap();
    let again = Batch { signals_add: vec![Signal { at: at(99), ..kept[0].clone() }], ..Default::default() };
    store.commit(epoch, &again).await.unwrap();
    assert_eq!(store.signals(epoch, "i").await.unwrap(), kept);
    let remove = Batch { signals_remove: vec![kept[1].clone(), kept[3].clone()], ..Default::default() };
    store.commit(epoch, &remove).await.unwrap();
    assert_eq!(store.signals(epoch, "i").await.unwrap(), [kept[0].clone(), kept[2].clone(), kept[4].clone()]);
    let new = signal("j", 1, SignalKind::Acked, 1);
    store.commit(epoch, &Batch { signals_add: vec![new.clone()], ..Default::default() }).await.unwrap();
    assert_eq!(store.signals(epoch, "j").await.unwrap(), [new]);
    assert_eq!(store.signals(epoch, "i").await.unwrap(), []);
}

async fn large_batches_are_written_whole(store: &Arc<dyn Store>) {
    let epoch = lead(store).await;
    let runs: Vec<Run> = (0..2500).map(|i| scheduled("t", i)).collect();
    let planned = store.plan(epoch, &runs, Some(Watermark { until: at(2500), seen_rev: 0 })).await.unwrap();
    assert_eq!(planned, Planned::Done { inserted: vec![true; 2500] });
    let changed: Vec<Run> = runs.iter().map(|run| Run { state: RunState::Succeeded, ..run.clone() }).collect();
    store.commit(epoch, &batch(changed)).await.unwrap();
    assert_eq!(store.unfinished(epoch).await.unwrap(), []);
    let again = store.plan(epoch, &runs, None).await.unwrap();
    assert_eq!(again, Planned::Done { inserted: vec![false; 2500] });
    let tasks: Vec<TaskRow> = (0..2500).map(|i| task(&format!("t{i}"), json!({}))).collect();
    put(store, tasks).await;
    assert_eq!(store.definitions(0).await.unwrap().1.len(), 2500);
}

// ------------------------------------------------------------------------------------------------------- tokens ----

fn token(name: &str, role: Role, expires_at: Option<Timestamp>) -> Token {
    Token { name: name.into(), role, hash: hash(&format!("{name} {}", role.as_str())), created_at: at(5), expires_at }
}

async fn a_token_is_kept_until_it_is_revoked(store: &Arc<dyn Store>) {
    assert_eq!(store.tokens().await.unwrap(), []);
    let all =
        [token("a", Role::Viewer, Some(at(9))), token("b", Role::Operator, None), token("Z@x.y", Role::Admin, None)];
    for token in &all {
        assert!(store.add_token(token, &audit(&token.name)).await.unwrap());
    }
    // By name in the order of bytes, those that have expired, too.
    let [a, b, z] = all;
    assert_eq!(store.tokens().await.unwrap(), [z.clone(), a.clone(), b.clone()]);
    assert!(!store.revoke_token("c", &audit("c")).await.unwrap());
    assert!(store.revoke_token("a", &audit("a")).await.unwrap());
    assert!(!store.revoke_token("a", &audit("a")).await.unwrap(), "once");
    assert_eq!(store.tokens().await.unwrap(), [z, b]);
    // The name is free again, for another token.
    let again = token("a", Role::Admin, None);
    assert!(store.add_token(&again, &audit("a")).await.unwrap());
    assert!(store.tokens().await.unwrap().contains(&again));
}

async fn of_tokens_with_one_name_one_is_added(store: &Arc<dyn Store>) {
    let tokens = [Role::Viewer, Role::Operator, Role::Admin].map(|role| token("same", role, None));
    let line = audit("same");
    let added = futures::future::join_all(tokens.iter().map(|token| store.add_token(token, &line))).await;
    let added: Vec<bool> = added.into_iter().map(Result::unwrap).collect();
    assert_eq!(added.iter().filter(|added| **added).count(), 1, "{added:?}");
    let kept = store.tokens().await.unwrap();
    assert_eq!(kept.len(), 1);
    assert!(added[tokens.iter().position(|token| *token == kept[0]).unwrap()]);
}
