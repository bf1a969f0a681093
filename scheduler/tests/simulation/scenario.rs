//! One simulation: what a seed makes of tasks, workers and faults, and how it ends.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ax_scheduler::api::service::{ApplyOptions, Caller, Expected, Role};
use ax_scheduler::bus::memory::Fate;
use ax_scheduler::core::run::Run;
use ax_scheduler::ports::Clock as _;
use ax_shared::TaskId;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, sleep_until};

use crate::link::Weather;
use crate::node::{LEASE_TTL, Node};
use crate::oracle;
use crate::rng::Rng;
use crate::tasks::{TASKS, definition, task_id};
use crate::worker::{Fleet, Manners, Worker};
use crate::world::{World, name, short};

/// How long it may take, once everything is well, until everything has ended.
const TO_END: Duration = Duration::from_secs(900);

/// What may go wrong in a simulation: each seed has some of it, so that no fault hides behind another.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Swarm {
    pub(crate) kill: bool,
    pub(crate) doom: bool,
    pub(crate) stop: bool,
    pub(crate) freeze: bool,
    pub(crate) blackout: bool,
    pub(crate) clock: bool,
    pub(crate) clock_far: bool,
    pub(crate) nats_cut: bool,
    pub(crate) nats_flaky: bool,
    pub(crate) sql_cut: bool,
    pub(crate) sql_flaky: bool,
    pub(crate) metrics: bool,
    pub(crate) doubles: bool,
    pub(crate) no_workers: bool,
    pub(crate) new_triggers: bool,
    pub(crate) new_events: bool,
    pub(crate) lost_events: bool,
    pub(crate) definitions: bool,
    pub(crate) deletions: bool,
    pub(crate) one_offs: bool,
    pub(crate) cut_triggers: bool,
}

/// What a seed says.
#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub(crate) seed: u64,
    pub(crate) nodes: usize,
    pub(crate) tasks: u64,
    pub(crate) swarm: Swarm,
    /// Mean time between two mischiefs, in ms.
    pub(crate) pace_ms: u64,
    /// For how long mischief is done.
    pub(crate) length: Duration,
    pub(crate) workers: Vec<(bool, Manners)>,
}

impl Scenario {
    /// What `seed` says, for a simulation whose mischief lasts `seconds`.
    pub(crate) fn of(seed: u64, seconds: u64) -> Self {
        let mut rng = Rng::new(seed);
        let mut some = |p: u64| rng.permille(p);
        let swarm = Swarm {
            kill: some(600),
            doom: some(500),
            stop: some(400),
            freeze: some(400),
            blackout: some(250),
            clock: some(250),
            clock_far: some(40),
            nats_cut: some(400),
            nats_flaky: some(400),
            sql_cut: some(400),
            sql_flaky: some(450),
            metrics: some(500),
            doubles: some(300),
            no_workers: some(200),
            new_triggers: some(120),
            new_events: some(120),
            lost_events: some(100),
            definitions: some(600),
            deletions: some(350),
            one_offs: some(600),
            cut_triggers: some(150),
        };
        let nodes = rng.between(2, 3) as usize;
        let workers = (0..rng.between(1, 3))
            .map(|_| {
                let mut some = |most: u64| if rng.permille(500) { rng.between(0, most) } else { 0 };
                let manners = Manners {
                    fail: some(300),
                    give_up: some(60),
                    hang: some(60),
                    die: some(100),
                    die_late: some(80),
                    release: some(80),
                    late: some(60),
                    ack_failure: some(200),
                };
                (rng.permille(600), manners)
            })
            .collect();
        Self {
            seed,
            nodes,
            tasks: rng.between(2, TASKS),
            swarm,
            pace_ms: *rng.pick(&[700, 2000, 5000, 12_000]),
            length: Duration::from_secs(seconds),
            workers,
        }
    }
}

