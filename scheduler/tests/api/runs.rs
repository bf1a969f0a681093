//! Runs that are asked for, and runs that are read.

use std::collections::HashSet;

use anyhow::Result;
use ax_scheduler::core::run::{Attempt, AttemptOutcome, RunState};
use ax_scheduler::ports::{Batch, Bus as _, Store as _};
use ax_shared::{RunId, TaskId};
use reqwest::Method;
use serde_json::{Value, json};

use crate::world::{NOW, World, task};

#[tokio::test]
async fn two_triggers_are_two_runs_and_one_key_is_one_run() -> Result<()> {
    let world = World::start().await?;
    world.put("a", task("a", json!({}))).await?.is(201);
    let trigger = |body: Value| world.post("/tasks/a/trigger", body);
    let (one, two) = tokio::join!(trigger(Value::Null), trigger(json!({})));
    let (one, two) = (one?.is(201), two?.is(201));
    assert_ne!(one["run_id"], two["run_id"], "in the same millisecond, too");
    assert_eq!(one["created"], true);

    let keyed = json!({"idempotency_key": "k", "payload": {"n": 1}, "reason": "by hand", "delay_ms": 5000});
    let answers = futures::future::try_join_all((0..8).map(|_| trigger(keyed.clone()))).await?;
    let created = answers.iter().filter(|a| a.status == 201).count();
    assert_eq!(created, 1);
    let ids: HashSet<String> = answers.iter().map(|a| a.body["run_id"].to_string()).collect();
    assert_eq!(ids.len(), 1);
    assert!(answers.iter().all(|a| a.body["created"] == (a.status == 201)));

    let id = answers[0].body["run_id"].as_str().unwrap();
    let run = world.get(&format!("/runs/{id}")).await?.is(200);
    assert_eq!((&run["kind"], &run["state"], &run["reason"]), (&json!("manual"), &json!("pending"), &json!("by hand")));
    assert_eq!((&run["trigger_time"], &run["payload"]), (&json!(NOW.plus_millis(5000)), &json!({"n": 1})));
    assert_eq!(run["trace_id"], id.replace('-', ""));
    let triggered = world.store.audit().iter().filter(|e| e.action == "run.triggered").count();
    assert_eq!(triggered, 3, "a known key does nothing, so there is nothing to tell");
    Ok(())
}

#[tokio::test]
async fn a_window_of_zero_remembers_no_key() -> Result<()> {
    let world = World::start().await?;
    world.put("a", task("a", json!({"dedup_window_seconds": 0}))).await?.is(201);
    let one = world.post("/tasks/a/trigger", json!({"idempotency_key": "k"})).await?.is(201);
    let two = world.post("/tasks/a/trigger", json!({"idempotency_key": "k"})).await?.is(201);
    assert_ne!(one["run_id"], two["run_id"]);
    Ok(())
}

#[tokio::test]
async fn a_trigger_is_read_strictly() -> Result<()> {
    let world = World::start().await?;
    world.put("a", task("a", json!({}))).await?.is(201);
    for (body, field, rule) in [
        (json!({"trigger_time": "2026-01-01T00:00:00Z"}), "trigger_time", "not_supported"),
        (json!({"force": true}), "force", "not_supported"),
        (json!({"delay_ms": -1}), "delay_ms", "range"),
        (json!({"delay_ms": 3_155_760_000_001u64}), "delay_ms", "range"),
        (json!({"delay_ms": "5s"}), "delay_ms", "type"),
        (json!({"idempotency_key": ""}), "idempotency_key", "format"),
        (json!({"idempotency_key": 5}), "idempotency_key", "type"),
        (json!({"colour": 1}), "colour", "unknown_field"),
        (json!([]), "", "type"),
    ] {
        let refused = world.post("/tasks/a/trigger", body.clone()).await?.refused(422);
        assert_eq!(refused.rules(), [(field, rule)], "{body}");
    }
    world.post("/tasks/a/trigger", json!({"force": false, "trigger_time": null})).await?.is(201);
    let century = world.post("/tasks/a/trigger", json!({"delay_ms": 3_155_760_000_000u64})).await?.is(201);
    let run = world.get(&format!("/runs/{}", century["run_id"].as_str().unwrap())).await?.is(200);
    assert_eq!(run["trigger_time"], json!(NOW.plus_millis(3_155_760_000_000)));

    world.post("/tasks/none/trigger", json!({})).await?.refused(404);
    world.call(Method::POST, "/tasks/a/pause", None).await?.is(200);
    world.post("/tasks/a/trigger", json!({})).await?.refused(409);
    let refused = world.post("/tasks/a/backfill", json!({"from": 1})).await?.refused(422);
    assert_eq!(refused.rules(), [("", "not_supported")]);
    Ok(())
}

