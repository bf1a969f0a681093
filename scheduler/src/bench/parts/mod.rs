//! The parts that a benchmark needs, each a process of its own as a user would have it.
//!
//! ```text
//!   guard      ends everything and removes the folder, however we end
//!   child      one process: its log, its lines, its end
//!   postgres   a private server      database   which database, made and dropped
//! ```
//!
//! Invariant: nothing of an installation that was there before is touched: on a NATS or a Postgres from outside, a run
//! has names of its own and removes what it made.

mod child;
mod database;
mod guard;
mod postgres;

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail};
use ax_shared::Prefix;
use futures::TryStreamExt as _;

use child::Child;
pub(super) use database::{Choice, Database};
use guard::{Folder, Guard};

use super::usage::Watched;
use crate::dev::nats;

const NODE_START: Duration = Duration::from_secs(60);
const WORKER_START: Duration = Duration::from_secs(30);
const STOP: Duration = Duration::from_secs(30);
/// What a node prints when its API listens.
const LISTENING: &str = "ax: listening on ";
/// What a part of ours prints when it has connected.
pub(super) const READY: &str = "ready";
/// The nats-server tells about itself on a port of its own.
const MONITOR: [&str; 2] = ["-m", "-1"];

/// Which parts are wanted.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    /// A NATS that runs already.
    pub(super) nats: Option<String>,
    pub(super) database: Choice,
}

/// What names streams and subjects: of the scheduler and of the floor.
#[derive(Debug, Clone)]
pub(super) struct Names {
    pub(super) ax: Prefix,
    pub(super) floor: Prefix,
}

/// Everything that runs.
pub(super) struct Parts {
    children: Vec<Child>,
    nats: Option<nats::Server>,
    nats_url: String,
    database: Option<Database>,
    names: Names,
    // Dropped in this order: the folder, then the shell that removes what is left of it.
    folder: Folder,
    guard: Guard,
}

impl Parts {
    /// Makes the folder; nothing runs yet.
    pub(super) fn new() -> anyhow::Result<Self> {
        let guard = Guard::start()?;
        let folder = Folder::make(&guard)?;
        let names = Names { ax: Prefix::default(), floor: prefix("fl")? };
        Ok(Self { children: Vec::new(), nats: None, nats_url: String::new(), database: None, names, folder, guard })
    }

    /// Starts NATS and the database.
    pub(super) async fn start(&mut self, wanted: &Wanted) -> anyhow::Result<()> {
        match &wanted.nats {
            Some(url) => {
                self.nats_url.clone_from(url);
                let id = short_id();
                self.names = Names { ax: prefix(&format!("b{id}"))?, floor: prefix(&format!("f{id}"))? };
            }
            None => {
                let server = nats::Server::start_with(&self.folder().join("nats"), &MONITOR).await;
                let server = server.context("start a private nats-server (--nats takes one that runs)")?;
                if let Some(pid) = server.pid() {
                    self.guard.watch(pid);
                }
                self.nats_url = server.url().to_owned();
                self.nats = Some(server);
            }
        }
        self.database = Some(Database::start(self, &wanted.database).await?);
        Ok(())
    }

    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(super) fn nats_url(&self) -> &str {
        &self.nats_url
    }

    /// Where the nats-server tells about itself.
    pub(super) fn nats_monitor(&self) -> Option<String> {
        self.nats.as_ref()?.monitor_url().map(ToOwned::to_owned)
    }

    pub(super) fn names(&self) -> &Names {
        &self.names
    }

    pub(super) fn database(&self) -> anyhow::Result<&Database> {
        self.database.as_ref().context("the database is not started")
    }

    /// Processes that outlive a phase: nats-server and database, where they are ours.
    pub(super) fn lasting(&self) -> Vec<Watched> {
        let nats = self.nats.as_ref().and_then(nats::Server::pid);
        let nats = nats.map(|pid| Watched { name: "nats-server".into(), pid, family: false });
        let database = self.database.as_ref().and_then(Database::private);
        nats.into_iter().chain(database.map(postgres::Postgres::watched)).collect()
    }