/// How a simulation went.
#[derive(Debug)]
pub(crate) struct Report {
    /// Hash of everything that happened.
    pub(crate) hash: u64,
    /// How much happened.
    pub(crate) events: u64,
    pub(crate) runs: usize,
    /// Runs that were executed more than once.
    pub(crate) repeated: usize,
    /// Nodes that were killed, and how many of them led.
    pub(crate) deaths: (u64, u64),
    pub(crate) broken: Vec<String>,
    pub(crate) last: Vec<String>,
}

/// How events fare on their way. Rates are of a thousand.
#[derive(Debug, Default, Clone, Copy)]
struct Rates {
    metrics_lost: u64,
    metrics_late: u64,
    doubled: u64,
}

/// What comes to its end later.
#[derive(Debug, Clone, Copy)]
enum Later {
    Start(usize),
    /// A node that was to die at one of its calls: if it did not come to that, it dies now.
    Doomed(usize),
    Sql(usize),
    Nats(usize),
    Outage,
    Metrics,
    Doubles,
}

struct Simulation {
    scenario: Scenario,
    world: Arc<World>,
    fleet: Arc<Fleet>,
    rng: Rng,
    nodes: Vec<Option<Node>>,
    lives: u64,
    offset_ms: i64,
    definitions: BTreeMap<u64, Value>,
    rates: Arc<Mutex<Rates>>,
    later: BTreeMap<(Instant, u64), Later>,
    laters: u64,
}

/// Runs a simulation to its end on a clock that nobody waits for.
pub(crate) fn run(scenario: &Scenario, print: bool) -> Report {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without I/O");
    runtime.block_on(async {
        let mut simulation = Simulation::new(scenario.clone(), print);
        simulation.run().await
    })
}

impl Simulation {
    fn new(scenario: Scenario, print: bool) -> Self {
        let mut rng = Rng::new(scenario.seed.wrapping_mul(31).wrapping_add(7));
        let world = World::new(LEASE_TTL, print);
        let rates: Arc<Mutex<Rates>> = Arc::default();
        let (told, mut chance) = (rates.clone(), rng.fork());
        world.server.judge_events(move |subject| {
            let rates = *told.lock().expect("rates");
            let by_server = subject.starts_with("$JS.");
            if by_server && chance.permille(rates.metrics_lost) {
                Fate::Lost
            } else if by_server && chance.permille(rates.metrics_late) {
                Fate::Late(Duration::from_millis(chance.between(1, 2000)))
            } else if chance.permille(rates.doubled) {
                Fate::Doubled
            } else {
                Fate::Stored
            }
        });
        Self {
            nodes: (0..scenario.nodes).map(|_| None).collect(),
            scenario,
            world,
            fleet: Arc::default(),
            rng,
            lives: 0,
            offset_ms: 0,
            definitions: BTreeMap::new(),
            rates,
            later: BTreeMap::new(),
            laters: 0,
        }
    }

    async fn run(&mut self) -> Report {
        for (n, (sdk, manners)) in self.scenario.workers.clone().into_iter().enumerate() {
            let name = format!("{}{n}", if sdk { "sdk" } else { "raw" });
            let worker = Worker { world: self.world.clone(), fleet: self.fleet.clone(), name, manners, sdk };
            tokio::spawn(worker.run(self.rng.fork()));
        }
        for i in 0..self.nodes.len() {
            self.start(i);
        }
        for n in 0..self.scenario.tasks {
            self.define(n);
        }
        let end = Instant::now() + self.scenario.length;
        let mut next = Instant::now() + Duration::from_secs(3);
        while Instant::now() < end && self.world.violations().is_empty() {
            let due = self.later.first_key_value().map(|((at, _), _)| *at);
            sleep_until(due.map_or(next, |at| at.min(next)).min(end)).await;
            while let Some(entry) = self.later.first_entry().filter(|entry| entry.key().0 <= Instant::now()) {
                let later = entry.remove();
                self.come_to_an_end(later);
            }
            if next <= Instant::now() {
                self.mischief();
                next = Instant::now() + Duration::from_millis(self.rng.about(self.scenario.pace_ms).max(1));
            }
        }
        self.calm_down().await
    }

