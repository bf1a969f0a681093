//! A worker made with the Rust SDK, for tests that kill, stop and freeze it: its handlers do what their payload says, and
//! it writes when each of them begins and ends.
//!
//! `sdk-worker GROUP WORKER_ID`, with `NATS_URL`, `CONCURRENCY` and `GRACE_MS` in the environment.

use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use ax_worker::{Context, Failure, Nats, Worker};
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize, Default)]
#[serde(default)]
struct Job {
    /// How long to work, in milliseconds.
    ms: u64,
    /// The first attempt that succeeds.
    from_attempt: u32,
    /// Works until this file exists.
    until: Option<PathBuf>,
}

/// Who executes.
struct Me(String);

/// Writes when an attempt begins, and when it ends in whatever way.
struct Inside(String);

impl Inside {
    fn enter(cx: &Context<Me>) -> Self {
        let inside = Self(format!("{} {}", cx.run_id(), cx.attempt()));
        inside.tell("entered");
        inside
    }

    fn tell(&self, what: &str) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{now} {what} {}", self.0).and_then(|()| out.flush());
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.tell("left");
    }
}

async fn work(job: Option<Job>, cx: Context<Me>) -> Result<Value, Failure> {
    let _inside = Inside::enter(&cx);
    let job = job.unwrap_or_default();
    tokio::time::sleep(Duration::from_millis(job.ms)).await;
    if let Some(file) = job.until {
        while !file.exists() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    if cx.attempt() < job.from_attempt {
        Err(format!("not before attempt {}", job.from_attempt))?;
    }
    Ok(json!({"by": cx.state().0, "attempt": cx.attempt()}))
}

async fn give_up(_: Value, cx: Context<Me>) -> Result<(), Failure> {
    let _inside = Inside::enter(&cx);
    Err(Failure::give_up("no such order").of_kind("not_found"))
}

async fn hang(_: Value, cx: Context<Me>) -> Result<(), Failure> {
    let _inside = Inside::enter(&cx);
    std::future::pending().await
}

async fn panicking(_: Value, cx: Context<Me>) -> Result<(), Failure> {
    let _inside = Inside::enter(&cx);
    panic!("it went boom")
}

#[tokio::main]
async fn main() -> Result<()> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let mut arguments = std::env::args().skip(1);
    let group = arguments.next().context("GROUP")?;
    let worker_id = arguments.next().context("WORKER_ID")?;
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u32>().ok());
    Worker::new(Nats::from_env(), &group)
        .worker_id(&worker_id)
        .concurrency(number("CONCURRENCY").unwrap_or(8))
        .grace(Duration::from_millis(number("GRACE_MS").unwrap_or(30_000).into()))
        .state(Me(worker_id))
        .handler("work", work)
        .handler("give_up", give_up)
        .handler("hang", hang)
        .handler("panic", panicking)
        .run()
        .await?;
    Ok(())
}
