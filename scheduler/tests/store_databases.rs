//! What belongs to one kind of database: files and locks, servers that are gone, schemas of other versions, plans.

use std::sync::Arc;
use std::time::Duration;

use ax_scheduler::core::definitions::{DefinitionWrite, TaskRow};
use ax_scheduler::core::run::{Message, Run, RunState};
use ax_scheduler::ports::{Batch, RunFilter, Store, StoreError, TaskFilter, Watermark};
use ax_scheduler::store;
use ax_shared::{RunId, RunKind, TaskDefinition, TaskId, Timestamp};
use ax_tests::postgres::Postgres;
use ax_tests::{Deadline, eventually, holds};
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, PgConnection, SqliteConnection};
use uuid::Uuid;

const T0: i64 = 1_790_000_000_000;

fn at(ms: i64) -> Timestamp {
    Timestamp::from_millis(T0 + ms)
}

fn task(id: &str) -> TaskRow {
    let object = json!({"task_id": id, "executor_group": "g", "cron_expr": "* * * * *"});
    TaskRow {
        definition: Arc::new(TaskDefinition::from_json(&object).unwrap().definition),
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

fn scheduled(id: &str, ms: i64) -> Run {
    let id_ = TaskId::new(id).unwrap();
    task(id).new_run(RunId::scheduled(&id_, at(ms)), RunKind::Cron, at(ms), at(ms), at(0))
}

async fn put(store: &Arc<dyn Store>, id: &str) -> Result<(), StoreError> {
    let write = DefinitionWrite { tasks: vec![task(id)], ..Default::default() };
    store.change_definitions(&[TaskId::new(id).unwrap()], Box::new(move |_| Some(write))).await
}

/// Waits for a call to succeed.
async fn soon<T, F: Future<Output = Result<T, StoreError>>>(what: &str, call: impl Fn() -> F) -> T {
    eventually(Deadline::seconds(20), what, || async { Ok(Some(call().await?)) }).await.unwrap()
}

async fn refusal(url: &str) -> String {
    match store::open(url).await {
        Err(error) => chain(&error),
        Ok(_) => panic!("{url} was opened"),
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text += ": ";
        text += &source.to_string();
        next = source.source();
    }
    text
}

/// Tries everything that a restart has to find again.
async fn reopening_keeps_everything(url: &str) {
    let store = store::open(url).await.unwrap();
    assert!(!store.migrate().await.unwrap().is_empty());
    let id = store.database_id().await.unwrap();
    let epoch = store.acquire(0, at(0)).await.unwrap().epoch;
    put(&store, "t").await.unwrap();
    let run = scheduled("t", 0);
    store.plan(epoch, std::slice::from_ref(&run), Some(Watermark { until: at(1000), seen_rev: 1 })).await.unwrap();
    let before = store.shard().await.unwrap();
    drop(store);
    // The file's lock is released when the last connection is: at once, but not in this instant.
    let store = soon("the database to be free", || store::open(url)).await;
    assert_eq!(store.migrate().await.unwrap(), Vec::<String>::new());
    assert_eq!(store.database_id().await.unwrap(), id);
    assert_eq!(store.shard().await.unwrap(), before);
    assert_eq!(store.task(&TaskId::new("t").unwrap()).await.unwrap().unwrap().rev, 1);
    assert_eq!(store.run(run.run_id).await.unwrap().unwrap().0, run);
    assert_eq!(store.unfinished(epoch).await.unwrap(), [run]);
}

/// Words and JSON that this version did not write are named, not guessed at.
async fn is_corrupt<T: std::fmt::Debug>(result: Result<T, StoreError>, part: &str) {
    match result {
        Err(StoreError::Corrupt(text)) => assert!(text.contains(part), "{text}"),
        other => panic!("{other:?}"),
    }
}

macro_rules! unknown_words {
    ($connection:expr, $store:expr) => {{
        let epoch = $store.acquire(0, at(0)).await.unwrap().epoch;
        put(&$store, "t").await.unwrap();
        let run = scheduled("t", 0);
        $store.plan(epoch, std::slice::from_ref(&run), None).await.unwrap();
        let list = RunFilter { limit: 1, ..Default::default() };
        for (sql, part) in [
            ("UPDATE run SET state = 'dreaming'", "state is \"dreaming\""),
            ("UPDATE run SET state = 'pending', kind = 'whim'", "kind is \"whim\""),
            ("UPDATE run SET kind = 'cron', priority = 256", "priority is 256"),
            ("UPDATE run SET priority = 1, message_seq = 1", "half a message"),
            ("UPDATE run SET message_seq = NULL, executor_group = 'a b'", "executor_group"),
            ("UPDATE run SET executor_group = 'g', profile = 't2r0'", "profile"),
        ] {
            sqlx::query(sql).execute(&mut $connection).await.unwrap();
            is_corrupt($store.run(run.run_id).await, part).await;
            is_corrupt($store.list_runs(&list).await, &run.run_id.to_string()).await;
        }
        sqlx::query("UPDATE task SET definition = '{}'").execute(&mut $connection).await.unwrap();
        is_corrupt($store.task(&TaskId::new("t").unwrap()).await, "task \"t\"").await;
        is_corrupt($store.definitions(0).await, "definition").await;
        is_corrupt($store.list_tasks(&TaskFilter { limit: 1, ..Default::default() }).await, "definition").await;
    }};
}

/// A history in which nearly all runs have succeeded, and a few of everything else.
fn history(n: i64) -> Vec<Run> {
    (0..n)
        .map(|i| {
            let mut run = scheduled(&format!("t{}", i % 50), i / 50 * 1000);
            run.group = format!("g{}", i % 7).parse().unwrap();
            run.finished_at = Some(at(i));
            run.state = match i % 1000 {
                1 => RunState::Failed,
                2 => RunState::Skipped,
                3 => RunState::Running,
                4 => RunState::Pending,
                _ => RunState::Succeeded,
            };
            if i % 1000 == 5 {
                run.message = Some(Message { incarnation: "i".into(), seq: 1, open: true });
            }
            if i % 2000 == 4 {
                run.run_id = RunId(Uuid::now_v7());
                run.adopted = false;
            }
            run
        })
        .collect()
}

async fn fill(store: &Arc<dyn Store>, n: i64) -> (u64, Vec<Run>) {
    let runs = history(n);
    for part in runs.chunks(10_000) {
        store.insert_runs(part, &[]).await.unwrap();
    }
    (store.acquire(0, at(0)).await.unwrap().epoch, runs)
}

/// Every query of `run` that there is.
async fn ask_everything(store: &Arc<dyn Store>, epoch: u64, runs: &[Run]) {
    let id = |text: &str| TaskId::new(text).unwrap();
    for task_id in [None, Some(id("t7"))] {
        for group in [None, Some("g3".parse().unwrap())] {
            for after in [None, Some((at(30_000), runs[900].run_id))] {
                for states in [
                    vec![],
                    vec![RunState::Succeeded],
                    vec![RunState::Failed],
                    vec![RunState::Blocked],
                    vec![RunState::Running],
                    vec![RunState::Pending, RunState::Failed, RunState::Succeeded],
                ] {
                    let (task_id, group) = (task_id.clone(), group.clone());
                    let filter = RunFilter { task_id, group, states, after, limit: 50, ..Default::default() };
                    store.list_runs(&filter).await.unwrap();
                }
            }
        }
    }
    store.histories(&(0..50).map(|i| id(&format!("t{i}"))).collect::<Vec<_>>(), at(100_000_000)).await.unwrap();
    store.run(runs[77].run_id).await.unwrap();
    assert!(!store.adopt_runs(epoch, at(100_000_000), 5).await.unwrap().is_empty());
    assert!(!store.unfinished(epoch).await.unwrap().is_empty());
    // Often enough for the server to settle on a plan that it keeps.
    for part in runs.chunks(1000).take(8) {
        store.commit(epoch, &Batch { runs: part.to_vec(), ..Default::default() }).await.unwrap();
        store.plan(epoch, part, None).await.unwrap();
    }
}

// -------------------------------------------------------------------------------------------------------- sqlite ----

fn file(folder: &tempfile::TempDir) -> String {
    format!("sqlite://{}", folder.path().join("ax.db").display())
}

async fn raw(folder: &tempfile::TempDir) -> SqliteConnection {
    SqliteConnection::connect(&file(folder)).await.unwrap()
}

#[tokio::test]
async fn sqlite_reopening_keeps_everything() {
    let folder = tempfile::tempdir().unwrap();
    reopening_keeps_everything(&file(&folder)).await;
}

#[tokio::test]
async fn sqlite_a_second_node_on_the_same_file_is_refused_until_the_first_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let url = file(&folder);
    let first = store::open(&url).await.unwrap();
    assert!(!first.is_shared());
    let text = refusal(&url).await;
    assert!(text.contains("in use by another ax node; several nodes need Postgres"), "{text}");
    first.migrate().await.unwrap();
    drop(first);
    soon("the file to be free", || store::open(&url)).await;
}

#[tokio::test]
async fn sqlite_what_cannot_be_a_database_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("ax.db"), "this is no database, and long enough to be looked at ".repeat(100))
        .unwrap();
    let text = refusal(&file(&folder)).await;
    assert!(text.contains("not a database"), "{text}");
    let text = refusal(&format!("sqlite://{}", folder.path().display())).await;
    assert!(text.contains("cannot be opened"), "{text}");
    let text = refusal(&format!("sqlite://{}/ax.db/x/y.db", folder.path().display())).await;
    assert!(text.contains("its folder"), "{text}");
}

