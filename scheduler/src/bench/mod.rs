//! `ax bench`: measures ax as a user would have it, every part a process of its own, beside what JetStream alone can do.
//!
//! ```text
//!   load        which tasks there are and what they owe       judge      what was received against what was owed
//!   parts       nats-server, database, nodes, workers         lateness   percentiles
//!   steady      the workload: floor, ax, floor                usage      CPU and memory of processes
//!   floor       publish → pull → ack, without a scheduler     traffic    NATS messages, SQL operations
//!   crew        the workers of a phase and their records      history    what the API says about it
//!   worker, publisher   the hidden processes                  report, machine, progress   what people see
//! ```
//!
//! A workload is one module that measures with these and answers a report; [`run`] chooses it.
//!
//! Invariant: what is owed is never taken from the scheduler, and what was received never from its history: those two
//! are compared with each other, and with the history.

mod crew;
mod floor;
mod history;
mod judge;
mod lateness;
mod load;
mod machine;
mod parts;
mod progress;
mod publisher;
mod record;
mod report;
mod steady;
mod traffic;
mod usage;
mod worker;

use std::time::Duration;

use tokio_util::sync::CancellationToken;

pub use publisher::{PublisherOptions, run as run_publisher};
pub use worker::{Fault, WorkerOptions, run as run_worker};

use load::{Load, Window};
use parts::{Parts, Wanted};
use progress::Progress;
use record::now_us;
use report::Report;
use traffic::{Counted, Counts};
use usage::Meter;

use crate::bus::nats::NatsConfig;

/// Counters are read this long before a stretch's first instant and its end, so that reading them disturbs neither.
const ASIDE: Duration = Duration::from_millis(300);
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// What is measured, and with what.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Number of tasks: nine of ten are due once in a period, the tenth twice.
    pub tasks: u32,
    /// Period in whole seconds, an even divisor of 60.
    pub period: Duration,
    /// Length of the measured stretch, whole seconds.
    pub length: Duration,
    /// Between the tasks' acceptance and the stretch.
    pub warm_up: Duration,
    /// Length of each floor, whole seconds.
    pub floor_length: Duration,
    /// Scheduler nodes.
    pub nodes: u32,
    /// Worker processes.
    pub workers: u32,
    /// Runs that each worker executes at once.
    pub concurrency: u32,
    /// `auto`, `sqlite`, `postgres` or the address of a Postgres server.
    pub database: String,
    /// A NATS that runs already; none = a private one.
    pub nats: Option<String>,
    /// What the nodes log.
    pub log: String,
    /// A fault to plant in the workers.
    pub fault: Option<Fault>,
}

/// Settings, checked.
#[derive(Debug, Clone)]
struct Options {
    load: Load,
    length: Duration,
    warm_up: Duration,
    floor_length: Duration,
    nodes: u32,
    workers: u32,
    concurrency: u32,
    wanted: Wanted,
    log: String,
    fault: Option<Fault>,
}

/// Settings that cannot be measured, in words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidSettings(String);

/// The result of a measurement.
#[derive(Debug)]
pub struct Measured {
    report: Report,
}

impl Measured {
    /// One JSON object.
    ///
    /// # Errors
    /// Never for a report.
    pub fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string(&self.report)
    }

    /// The report for people, several lines.
    #[must_use]
    pub fn text(&self) -> String {
        self.report.text()
    }

    /// What was wrong, in words; none when every owed instant was received and settled once.
    #[must_use]
    pub fn faults(&self) -> Option<String> {
        self.report.fault_text()
    }
}

/// A measurement whose settings hold.
#[derive(Debug, Clone)]
pub struct Bench(Options);

