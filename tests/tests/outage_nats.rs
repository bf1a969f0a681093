//! What NATS loses is found and published again; every instant has exactly one run.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use ax_tests::ax::Node;
use ax_tests::ledger::{self, Ledger, rfc3339};
use ax_tests::world::{Database, World, task};
use ax_tests::{Deadline, eventually, lasts, worker};
use serde_json::json;

/// The folder of a stream below that of the server's store.
fn stream_folder(store: &Path, stream: &str) -> Result<std::path::PathBuf> {
    let mut folders = vec![store.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() && path.ends_with(Path::new("streams").join(stream)) {
                return Ok(path);
            }
            if path.is_dir() {
                folders.push(path);
            }
        }
    }
    anyhow::bail!("no folder of {stream} below {}", store.display())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &to.join(entry.file_name()))?;
        } else {
            std::fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

/// The server is killed, and what it has of AX_TRIGGERS on its disk is older than what it acknowledged: the stream keeps its
/// creation time and gives the lost sequences to other messages.
#[tokio::test]
async fn triggers_that_were_acknowledged_and_not_on_disk_are_published_again() -> Result<()> {
    let mut world = World::start(Database::Sqlite).await?;
    let mut options = world.options("n1");
    options.env.push(("AX_SWEEP_INTERVAL".into(), "2s".into()));
    let node = Node::start(&options).await?;
    let api = node.api();
    api.has_leader(Deadline::seconds(30)).await?;
    // Nobody pulls, so that every message is in the stream.
    api.apply(&json!({ "tasks": [task("tail", json!({"cron_expr": "EVERY 1s", "overlap_policy": "allow"}))] })).await?;
    let since = ledger::now();
    api.runs_reach("tail", "triggered", 2, Deadline::seconds(30)).await?;

    world.nats.terminate().await?;
    let folder = stream_folder(&world.nats.store(), "AX_TRIGGERS")?;
    // Beside the store: the server must not take it for a stream.
    let kept = world.nats.store().with_file_name("kept");
    copy(&folder, &kept)?;
    world.nats.start_again().await?;
    let before = api.runs("state=triggered").await?.len();
    api.runs_reach("tail", "triggered", before + 3, Deadline::seconds(60)).await?;
    world.nats.kill9()?;
    std::fs::remove_dir_all(&folder)?;
    copy(&kept, &folder)?;
    world.nats.start_again().await?;

    eventually(Deadline::seconds(60), "the loss is noticed", || async {
        let text = api.metrics().await?;
        let lost = text.lines().filter_map(|line| line.strip_prefix("ax_messages_lost_total ")).next();
        Ok(lost.is_some_and(|count| count != "0").then_some(()))
    })
    .await?;
    let _worker = worker::python(&world.nats.url(), "test")?;
    lasts(Duration::from_secs(3)).await;
    let to = ledger::now();
    let open = format!("state=pending&state=triggered&state=running&to={}", rfc3339(to)?);
    eventually(Deadline::seconds(60), "every run that was due has ended", || async {
        let open = api.runs(&open).await?.len();
        ensure!(open == 0, "{open} are open");
        Ok(Some(()))
    })
    .await?;
    let ledger = Ledger::of(&api.runs(&format!("to={}", rfc3339(to)?)).await?)?;
    ledger.check_every(1000, since, to - 1000)?;
    ledger.check_state("succeeded")
}
