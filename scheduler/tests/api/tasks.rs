//! Definitions: what is accepted, refused, told, and written.

use anyhow::Result;
use ax_scheduler::core::run::{Run, RunState};
use ax_scheduler::ports::Bus as _;
use ax_scheduler::ports::{Batch, RunFilter, Store as _, Watermark};
use ax_shared::wire::{GroupConfig, GroupConsumer};
use ax_shared::{Group, Queue, RunId, RunKind, TaskId};
use reqwest::{Method, header};
use serde_json::{Value, json};

use crate::world::{NOW, World, task};

#[tokio::test]
async fn a_task_is_put_read_changed_and_deleted() -> Result<()> {
    let world = World::start().await?;
    let definition = task("a.b", json!({"cron_expr": "0 2 * * *", "timezone": "asia/shanghai", "name": "订单"}));
    let put = world.put("a.b", definition.clone()).await?;
    assert_eq!(put.header(header::ETAG), "\"1\"");
    let put = put.is(201);
    assert_eq!((&put["version"], &put["timezone"], &put["name"]), (&json!(1), &json!("Asia/Shanghai"), &json!("订单")));
    assert_eq!(put["next_fire_at"], "2026-12-01T18:00:00.000Z", "22:00Z is 06:00 in Shanghai: 02:00 comes next");
    assert_eq!(put["anchor_at"], NOW.to_string());
    assert_eq!((&put["last_run"], &put["last_success_at"]), (&Value::Null, &Value::Null));
    assert_eq!(world.get("/tasks/a.b").await?.is(200), put);

    let again = world.put("a.b", definition.clone()).await?.is(200);
    assert_eq!(again["version"], 1, "an equal definition changes nothing");
    let mut changed = definition.clone();
    changed["priority"] = json!(9);
    assert_eq!(world.put("a.b", changed).await?.is(200)["version"], 2);

    assert_eq!(world.call(Method::DELETE, "/tasks/a.b", None).await?.is(204), Value::Null);
    world.get("/tasks/a.b").await?.refused(404);
    world.call(Method::DELETE, "/tasks/a.b", None).await?.refused(404);
    assert_eq!(world.put("a.b", definition).await?.is(201)["version"], 4, "versions go on over a deletion");

    let actions: Vec<String> = world.store.audit().into_iter().map(|entry| entry.action).collect();
    assert_eq!(actions, ["task.created", "task.updated", "task.deleted", "task.created"]);
    let update = world.store.audit().remove(1);
    assert_eq!(update.detail["changed"], json!({"priority": {"from": 5, "to": 9}}));
    assert_eq!(update.actor, "127.0.0.1");
    Ok(())
}

#[tokio::test]
async fn the_id_in_the_body_may_be_left_out_and_must_not_differ() -> Result<()> {
    let world = World::start().await?;
    world.put("a", json!({"executor_group": "g"})).await?.is(201);
    let refused = world.put("a", task("b", json!({}))).await?.refused(422);
    assert_eq!(refused.rules(), [("task_id", "conflict")]);
    Ok(())
}

#[tokio::test]
async fn a_change_of_another_version_than_expected_is_a_conflict() -> Result<()> {
    let world = World::start().await?;
    let body = || Some(task("a", json!({})).to_string().into_bytes());
    let world = &world;
    let put = async |version: &str, body| world.send(Method::PUT, "/tasks/a", body, &[("If-Match", version)]).await;
    put("\"1\"", body()).await?.refused(409);
    put("*", body()).await?.refused(409);
    world.put("a", task("a", json!({}))).await?.is(201);
    put("\"2\"", body()).await?.refused(409);
    put("x", body()).await?.refused(422);
    let changed = || Some(task("a", json!({"priority": 1})).to_string().into_bytes());
    assert_eq!(put("1", changed()).await?.is(200)["version"], 2);
    put("\"1\"", changed()).await?.refused(409);
    world.send(Method::DELETE, "/tasks/a", None, &[("If-Match", "1")]).await?.refused(409);
    world.send(Method::DELETE, "/tasks/a", None, &[("If-Match", "2")]).await?.is(204);
    Ok(())
}