#[tokio::test]
async fn sqlite_unknown_words_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let store = store::open(&file(&folder)).await.unwrap();
    store.migrate().await.unwrap();
    let mut connection = raw(&folder).await;
    unknown_words!(connection, store);
}

#[tokio::test]
async fn sqlite_a_missing_or_newer_schema_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let store = store::open(&file(&folder)).await.unwrap();
    let text = chain(&store.shard().await.unwrap_err());
    assert!(text.contains("ax migrate"), "{text}");
    store.migrate().await.unwrap();
    sqlx::query(
        "INSERT INTO _sqlx_migrations SELECT 9999, 'later', installed_on, 1, checksum, 0 FROM _sqlx_migrations \
         WHERE version = 1",
    )
    .execute(&mut raw(&folder).await)
    .await
    .unwrap();
    let text = chain(&store.migrate().await.unwrap_err());
    assert!(text.contains("step 9999, newer than"), "{text}");
}

#[tokio::test]
async fn sqlite_another_program_that_has_the_file_locked_makes_it_unavailable_not_broken() {
    let folder = tempfile::tempdir().unwrap();
    let store = store::open(&file(&folder)).await.unwrap();
    store.migrate().await.unwrap();
    let epoch = store.acquire(0, at(0)).await.unwrap().epoch;
    let mut other = raw(&folder).await;
    sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut other).await.unwrap();
    assert!(matches!(store.heartbeat(epoch).await, Err(StoreError::Unavailable(_))));
    assert_eq!(store.shard().await.unwrap().epoch, epoch, "reading goes on");
    sqlx::raw_sql("ROLLBACK").execute(&mut other).await.unwrap();
    store.heartbeat(epoch).await.unwrap();
}