    /// This program with arguments, seeing none of our own settings.
    fn ax(&self, arguments: &[&str]) -> Command {
        // The very program that runs, also when another build has taken the place of its file meanwhile.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("ax").args(arguments).current_dir(self.folder());
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            if name.starts_with("AX_") || name.starts_with("OTEL_") {
                command.env_remove(&*name);
            }
        }
        command.env("AX_NATS_URL", &self.nats_url).env("AX_PREFIX", self.names.ax.as_str());
        command
    }

    /// Starts scheduler node number `number`; answers where its API is.
    pub(super) async fn start_node(&mut self, number: u32, log: &str) -> anyhow::Result<(Watched, String)> {
        let mut command = self.ax(&["server"]);
        command
            .env("AX_DATABASE_URL", self.database()?.url())
            .env("AX_HTTP_ADDR", "127.0.0.1:0")
            .env("AX_NODE_ID", format!("bench-{number}"))
            .env("AX_LOG", log);
        let mut child = Child::spawn(self, &format!("scheduler {number}"), command)?;
        let url = child.line(LISTENING, NODE_START).await?;
        let watched = child.watched();
        self.children.push(child);
        Ok((watched, url))
    }

    /// Starts a hidden part of this program and waits until it has connected.
    pub(super) async fn start_part(&mut self, name: &str, arguments: &[&str]) -> anyhow::Result<Watched> {
        let mut child = Child::spawn(self, name, self.ax(arguments))?;
        child.line(READY, WORKER_START).await?;
        let watched = child.watched();
        self.children.push(child);
        Ok(watched)
    }

    fn place(&self, process: &Watched) -> anyhow::Result<usize> {
        let place = self.children.iter().position(|child| child.pid() == process.pid);
        place.with_context(|| format!("{} does not run", process.name))
    }

    /// Waits for a line that a part prints; answers what follows `prefix`.
    pub(super) async fn line(&mut self, process: &Watched, prefix: &str, within: Duration) -> anyhow::Result<String> {
        let place = self.place(process)?;
        self.children[place].line(prefix, within).await
    }

    /// Ends one part in good order.
    pub(super) async fn end(&mut self, process: &Watched) -> anyhow::Result<()> {
        let place = self.place(process)?;
        let child = self.children.remove(place);
        child.stop(self, STOP).await
    }

    /// Fails when a part has ended.
    pub(super) fn check(&mut self) -> anyhow::Result<()> {
        for child in &mut self.children {
            child.check()?;
        }
        self.database.as_mut().map_or(Ok(()), Database::check)
    }

    /// Ends everything in its order: what works, what it works on, NATS, the database. Tells the first failure, and ends
    /// the rest all the same.
    pub(super) async fn stop(mut self) -> anyhow::Result<()> {
        let mut result = Ok(());
        for child in std::mem::take(&mut self.children).into_iter().rev() {
            let ended = child.stop(&self, STOP).await;
            result = result.and(ended);
        }
        match self.nats.take() {
            Some(server) => {
                let pid = server.pid();
                server.stop().await;
                pid.into_iter().for_each(|pid| self.guard.forget(pid));
            }
            None if !self.nats_url.is_empty() => result = result.and(remove_streams(&self.nats_url, &self.names).await),
            None => {}
        }
        if let Some(database) = self.database.take() {
            result = result.and(database.stop(&self).await);
        }
        result
    }
}

/// Removes what a run has made on a NATS that was there before.
async fn remove_streams(url: &str, names: &Names) -> anyhow::Result<()> {
    let jetstream = async_nats::jetstream::new(crate::bench::connect(url).await?);
    let all: Vec<String> = jetstream.stream_names().try_collect().await.context("list the streams of NATS")?;
    for name in all.iter().filter(|name| [&names.ax, &names.floor].iter().any(|prefix| is_of(name, prefix))) {
        jetstream.delete_stream(name).await.with_context(|| format!("remove the stream {name}"))?;
    }
    Ok(())
}

/// Whether a stream, bucket or object store belongs to an installation.
fn is_of(stream: &str, prefix: &Prefix) -> bool {
    let lower = format!("{}_", prefix.as_str());
    stream.starts_with(&lower.to_ascii_uppercase())
        || ["KV_", "OBJ_"].iter().any(|kind| stream.strip_prefix(kind).is_some_and(|rest| rest.starts_with(&lower)))
}

fn prefix(text: &str) -> anyhow::Result<Prefix> {
    match Prefix::new(text) {
        Ok(prefix) => Ok(prefix),
        Err(error) => bail!(error),
    }
}

/// Eight letters and digits that nobody else has.
fn short_id() -> String {
    uuid::Uuid::new_v4().simple().to_string()[..8].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_streams_of_the_run_are_removed() {
        let ours = prefix("b1").unwrap();
        for name in ["B1_TRIGGERS", "B1_EVENTS", "KV_b1_leader", "OBJ_b1_results"] {
            assert!(is_of(name, &ours), "{name}");
        }
        for name in ["AX_TRIGGERS", "KV_ax_leader", "B12_TRIGGERS", "KV_b12_leader", "B1", "KV_B1_leader"] {
            assert!(!is_of(name, &ours), "{name}");
        }
    }
}
