//! `ax bench` measures what it says, finds what is planted, and leaves nothing behind.

use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ax_tests::nats::Nats;
use ax_tests::process::Process;
use ax_tests::{Deadline, Scratch, ax, dev, eventually, postgres};
use futures::TryStreamExt;
use rustix::process::Signal;
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection};

/// A debug build beside other tests on two cores.
const LIMIT: Duration = Duration::from_secs(180);

/// How a report begins.
const REPORT: &str = r#"{"workload":"steady""#;

fn start(folder: &Scratch, arguments: &[&str]) -> Result<Process> {
    let mut command = ax::command(folder.path())?;
    command.args(["bench", "steady", "--tasks", "100", "--warm-up", "4s", "--concurrency", "32"]).args(arguments);
    command.env("AX_NATS_SERVER", dev::nats_server()?);
    Process::spawn("ax bench steady", &mut command)
}

/// Runs a benchmark to its end.
async fn bench(arguments: &[&str]) -> Result<(ExitStatus, String)> {
    let folder = Scratch::new("bench")?;
    let mut process = start(&folder, arguments)?;
    let status = process.wait(LIMIT).await?;
    // What was written last may still be on its way through the pipes.
    let written = process.output().clone();
    let complete = eventually(Deadline::seconds(5), "the report and the refusal are read", || async {
        let lines = written.lines();
        let reported = !arguments.contains(&"--json") || lines.iter().any(|line| line.starts_with(REPORT));
        let refused = status.success() || lines.iter().any(|line| line.starts_with("ax: "));
        Ok((reported && refused).then(|| lines.join("\n")))
    });
    let output = complete.await.with_context(|| written.text())?;
    Ok((status, output))
}

fn report(output: &str) -> Result<Value> {
    let line = output.lines().find(|line| line.starts_with(REPORT)).with_context(|| output.to_owned())?;
    serde_json::from_str(line).with_context(|| line.to_owned())
}

fn number(value: &Value) -> Result<f64> {
    value.as_f64().with_context(|| format!("not a number: {value}"))
}

/// Checks what every report of a run without faults has.
fn check(report: &Value, seconds: u64, floor_seconds: u64) -> Result<()> {
    ensure!(report["workload"] == "steady", "{report}");
    for version in ["ax", "build", "rustc", "nats_server", "database", "kernel"] {
        ensure!(report["versions"][version].as_str().is_some_and(|text| !text.is_empty()), "no version of {version}");
    }
    let machine = &report["machine"];
    ensure!(number(&machine["cores"])? >= 1.0 && number(&machine["memory_bytes"])? > 1e8, "{machine}");
    let settings = &report["settings"];
    ensure!(settings["tasks"] == 100 && settings["slow_tasks"] == 90 && settings["fast_tasks"] == 10, "{settings}");
    ensure!(settings["expressions"] == json!(["0/10 * * * * ?", "0/5 * * * * ?"]), "{settings}");

    for (name, length) in [("floor_before", floor_seconds), ("ax", seconds), ("floor_after", floor_seconds)] {
        let phase = &report[name];
        // 90 tasks each 10 s and 10 each 5 s: eleven each second.
        ensure!(phase["seconds"] == length && phase["owed"] == 11 * length, "{name}: {phase}");
        ensure!(phase["received"] == phase["owed"] && phase["missed"] == 0 && phase["doubled"] == 0, "{name}: {phase}");
        ensure!(phase["unowed"] == 0 && phase["faults"].is_null(), "{name}: {phase}");
        let lateness = &phase["lateness_ms"];
        ensure!(lateness["count"] == phase["owed"], "{name}: {lateness}");
        let rising = ["min", "p50", "p95", "p99", "max"].map(|key| number(&lateness[key]));
        let rising = rising.into_iter().collect::<Result<Vec<_>>>()?;
        ensure!(rising[0] >= 0.0 && rising.is_sorted(), "{name}: {lateness}");
        // Later than ever on a machine that works at all; what no clock in the wrong unit would pass.
        ensure!(rising[1] > 0.05 && rising[1] < 5_000.0, "{name}: {lateness}");
        for process in phase["processes"].as_array().context("processes")? {
            let (whole, stretch) = (&process["phase"], &process["stretch"]);
            ensure!(number(&whole["cpu_seconds"])? >= number(&stretch["cpu_seconds"])?, "{name}: {process}");
            ensure!(number(&stretch["peak_memory_bytes"])? > 1e6, "{name}: {process}");
        }
    }
    let floor = &report["floor_before"]["publisher"];
    ensure!(floor["confirmed"] == 11 * floor_seconds && floor["unconfirmed"] == 0, "{floor}");

    let ax = &report["ax"];
    let history = &ax["history"];
    ensure!(history["runs"] == ax["owed"] && history["succeeded"] == ax["owed"], "{history}");
    ensure!(history["missing"] == 0 && history["superfluous"] == 0, "{history}");
    ensure!(number(&history["published_ms"]["count"])? > 0.0, "{history}");
    ensure!(number(&ax["sql"]["operations_per_run"])? > 0.0, "{}", ax["sql"]);

    let ratios = &report["ratios"];
    let mean = |key: &str| -> Result<f64> {
        let of = |phase: &str| number(&report[phase]["lateness_ms"][key]);
        Ok(f64::midpoint(of("floor_before")?, of("floor_after")?))
    };
    let over = number(&ax["lateness_ms"]["p50"])? - mean("p50")?;
    let by = number(&ax["lateness_ms"]["p99"])? / mean("p99")?;
    ensure!((number(&ratios["p50_over_floor_ms"])? - over).abs() < 0.01, "{ratios}");
    ensure!((number(&ratios["p99_by_floor"])? - by).abs() < 0.01, "{ratios}");
    Ok(())
}