#[tokio::test]
async fn sqlite_a_cancelled_call_writes_nothing_and_blocks_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = store::open(&file(&folder)).await.unwrap();
    store.migrate().await.unwrap();
    cancelled_calls_leave_nothing(&store).await;
}

/// Drops calls at many points of their way; afterwards the store works, and each call is whole or nothing.
async fn cancelled_calls_leave_nothing(store: &Arc<dyn Store>) {
    let epoch = store.acquire(0, at(0)).await.unwrap().epoch;
    for i in 0..60u64 {
        let runs: Vec<Run> = (0..50).map(|k| scheduled(&format!("c{i}"), k)).collect();
        let limit = Duration::from_micros(i * 150);
        tokio::time::timeout(limit, store.plan(epoch, &runs, None)).await.ok();
        tokio::time::timeout(limit, put(store, &format!("c{i}"))).await.ok();
        let filter = RunFilter {
            task_id: Some(TaskId::new(format!("c{i}").as_str()).unwrap()),
            limit: 99,
            ..Default::default()
        };
        let n = soon("an answer", || store.list_runs(&filter)).await.len();
        assert!(n == 0 || n == 50, "{n} of 50 rows");
    }
    soon("a heartbeat", || store.heartbeat(epoch)).await;
    put(store, "after").await.unwrap();
    let (rev, tasks) = store.definitions(0).await.unwrap();
    assert_eq!(rev, tasks.len() as u64);
}