impl Bench {
    /// Checks settings.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn new(settings: Settings) -> Result<Self, InvalidSettings> {
        let refuse = |text: &str| Err(InvalidSettings(text.to_owned()));
        let period_s = u32::try_from(settings.period.as_secs()).unwrap_or(u32::MAX);
        let load = Load::new(settings.tasks, period_s).map_err(|error| InvalidSettings(error.to_string()))?;
        let database = settings.database.parse().map_err(|why| InvalidSettings(format!("--database {why}")))?;
        if !(1..=16).contains(&settings.nodes) || !(1..=64).contains(&settings.workers) {
            return refuse("there must be 1 to 16 nodes and 1 to 64 workers");
        }
        if settings.nodes > 1 && database == parts::Choice::Sqlite {
            return refuse("SQLite is for one node: use Postgres for several");
        }
        if !(1..=10_000).contains(&settings.concurrency) {
            return refuse("a worker must execute 1 to 10000 runs at once");
        }
        if settings.length.is_zero() || settings.floor_length.is_zero() {
            return refuse("there must be at least one second to measure");
        }
        Ok(Self(Options {
            load,
            length: settings.length,
            warm_up: settings.warm_up,
            floor_length: settings.floor_length,
            nodes: settings.nodes,
            workers: settings.workers,
            concurrency: settings.concurrency,
            wanted: Wanted { nats: settings.nats, database },
            log: settings.log,
            fault: settings.fault,
        }))
    }

    /// Measures once, with parts of its own that end with it.
    ///
    /// # Errors
    /// A part does not start or ends by itself; or `stop` was cancelled.
    pub async fn steady(&self, stop: &CancellationToken) -> anyhow::Result<Measured> {
        let mut progress = Progress::new();
        let mut parts = Parts::new()?;
        let measured = tokio::select! {
            measured = Box::pin(steady::measure(&self.0, &mut parts, &mut progress)) => measured,
            () = stop.cancelled() => Err(anyhow::anyhow!("interrupted")),
        };
        progress.phase("ending every part");
        let ended = parts.stop().await;
        let report = measured?;
        ended?;
        Ok(Measured { report })
    }
}

/// The stretch that begins at the first whole second after `pause`.
fn window(pause: Duration, length: Duration) -> Window {
    let from_us = now_us() + i64::try_from((pause + ASIDE).as_micros()).unwrap_or(0);
    Window::of(from_us.div_euclid(1_000_000) + 1, length)
}

/// Counters at both ends of a stretch.
struct Stretch {
    before: Counts,
    after: Counts,
}

/// Waits for a stretch and through it, and reads the counters at both ends.
async fn measure_stretch(
    parts: &mut Parts,
    progress: &mut Progress,
    meter: &mut Meter,
    counted: &Counted,
    window: Window,
    name: &str,
) -> anyhow::Result<Stretch> {
    let aside_us = i64::try_from(ASIDE.as_micros()).unwrap_or(0);
    wait_until(parts, progress, window.from_s * 1_000_000 - aside_us, &format!("{name}: warming up")).await?;
    let before = counted.read().await;
    meter.stretch_begins();
    wait_until(parts, progress, window.to_s * 1_000_000 - aside_us, &format!("{name}: measuring")).await?;
    meter.stretch_ends();
    let after = counted.read().await;
    Ok(Stretch { before, after })
}

/// Waits for an instant in microseconds since 1970, looking at the parts meanwhile.
async fn wait_until(parts: &mut Parts, progress: &mut Progress, at_us: i64, text: &str) -> anyhow::Result<()> {
    loop {
        parts.check()?;
        let left = Duration::from_micros(u64::try_from(at_us - now_us()).unwrap_or(0));
        if left.is_zero() {
            progress.end_line();
            return Ok(());
        }
        progress.left(text, left);
        tokio::time::sleep(left.min(LOOK_EVERY)).await;
    }
}

/// Connects to NATS without the SDK.
async fn connect(url: &str) -> anyhow::Result<async_nats::Client> {
    Ok(NatsConfig { name: "ax bench".into(), ..NatsConfig::new(url) }.client().await?)
}

/// Tells whoever started this process.
fn say(text: impl std::fmt::Display) {
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{text}");
    let _ = out.flush();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings {
            tasks: 100,
            period: Duration::from_secs(10),
            length: Duration::from_secs(20),
            warm_up: Duration::from_secs(5),
            floor_length: Duration::from_secs(5),
            nodes: 1,
            workers: 2,
            concurrency: 16,
            database: "auto".into(),
            nats: None,
            log: "info".into(),
            fault: None,
        }
    }

    #[test]
    fn settings_that_cannot_be_measured_are_refused() {
        assert!(Bench::new(settings()).is_ok());
        let refused = |settings: Settings| Bench::new(settings).map(|_| ()).unwrap_err().to_string();
        let text = refused(Settings { nodes: 2, database: "sqlite".into(), ..settings() });
        assert!(text.contains("one node"), "{text}");
        for wrong in [
            Settings { tasks: 1, ..settings() },
            Settings { period: Duration::from_secs(7), ..settings() },
            Settings { length: Duration::ZERO, ..settings() },
            Settings { workers: 0, ..settings() },
            Settings { concurrency: 0, ..settings() },
            Settings { database: "oracle".into(), ..settings() },
        ] {
            assert!(!refused(wrong).is_empty());
        }
    }

    #[test]
    fn a_window_begins_at_a_second_that_is_far_enough_away() {
        let window = window(Duration::from_secs(3), Duration::from_secs(20));
        let ahead_us = window.from_s * 1_000_000 - now_us();
        assert!((3_000_000..4_400_000).contains(&ahead_us), "{ahead_us}");
        assert_eq!(window.seconds(), 20);
    }
}