/// The names of the processes of a phase.
fn processes(phase: &Value) -> Vec<&str> {
    let processes = phase["processes"].as_array().map(Vec::as_slice).unwrap_or_default();
    processes.iter().filter_map(|process| process["name"].as_str()).collect()
}

#[tokio::test]
async fn everything_is_received_once_with_sqlite() -> Result<()> {
    let arguments = ["--period", "10s", "--for", "20s", "--floor-for", "3s", "--database", "sqlite", "--json"];
    let (status, output) = bench(&arguments).await?;
    let report = report(&output)?;
    ensure!(status.success(), "{status}: {output}");
    check(&report, 20, 3)?;
    ensure!(report["versions"]["database"].as_str().is_some_and(|text| text.starts_with("SQLite 3.")), "{report}");
    ensure!(report["settings"]["database"] == "a private SQLite file", "{report}");
    ensure!(processes(&report["ax"]) == ["nats-server", "scheduler 1", "worker 1", "worker 2"], "{report}");
    let floor = ["nats-server", "worker 1", "worker 2", "publisher"];
    ensure!(processes(&report["floor_after"]) == floor, "{report}");
    // At least the trigger, its delivery and its ack; the floor has nothing else but pulls and the publisher's acks.
    for phase in ["floor_before", "ax"] {
        let nats = &report[phase]["nats"];
        ensure!(number(&nats["messages_per_run"])? >= 3.0 && number(&nats["bytes_per_run"])? > 500.0, "{nats}");
    }
    Ok(())
}

#[tokio::test]
async fn on_a_nats_and_a_postgres_from_outside_nothing_is_left() -> Result<()> {
    let nats = Nats::start().await?;
    nats.jetstream().await?.create_stream("AX_TRIGGERS").await?;
    let server = postgres::database().await?;
    let before = databases(&server).await?;
    let url = nats.url();
    let outside = ["--nats", &url, "--database", &server, "--nodes", "2", "--json"];
    let arguments = ["--period", "10s", "--for", "8s", "--floor-for", "3s"];
    let (status, output) = bench(&[&arguments[..], &outside[..]].concat()).await?;
    let report = report(&output)?;
    ensure!(status.success(), "{status}: {output}");
    check(&report, 8, 3)?;
    ensure!(report["versions"]["database"].as_str().is_some_and(|text| text.starts_with("PostgreSQL ")), "{report}");
    // Processes that are not ours cannot be watched, and are left out rather than told as zero.
    ensure!(processes(&report["ax"]) == ["scheduler 1", "scheduler 2", "worker 1", "worker 2"], "{report}");
    ensure!(report["ax"]["nats"].is_null() && number(&report["ax"]["sql"]["transactions"])? > 0.0, "{report}");

    let streams: Vec<String> = nats.jetstream().await?.stream_names().try_collect().await?;
    ensure!(streams == ["AX_TRIGGERS"], "{streams:?}");
    // Other tests of this process may have made theirs meanwhile.
    let left: Vec<_> = databases(&server).await?.into_iter().filter(|name| !before.contains(name)).collect();
    ensure!(left.iter().all(|name| !name.contains("bench")), "{left:?}");
    Ok(())
}