    fn start(&mut self, i: usize) {
        if self.nodes[i].is_some() {
            return;
        }
        self.lives += 1;
        let offset = self.offset_ms + self.rng.between(0, 40) as i64 - 20;
        let rng = self.rng.fork();
        self.nodes[i] = Some(Node::start(&self.world, &format!("n{i}"), self.lives, rng, offset));
    }

    fn after(&mut self, ms: u64, what: Later) {
        self.laters += 1;
        self.later.insert((Instant::now() + Duration::from_millis(ms), self.laters), what);
    }

    fn come_to_an_end(&mut self, what: Later) {
        self.world.say(format_args!("end of {what:?}"));
        match what {
            Later::Start(i) => self.start(i),
            Later::Doomed(i) => {
                if let Some(node) = self.nodes[i].take() {
                    node.kill();
                    let back = self.rng.about(3000);
                    self.after(back, Later::Start(i));
                }
            }
            Later::Sql(i) => {
                if let Some(node) = &self.nodes[i] {
                    node.link.set_sql(Weather::default());
                }
            }
            Later::Nats(i) => {
                if let Some(node) = &self.nodes[i] {
                    node.link.set_nats(Weather::default());
                }
            }
            Later::Outage => {
                self.fleet.away.store(false, Ordering::Relaxed);
                for node in self.nodes.iter().flatten() {
                    node.link.set_nats(Weather::default());
                    node.link.set_sql(Weather::default());
                }
            }
            Later::Metrics => {
                let mut rates = self.rates.lock().expect("rates");
                (rates.metrics_lost, rates.metrics_late) = (0, 0);
            }
            Later::Doubles => self.rates.lock().expect("rates").doubled = 0,
        }
    }

    /// A node that runs.
    fn some_node(&mut self) -> Option<usize> {
        let up: Vec<usize> = (0..self.nodes.len()).filter(|i| self.nodes[*i].is_some()).collect();
        if up.is_empty() { None } else { Some(*self.rng.pick(&up)) }
    }

