//! Runs that no schedule sets off: by hand, delayed, enqueued, several at once.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ax_tests::ax::{self, Node};
use ax_tests::ledger::{self, Ledger, millis};
use ax_tests::world::{Database, World, task};
use ax_tests::{Deadline, eventually, holds, lasts, worker};
use serde_json::{Value, json};

const SOON: Deadline = Deadline::seconds(30);

fn run_id(answer: &Value) -> Result<String> {
    Ok(answer["run_id"].as_str().with_context(|| format!("no run_id: {answer}"))?.to_owned())
}

/// A delay longer than the broker's redelivery time handed the task to every worker elsewhere. Here a delayed run is a row,
/// and its message is published when it is due.
#[tokio::test]
async fn a_delay_of_three_ack_deadlines_executes_once() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let (_node, api) = world.leader("n1").await?;
    let delayed = json!({"timeout_ms": 1000, "max_retry": 2, "delay_seconds": 9});
    api.apply(&json!([task("by.hand", json!({"timeout_ms": 1000, "max_retry": 2})), task("by.definition", delayed)]))
        .await?;
    let workers: Vec<_> = (0..8).map(|_| worker::python(&world.nats.url(), "test")).collect::<Result<_>>()?;
    let answer = api.trigger("by.hand", &json!({"delay_ms": 9000})).await?.ok()?;
    let id = run_id(&answer)?;
    let stream = world.jetstream().await?.get_stream("AX_TRIGGERS").await?;
    holds(Duration::from_secs(7), "no message waits for its time", 0, || async {
        Ok(stream.get_info().await?.state.messages)
    })
    .await?;
    for run in [
        api.run_reaches(&id, &["succeeded"], SOON).await?,
        api.runs_reach("by.definition", "succeeded", 1, SOON).await?.remove(0),
    ] {
        ensure!(run["attempt"] == 1, "{run}");
        ensure!(millis(&run["published_at"])? >= millis(&run["trigger_time"])?, "{run}");
    }
    let executed: usize = workers.iter().map(|worker| worker.output().text().matches(" by.").count()).sum();
    ensure!(executed == 2, "executed {executed} times");
    Ok(())
}

/// A delay beyond 2^31 ms fired at once elsewhere.
#[tokio::test]
async fn a_delay_of_years_waits_and_survives_a_restart() -> Result<()> {
    const DAY: i64 = 24 * 3600 * 1000;
    let world = World::start(Database::Sqlite).await?;
    let (mut node, api) = world.leader("n1").await?;
    api.apply(&task("later", json!({}))).await?;
    let delays = [2_147_483_648, 25 * DAY, 30 * DAY, 4_302_720_000, 400 * DAY, 36_525 * DAY];
    let mut runs = Vec::new();
    for delay in delays {
        let asked = ledger::now();
        let id = run_id(&api.trigger("later", &json!({"delay_ms": delay})).await?.ok()?)?;
        let due = millis(&api.run(&id).await?["trigger_time"])?;
        ensure!((asked + delay..asked + delay + 10_000).contains(&due), "a delay of {delay} ms is due at {due}");
        runs.push((id, due));
    }
    for delay in [json!(36_526 * DAY), json!(-1), json!(1e30), json!("5")] {
        let answer = api.trigger("later", &json!({"delay_ms": delay})).await?;
        ensure!(answer.status.is_client_error(), "{delay}: {}", answer.status);
    }
    node.terminate().await?;
    let (_node, api) = world.leader("n1").await?;
    lasts(Duration::from_secs(3)).await;
    for (id, due) in runs {
        let run = api.run(&id).await?;
        ensure!(run["state"] == "pending" && millis(&run["trigger_time"])? == due, "{run}");
    }
    ensure!(api.runs("task_id=later").await?.len() == delays.len());
    Ok(())
}

