//! Two SDK workers and a raw one share a group while workers are killed and stopped at random: no instant is lost, none has
//! two runs, and nothing is executed again after its success was confirmed.
//!
//! `AX_SOAK_SECONDS` says for how long (60 by default), `AX_SOAK_SEED` makes the same choices again.

use std::collections::HashMap;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ax_tests::ledger::{Ledger, millis, now};
use ax_tests::process::Process;
use ax_tests::world::{Database, World, task};
use ax_tests::{Deadline, dev, eventually, lasts};
use futures::StreamExt;
use serde_json::{Value, json};

use crate::program::{self, Line, Options, lines};

const TASKS: usize = 10;
const INTERVAL_MS: i64 = 1000;
/// A worker that is asked to stop in the soak has this long for what it does.
const GRACE: Duration = Duration::from_millis(200);

/// Choices that a seed decides.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        // Constants of Knuth's MMIX.
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Starts the raw worker of `examples/`, with the time put before what it prints.
fn raw(nats_url: &str) -> Result<Process> {
    let script = dev::examples().join("raw-worker/worker.py");
    let around = format!(
        "import builtins, runpy, sys, time; told = print; \
         builtins.print = lambda *a, **k: told(int(time.time() * 1000), *a, **k); \
         sys.argv = ['worker.py', 'test']; runpy.run_path({:?}, run_name='__main__')",
        script.display().to_string()
    );
    Process::spawn("raw worker", Command::new(dev::python()?).args(["-u", "-c", &around]).env("NATS_URL", nats_url))
}

/// What the raw worker has executed: `<ms> <trigger time> <handler> <run id> <payload>`.
fn raw_lines(worker: &Process) -> Vec<Line> {
    let read = |line: &String| {
        let words: Vec<&str> = line.split(' ').collect();
        let run_id = words.get(3).filter(|_| words[2] == "work")?;
        Some(Line { at: words[0].parse().ok()?, what: "entered".into(), run_id: (*run_id).to_owned(), attempt: 0 })
    };
    worker.output().lines().iter().filter_map(read).collect()
}

/// The workers and what those that are no more have executed.
struct Workers {
    url: String,
    alive: Vec<Process>,
    executed: Vec<Line>,
    started: usize,
}

impl Workers {
    fn start(&mut self, place: usize) -> Result<Process> {
        if place == 2 {
            return raw(&self.url);
        }
        self.started += 1;
        let options = Options { grace: GRACE, ..Options::default() };
        program::start(&self.url, &format!("w{place}-{}", self.started), options)
    }

    fn note(&mut self, place: usize) {
        let worker = &self.alive[place];
        let found = if place == 2 { raw_lines(worker) } else { lines(worker) };
        self.executed.extend(found.into_iter().filter(|line| line.what == "entered"));
    }

    /// Ends the worker at a place, roughly or gently, and starts another.
    async fn replace(&mut self, place: usize, gently: bool) -> Result<()> {
        if gently && place != 2 {
            let status = self.alive[place].terminate(Duration::from_secs(30)).await?;
            ensure!(status.success(), "a stopped worker ended with {status}");
        } else {
            self.alive[place].kill9()?;
        }
        self.note(place);
        self.alive[place] = self.start(place)?;
        Ok(())
    }
}