async fn databases(server: &str) -> Result<Vec<String>> {
    let mut connection = PgConnection::connect(server).await?;
    Ok(sqlx::query_scalar("select datname::text from pg_database").fetch_all(&mut connection).await?)
}

#[tokio::test]
async fn a_worker_that_drops_runs_is_found_with_a_private_postgres() -> Result<()> {
    let fault = ["--fault", "drop", "--database", "postgres", "--json"];
    let arguments = ["--period", "10s", "--for", "5s", "--floor-for", "1s"];
    let (status, output) = bench(&[&arguments[..], &fault[..]].concat()).await?;
    let report = report(&output)?;
    ensure!(status.code() == Some(1), "{status}: {output}");
    let ax = &report["ax"];
    ensure!(number(&ax["missed"])? >= 1.0 && ax["doubled"] == 0, "{ax}");
    ensure!(number(&ax["missed"])? + number(&ax["received"])? == number(&ax["owed"])?, "{ax}");
    ensure!(ax["faults"][0].as_str().is_some_and(|text| text.starts_with("missed: bench.t")), "{ax}");
    // The scheduler was told that they succeeded: only the receipts show it.
    ensure!(ax["history"]["succeeded"] == ax["owed"], "{ax}");
    ensure!(processes(ax)[..2] == ["nats-server", "postgres"], "{ax}");
    ensure!(output.lines().any(|line| line.starts_with("ax: ax: ") && line.contains("missed")), "{output}");
    Ok(())
}

#[tokio::test]
async fn a_worker_that_executes_twice_is_found_and_people_read_it() -> Result<()> {
    let fault = ["--fault", "double", "--database", "sqlite"];
    let arguments = ["--period", "10s", "--for", "5s", "--floor-for", "1s"];
    let (status, output) = bench(&[&arguments[..], &fault[..]].concat()).await?;
    ensure!(status.code() == Some(1), "{status}: {output}");
    ensure!(
        output.lines().any(|line| line.starts_with("ax: ax: 0 missed, ") && !line.contains(" 0 doubled")),
        "{output}"
    );
    for word in ["lateness, ms", "floor before", "ax beside the floor", "history: ", "CPU seconds", "peak MiB"] {
        ensure!(output.contains(word), "no {word:?}: {output}");
    }
    Ok(())
}

/// Processes that were started in a folder or below it, or name it on their command lines.
fn living(folder: &Path) -> Result<usize> {
    let name = folder.to_string_lossy();
    let mut found = 0;
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let inside = std::fs::read_link(entry.path().join("cwd")).is_ok_and(|cwd| cwd.starts_with(folder));
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        found += usize::from(inside || String::from_utf8_lossy(&line).contains(&*name));
    }
    Ok(found)
}

#[tokio::test]
async fn its_parts_end_with_it_however_it_ends() -> Result<()> {
    for signal in [Signal::INT, Signal::KILL] {
        let (folder, temporary) = (Scratch::new("bench")?, Scratch::new("bench-temporary")?);
        let mut command = ax::command(folder.path())?;
        command.args(["bench", "steady", "--tasks", "100", "--database", "sqlite", "--floor-for", "1m"]);
        command.env("AX_NATS_SERVER", dev::nats_server()?).env("TMPDIR", temporary.path());
        let mut process = Process::spawn("ax bench steady", &mut command)?;
        // The nats-server, two workers and the publisher.
        eventually(Deadline::seconds(60), "its parts run", || async {
            Ok((living(temporary.path())? >= 4).then_some(()))
        })
        .await?;
        process.signal(signal)?;
        let status = process.wait(Duration::from_secs(30)).await?;
        ensure!(!status.success(), "{status}");
        eventually(Deadline::seconds(20), "nothing is left of it", || async {
            let empty = std::fs::read_dir(temporary.path())?.next().is_none();
            Ok((living(temporary.path())? == 0 && empty).then_some(()))
        })
        .await
        .with_context(|| format!("after {signal:?}"))?;
    }
    Ok(())
}

#[tokio::test]
async fn settings_that_cannot_be_measured_are_a_wrong_call() -> Result<()> {
    let folder = Scratch::new("bench")?;
    for arguments in [["--period", "7s"], ["--database", "oracle"], ["--for", "soon"], ["--tasks", "3"]] {
        let mut process = start(&folder, &arguments)?;
        let status = process.wait(LIMIT).await?;
        ensure!(status.code() == Some(2), "{arguments:?}: {status}");
    }
    Ok(())
}
