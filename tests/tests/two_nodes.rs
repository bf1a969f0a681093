//! Two nodes on one Postgres: every instant is exactly one run, whatever happens to the leader.
//!
//! The tests of this file load the machine: they take turns, so that one does not spoil another's times.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ax_tests::api::Api;
use ax_tests::ax::Node;
use ax_tests::ledger::{self, Ledger, millis, rfc3339};
use ax_tests::process::Process;
use ax_tests::world::{Database, World, task};
use ax_tests::{Deadline, eventually, lasts, worker};
use serde_json::{Value, json};
use tokio::sync::{Mutex, MutexGuard};

static TURN: Mutex<()> = Mutex::const_new(());

/// Two nodes, some tasks that fire every second, workers.
struct Cluster {
    world: World,
    nodes: Vec<Node>,
    tasks: usize,
    /// When the tasks had been accepted, in milliseconds.
    since: i64,
    _workers: Vec<Process>,
    _turn: MutexGuard<'static, ()>,
}

impl Cluster {
    async fn start(tasks: usize, lease_ttl: &str) -> Result<Self> {
        let turn = TURN.lock().await;
        let world = World::start(Database::Postgres).await?;
        let mut nodes = Vec::new();
        for name in ["n1", "n2"] {
            let mut options = world.options(name);
            options.env.push(("AX_LEASE_TTL".into(), lease_ttl.into()));
            nodes.push(Node::start(&options).await?);
        }
        nodes[0].api().has_leader(Deadline::seconds(30)).await?;
        let definitions: Vec<Value> = (0..tasks)
            .map(|n| task(&format!("load.{n:03}"), json!({"cron_expr": "EVERY 1s", "overlap_policy": "allow"})))
            .collect();
        nodes[1].api().apply(&json!({ "tasks": definitions })).await?;
        let since = ledger::now();
        let workers = (0..2).map(|_| worker::python(&world.nats.url(), "test")).collect::<Result<_>>()?;
        Ok(Self { world, nodes, tasks, since, _workers: workers, _turn: turn })
    }

    /// Returns the place of the leader in `nodes`.
    async fn leader(&self) -> Result<usize> {
        let name = self.nodes[0].api().has_leader(Deadline::seconds(30)).await?;
        Ok(usize::from(name == "n2"))
    }

    /// Waits until every run that was due by `to` has ended, and checks that each instant up to then is one run that
    /// succeeded. Asks `api`.
    async fn check(&self, api: &Api, to: i64) -> Result<Ledger> {
        let open = format!("state=pending&state=triggered&state=running&to={}", rfc3339(to)?);
        eventually(Deadline::seconds(120), "every run that was due has ended", || async {
            // Nothing is open *and* everything was planned: the newest task has its last instant.
            let open = api.runs(&open).await?.len();
            ensure!(open == 0, "{open} are open");
            let newest = api.get("/runs?limit=1&state=succeeded").await?.ok()?;
            Ok((millis(&newest["runs"][0]["trigger_time"])? >= to).then_some(()))
        })
        .await?;
        let ledger = Ledger::of(&api.runs(&format!("to={}", rfc3339(to)?)).await?)?;
        ensure!(ledger.tasks() == self.tasks, "{} of {} tasks have fired", ledger.tasks(), self.tasks);
        // A task's last instant before `to` lies up to a second earlier.
        ledger.check_every(1000, self.since, to - 1000)?;
        ledger.check_state("succeeded")?;
        for run in ledger.runs() {
            ensure!(millis(&run["published_at"])? >= millis(&run["trigger_time"])?, "handed over too early: {run}");
        }
        let stream = self.world.jetstream().await?.get_stream("AX_TRIGGERS").await?;
        ensure!(stream.cached_info().state.messages < 1000, "finished runs leave messages behind");
        Ok(ledger)
    }
}

/// Returns how long after `moment` the first run that fell due later was handed over. Milliseconds.
fn first_after(ledger: &Ledger, moment: i64) -> Result<i64> {
    let mut first = None::<i64>;
    for run in ledger.runs() {
        let published = millis(&run["published_at"])?;
        if millis(&run["trigger_time"])? >= moment && published >= moment {
            first = Some(first.map_or(published, |first| first.min(published)));
        }
    }
    Ok(first.context("nothing fired afterwards")? - moment)
}

