//! Nodes, workers and mischief on a clock that nobody waits for: the real core, loops and API over the adapters in memory.
//!
//! `AX_SIM_SEED=n` runs one seed and prints everything that happens; `AX_SIM_SEEDS=n` runs that many, from
//! `AX_SIM_FROM` on; `AX_SIM_SECONDS` is how long mischief is done in each. See docs/simulation.md.

mod link;
mod node;
mod oracle;
mod ports;
mod rng;
mod scenario;
mod tasks;
mod worker;
mod world;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use scenario::{Report, Scenario};

/// How many seeds every build runs.
const SEEDS: u64 = 200;
/// How long mischief is done in each, in simulated seconds.
const SECONDS: u64 = 100;
/// Failures after which a hunt ends.
const ENOUGH: usize = 5;

/// What all seeds together went through.
#[derive(Default)]
struct Totals {
    events: u64,
    runs: usize,
    repeated: usize,
    deaths: u64,
    leaders: u64,
}

impl Totals {
    fn add(&mut self, report: &Report) {
        self.events += report.events;
        self.runs += report.runs;
        self.repeated += report.repeated;
        self.deaths += report.deaths.0;
        self.leaders += report.deaths.1;
    }
}

impl std::fmt::Display for Totals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { events, runs, repeated, deaths, leaders } = self;
        write!(f, "{runs} runs ({repeated} executed again), {deaths} nodes killed ({leaders} led), {events} events")
    }
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name} must be a number")))
}

fn tell(scenario: &Scenario, report: &Report) {
    eprintln!("\nseed {} fails: {scenario:#?}", scenario.seed);
    for line in &report.last {
        eprintln!("  {line}");
    }
    for broken in report.broken.iter().take(20) {
        eprintln!("seed {}: {broken}", scenario.seed);
    }
    eprintln!(
        "again: AX_SIM_SEED={} AX_SIM_SECONDS={} cargo test -p ax-scheduler --test simulation seeds -- --nocapture\n",
        scenario.seed,
        scenario.length.as_secs()
    );
}

#[test]
fn every_promise_holds_on_all_seeds() {
    let seconds = setting("AX_SIM_SECONDS").unwrap_or(SECONDS);
    if let Some(seed) = setting("AX_SIM_SEED") {
        let scenario = Scenario::of(seed, seconds);
        let report = scenario::run(&scenario, true);
        tell(&scenario, &report);
        assert!(report.broken.is_empty(), "seed {seed} fails");
        return;
    }
    let from = setting("AX_SIM_FROM").unwrap_or(0);
    let seeds = setting("AX_SIM_SEEDS").unwrap_or(SEEDS);
    let threads = setting("AX_SIM_THREADS").unwrap_or(2);
    let next = AtomicU64::new(from);
    let failed: Mutex<Vec<u64>> = Mutex::default();
    let totals: Mutex<Totals> = Mutex::default();
    let began = std::time::Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::SeqCst);
                    if seed >= from + seeds || failed.lock().expect("failed").len() >= ENOUGH {
                        return;
                    }
                    let scenario = Scenario::of(seed, seconds);
                    let report = scenario::run(&scenario, false);
                    let mut totals = totals.lock().expect("totals");
                    totals.add(&report);
                    if !report.broken.is_empty() {
                        tell(&scenario, &report);
                        failed.lock().expect("failed").push(seed);
                    }
                }
            });
        }
    });
    eprintln!("{seeds} seeds in {:?}: {}", began.elapsed(), totals.into_inner().expect("totals"));
    let failed = failed.into_inner().expect("failed");
    assert!(failed.is_empty(), "these seeds fail: {failed:?}");
}

#[test]
fn a_seed_is_the_same_simulation_each_time() {
    let mut events = 0;
    for seed in 0..8 {
        let scenario = Scenario::of(seed, 60);
        let (a, b) = (scenario::run(&scenario, false), scenario::run(&scenario, false));
        events += a.events;
        if (a.hash, a.events) != (b.hash, b.events) {
            let differ = a.last.iter().zip(&b.last).find(|(a, b)| a != b);
            panic!("seed {seed} went two ways: {} and {} events; {differ:?}", a.events, b.events);
        }
    }
    assert!(events > 3000, "only {events} events");
}