#[tokio::test]
async fn refusals_of_a_schedule_name_its_field() -> Result<()> {
    let world = World::start().await?;
    for (more, field, words) in [
        (json!({"cron_expr": "60 * * * *"}), "cron_expr", "60 is out of range 0–59"),
        (json!({"cron_expr": "0 0 30 2 *"}), "cron_expr", "never fires"),
        (json!({"cron_expr": "0 0 0 1 1 ? 2019"}), "cron_expr", "no fire after now"),
        (json!({"cron_expr": "EVERY 1d"}), "cron_expr", "PT24H"),
        (json!({"cron_expr": "* * * * *", "timezone": "+05:30"}), "timezone", "IANA"),
        (json!({"cron_expr": "* * * * *", "timezone": ""}), "timezone", "empty"),
        (json!({"timezone": "Europe/Budapesst"}), "timezone", "Budapesst"),
    ] {
        let refused = world.put("a", task("a", more.clone())).await?.refused(422);
        assert_eq!(refused.rules(), [(field, "schedule")], "{more}");
        assert!(refused.body["detail"].as_str().unwrap().contains(words), "{more}: {}", refused.body);
    }
    world.get("/tasks/a").await?.refused(404);
    Ok(())
}

/// A stored schedule comes to its end; whoever applies the same document again must not be stopped by it.
#[tokio::test]
async fn a_schedule_that_has_come_to_its_end_may_stay() -> Result<()> {
    let world = World::start().await?;
    let last = task("a", json!({"cron_expr": "0 0 0 31 12 ? 2026"}));
    world.put("a", last.clone()).await?.is(201);
    world.clock.advance(90 * 24 * 3_600_000);
    let report = world.post("/apply", json!([last, task("b", json!({}))])).await?.is(200);
    assert_eq!((&report["unchanged"], &report["created"]), (&json!(["a"]), &json!(["b"])));
    let refused = world.post("/apply", json!([task("c", json!({"cron_expr": "0 0 0 31 12 ? 2026"}))])).await?;
    assert_eq!(refused.refused(422).rules(), [("[0].cron_expr", "schedule")]);
    Ok(())
}

#[tokio::test]
async fn a_document_is_applied_whole_or_not_at_all() -> Result<()> {
    let world = World::start().await?;
    let bad = json!({"tasks": [task("a", json!({})), {"task_id": "b c", "executor_group": "g", "max_retry": 101},
        task("d", json!({"cron_expr": "99 * * * *"})), task("a", json!({}))]});
    let refused = world.post("/apply", bad).await?.refused(422);
    assert_eq!(
        refused.rules(),
        [
            ("tasks[1].task_id", "format"),
            ("tasks[1].max_retry", "range"),
            ("tasks[2].cron_expr", "schedule"),
            ("tasks[3].task_id", "conflict")
        ]
    );
    assert_eq!(world.get("/tasks").await?.is(200), json!({"tasks": []}));
    assert!(world.store.audit().is_empty());
    Ok(())
}

#[tokio::test]
async fn a_dry_run_tells_and_writes_nothing() -> Result<()> {
    let world = World::start().await?;
    world.put("b", task("b", json!({}))).await?.is(201);
    world.put("c", task("c", json!({}))).await?.is(201);
    let document = json!([task("a", json!({})), task("b", json!({})), task("c", json!({"priority": 1}))]);
    let dry = world.post("/apply?dry_run=true", document.clone()).await?.is(200);
    assert_eq!(
        (&dry["created"], &dry["unchanged"], &dry["updated"], &dry["deleted"]),
        (&json!(["a"]), &json!(["b"]), &json!(["c"]), &json!([]))
    );
    world.get("/tasks/a").await?.refused(404);
    let wet = world.post("/apply", document).await?.is(200);
    assert_eq!(wet["created"], dry["created"]);
    world.get("/tasks/a").await?.is(200);
    let prune = world.post("/apply?prune=true", json!([])).await?.refused(422);
    assert_eq!(prune.rules(), [("prune", "not_supported")]);
    Ok(())
}

#[tokio::test]
async fn what_is_left_to_a_default_is_warned_about_or_refused() -> Result<()> {
    let world = World::start().await?;
    let bare = json!({"tasks": [{"task_id": "a", "executor_group": "g"}]});
    let report = world.post("/apply", bare.clone()).await?.is(200);
    let warned = |report: &Value, rule: &str| -> Vec<String> {
        let warnings = report["warnings"].as_array().unwrap().iter();
        warnings.filter(|w| w["rule"] == rule).map(|w| w["field"].as_str().unwrap().to_owned()).collect()
    };
    let fields = ["tasks[0].timeout_ms", "tasks[0].max_retry", "tasks[0].dedup_window_seconds"];
    assert_eq!(warned(&report, "defaulted"), fields);
    assert!(report["warnings"].to_string().contains("g-default-t60r0"), "{report}");

    let strict = world.post("/apply?strict=true", bare.clone()).await?.refused(422);
    assert_eq!(strict.rules(), fields.map(|field| (field, "required")));

    let strict_world = World::with(true, true).await?;
    strict_world.post("/apply", bare).await?.refused(422);
    strict_world.put("a", json!({"executor_group": "g"})).await?.refused(422);
    strict_world.put("a", task("a", json!({}))).await?.is(201);
    Ok(())
}