#[tokio::test]
async fn an_enqueue_is_all_or_nothing() -> Result<()> {
    let world = World::start().await?;
    world
        .post("/apply", json!([task("a", json!({})), task("b", json!({})), task("p", json!({"status": 0}))]))
        .await?
        .is(200);
    for (runs, rules) in [
        (
            json!([{"task_id": "a"}, {"task_id": "c"}, {"task_id": "c"}]),
            vec![("runs[1].task_id", "exists"), ("runs[2].task_id", "exists")],
        ),
        (
            json!([{"task_id": "a"}, {}, {"task_id": "a b"}, {"task_id": "a", "force": 1}, 7]),
            vec![
                ("runs[1].task_id", "required"),
                ("runs[2].task_id", "format"),
                ("runs[3].force", "unknown_field"),
                ("runs[4]", "type"),
            ],
        ),
    ] {
        assert_eq!(world.post("/enqueue", json!({"runs": runs})).await?.refused(422).rules(), rules);
    }
    let paused = world.post("/enqueue", json!({"runs": [{"task_id": "a"}, {"task_id": "p"}]})).await?.refused(409);
    assert_eq!(paused.rules(), [("runs[1].task_id", "conflict")]);
    assert_eq!(world.post("/enqueue", json!({})).await?.refused(422).rules(), [("runs", "required")]);
    assert_eq!(world.get("/runs").await?.is(200), json!({"runs": []}));

    let body = json!({"runs": [{"task_id": "a", "idempotency_key": "k"}, {"task_id": "b", "idempotency_key": "k"},
        {"task_id": "a", "idempotency_key": "k"}, {"task_id": "a", "payload": 1, "delay_ms": 9}]});
    let created = |answer: &Value| -> Vec<bool> {
        answer["runs"].as_array().unwrap().iter().map(|r| r["created"].as_bool().unwrap()).collect()
    };
    let first = world.post("/enqueue", body.clone()).await?.is(201);
    assert_eq!(created(&first), [true, true, false, true]);
    assert_eq!(first["runs"][0]["run_id"], first["runs"][2]["run_id"]);
    assert_ne!(first["runs"][0]["run_id"], first["runs"][1]["run_id"], "a key belongs to a task");
    let second = world.post("/enqueue", body).await?.is(201);
    assert_eq!(created(&second), [false, false, false, true]);
    assert_eq!(second["runs"][0], json!({"run_id": first["runs"][0]["run_id"], "created": false}));
    Ok(())
}