#[tokio::test]
async fn two_hundred_tasks_every_second_for_a_minute() -> Result<()> {
    let cluster = Cluster::start(200, "5s").await?;
    lasts(Duration::from_secs(60)).await;
    let to = ledger::now();
    let ledger = cluster.check(&cluster.nodes[0].api(), to).await?;
    ensure!(ledger.in_stretches() == 0);
    Ok(())
}

#[tokio::test]
async fn the_same_with_the_leader_killed_in_between() -> Result<()> {
    let mut cluster = Cluster::start(200, "5s").await?;
    lasts(Duration::from_secs(25)).await;
    let leader = cluster.leader().await?;
    let killed = ledger::now();
    cluster.nodes[leader].kill9()?;
    lasts(Duration::from_secs(35)).await;
    let to = ledger::now();
    let ledger = cluster.check(&cluster.nodes[1 - leader].api(), to).await?;
    ensure!(ledger.in_stretches() == 0, "within their grace fires are late, not missed");
    let gap = first_after(&ledger, killed)?;
    eprintln!("first fire {gap} ms after the kill");
    ensure!(gap < 2_500, "the next leader took {gap} ms");
    Ok(())
}

#[tokio::test]
async fn a_clean_stop_hands_over_at_once() -> Result<()> {
    let mut cluster = Cluster::start(20, "5s").await?;
    lasts(Duration::from_secs(5)).await;
    let leader = cluster.leader().await?;
    let stopped = ledger::now();
    ensure!(cluster.nodes[leader].terminate().await?.success());
    lasts(Duration::from_secs(6)).await;
    let to = ledger::now();
    let ledger = cluster.check(&cluster.nodes[1 - leader].api(), to).await?;
    let gap = first_after(&ledger, stopped)?;
    eprintln!("first fire {gap} ms after SIGTERM");
    ensure!(gap < 2_000, "the next leader took {gap} ms");
    Ok(())
}

/// A leader that was frozen for longer than its lease wakes up and believes that it still leads: nothing that it does counts.
#[tokio::test]
async fn a_leader_that_wakes_up_after_its_lease_changes_nothing() -> Result<()> {
    let mut cluster = Cluster::start(20, "2s").await?;
    lasts(Duration::from_secs(4)).await;
    let leader = cluster.leader().await?;
    let other = 1 - leader;
    let name = ["n1", "n2"][other];
    cluster.nodes[leader].process().freeze()?;
    let api = cluster.nodes[other].api();
    eventually(Deadline::seconds(15), "the other node leads", || async {
        Ok((api.leader().await?.as_deref() == Some(name)).then_some(()))
    })
    .await?;
    lasts(Duration::from_secs(5)).await;
    cluster.nodes[leader].process().thaw()?;
    lasts(Duration::from_secs(5)).await;
    cluster.check(&api, ledger::now()).await?;
    let old = cluster.nodes[leader].api();
    eventually(Deadline::seconds(15), "the old leader follows", || async {
        Ok((old.leader().await?.as_deref() == Some(name)).then_some(()))
    })
    .await
}

/// Any node takes requests, and what it was told takes effect within a second or so.
#[tokio::test]
async fn a_follower_takes_requests() -> Result<()> {
    let cluster = Cluster::start(1, "5s").await?;
    let leader = cluster.leader().await?;
    let follower = cluster.nodes[1 - leader].api();
    let run = follower.trigger("load.000", &json!({"payload": {"by": "hand"}})).await?.ok()?;
    let run_id = run["run_id"].as_str().context("no run_id")?.to_owned();
    follower.run_reaches(&run_id, &["succeeded"], Deadline::seconds(20)).await?;
    follower.post("/tasks/load.000/pause", &json!({})).await?.ok()?;
    let paused = ledger::now();
    lasts(Duration::from_secs(4)).await;
    let runs =
        cluster.nodes[leader].api().runs("task_id=load.000&state=succeeded&state=triggered&state=running").await?;
    for run in runs.iter().filter(|run| run["kind"] == "every") {
        ensure!(millis(&run["trigger_time"])? <= paused + 1_000, "fired while paused: {run}");
    }
    let nodes = follower.nodes().await?;
    ensure!(nodes.len() == 2 && nodes.iter().filter(|node| node["leader"] == true).count() == 1, "{nodes:?}");
    Ok(())
}