/// Two triggers by hand are two runs, also in one millisecond; the same idempotency key is one.
#[tokio::test]
async fn two_triggers_are_two_runs_and_one_key_is_one() -> Result<()> {
    let world = World::start(Database::Postgres).await?;
    let (_node, api) = world.leader("n1").await?;
    api.apply(&task("click", json!({"overlap_policy": "allow", "dedup_window_seconds": 60}))).await?;
    let _worker = worker::python(&world.nats.url(), "test")?;

    let none = json!({});
    let (one, two) = tokio::join!(api.trigger("click", &none), api.trigger("click", &none));
    let (one, two) = (one?, two?);
    ensure!(one.status == 201 && two.status == 201, "{one:?} {two:?}");
    let (one, two) = (run_id(&one.body)?, run_id(&two.body)?);
    ensure!(one != two);

    let keyed = json!({"idempotency_key": "订单 42"});
    let answers = futures::future::try_join_all((0..20).map(|_| api.trigger("click", &keyed))).await?;
    let ids: BTreeSet<String> = answers.iter().map(|answer| run_id(&answer.body)).collect::<Result<_>>()?;
    ensure!(ids.len() == 1, "one key, {} runs", ids.len());
    let created: Vec<bool> = answers.iter().map(|answer| answer.body["created"] == true).collect();
    ensure!(created.iter().filter(|created| **created).count() == 1, "{created:?}");
    for answer in &answers {
        let expected = if answer.body["created"] == true { 201 } else { 200 };
        ensure!(answer.status == expected, "{answer:?}");
    }

    let other = api.trigger("click", &json!({"payload": {"n": 1}})).await?.ok()?;
    for id in [one, two, run_id(&other)?].iter().chain(&ids) {
        api.run_reaches(id, &["succeeded"], SOON).await?;
    }
    ensure!(api.runs("task_id=click").await?.len() == 4);
    // A key that lived its window means a new run.
    api.apply(&task("short", json!({"overlap_policy": "allow", "dedup_window_seconds": 1}))).await?;
    let first = run_id(&api.trigger("short", &keyed).await?.ok()?)?;
    eventually(SOON, "the key is forgotten", || async {
        let answer = api.trigger("short", &keyed).await?.ok()?;
        Ok((answer["created"] == true && run_id(&answer)? != first).then_some(()))
    })
    .await?;
    // A window of nothing forgets at once.
    api.apply(&task("none", json!({"overlap_policy": "allow", "dedup_window_seconds": 0}))).await?;
    ensure!(run_id(&api.trigger("none", &keyed).await?.ok()?)? != run_id(&api.trigger("none", &keyed).await?.ok()?)?);
    Ok(())
}

#[tokio::test]
async fn the_overlap_policy_decides_between_manual_and_scheduled_runs() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let (_node, api) = world.leader("n1").await?;
    // No worker: the first run stays in the stream, and whatever the policy binds is skipped.
    api.apply(&task("alone", json!({"cron_expr": "EVERY 1h"}))).await?;
    let first = run_id(&api.trigger("alone", &json!({})).await?.ok()?)?;
    api.run_reaches(&first, &["triggered"], SOON).await?;
    let second = run_id(&api.trigger("alone", &json!({})).await?.ok()?)?;
    let second = api.run_reaches(&second, &["skipped"], SOON).await?;
    ensure!(second["reason"].as_str().is_some_and(|reason| reason.contains("overlap")), "{second}");
    // Enqueued and delayed runs neither block nor are blocked.
    let enqueued = api.enqueue(&json!([{"task_id": "alone"}, {"task_id": "alone"}])).await?;
    for n in 0..2 {
        api.run_reaches(&run_id(&enqueued["runs"][n])?, &["triggered"], SOON).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_manual_run_beside_a_scheduled_one_of_the_same_instant_is_another_run() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let (_node, api) = world.leader("n1").await?;
    api.apply(&task("both", json!({"cron_expr": "EVERY 1s", "overlap_policy": "allow"}))).await?;
    let _worker = worker::python(&world.nats.url(), "test")?;
    let first = api.runs_reach("both", "succeeded", 1, SOON).await?.remove(0);
    let phase = millis(&first["trigger_time"])?;
    let mut manual = Vec::new();
    for _ in 0..3 {
        // Asks at the very instant of the next fire.
        let now = ledger::now();
        let wait = 1000 - (now - phase).rem_euclid(1000);
        lasts(Duration::from_millis(u64::try_from(wait)?)).await;
        manual.push(run_id(&api.trigger("both", &json!({})).await?.ok()?)?);
    }
    let to = ledger::now() - 1000;
    for id in &manual {
        api.run_reaches(id, &["succeeded"], SOON).await?;
    }
    let runs = api.runs("task_id=both").await?;
    ensure!(runs.iter().filter(|run| run["kind"] == "manual").count() == manual.len());
    Ledger::of(&runs)?.check_every(1000, phase - 1000, to)
}

