//! A private Postgres with default durability, on a free port of the loopback, without a Unix socket.
//!
//! Postgres refuses to run as root: for root it runs as `postgres`, or as `nobody` where there is no such user.

use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::process::Signal;

use super::{Child, Parts};
use crate::bench::usage::Watched;

const START: Duration = Duration::from_secs(60);
const STOP: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Somebody else may take a port that was free a moment ago.
const ATTEMPTS: u32 = 5;

/// A running server.
#[derive(Debug)]
pub(super) struct Postgres {
    child: Child,
    port: u16,
}

impl Postgres {
    pub(super) async fn start(parts: &Parts, programs: &Path) -> anyhow::Result<Self> {
        let folder = parts.folder().join("postgres");
        std::fs::create_dir(&folder).context("make the folder of Postgres")?;
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o700))?;
        let user = unprivileged()?;
        if let Some((uid, gid)) = user {
            chown(&folder, Some(uid), Some(gid)).context("give the folder to the Postgres user")?;
        }
        let data = folder.join("data");
        let program = |name: &str| {
            let mut command = Command::new(programs.join(name));
            command.current_dir(&folder).env("LC_ALL", "C");
            if let Some((uid, gid)) = user {
                command.uid(uid).gid(gid);
            }
            command.arg("-D").arg(&data);
            command
        };
        let mut initdb = program("initdb");
        initdb.args(["--username=ax", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]);
        Child::spawn(parts, "initdb", initdb)?.ended(parts, START).await?;

        let mut last = None;
        for _ in 0..ATTEMPTS {
            let port = free_port()?;
            let mut command = program("postgres");
            command.args(["-h", "127.0.0.1", "-p", &port.to_string()]);
            for setting in [
                "unix_socket_directories=",
                // Leaves nothing behind in /dev/shm, however it ends.
                "dynamic_shared_memory_type=mmap",
                "log_min_messages=warning",
                "timezone=UTC",
            ] {
                command.args(["-c", setting]);
            }
            let mut child = Child::spawn(parts, "postgres", command)?;
            match ready(&mut child, &data).await {
                Ok(()) => return Ok(Self { child, port }),
                Err(error) => last = Some(error),
            }
        }
        Err(last.context("no attempt")?.context("start Postgres"))
    }

    /// The database that every server has.
    pub(super) fn url(&self) -> String {
        format!("postgres://ax@127.0.0.1:{}/postgres", self.port)
    }

    pub(super) fn watched(&self) -> Watched {
        Watched { family: true, ..self.child.watched() }
    }

    pub(super) fn check(&mut self) -> anyhow::Result<()> {
        self.child.check()
    }

    /// Ends it, and the sessions that are still open, in order.
    pub(super) async fn stop(self, parts: &Parts) -> anyhow::Result<()> {
        self.child.signal(Signal::INT);
        self.child.ended(parts, STOP).await
    }
}

/// Waits for the server's own word: the last line of its lock file becomes `ready` when it accepts sessions.
async fn ready(child: &mut Child, data: &Path) -> anyhow::Result<()> {
    let deadline = tokio::time::Instant::now() + START;
    let lock = data.join("postmaster.pid");
    loop {
        child.check()?;
        if std::fs::read_to_string(&lock).is_ok_and(|text| text.trim_end().ends_with("ready")) {
            return Ok(());
        }
        if tokio::time::Instant::now() > deadline {
            bail!("Postgres was not ready within {} s", START.as_secs());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn free_port() -> anyhow::Result<u16> {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).context("find a free port")?;
    Ok(listener.local_addr()?.port())
}

/// The folder of `initdb` and `postgres`: in `PATH`, else the newest of Debian's.
pub(super) fn programs() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut debian: Vec<(u32, PathBuf)> = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path().join("bin"))))
        .collect();
    debian.sort_by_key(|(version, _)| std::cmp::Reverse(*version));
    std::env::split_paths(&path)
        .chain(debian.into_iter().map(|(_, folder)| folder))
        .find(|folder| folder.join("initdb").exists() && folder.join("postgres").exists())
}

/// The user and group under which Postgres has to run; none when our own will do.
fn unprivileged() -> anyhow::Result<Option<(u32, u32)>> {
    if !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    let users = std::fs::read_to_string("/etc/passwd").context("read /etc/passwd")?;
    let ids = |name: &str| {
        let line = users.lines().find(|line| line.split(':').next() == Some(name))?;
        let mut fields = line.split(':').skip(2);
        Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
    };
    Ok(Some(ids("postgres").or_else(|| ids("nobody")).context("no user `postgres` or `nobody` to run Postgres as")?))
}
