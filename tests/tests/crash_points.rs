//! A leader that dies between any two of its effects loses no fire and doubles none.
//!
//! For each of the named places the leader kills itself there, in the middle of a load; its successor on the same
//! database and NATS has to account for every instant with exactly one run.

use std::time::Duration;

use anyhow::{Result, ensure};
use ax_tests::ax::Node;
use ax_tests::ledger::{self, Ledger, millis, rfc3339};
use ax_tests::world::{Database, World, task};
use ax_tests::{Deadline, eventually, lasts, worker};
use serde_json::{Value, json};

/// Where the leader dies, and at which pass. The passes of a load of `TASKS` tasks every second differ: planning and
/// flushing come some times a second, a PubAck comes with every fire.
const PLACES: [(&str, u32); 6] = [
    ("plan.computed", 12),
    ("plan.committed", 12),
    ("fire.decided", 8),
    ("publish.acked", 900),
    ("flush.begin", 25),
    ("flush.committed", 25),
];
const TASKS: usize = 200;

async fn dies_at(place: &str, pass: u32, database: Database) -> Result<usize> {
    let world = World::start(database).await?;
    let mut options = world.options("n1");
    options.env.push(("FAILPOINTS".into(), format!("{place}={pass}*off->return")));
    let mut first = Node::start(&options).await?;
    first.api().has_leader(Deadline::seconds(30)).await?;
    let definitions: Vec<Value> = (0..TASKS)
        .map(|n| task(&format!("load.{n:03}"), json!({"cron_expr": "EVERY 1s", "overlap_policy": "allow"})))
        .collect();
    first.api().apply(&json!({ "tasks": definitions })).await?;
    let since = ledger::now();
    let _worker = worker::python(&world.nats.url(), "test")?;
    let status = first.process().wait(Duration::from_secs(60)).await?;
    ensure!(!status.success(), "it did not die at {place}, but ended by itself");

    let second = world.node("n2").await?;
    let api = second.api();
    api.has_leader(Deadline::seconds(30)).await?;
    lasts(Duration::from_secs(3)).await;
    let to = ledger::now();
    let open = format!("state=pending&state=triggered&state=running&to={}", rfc3339(to)?);
    eventually(Deadline::seconds(120), "every run that was due has ended", || async {
        let open = api.runs(&open).await?.len();
        ensure!(open == 0, "{open} are open after dying at {place}");
        let newest = api.get("/runs?limit=1&state=succeeded").await?.ok()?;
        Ok((millis(&newest["runs"][0]["trigger_time"])? >= to).then_some(()))
    })
    .await?;
    let ledger = Ledger::of(&api.runs(&format!("to={}", rfc3339(to)?)).await?)?;
    ensure!(ledger.tasks() == TASKS, "{} of {TASKS} tasks have fired", ledger.tasks());
    ledger.check_every(1000, since, to - 1000)?;
    ledger.check_state("succeeded")?;
    Ok(ledger.runs().count())
}

async fn dies_everywhere(database: Database) -> Result<()> {
    let mut fires = 0;
    for (place, pass) in PLACES {
        fires += dies_at(place, pass, database).await?;
    }
    ensure!(fires >= 5_000, "only {fires} fires: too few to mean anything");
    Ok(())
}

#[tokio::test]
async fn a_node_that_dies_between_planning_and_recording_loses_no_fire_with_postgres() -> Result<()> {
    dies_everywhere(Database::Postgres).await
}

#[tokio::test]
async fn a_node_that_dies_between_planning_and_recording_loses_no_fire_with_sqlite() -> Result<()> {
    dies_everywhere(Database::Sqlite).await
}