// ------------------------------------------------------------------------------------------------------ postgres ----

async fn migrated() -> (String, Arc<dyn Store>) {
    let url = ax_tests::postgres::database().await.unwrap();
    let store = store::open(&url).await.unwrap();
    store.migrate().await.unwrap();
    (url, store)
}

#[tokio::test]
async fn postgres_reopening_keeps_everything() {
    reopening_keeps_everything(&ax_tests::postgres::database().await.unwrap()).await;
}

#[tokio::test]
async fn postgres_unknown_words_are_named() {
    let (url, store) = migrated().await;
    let mut connection = PgConnection::connect(&url).await.unwrap();
    unknown_words!(connection, store);
}

#[tokio::test]
async fn postgres_wrong_urls_are_refused_with_the_reason_and_without_the_password() {
    let url = ax_tests::postgres::database().await.unwrap();
    let host = url.split_once('@').unwrap().1.split_once('/').unwrap().0;
    let (free, _listener) = {
        // Nobody listens on a port that was free a moment ago; one that listens and never answers.
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        (free, std::net::TcpListener::bind("127.0.0.1:0").unwrap())
    };
    for (url, part) in [
        (format!("postgres://ax:secret@{host}/nowhere"), "database \"nowhere\" does not exist"),
        (format!("postgres://nobody:secret@{host}/ax_0"), "role \"nobody\" does not exist"),
        (format!("postgres://ax:secret@{free}/ax"), "Connection refused"),
        (format!("postgres://ax:secret@{}/ax", _listener.local_addr().unwrap()), "more than 5s"),
        ("postgres://ax:secret@no-such-host.invalid/ax".to_owned(), "no-such-host.invalid"),
    ] {
        let text = refusal(&url).await;
        assert!(text.contains(part) && text.contains("cannot connect to postgres://"), "{url}: {text}");
        assert!(!text.contains("secret"), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_several_nodes_may_migrate_at_once() {
    let url = ax_tests::postgres::database().await.unwrap();
    let nodes: Vec<_> = (0..5)
        .map(|_| {
            let url = url.clone();
            tokio::spawn(async move {
                let store = store::open(&url).await.unwrap();
                let steps = store.migrate().await.unwrap();
                (store.database_id().await.unwrap(), steps)
            })
        })
        .collect();
    let mut ids = Vec::new();
    let mut applied = Vec::new();
    for node in nodes {
        let (id, steps) = node.await.unwrap();
        ids.push(id);
        applied.extend(steps);
    }
    ids.dedup();
    assert_eq!(ids.len(), 1);
    let steps = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../migrations/postgres")).unwrap().count();
    assert_eq!(applied.len(), steps, "each step was applied by one of them: {applied:?}");
    applied.sort();
    applied.dedup();
    assert_eq!(applied.len(), steps, "{applied:?}");
}

#[tokio::test]
async fn postgres_a_missing_or_newer_schema_is_refused_by_name() {
    let url = ax_tests::postgres::database().await.unwrap();
    let store = store::open(&url).await.unwrap();
    let text = chain(&store.shard().await.unwrap_err());
    assert!(text.contains("ax migrate"), "{text}");
    store.migrate().await.unwrap();
    sqlx::query(
        "INSERT INTO _sqlx_migrations SELECT 9999, 'later', now(), true, checksum, 0 FROM _sqlx_migrations \
         WHERE version = 1",
    )
    .execute(&mut PgConnection::connect(&url).await.unwrap())
    .await
    .unwrap();
    let text = chain(&store.migrate().await.unwrap_err());
    assert!(text.contains("step 9999, newer than"), "{text}");
}

#[tokio::test]
async fn postgres_tells_its_time() {
    let (_url, store) = migrated().await;
    assert!(store.is_shared());
    let there = store.server_time().await.unwrap().unwrap();
    let here = Timestamp::from_jiff(jiff::Timestamp::now());
    assert!(here.millis_since(there).abs() < 2000, "{there} {here}");
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_a_cancelled_call_writes_nothing_and_blocks_nothing() {
    let (_url, store) = migrated().await;
    cancelled_calls_leave_nothing(&store).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_an_outage_is_unavailable_and_over_when_it_is_over() {
    let mut cluster = Postgres::start().await.unwrap();
    let url = cluster.create_database().await.unwrap();
    let store = store::open(&url).await.unwrap();
    store.migrate().await.unwrap();
    let epoch = store.acquire(0, at(0)).await.unwrap().epoch;
    let run = scheduled("t", 0);
    store.plan(epoch, std::slice::from_ref(&run), None).await.unwrap();
    cluster.stop().await.unwrap();
    let start = std::time::Instant::now();
    assert!(matches!(store.heartbeat(epoch).await, Err(StoreError::Unavailable(_))));
    assert!(matches!(store.ping().await, Err(StoreError::Unavailable(_))));
    assert!(matches!(store.plan(epoch, &[scheduled("t", 1)], None).await, Err(StoreError::Unavailable(_))));
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    cluster.start_again().await.unwrap();
    soon("a heartbeat", || store.heartbeat(epoch)).await;
    store.ping().await.unwrap();
    assert_eq!(store.run(run.run_id).await.unwrap().unwrap().0, run);
}

/// A follower's idle connections are dead after a restart; each of them once cost a takeover that failed.
#[tokio::test]
async fn postgres_a_takeover_after_a_restart_succeeds_at_once() {
    let mut cluster = Postgres::start().await.unwrap();
    let url = cluster.create_database().await.unwrap();
    let store = store::open(&url).await.unwrap();
    store.migrate().await.unwrap();
    let epoch = store.acquire(0, at(0)).await.unwrap().epoch;
    // Several connections of the leader, idle from now on.
    let beats = (0..16).map(|_| store.heartbeat(epoch));
    for beat in futures::future::join_all(beats).await {
        beat.unwrap();
    }
    cluster.stop().await.unwrap();
    cluster.start_again().await.unwrap();
    soon("the database answers", || store.ping()).await;
    assert_eq!(store.acquire(0, at(0)).await.unwrap().epoch, epoch + 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_requests_that_use_up_their_pool_do_not_hold_up_the_leader() {
    let (url, store) = migrated().await;
    put(&store, "t").await.unwrap();
    let epoch = store.acquire(0, at(0)).await.unwrap().epoch;
    let mut other = PgConnection::connect(&url).await.unwrap();
    let mut holder = other.begin().await.unwrap();
    sqlx::query("LOCK TABLE task IN ACCESS EXCLUSIVE MODE").execute(&mut *holder).await.unwrap();
    let calls: Vec<_> = (0..40)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move { store.task(&TaskId::new("t").unwrap()).await })
        })
        .collect();
    let waiting =
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let mut observer = PgConnection::connect(&url).await.unwrap();
    while sqlx::query_scalar::<_, i64>(waiting).fetch_one(&mut observer).await.unwrap() < 12 {}
    let start = std::time::Instant::now();
    for i in 0..20 {
        store.plan(epoch, &[scheduled("t", i)], None).await.unwrap();
        store.heartbeat(epoch).await.unwrap();
    }
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    holder.rollback().await.unwrap();
    for call in calls {
        // Those that waited for a connection for too long were told so, the others got their task.
        assert!(matches!(call.await.unwrap(), Ok(Some(_)) | Err(StoreError::Unavailable(_))));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_a_long_change_of_definitions_does_not_hold_up_rows_and_commits() {
    let (url, store) = migrated().await;
    let epoch = store.acquire(0, at(0)).await.unwrap().epoch;
    // As far as a change gets before its last statements: it has the watermark locked.
    let mut other = PgConnection::connect(&url).await.unwrap();
    let mut change = other.begin().await.unwrap();
    sqlx::query("SELECT 1 FROM shard FOR SHARE").execute(&mut *change).await.unwrap();
    store.plan(epoch, &[scheduled("t", 0)], None).await.unwrap();
    store.commit(epoch, &Batch::default()).await.unwrap();
    store.heartbeat(epoch).await.unwrap();
    let moving = {
        let store = store.clone();
        tokio::spawn(async move { store.plan(epoch, &[], Some(Watermark { until: at(9), seen_rev: 0 })).await })
    };
    holds(Duration::from_millis(300), "the watermark to wait", false, || async { Ok(moving.is_finished()) })
        .await
        .unwrap();
    sqlx::query("UPDATE shard SET definitions_rev = 1").execute(&mut *change).await.unwrap();
    change.commit().await.unwrap();
    let planned = moving.await.unwrap().unwrap();
    assert_eq!(planned, ax_scheduler::ports::Planned::RevChanged { rev: 1 });
}

#[tokio::test]
async fn postgres_no_query_reads_the_whole_history() {
    let (url, store) = migrated().await;
    let (epoch, runs) = fill(&store, 40_000).await;
    let mut observer = PgConnection::connect(&url).await.unwrap();
    sqlx::raw_sql("ANALYZE").execute(&mut observer).await.unwrap();
    let scans = "SELECT seq_scan::bigint FROM pg_stat_user_tables WHERE relname = 'run_default'";
    // A session tells its figures at the latest when it ends.
    let ended = async |observer: &mut PgConnection| {
        let sessions =
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'ax' AND datname = current_database()";
        while sqlx::query_scalar::<_, i64>(sessions).fetch_one(&mut *observer).await.unwrap() > 0 {}
    };
    drop(store);
    ended(&mut observer).await;
    let before: i64 = sqlx::query_scalar(scans).fetch_one(&mut observer).await.unwrap();
    let store = store::open(&url).await.unwrap();
    ask_everything(&store, epoch, &runs).await;
    drop(store);
    ended(&mut observer).await;
    let after: i64 = sqlx::query_scalar(scans).fetch_one(&mut observer).await.unwrap();
    assert_eq!(after - before, 0, "whole-table scans of run");
    let used: Vec<(String, i64)> = sqlx::query_as(AssertSqlSafe(
        "SELECT indexrelname::text, idx_scan::bigint FROM pg_stat_user_indexes WHERE relname = 'run_default' ORDER BY 1",
    ))
    .fetch_all(&mut observer)
    .await
    .unwrap();
    assert_eq!(used.len(), 7);
    assert!(used.iter().all(|(_, scans)| *scans > 0), "every index is of use: {used:?}");
}