#[tokio::test]
async fn an_enqueue_leaves_one_line_in_the_audit_about_what_is_new() -> Result<()> {
    let world = World::start().await?;
    world.post("/apply", json!([task("a", json!({})), task("b", json!({}))])).await?.is(200);
    let lines = || {
        let all = world.store.audit().into_iter().filter(|line| line.action == "runs.enqueued");
        all.map(|line| (line.actor, line.subject, line.detail)).collect::<Vec<_>>()
    };
    let keyed = json!([{"task_id": "b", "idempotency_key": "k"}, {"task_id": "a", "idempotency_key": "k"},
        {"task_id": "a", "idempotency_key": "k"}]);
    let first = world.post("/enqueue", json!({"runs": keyed})).await?.is(201);
    let actor = "127.0.0.1".to_owned();
    let subject = |answer: &Value, i: usize| answer["runs"][i]["run_id"].as_str().unwrap().to_owned();
    let line = (actor.clone(), subject(&first, 0), json!({"count": 2, "tasks": ["a", "b"]}));
    assert_eq!(lines(), std::slice::from_ref(&line), "one key twice is one run");

    world.post("/enqueue", json!({"runs": keyed})).await?.is(201);
    world.post("/enqueue", json!({"runs": []})).await?.is(201);
    world.post("/enqueue", json!({"runs": [{"task_id": "a"}, {"task_id": "c"}]})).await?.refused(422);
    assert_eq!(lines(), std::slice::from_ref(&line), "nothing new, nothing to tell");

    let mut mixed = keyed.as_array().unwrap().clone();
    mixed.push(json!({"task_id": "a"}));
    let third = world.post("/enqueue", json!({"runs": mixed})).await?.is(201);
    assert_eq!(lines(), [line, (actor, subject(&third, 3), json!({"count": 1, "tasks": ["a"]}))]);
    Ok(())
}

/// Whoever claimed the key may have ended before it came to insert the run.
#[tokio::test]
async fn a_run_whose_key_is_known_and_which_is_not_there_is_told_in_the_audit() -> Result<()> {
    let world = World::start().await?;
    world.put("a", task("a", json!({}))).await?.is(201);
    let id = RunId(uuid::Uuid::from_u128(7));
    world.bus.claim_key(&TaskId::new("a")?, "k", id, std::time::Duration::from_secs(60)).await?;
    let body = json!({"runs": [{"task_id": "a", "idempotency_key": "k"}]});
    for created in [true, false] {
        let answer = world.post("/enqueue", body.clone()).await?.is(201);
        assert_eq!(answer["runs"], json!([{"run_id": id, "created": created}]));
    }
    let audit = world.store.audit();
    let about: Vec<&str> =
        audit.iter().filter(|line| line.action == "runs.enqueued").map(|line| line.subject.as_str()).collect();
    assert_eq!(about, [id.to_string()]);
    Ok(())
}

#[tokio::test]
async fn ten_thousand_runs_are_enqueued_at_once_in_order_and_no_more() -> Result<()> {
    let world = World::start().await?;
    world.put("a", task("a", json!({}))).await?.is(201);
    let many = |n: usize| json!({"runs": vec![json!({"task_id": "a"}); n]});
    let refused = world.post("/enqueue", many(10_001)).await?.refused(422);
    assert_eq!(refused.rules(), [("runs", "size")]);
    let answer = world.post("/enqueue", many(10_000)).await?.is(201);
    let ids: Vec<&str> = answer["runs"].as_array().unwrap().iter().map(|r| r["run_id"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), 10_000);
    assert!(ids.is_sorted(), "ids are ordered as the request is");
    Ok(())
}