    fn mischief(&mut self) {
        let s = self.scenario.swarm;
        let menu: Vec<u32> = [
            s.kill,
            s.stop,
            s.freeze,
            s.blackout,
            s.clock,
            s.clock_far,
            s.nats_cut,
            s.nats_flaky,
            s.sql_cut,
            s.sql_flaky,
            s.metrics,
            s.doubles,
            s.no_workers,
            s.new_triggers,
            s.new_events,
            s.lost_events,
            s.definitions,
            s.deletions,
            s.one_offs,
            s.one_offs,
            s.nats_cut,
            s.sql_cut,
            s.doom,
            s.cut_triggers,
        ]
        .iter()
        .zip(0u32..)
        .filter_map(|(on, what)| on.then_some(what))
        .collect();
        if menu.is_empty() {
            return;
        }
        let what = *self.rng.pick(&menu);
        // What takes down much, or is rare in life, is rare here.
        let rare = matches!(what, 3 | 5 | 13 | 14 | 15 | 20 | 21 | 23);
        if rare && !self.rng.permille(300) {
            return;
        }
        match what {
            16 => return self.change(),
            17 => return self.delete(),
            18 | 19 => return self.order(),
            _ => {}
        }
        let Some(i) = self.some_node() else { return };
        let link = self.nodes[i].as_ref().map(|node| node.link.clone()).expect("it runs");
        let name = format!("n{i}");
        match what {
            0 | 1 => {
                let node = self.nodes[i].take().expect("it runs");
                if what == 0 {
                    node.kill();
                } else {
                    node.stop();
                }
                let back = self.rng.about(4000);
                self.after(back, Later::Start(i));
            }
            2 => {
                let ms = self.rng.about(4000);
                self.world.say(format_args!("{name} freezes for {ms} ms"));
                link.freeze(Duration::from_millis(ms));
            }
            3 => {
                for i in 0..self.nodes.len() {
                    if let Some(node) = self.nodes[i].take() {
                        node.kill();
                    }
                    let back = self.rng.about(25_000);
                    self.after(back, Later::Start(i));
                }
            }
            4 => {
                let ms = self.rng.between(0, 4000) as i64 - 2000;
                self.world.say(format_args!("the clock of {name} is {ms} ms off now"));
                link.set_clock(self.offset_ms + ms);
            }
            5 if self.offset_ms == 0 => {
                self.offset_ms = if self.rng.permille(500) { 3_600_000 } else { -3_600_000 };
                self.world.say(format_args!("all clocks step by {} ms", self.offset_ms));
                if self.offset_ms < 0 {
                    self.world.book().turned_back = Some(self.world.time.now().plus_millis(self.offset_ms));
                }
                for node in self.nodes.iter().flatten() {
                    node.link.set_clock(self.offset_ms);
                }
            }
            6 | 8 => {
                let ms = self.rng.about(5000);
                let weather = Weather { cut: true, ..Weather::default() };
                self.world.say(format_args!("{name} loses {} for {ms} ms", if what == 6 { "NATS" } else { "SQL" }));
                if what == 6 {
                    link.set_nats(weather);
                } else {
                    link.set_sql(weather);
                }
                self.after(ms, if what == 6 { Later::Nats(i) } else { Later::Sql(i) });
            }
            7 | 9 => {
                let ms = self.rng.about(15_000);
                let weather = Weather {
                    cut: false,
                    lost: self.rng.between(0, 150),
                    unanswered: self.rng.between(0, 150),
                    slow_ms: *self.rng.pick(&[2, 50, 500, 1500]),
                };
                self.world
                    .say(format_args!("{name} {} for {ms} ms: {weather:?}", if what == 7 { "NATS" } else { "SQL" }));
                if what == 7 {
                    link.set_nats(weather);
                } else {
                    link.set_sql(weather);
                }
                self.after(ms, if what == 7 { Later::Nats(i) } else { Later::Sql(i) });
            }
            10 => {
                {
                    let mut rates = self.rates.lock().expect("rates");
                    rates.metrics_lost = *self.rng.pick(&[0, 100, 500, 1000]);
                    rates.metrics_late = *self.rng.pick(&[0, 100, 500]);
                }
                self.world.say(format_args!("the server's events: {:?}", self.rates));
                let ms = self.rng.about(10_000);
                self.after(ms, Later::Metrics);
            }
            11 => {
                self.rates.lock().expect("rates").doubled = *self.rng.pick(&[100, 1000]);
                let ms = self.rng.about(10_000);
                self.after(ms, Later::Doubles);
            }
            12 => {
                let ms = self.rng.about(8000);
                self.world.say(format_args!("nobody pulls for {ms} ms"));
                let until = self.world.time.0.elapsed().as_millis() as u64 + ms;
                self.fleet.idle_until.store(until, Ordering::Relaxed);
            }
            13 => {
                self.world.say(format_args!("AX_TRIGGERS is deleted and made anew"));
                self.world.server.recreate_triggers();
            }
            14 => {
                self.world.say(format_args!("AX_EVENTS is deleted and made anew"));
                self.forget_successes();
                self.world.server.recreate_events();
            }
            15 => {
                self.world.say(format_args!("AX_EVENTS drops what it has"));
                self.forget_successes();
                self.world.server.drop_events(u64::MAX - 1);
            }
            20 | 21 => {
                let ms = self.rng.about(6000);
                let (nats, sql) = (what == 20, what == 21);
                self.world.say(format_args!("nobody has {} for {ms} ms", if nats { "NATS" } else { "SQL" }));
                let weather = Weather { cut: true, ..Weather::default() };
                for node in self.nodes.iter().flatten() {
                    if nats {
                        node.link.set_nats(weather);
                    }
                    if sql {
                        node.link.set_sql(weather);
                    }
                }
                self.fleet.away.store(nats, Ordering::Relaxed);
                self.after(ms, Later::Outage);
            }
            22 => {
                let (calls, after) = (self.rng.about(40).max(1), self.rng.permille(500));
                let when = if after { "after" } else { "before" };
                self.world.say(format_args!("{name} will die {when} its call {calls} from now"));
                link.doom(calls, after);
                let ms = self.rng.between(500, 3000);
                self.after(ms, Later::Doomed(i));
            }
            23 => {
                let (ms, count) = (self.rng.about(2000), self.rng.between(1, 20));
                self.world.say(format_args!("NATS is away for {ms} ms, and AX_TRIGGERS loses its last {count}"));
                for node in self.nodes.iter().flatten() {
                    node.link.set_nats(Weather { cut: true, ..Weather::default() });
                }
                self.fleet.away.store(true, Ordering::Relaxed);
                self.world.server.truncate_triggers(count);
                self.after(ms, Later::Outage);
            }
            _ => {}
        }
    }