#[tokio::test]
async fn an_enqueue_answers_in_order_and_knows_its_keys() -> Result<()> {
    let world = World::start(Database::Postgres).await?;
    let (node, api) = world.leader("n1").await?;
    api.apply(&json!([task("a", json!({})), task("b", json!({}))])).await?;
    let _worker = worker::python(&world.nats.url(), "test")?;
    let runs: Vec<Value> = (0..1000)
        .map(|n| json!({"task_id": if n % 2 == 0 { "a" } else { "b" }, "payload": n, "idempotency_key": format!("k{n}")}))
        .collect();
    let answer = api.enqueue(&json!(runs)).await?;
    let first: Vec<&Value> = answer["runs"].as_array().context("no runs")?.iter().collect();
    ensure!(first.len() == 1000 && first.iter().all(|run| run["created"] == true));
    let again = api.enqueue(&json!(runs)).await?;
    for (n, run) in again["runs"].as_array().context("no runs")?.iter().enumerate() {
        ensure!(run["created"] == false && run["run_id"] == first[n]["run_id"], "{n}: {run}");
    }
    for n in [0, 1, 999] {
        let run = api.run_reaches(&run_id(first[n])?, &["succeeded"], Deadline::seconds(60)).await?;
        ensure!(run["task_id"] == runs[n]["task_id"] && run["kind"] == "enqueue", "{run}");
    }
    eventually(Deadline::seconds(60), "all have succeeded", || async {
        Ok((api.runs("state=succeeded").await?.len() == 1000).then_some(()))
    })
    .await?;
    let one = ax::run(node.url(), &["enqueue", "a", "--json"]).await?.ok()?.json()?;
    ensure!(one.to_string().contains("run_id"), "{one}");
    Ok(())
}

#[tokio::test]
async fn a_paused_task_does_not_fire_and_a_deleted_one_cancels_what_is_queued() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let (_node, api) = world.leader("n1").await?;
    api.apply(&task("stop", json!({"cron_expr": "EVERY 500ms", "overlap_policy": "allow"}))).await?;
    let queued = api.runs_reach("stop", "triggered", 2, SOON).await?;
    api.post("/tasks/stop/pause", &json!({})).await?.ok()?;
    let stream = world.jetstream().await?.get_stream("AX_TRIGGERS").await?;
    lasts(Duration::from_secs(1)).await;
    let paused_at = stream.get_info().await?.state.messages;
    holds(Duration::from_secs(3), "nothing is published while paused", paused_at, || async {
        Ok(stream.get_info().await?.state.messages)
    })
    .await?;
    ensure!(api.delete_task("stop").await?.status == 204);
    ensure!(api.task("stop").await?.status == 404);
    for run in queued {
        api.run_reaches(&run_id(&run)?, &["cancelled"], SOON).await?;
    }
    eventually(SOON, "the stream is empty", || async {
        Ok((stream.get_info().await?.state.messages == 0).then_some(()))
    })
    .await?;
    // Once more under the same id: its history is there, and it fires.
    api.apply(&task("stop", json!({"cron_expr": "EVERY 500ms", "overlap_policy": "allow"}))).await?;
    api.runs_reach("stop", "triggered", 1, SOON).await?;
    Ok(())
}