#[tokio::test]
async fn two_sdk_workers_and_a_raw_one_lose_and_double_nothing_under_random_kills() -> Result<()> {
    let seconds = number("AX_SOAK_SECONDS").unwrap_or(60);
    let seed = number("AX_SOAK_SEED").unwrap_or_else(|| now().unsigned_abs());
    eprintln!("AX_SOAK_SECONDS={seconds} AX_SOAK_SEED={seed}");
    let mut dice = Dice(seed);
    let world = World::start(Database::Postgres).await?;
    let (_node, api) = world.leader("n1").await?;
    let url = world.nats.url();
    let mut workers = Workers { url, alive: Vec::new(), executed: Vec::new(), started: 0 };
    for place in 0..3 {
        let worker = workers.start(place)?;
        workers.alive.push(worker);
    }
    let id = |n: usize| format!("soak.{n}");
    let definitions: Vec<Value> = (0..TASKS)
        .map(|n| {
            let backoff = json!({"initial_ms": 200, "multiplier": 1, "max_ms": 200, "jitter_ms": 100});
            let (retries, ms) = ([8, 9][n % 2], [5, 400, 1500][n % 3]);
            let more = json!({
                "handler": "work", "cron_expr": "EVERY 1s", "overlap_policy": "allow", "timeout_ms": 5000,
                "max_retry": retries, "retry_backoff": backoff, "payload": {"ms": ms},
            });
            task(&id(n), more)
        })
        .collect();
    api.apply(&json!({ "tasks": definitions })).await?;

    let (start, mut kills) = (Instant::now(), 0);
    while start.elapsed() < Duration::from_secs(seconds) {
        lasts(Duration::from_millis(1000 + dice.roll(2000))).await;
        workers.replace(dice.roll(3) as usize, dice.roll(5) < 2).await?;
        kills += 1;
    }
    for n in 0..TASKS {
        api.post(&format!("/tasks/{}/pause", id(n)), &json!({})).await?.ok()?;
    }
    let to = now();
    let all = eventually(Deadline::seconds(180), "every run has succeeded", || async {
        let all = api.runs("group=test").await?;
        let open: Vec<&Value> = all.iter().filter(|r| r["state"] != "succeeded" && r["state"] != "skipped").collect();
        if open.is_empty() {
            return Ok(Some(all));
        }
        bail!("{} of {}, such as {}", open.len(), all.len(), open[0])
    })
    .await?;
    for place in 0..3 {
        workers.note(place);
    }

    // One run per instant, without a hole; what fell due while they were being paused is skipped and says so.
    let ledger = Ledger::of(&all)?;
    ensure!(ledger.tasks() == TASKS, "{} tasks", ledger.tasks());
    for n in 0..TASKS {
        let anchor = millis(&api.task(&id(n)).await?.ok()?["anchor_at"])?;
        let own: Vec<Value> = all.iter().filter(|run| run["task_id"] == id(n)).cloned().collect();
        Ledger::of(&own)?.check_every(INTERVAL_MS, anchor, to - 3 * INTERVAL_MS)?;
    }
    let succeeded = all.iter().filter(|run| run["state"] == "succeeded").count();
    let expected = TASKS * usize::try_from(seconds)? * 1000 / usize::try_from(INTERVAL_MS)?;
    ensure!(succeeded >= expected, "{succeeded} runs, not {expected}");

    // Nothing was executed after its success was confirmed: by its event, or, of a raw worker, by its ack.
    let mut confirmed = successes(&world).await?;
    let told = confirmed.len();
    for run in all.iter().filter(|run| run["state"] == "succeeded") {
        let run_id = run["run_id"].as_str().context("no run_id")?.to_owned();
        if let std::collections::hash_map::Entry::Vacant(place) = confirmed.entry(run_id) {
            place.insert(millis(&run["finished_at"])?);
        }
    }
    let mut executions = HashMap::<&str, usize>::new();
    for line in &workers.executed {
        *executions.entry(&line.run_id).or_default() += 1;
        let at = confirmed.get(&line.run_id).with_context(|| format!("{line:?} is of no run that succeeded"))?;
        ensure!(line.at <= at + 5, "{line:?} began after the run's success was confirmed at {at}");
    }
    let again = executions.values().filter(|count| **count > 1).count();
    eprintln!(
        "{succeeded} runs, {told} of them by SDK workers; {kills} workers ended; {} executions, {again} runs more than once",
        workers.executed.len()
    );
    ensure!(executions.len() == succeeded, "{} runs were executed, {succeeded} succeeded", executions.len());
    ensure!(told > succeeded / 10 && told < succeeded, "all kinds of workers had their share");
    Ok(())
}

/// When the first success of each run was stored, in milliseconds since 1970, as far as workers told it by an event.
async fn successes(world: &World) -> Result<HashMap<String, i64>> {
    let stream = world.jetstream().await?.get_stream("AX_EVENTS").await?;
    let config = async_nats::jetstream::consumer::pull::OrderedConfig {
        filter_subject: "ax.event.succeeded.>".into(),
        ..Default::default()
    };
    let consumer = stream.create_consumer(config).await?;
    let mut left = consumer.cached_info().num_pending;
    let mut messages = consumer.messages().await?;
    let mut found = HashMap::new();
    while left > 0 {
        let message = messages.next().await.context("the events ended")??;
        let info = message.info().map_err(|error| anyhow::anyhow!(error))?;
        let run_id = message.subject.rsplit('.').next().unwrap_or_default().to_owned();
        let at = i64::try_from(info.published.unix_timestamp_nanos() / 1_000_000)?;
        found.entry(run_id).or_insert(at);
        left = info.pending;
    }
    Ok(found)
}