    /// What is lost with AX_EVENTS before it was settled binds nobody.
    fn forget_successes(&self) {
        let mut book = self.world.book();
        book.must_succeed.clear();
        book.told_of.clear();
    }

    fn define(&mut self, n: u64) {
        let old = self.definitions.get(&n).cloned();
        let new = definition(&mut self.rng, n, old.as_ref());
        self.definitions.insert(n, new.clone());
        self.ask(move |service| {
            let new = new.clone();
            async move {
                let id = TaskId::new(&task_id(n)).expect("a task id");
                service.put_task(&caller(), &id, new, Expected::Any).await.map(drop)
            }
        });
    }

    fn change(&mut self) {
        let n = self.rng.between(0, self.scenario.tasks - 1);
        let id = TaskId::new(&task_id(n)).expect("a task id");
        match self.rng.between(0, 4) {
            0 | 1 => self.define(n),
            2 => self.ask(move |service| {
                let id = id.clone();
                async move { service.pause_task(&caller(), &id).await.map(drop) }
            }),
            3 => self.ask(move |service| {
                let id = id.clone();
                async move { service.resume_task(&caller(), &id).await.map(drop) }
            }),
            _ => {
                // Applied again as it is, together with another one.
                let all: Vec<Value> = self.definitions.values().cloned().collect();
                self.ask(move |service| {
                    let document = json!({"tasks": all.clone()});
                    async move { service.apply(&caller(), &document, ApplyOptions::default()).await.map(drop) }
                });
            }
        }
    }

    fn delete(&mut self) {
        let n = self.rng.between(0, self.scenario.tasks - 1);
        if self.rng.permille(500) {
            return self.define(n);
        }
        let id = TaskId::new(&task_id(n)).expect("a task id");
        self.ask(move |service| {
            let id = id.clone();
            async move { service.delete_task(&caller(), &id, Expected::Any).await }
        });
    }

    fn order(&mut self) {
        let n = self.rng.between(0, self.scenario.tasks - 1);
        let key = self.rng.permille(300).then(|| format!("k{}", self.rng.between(0, 2)));
        let delay = if self.rng.permille(300) { self.rng.between(0, 10_000) } else { 0 };
        let id = TaskId::new(&task_id(n)).expect("a task id");
        if self.rng.permille(500) {
            self.ask(move |service| {
                let (id, body) =
                    (id.clone(), json!({"idempotency_key": key, "delay_ms": delay, "payload": {"by": "hand"}}));
                async move { service.trigger(&caller(), &id, body).await.map(drop) }
            });
        } else {
            let count = self.rng.between(1, 5);
            self.ask(move |service| {
                let run = json!({"task_id": id, "idempotency_key": key, "delay_ms": delay});
                let runs = vec![run; count as usize];
                async move { service.enqueue(&caller(), json!({"runs": runs})).await.map(drop) }
            });
        }
    }