#[tokio::test]
async fn runs_are_listed_newest_first_and_paged() -> Result<()> {
    let world = World::start().await?;
    world.post("/apply", json!([task("a", json!({})), task("b", json!({"executor_group": "h"}))])).await?.is(200);
    // Some of one instant, so that a page ends within it.
    let runs: Vec<Value> =
        (0..10).map(|i| json!({"task_id": if i < 7 { "a" } else { "b" }, "delay_ms": (i / 4) * 1000})).collect();
    world.post("/enqueue", json!({"runs": runs})).await?.is(201);
    let mut seen: Vec<(String, String)> = Vec::new();
    let mut path = "/runs?limit=3".to_owned();
    loop {
        let page = world.get(&path).await?.is(200);
        for run in page["runs"].as_array().unwrap() {
            let text = |field: &str| run[field].as_str().unwrap().to_owned();
            seen.push((text("trigger_time"), text("run_id")));
        }
        let Some(cursor) = page["next_cursor"].as_str() else { break };
        path = format!("/runs?limit=3&cursor={cursor}");
    }
    assert_eq!(seen.len(), 10);
    assert!(seen.windows(2).all(|pair| pair[0] > pair[1]), "{seen:?}");

    let count = |answer: Value| answer["runs"].as_array().unwrap().len();
    assert_eq!(count(world.get("/runs?task_id=b").await?.is(200)), 3);
    assert_eq!(count(world.get("/runs?group=h").await?.is(200)), 3);
    assert_eq!(count(world.get("/runs?state=pending&state=failed").await?.is(200)), 10);
    assert_eq!(count(world.get("/runs?state=failed&state=timed_out").await?.is(200)), 0);
    let (from, to) = (NOW.plus_millis(1000), NOW.plus_millis(2000));
    assert_eq!(count(world.get(&format!("/runs?from={from}&to={to}")).await?.is(200)), 4);
    for (path, field) in [("/runs?state=done", "state"), ("/runs?from=yesterday", "from"), ("/runs?limit=999", "limit")]
    {
        assert_eq!(world.get(path).await?.refused(422).rules()[0].0, field);
    }
    Ok(())
}

#[tokio::test]
async fn a_run_tells_its_attempts_its_timeline_and_its_result() -> Result<()> {
    let world = World::start().await?;
    world.put("a", task("a", json!({"max_retry": 1}))).await?.is(201);
    let requested = world.post("/tasks/a/trigger", json!({})).await?.is(201);
    let id: RunId = requested["run_id"].as_str().unwrap().parse()?;
    let (mut run, _) = world.store.run(id).await?.unwrap();
    let at = |ms| Some(NOW.plus_millis(ms));
    let attempt = |attempt, outcome, started: i64, finished: i64, error: Option<&str>| Attempt {
        run_id: id,
        attempt,
        outcome: Some(outcome),
        worker_id: Some("w1".into()),
        started_at: at(started),
        finished_at: at(finished),
        error: error.map(ToOwned::to_owned),
    };
    run.state = RunState::Succeeded;
    (run.attempt, run.published_at, run.started_at, run.finished_at) = (2, at(3), at(5010), at(5020));
    (run.result, run.worker_id, run.lateness_ms) = (Some(json!({"rows": 5})), Some("w1".into()), Some(4));
    let attempts = vec![
        attempt(1, AttemptOutcome::Failed, 4, 10, Some("no such table")),
        attempt(2, AttemptOutcome::Succeeded, 5010, 5020, None),
    ];
    let epoch = world.store.shard().await?.epoch;
    world.store.commit(epoch, &Batch { runs: vec![run], attempts, ..Batch::default() }).await?;

    let run = world.get(&format!("/runs/{id}")).await?.is(200);
    assert_eq!((&run["state"], &run["result"], &run["attempt"]), (&json!("succeeded"), &json!({"rows": 5}), &json!(2)));
    assert_eq!(run["attempts"][0]["error"], "no such table");
    let events: Vec<&str> = run["timeline"].as_array().unwrap().iter().map(|e| e["event"].as_str().unwrap()).collect();
    assert_eq!(events, ["requested", "due", "published", "started", "failed", "started", "succeeded"]);
    assert_eq!(run["timeline"][4]["detail"], "no such table");
    let listed = &world.get("/runs").await?.is(200)["runs"][0];
    assert!(listed.get("result").is_none() && listed.get("attempts").is_none());
    let task = world.get("/tasks/a").await?.is(200);
    assert_eq!((&task["last_run"]["run_id"], &task["last_success_at"]), (&json!(id), &json!(at(5020))));

    let simple = id.0.simple().to_string();
    assert_eq!(world.get(&format!("/runs/{simple}")).await?.is(200)["run_id"], json!(id), "the trace id finds it, too");
    world.get("/runs/00000000-0000-0000-0000-000000000000").await?.refused(404);
    assert_eq!(world.get("/runs/x").await?.refused(422).rules(), [("run_id", "format")]);
    Ok(())
}
