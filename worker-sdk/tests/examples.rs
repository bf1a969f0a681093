//! The SDK's examples are short, and do what they say.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ax_tests::api::Api;
use ax_tests::ax::Node;
use ax_tests::process::Process;
use ax_tests::world::{Database, World};
use ax_tests::{Deadline, dev, eventually};
use serde_json::{Value, json};

const SOON: Deadline = Deadline::seconds(30);
const MAX_LINES: usize = 40;

/// Finds an example, which cargo builds before it runs all tests of this package.
fn program(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("find the test program")?;
    // Test programs lie in <target>/debug/deps.
    let program = own.ancestors().nth(2).context("the test program lies nowhere")?.join("examples").join(name);
    let built = std::fs::metadata(&program).and_then(|file| file.modified());
    let written = std::fs::metadata(source(name)).and_then(|file| file.modified())?;
    ensure!(
        built.is_ok_and(|built| built >= written),
        "{} is missing or old: cargo build --examples",
        program.display()
    );
    Ok(program)
}

fn source(name: &str) -> PathBuf {
    dev::root().join(format!("worker-sdk/examples/{name}.rs"))
}

/// A node and a running example.
struct Example {
    world: World,
    _node: Node,
    api: Api,
    process: Process,
}

impl Example {
    async fn start(name: &str) -> Result<Self> {
        let world = World::start(Database::Sqlite).await?;
        let (node, api) = world.leader("n1").await?;
        let mut command = Command::new(program(name)?);
        let process = Process::spawn(name, command.env("NATS_URL", world.nats.url()))?;
        Ok(Self { world, _node: node, api, process })
    }

    /// Runs a task that the example itself defines.
    async fn run(&self, task_id: &str, payload: Value, state: &str) -> Result<Value> {
        eventually(SOON, "its definition is applied", || async {
            Ok((self.api.task(task_id).await?.status == 200).then_some(()))
        })
        .await?;
        let answer = self.api.enqueue(&json!([{"task_id": task_id, "payload": payload}])).await?;
        let run_id = answer["runs"][0]["run_id"].as_str().context("no run_id")?;
        self.api.run_reaches(run_id, &[state], SOON).await
    }

    async fn stop(mut self) -> Result<()> {
        let status = self.process.terminate(Duration::from_secs(30)).await?;
        ensure!(status.success(), "{status}: {}", self.process.output().text());
        Ok(())
    }
}

/// The outcomes of a run's attempts, in order.
fn outcomes(run: &Value) -> Vec<&str> {
    run["attempts"].as_array().into_iter().flatten().map(|attempt| attempt["outcome"].as_str().unwrap_or("")).collect()
}

#[test]
fn no_example_is_longer_than_a_page() -> Result<()> {
    let mut seen = 0;
    for entry in std::fs::read_dir(dev::root().join("worker-sdk/examples"))? {
        let path = entry?.path();
        let lines = std::fs::read_to_string(&path)?.lines().count();
        ensure!(lines <= MAX_LINES, "{} has {lines} lines", path.display());
        // Each of them is run below.
        let name = path.file_stem().and_then(|name| name.to_str()).context("no name")?.to_owned();
        ensure!(include_str!("examples.rs").contains(&format!("Example::start(\"{name}\")")), "{name} is not run");
        seen += 1;
    }
    ensure!(seen >= 4, "only {seen} examples");
    Ok(())
}

#[tokio::test]
async fn hello_greets_and_logs() -> Result<()> {
    let example = Example::start("hello").await?;
    let run = example.run("hello", json!("ax"), "succeeded").await?;
    ensure!(run["result"] == "hello, ax", "{run}");
    let logs = example.world.jetstream().await?.get_stream("AX_LOGS").await?;
    let subject = format!("ax.log.hello.{}", run["run_id"].as_str().unwrap_or_default());
    let line: Value = serde_json::from_slice(&logs.get_last_raw_message_by_subject(&subject).await?.payload)?;
    ensure!(line["text"].as_str().is_some_and(|text| text.starts_with("attempt 1 of run ")), "{line}");
    // What does not fit the handler's type ends the run.
    let run = example.run("hello", json!(7), "failed").await?;
    ensure!(run["attempts"][0]["error"].as_str().is_some_and(|error| error.contains("payload")), "{run}");
    example.stop().await
}

#[tokio::test]
async fn orders_are_copied_every_second_by_the_schedule_in_the_code() -> Result<()> {
    let example = Example::start("orders").await?;
    let runs = example.api.runs_reach("orders.copy", "succeeded", 3, Deadline::seconds(60)).await?;
    ensure!(runs.iter().all(|run| run["kind"] == "every"), "{runs:?}");
    let task = example.api.task("orders.copy").await?.ok()?;
    ensure!(task["version"] == 1 && task["timeout_ms"] == 60_000 && task["max_retry"] == 3, "{task}");
    // A second copy of the program changes nothing.
    let mut second = Process::spawn(
        "orders, again",
        Command::new(program("orders")?).env("NATS_URL", example.world.nats.url()).env("RUST_LOG", "info"),
    )?;
    example.api.runs_reach("orders.copy", "succeeded", 6, Deadline::seconds(60)).await?;
    ensure!(example.api.task("orders.copy").await?.ok()?["version"] == 1, "no change, no version");
    ensure!(second.terminate(Duration::from_secs(30)).await?.success());
    example.stop().await
}

#[tokio::test]
async fn failing_fails_in_every_way() -> Result<()> {
    let example = Example::start("failing").await?;
    let run = example.run("pay", json!("250"), "succeeded").await?;
    ensure!(outcomes(&run) == ["failed", "failed", "failed", "succeeded"] && run["result"] == 250, "{run}");
    let errors: Vec<&str> = (0..3).filter_map(|n| run["attempts"][n]["error"].as_str()).collect();
    ensure!(errors[0].contains("No such file") && errors[1].contains("busy") && errors[2].contains("panic"), "{run}");
    let run = example.run("pay", json!("much"), "failed").await?;
    ensure!(outcomes(&run) == ["failed"], "{run}");
    example.stop().await
}

#[tokio::test]
async fn long_runs_wait_compute_and_time_out() -> Result<()> {
    let example = Example::start("long").await?;
    let run = example.run("long.wait", json!(3), "succeeded").await?;
    ensure!(run["result"] == 3, "{run}");
    let subject = format!("ax.event.progress.long.long.wait.{}", run["run_id"].as_str().unwrap_or_default());
    let events = example.world.jetstream().await?.get_stream("AX_EVENTS").await?;
    let progress: Value = serde_json::from_slice(&events.get_last_raw_message_by_subject(&subject).await?.payload)?;
    ensure!(progress["message"] == "step 2 of 3", "{progress}");
    let run = example.run("long.compute", json!(50), "succeeded").await?;
    ensure!(run["result"].as_u64().is_some_and(|rounds| rounds > 0), "{run}");
    let (wait, compute) = tokio::try_join!(
        example.run("long.wait", json!(1000), "timed_out"),
        example.run("long.compute", json!(60_000), "timed_out")
    )?;
    ensure!(outcomes(&wait) == ["timed_out"] && outcomes(&compute) == ["timed_out"], "{wait} {compute}");
    example.stop().await
}
