//! `ax bench`, and the hidden processes that it starts.

use std::path::PathBuf;
use std::time::Duration;

use ax_shared::Prefix;
use clap::{Args, Subcommand};
use tokio_util::sync::CancellationToken;

use super::{Failure, REFUSED, USAGE, say};
use crate::bench::{Bench, Fault, PublisherOptions, Settings, WorkerOptions, run_publisher, run_worker};
use crate::config::LogFormat;
use crate::telemetry;

/// `ax bench`.
#[derive(Debug, Args)]
pub(super) struct BenchArgs {
    #[command(subcommand)]
    workload: Workload,
}

#[derive(Debug, Subcommand)]
enum Workload {
    /// Tasks due all the time, their phases spread over the seconds, beside the same load on JetStream alone
    #[command(after_help = "Exit code 1 when an instant was missed, received twice, or has no success in the history.")]
    Steady(SteadyArgs),
}

#[derive(Debug, Args)]
struct SteadyArgs {
    /// Number of tasks: nine of ten are due once in a period, the tenth twice
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    tasks: u32,
    /// The period: 2s, 4s, 6s, 10s, 12s, 20s, 30s or 60s
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = seconds)]
    period: Duration,
    /// How long is measured
    #[arg(long = "for", value_name = "DURATION", default_value = "3m", value_parser = seconds)]
    length: Duration,
    /// Between the acceptance of the tasks and what is measured
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = seconds)]
    warm_up: Duration,
    /// How long JetStream alone is measured, before and after
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = seconds)]
    floor_for: Duration,
    /// Scheduler nodes
    #[arg(long, value_name = "N", default_value_t = 1)]
    nodes: u32,
    /// Worker processes
    #[arg(long, value_name = "N", default_value_t = 2)]
    workers: u32,
    /// Runs that a worker executes at once
    #[arg(long, value_name = "N", default_value_t = 128)]
    concurrency: u32,
    /// auto (a private Postgres when its programs are found, else SQLite), sqlite, postgres, or the postgres:// address of
    /// a server on which a database is made and dropped
    #[arg(long, value_name = "WHICH", default_value = "auto")]
    database: String,
    /// A NATS to use instead of a private nats-server; streams under names of their own are made on it and removed
    #[arg(long, value_name = "URL")]
    nats: Option<String>,
    /// What the nodes log
    #[arg(long, value_name = "FILTER", default_value = "info")]
    log: String,
    /// How often all of it is measured, each time with new parts
    #[arg(long, value_name = "N", default_value_t = 1)]
    repeat: u32,
    /// Print one JSON object for each measurement
    #[arg(long)]
    json: bool,
    /// Plant a fault, to see that it is found
    #[arg(long, hide = true)]
    fault: Option<Fault>,
}

/// `ax bench-worker`.
#[derive(Debug, Args)]
pub(super) struct BenchWorkerArgs {
    #[arg(long, env = "AX_NATS_URL", hide_env_values = true)]
    nats_url: String,
    #[arg(long)]
    prefix: String,
    #[arg(long)]
    record: PathBuf,
    #[arg(long)]
    concurrency: u32,
    #[arg(long)]
    plain: bool,
    #[arg(long)]
    fault: Option<Fault>,
}

/// `ax bench-publisher`.
#[derive(Debug, Args)]
pub(super) struct BenchPublisherArgs {
    #[arg(long, env = "AX_NATS_URL", hide_env_values = true)]
    nats_url: String,
    #[arg(long)]
    prefix: String,
    #[arg(long)]
    tasks: u32,
    #[arg(long)]
    period: u32,
    #[arg(long)]
    from: i64,
    #[arg(long)]
    to: i64,
}

pub(super) async fn bench(args: BenchArgs, stop: CancellationToken) -> Result<(), Failure> {
    let Workload::Steady(args) = args.workload;
    let bench = Bench::new(Settings {
        tasks: args.tasks,
        period: args.period,
        length: args.length,
        warm_up: args.warm_up,
        floor_length: args.floor_for,
        nodes: args.nodes,
        workers: args.workers,
        concurrency: args.concurrency,
        database: args.database,
        nats: args.nats,
        log: args.log,
        fault: args.fault,
    })
    .map_err(|error| Failure { code: USAGE, error: error.into() })?;
    // Beside the progress, for people; the database's slowness is measured, not told.
    telemetry::start("warn,sqlx=error", Some(LogFormat::Text));
    let mut faults = Vec::new();
    for _ in 0..args.repeat.max(1) {
        let measured = bench.steady(&stop).await?;
        if args.json {
            say(measured.json()?);
        } else {
            say(measured.text());
        }
        faults.extend(measured.faults());
    }
    if faults.is_empty() {
        return Ok(());
    }
    Err(Failure { code: REFUSED, error: anyhow::anyhow!("{}", faults.join("\n")) })
}

pub(super) async fn worker(args: BenchWorkerArgs, stop: CancellationToken) -> Result<(), Failure> {
    telemetry::start("warn", None);
    let options = WorkerOptions {
        nats_url: args.nats_url,
        prefix: prefix(&args.prefix)?,
        record: args.record,
        concurrency: args.concurrency,
        plain: args.plain,
        fault: args.fault,
    };
    Ok(run_worker(options, stop).await?)
}

pub(super) async fn publisher(args: BenchPublisherArgs, stop: CancellationToken) -> Result<(), Failure> {
    telemetry::start("warn", None);
    let options = PublisherOptions {
        nats_url: args.nats_url,
        prefix: prefix(&args.prefix)?,
        tasks: args.tasks,
        period_s: args.period,
        from_s: args.from,
        to_s: args.to,
    };
    Ok(run_publisher(options, stop).await?)
}

fn prefix(text: &str) -> Result<Prefix, Failure> {
    Prefix::new(text).map_err(|error| Failure { code: USAGE, error: error.into() })
}

/// Reads whole seconds or minutes: `20s`, `3m`.
fn seconds(text: &str) -> Result<Duration, String> {
    let rule = || format!("{text:?} must be a whole number with s or m, e.g. 30s, up to 24 hours");
    let (number, factor) = match (text.strip_suffix('s'), text.strip_suffix('m')) {
        (Some(number), _) => (number, 1),
        (_, Some(number)) => (number, 60),
        _ => return Err(rule()),
    };
    let seconds = number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
    seconds.filter(|seconds| *seconds <= 86_400).map(Duration::from_secs).ok_or_else(rule)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_whole_seconds_or_minutes() {
        assert_eq!(seconds("20s"), Ok(Duration::from_secs(20)));
        assert_eq!(seconds("3m"), Ok(Duration::from_secs(180)));
        for bad in ["", "5", "1h", "1.5s", "-1s", "99999999999999999999m", "100000s"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}