#[tokio::test]
async fn more_than_a_thousand_consumers_are_refused() -> Result<()> {
    let world = World::start().await?;
    let group = Group::new("g")?;
    let consumers = (0..1000).map(|i| GroupConsumer {
        name: format!("g-q{i}-t60r0"),
        queue: Queue::new(&format!("q{i}")).unwrap(),
        profile: "t60r0".into(),
        max_weight: 1.0,
    });
    world.bus.put_group(&group, Some(&GroupConfig { consumers: consumers.collect(), paused: false })).await?;
    world.put("a", task("a", json!({"queue_label": "q7"}))).await?.is(201);
    let refused = world.put("b", task("b", json!({"queue_label": "other"}))).await?.refused(422);
    assert_eq!(refused.rules(), [("executor_group", "size")]);
    assert!(refused.body["detail"].as_str().unwrap().contains("1001"), "{}", refused.body);
    Ok(())
}

#[tokio::test]
async fn lists_are_filtered_and_paged() -> Result<()> {
    let world = World::start().await?;
    let tasks: Vec<Value> = (0..7)
        .map(|i| {
            task(
                &format!("t{i}"),
                json!({"executor_group": if i % 2 == 0 { "even" } else { "odd" },
                "labels": {"n": i.to_string()}, "status": if i == 3 { "paused" } else { "enabled" }}),
            )
        })
        .collect();
    world.post("/apply", tasks.into()).await?.is(200);
    let ids = |page: &Value| -> Vec<String> {
        page["tasks"].as_array().unwrap().iter().map(|t| t["task_id"].as_str().unwrap().to_owned()).collect()
    };
    let mut seen = Vec::new();
    let mut path = "/tasks?limit=3".to_owned();
    let mut pages = 0;
    loop {
        let page = world.get(&path).await?.is(200);
        seen.extend(ids(&page));
        pages += 1;
        let Some(cursor) = page["next_cursor"].as_str() else { break };
        path = format!("/tasks?limit=3&cursor={cursor}");
    }
    assert_eq!((pages, seen), (3, (0..7).map(|i| format!("t{i}")).collect()));

    assert_eq!(ids(&world.get("/tasks?group=odd").await?.is(200)), ["t1", "t3", "t5"]);
    assert_eq!(ids(&world.get("/tasks?status=paused").await?.is(200)), ["t3"]);
    assert_eq!(ids(&world.get("/tasks?label=n=4").await?.is(200)), ["t4"]);
    assert_eq!(ids(&world.get("/tasks?q=T6").await?.is(200)), ["t6"]);
    for (path, field, rule) in [
        ("/tasks?colour=red", "colour", "unknown_field"),
        ("/tasks?limit=501", "limit", "range"),
        ("/tasks?limit=0", "limit", "range"),
        ("/tasks?limit=x", "limit", "type"),
        ("/tasks?limit=1&limit=2", "limit", "type"),
        ("/tasks?cursor=x", "cursor", "format"),
        ("/tasks?group=a.b", "group", "format"),
        ("/tasks?status=on", "status", "format"),
    ] {
        assert_eq!(world.get(path).await?.refused(422).rules(), [(field, rule)], "{path}");
    }
    Ok(())
}