    /// Asks some node, without waiting for the answer.
    fn ask<F, A>(&mut self, call: F)
    where
        F: FnOnce(Arc<ax_scheduler::api::service::Service>) -> A,
        A: Future<Output = Result<(), ax_scheduler::api::ApiError>> + Send + 'static,
    {
        let Some(i) = self.some_node() else { return };
        let node = self.nodes[i].as_ref().expect("it runs");
        let world = self.world.clone();
        let asked = call(node.service.clone());
        tokio::spawn(async move {
            if let Err(e) = asked.await {
                world.say(format_args!("n{i} refuses: {e}"));
            }
        });
    }

    /// Lets everything become well, then waits until everything has ended, and judges.
    async fn calm_down(&mut self) -> Report {
        self.world.say(format_args!("calm"));
        self.later.clear();
        self.fleet.away.store(false, Ordering::Relaxed);
        self.fleet.calm.store(true, Ordering::Relaxed);
        self.fleet.idle_until.store(0, Ordering::Relaxed);
        *self.rates.lock().expect("rates") = Rates::default();
        self.world.server.settle_late();
        for i in 0..self.nodes.len() {
            if let Some(node) = self.nodes[i].take_if(|node| node.link.is_dead()) {
                node.kill();
            }
            if let Some(node) = &self.nodes[i] {
                node.link.spare();
            }
            self.start(i);
        }
        for node in self.nodes.iter().flatten() {
            node.link.set_nats(Weather::default());
            node.link.set_sql(Weather::default());
        }
        sleep(Duration::from_secs(20)).await;
        self.pause_all().await;
        let begun = Instant::now();
        let end = self.world.time.now().plus_millis(self.offset_ms);
        while self.world.violations().is_empty() {
            sleep(Duration::from_secs(5)).await;
            let mut open = self.world.store.unfinished_runs();
            // After a step back of the clocks some of what was planned falls due in an hour.
            open.retain(|run| run.publish_at <= end.plus_millis(5000) || run.decision.is_some());
            if open.is_empty() && self.world.server.trigger_messages().is_empty() {
                break;
            }
            if begun.elapsed() > TO_END {
                for run in &open {
                    self.world.violate(format!("{} has not ended: {run:?}", name(run)));
                }
                for message in self.world.server.trigger_messages() {
                    self.world.violate(format!("a message was left: {} {}", message.seq, message.subject));
                }
            }
        }
        let runs: Vec<Run> = self.world.store.all_runs();
        let mut broken = self.world.violations();
        if broken.is_empty() {
            broken = oracle::judge(&self.world, &runs, end.plus_millis(-100));
        }
        let repeated = self.world.book().executed.values().filter(|n| **n > 1).count();
        let deaths = self.world.book().deaths;
        let (hash, events) = self.world.trace();
        Report { hash, events, runs: runs.len(), repeated, deaths, broken, last: self.world.last_events() }
    }

    /// Pauses every task, so that nothing new falls due.
    async fn pause_all(&mut self) {
        let ids: Vec<TaskId> = (0..self.scenario.tasks).filter_map(|n| TaskId::new(&task_id(n)).ok()).collect();
        for id in ids {
            for _ in 0..100 {
                let Some(i) = self.some_node() else { break };
                let service = self.nodes[i].as_ref().expect("it runs").service.clone();
                let asked = tokio::time::timeout(Duration::from_secs(5), service.pause_task(&caller(), &id)).await;
                match asked {
                    Ok(Ok(_) | Err(ax_scheduler::api::ApiError::NotFound(_))) => break,
                    Ok(Err(e)) => self.world.say(format_args!("n{i} refuses: {e}")),
                    Err(_) => {}
                }
                sleep(Duration::from_secs(1)).await;
            }
        }
        self.world.say(format_args!("everything is paused at {}", short(self.world.time.now())));
    }
}

fn caller() -> Caller {
    Caller { actor: "simulation".into(), role: Role::Admin }
}
