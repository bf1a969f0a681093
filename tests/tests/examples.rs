//! The examples work as they are written: definitions, workers, `ax dev --demo`.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ax_tests::api::Api;
use ax_tests::process::Process;
use ax_tests::world::{Database, World};
use ax_tests::{Deadline, Scratch, ax, dev, worker};
use serde_json::{Value, json};

/// Returns the definitions of `examples/tasks`.
fn definitions() -> Result<Vec<Value>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dev::examples().join("tasks"))? {
        let path = entry?.path();
        let document: Value =
            serde_json::from_slice(&std::fs::read(&path)?).with_context(|| path.display().to_string())?;
        match document {
            Value::Array(tasks) => all.extend(tasks),
            mut one if one["tasks"].is_array() => all.append(one["tasks"].as_array_mut().context("a list")?),
            one => all.push(one),
        }
    }
    Ok(all)
}

/// Returns a field that must be text.
fn text<'a>(value: &'a Value, field: &str) -> Result<&'a str> {
    value[field].as_str().with_context(|| format!("no {field}: {value}"))
}

#[tokio::test]
async fn the_definitions_apply_without_a_warning_and_python_executes_each() -> Result<()> {
    let world = World::start(Database::Postgres).await?;
    let (node, api) = world.leader("n1").await?;
    let tasks = definitions()?;
    let applied = ax::run(node.url(), &["apply", "-f", "examples/tasks", "--json"]).await?.ok()?.json()?;
    ensure!(applied["created"].as_array().is_some_and(|created| created.len() == tasks.len()), "{applied}");
    let warnings = applied["warnings"].as_array().context("no warnings")?;
    ensure!(warnings.iter().all(|warning| warning.to_string().contains("consumer")), "{applied}");

    let _workers: Vec<Process> = ["data-sync", "payment", "demo"]
        .iter()
        .map(|group| worker::python(&world.nats.url(), group))
        .collect::<Result<_>>()?;
    for definition in &tasks {
        let id = text(definition, "task_id")?;
        let shown = api.task(id).await?.ok()?;
        if definition["cron_expr"].is_string() {
            ensure!(shown["next_fire_at"].is_string(), "{id} never fires: {shown}");
        }
        // A scheduled run of the same moment may make a manual one skip, so they are enqueued: those are not bound.
        let answer = api.enqueue(&json!([{"task_id": id}])).await?;
        let run = api.run_reaches(text(&answer["runs"][0], "run_id")?, &["succeeded"], Deadline::seconds(30)).await?;
        ensure!(run["group"] == definition["executor_group"] && run["attempt"] == 1, "{run}");
    }
    api.runs_reach("demo.heartbeat", "succeeded", 2, Deadline::seconds(30)).await?;
    api.runs_reach("demo.welcome", "succeeded", 2, Deadline::seconds(30)).await?;
    Ok(())
}

#[tokio::test]
async fn the_shell_worker_executes_what_its_consumer_holds() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let (node, api) = world.leader("n1").await?;
    ax::run(node.url(), &["apply", "-f", "examples/tasks/payment.json"]).await?.ok()?;
    let shell = worker::shell(&world.nats.url(), "payment-default-t15r1")?;
    for _ in 0..3 {
        let answer = api.enqueue(&json!([{"task_id": "payment.reconcile", "payload": {"by": "shell"}}])).await?;
        let run_id = text(&answer["runs"][0], "run_id")?;
        api.run_reaches(run_id, &["succeeded"], Deadline::seconds(30)).await?;
        ensure!(shell.output().text().contains(run_id), "{}", shell.output().text());
    }
    Ok(())
}

/// Starts `ax dev --demo` in an empty folder with only nats-server to be found, as a newcomer has it.
async fn demo() -> Result<(Process, Api, Scratch)> {
    let folder = Scratch::new("demo")?;
    let nats_server = dev::nats_server()?;
    let programs: PathBuf = nats_server.parent().context("nats-server lies nowhere")?.to_path_buf();
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command: Command = ax::command(folder.path())?;
    command
        .args(["dev", "--demo"])
        .env("AX_HTTP_ADDR", "127.0.0.1:0")
        .env("PATH", format!("{}:{path}", programs.display()));
    let mut process = Process::spawn("ax dev --demo", &mut command)?;
    let url = process.ready(Duration::from_secs(60), |output| output.after("ax: listening on ")).await?;
    Ok((process, Api::new(&url), folder))
}

#[tokio::test]
async fn the_demo_shows_tasks_that_fire_run_and_finish() -> Result<()> {
    let (mut process, api, folder) = demo().await?;
    let runs = api.runs_reach("demo.heartbeat", "succeeded", 3, Deadline::seconds(60)).await?;
    api.runs_reach("demo.welcome", "succeeded", 1, Deadline::seconds(60)).await?;
    // The terminal tells it too, with the addresses and the `nats` commands to look further.
    let shown = process.output().text();
    for word in ["demo.heartbeat", "succeeded", "nats://127.0.0.1:", "nats "] {
        ensure!(shown.contains(word), "the terminal does not show {word:?}");
    }
    let page = api.send(reqwest::Method::GET, "/", None).await?;
    let page = page.body.as_str().context("no page")?;
    ensure!(page.contains("demo.heartbeat") && page.contains("sync_order_to_ods"), "{page}");
    for definition in definitions()? {
        ensure!(api.task(text(&definition, "task_id")?).await?.status == 200, "the demo lacks {definition}");
    }
    ensure!(folder.join(".ax").is_dir(), "the state lies in .ax/");

    ensure!(process.terminate(Duration::from_secs(30)).await?.success());
    // Started again in the same folder it goes on with the same history.
    let run_id = text(&runs[0], "run_id")?.to_owned();
    let mut command = ax::command(folder.path())?;
    let nats_server = dev::nats_server()?;
    command
        .args(["dev", "--demo"])
        .env("AX_HTTP_ADDR", "127.0.0.1:0")
        .env("PATH", nats_server.parent().context("no folder")?);
    let mut process = Process::spawn("ax dev --demo, again", &mut command)?;
    let url = process.ready(Duration::from_secs(60), |output| output.after("ax: listening on ")).await?;
    ensure!(Api::new(&url).run(&run_id).await?["state"] == "succeeded");
    Ok(())
}

#[tokio::test]
async fn two_demos_do_not_disturb_each_other() -> Result<()> {
    let (one, two) = tokio::try_join!(demo(), demo())?;
    for (_process, api, _folder) in [&one, &two] {
        api.runs_reach("demo.heartbeat", "succeeded", 2, Deadline::seconds(60)).await?;
    }
    Ok(())
}