/// Deploying several copies of a program doubled every periodic task elsewhere.
#[tokio::test]
async fn three_processes_that_put_the_same_tasks_make_five_tasks() -> Result<()> {
    let world = World::start(Database::Postgres).await?;
    let (one, api) = world.leader("n1").await?;
    let two = world.node("n2").await?;
    let since = ledger::now();
    let tasks: Vec<Value> = (0..5)
        .map(|n| task(&format!("periodic.{n}"), json!({"cron_expr": "EVERY 1s", "overlap_policy": "allow"})))
        .collect();
    let document = json!({ "tasks": tasks }).to_string();
    let _worker = worker::python(&world.nats.url(), "test")?;
    let arguments = ["apply", "-f", "-", "--json"];
    let (a, b, c) = tokio::join!(
        ax::run_with(one.url(), &arguments, document.as_bytes()),
        ax::run_with(two.url(), &arguments, document.as_bytes()),
        ax::run_with(one.url(), &arguments, document.as_bytes()),
    );
    let mut created = 0;
    for finished in [a?, b?, c?] {
        created += finished.ok()?.json()?["created"].as_array().context("no list")?.len();
    }
    ensure!(created == 5, "{created} were created");
    api.runs_reach("periodic.4", "succeeded", 4, SOON).await?;
    // And again while it runs: the interval does not begin anew.
    ax::run_with(two.url(), &arguments, document.as_bytes()).await?.ok()?;
    api.runs_reach("periodic.4", "succeeded", 7, SOON).await?;
    let to = ledger::now() - 2000;
    ensure!(api.all("/tasks", "tasks", "").await?.len() == 5);
    let ledger = Ledger::of(&api.runs("").await?)?;
    ensure!(ledger.tasks() == 5);
    ledger.check_every(1000, since, to)
}

/// Two processes with one name both renewed the same lease elsewhere.
#[tokio::test]
async fn a_node_id_in_use_is_refused_while_its_owner_answers() -> Result<()> {
    let world = World::start(Database::Postgres).await?;
    let (mut first, _api) = world.leader("n1").await?;
    let (code, output) = Node::refused(&world.options("n1")).await?;
    ensure!(code == Some(1) && output.contains("n1") && !output.contains("panicked"), "{code:?}: {output}");
    first.kill9()?;
    let (_second, api) = world.leader("n1").await?;
    let nodes = api.nodes().await?;
    ensure!(nodes.len() == 1, "{nodes:?}");
    Ok(())
}

/// The leader reloads definitions and takes up runs independently: a run must not be judged on definitions older than itself.
async fn a_trigger_means_the_task_as_it_is_then(database: Database) -> Result<()> {
    let world = World::start(database).await?;
    let (_node, api) = world.leader("n1").await?;
    for n in 0..40 {
        let id = format!("new.{n}");
        api.apply(&task(&id, json!({}))).await?;
        let run = api.post(&format!("/tasks/{id}/trigger"), &json!({})).await?.ok()?;
        let run_id = run["run_id"].as_str().context("run_id")?;
        api.run_reaches(run_id, &["triggered"], Deadline::seconds(20)).await.context("triggered right after apply")?;

        api.post(&format!("/tasks/{id}/pause"), &json!({})).await?.ok()?;
        api.post(&format!("/tasks/{id}/resume"), &json!({})).await?.ok()?;
        let run = api.enqueue(&json!([{ "task_id": id }])).await?;
        let run_id = run["runs"][0]["run_id"].as_str().context("run_id")?;
        api.run_reaches(run_id, &["triggered"], Deadline::seconds(20)).await.context("enqueued right after resume")?;
    }
    Ok(())
}

#[tokio::test]
async fn a_trigger_right_after_its_definition_is_not_taken_for_one_of_a_deleted_task_with_sqlite() -> Result<()> {
    a_trigger_means_the_task_as_it_is_then(Database::Sqlite).await
}

#[tokio::test]
async fn a_trigger_right_after_its_definition_is_not_taken_for_one_of_a_deleted_task_with_postgres() -> Result<()> {
    a_trigger_means_the_task_as_it_is_then(Database::Postgres).await
}