/// Instants that had been planned when the task was paused have a row each; the answer counted only those after them.
#[tokio::test]
async fn a_resume_counts_every_skipped_instant() -> Result<()> {
    let world = World::start().await?;
    world.put("a", task("a", json!({"cron_expr": "EVERY 1s"}))).await?.is(201);
    let id: TaskId = "a".parse()?;
    let row = world.store.task(&id).await?.unwrap();
    let epoch = world.store.shard().await?.epoch;
    let run = |second: i64| {
        let at = NOW.plus_millis(second * 1000);
        row.new_run(RunId::scheduled(&id, at), RunKind::Every, at, at, NOW)
    };
    // Planned two seconds ahead, paused after half a second; both are judged as skipped.
    let watermark = Watermark { until: NOW.plus_millis(2500), seen_rev: world.store.shard().await?.definitions_rev };
    world.store.plan(epoch, &[run(1), run(2)], Some(watermark)).await?;
    world.clock.advance(500);
    world.call(Method::POST, "/tasks/a/pause", None).await?.is(200);
    let skipped = |second| Run { state: RunState::Skipped, reason: Some("paused".into()), ..run(second) };
    world.store.commit(epoch, &Batch { runs: vec![skipped(1), skipped(2)], ..Batch::default() }).await?;
    world.clock.advance(9_500);
    let resumed = world.call(Method::POST, "/tasks/a/resume", None).await?.is(200);
    assert_eq!(
        resumed["skipped"],
        json!({"from": "2026-11-30T22:00:01.000Z", "to": "2026-11-30T22:00:10.000Z", "count": 10})
    );
    let again = world.call(Method::POST, "/tasks/a/resume", None).await?.is(200);
    assert_eq!(again["skipped"], Value::Null, "what was not paused skips nothing");
    Ok(())
}

#[tokio::test]
async fn a_paused_task_has_no_next_fire_and_its_stretch_is_told_at_resume() -> Result<()> {
    let world = World::start().await?;
    world.put("a", task("a", json!({"cron_expr": "0 * * * *"}))).await?.is(201);
    world.clock.advance(1000);
    let paused = world.call(Method::POST, "/tasks/a/pause", None).await?.is(200);
    assert_eq!((&paused["status"], &paused["next_fire_at"]), (&json!("paused"), &Value::Null));
    assert_eq!(world.get("/tasks/a/next").await?.is(200), json!({"fires": []}));
    assert_eq!(world.call(Method::POST, "/tasks/a/pause", None).await?.is(200)["version"], 2, "twice is once");
    world.post("/tasks/a/pause", json!({"why": 1})).await?.refused(422);

    world.clock.advance(3 * 3_600_000);
    let resumed = world.call(Method::POST, "/tasks/a/resume", None).await?.is(200);
    assert_eq!(
        resumed["skipped"],
        json!({"from": "2026-11-30T23:00:00.000Z", "to": "2026-12-01T01:00:00.000Z", "count": 3})
    );
    assert_eq!(resumed["starts"][0], "2026-12-01T02:00:00.000Z");
    assert_eq!(resumed["starts"].as_array().unwrap().len(), 5);
    let runs = world.get("/runs?task_id=a").await?.is(200);
    let run = &runs["runs"][0];
    assert_eq!((&run["kind"], &run["state"], &run["reason"]), (&json!("skipped"), &json!("skipped"), &json!("paused")));
    assert_eq!(run["count"], 3);
    world.call(Method::POST, "/tasks/b/pause", None).await?.refused(404);
    let actions: Vec<String> = world.store.audit().into_iter().map(|entry| entry.action).collect();
    assert_eq!(actions, ["task.created", "task.paused", "task.resumed"]);
    Ok(())
}

#[tokio::test]
async fn a_delay_makes_one_run_however_long_it_is() -> Result<()> {
    let world = World::start().await?;
    for (id, seconds) in [("d25", 2_160_000u64), ("d30", 2_592_000), ("d50", 4_302_720), ("y100", 3_155_760_000)] {
        let put = world.put(id, task(id, json!({"delay_seconds": seconds}))).await?.is(201);
        let due = NOW.plus_millis(seconds as i64 * 1000);
        assert_eq!((&put["delay_seconds"], &put["next_fire_at"]), (&json!(seconds), &json!(due)));
        let filter = RunFilter { task_id: Some(id.parse()?), limit: 10, ..RunFilter::default() };
        let runs = world.store.list_runs(&filter).await?;
        assert_eq!(runs.len(), 1);
        let run = &runs[0];
        assert_eq!(
            (run.kind, run.state, run.trigger_at, run.publish_at),
            (RunKind::Delay, RunState::Pending, due, due)
        );
    }
    world.put("d30", task("d30", json!({"delay_seconds": 2_592_000, "priority": 1}))).await?.is(200);
    let runs = world.get("/runs?task_id=d30").await?.is(200);
    assert_eq!(runs["runs"].as_array().unwrap().len(), 1, "a change of something else sets off no other run");
    let refused = world.put("x", task("x", json!({"delay_seconds": 3_155_760_001u64}))).await?.refused(422);
    assert_eq!(refused.rules(), [("delay_seconds", "range")]);
    Ok(())
}
