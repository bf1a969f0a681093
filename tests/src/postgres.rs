//! One throw-away Postgres cluster per test process, shared by its tests; a database for each.
//!
//! Postgres refuses to run as root: a root user's tests run it as `postgres`, or as `nobody` where there is no such user.

use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use sqlx::{Connection, PgConnection};
use tokio::sync::OnceCell;

use crate::process::Process;
use crate::{Scratch, nats::free_ports};

const START: Duration = Duration::from_secs(60);

/// A Postgres cluster with default durability, on a free port of the loopback, without a Unix socket.
#[derive(Debug)]
pub struct Postgres {
    process: Option<Process>,
    folder: Scratch,
    programs: PathBuf,
    user: Option<(u32, u32)>,
    port: u16,
    databases: AtomicU32,
}

/// Makes an empty database in the cluster that the tests of this process share, and returns its URL.
///
/// # Errors
/// When Postgres is missing (`scripts/setup` says how to get it) or does not start.
pub async fn database() -> Result<String> {
    static SHARED: OnceCell<Postgres> = OnceCell::const_new();
    SHARED.get_or_try_init(Postgres::start).await?.create_database().await
}

impl Postgres {
    /// Makes a cluster of this test's own and starts it: for tests that stop it. Others share one, see [`database`].
    ///
    /// # Errors
    /// When Postgres is missing or does not start.
    pub async fn start() -> Result<Self> {
        let folder = Scratch::new("postgres")?;
        let user = unprivileged()?;
        if let Some((uid, gid)) = user {
            chown(folder.path(), Some(uid), Some(gid)).context("give the folder to the Postgres user")?;
        }
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o700))?;
        let mut cluster =
            Self { process: None, folder, programs: programs()?, user, port: 0, databases: AtomicU32::new(0) };
        let mut initdb = cluster.program("initdb");
        initdb
            .args(["--username=ax", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", "-D"])
            .arg(cluster.data());
        let mut initdb = Process::spawn("initdb", &mut initdb)?;
        let status = initdb.wait(START).await?;
        if !status.success() {
            bail!("initdb: {status}\n{}", initdb.output().text());
        }
        cluster.run().await?;
        Ok(cluster)
    }

    async fn run(&mut self) -> Result<()> {
        let mut last = None;
        for _ in 0..5 {
            // Postgres cannot choose a port, and somebody else may take one that was free a moment ago.
            let port = if self.port == 0 { free_ports(1)?[0] } else { self.port };
            let mut command = self.program("postgres");
            command.arg("-D").arg(self.data()).args(["-h", "127.0.0.1", "-p", &port.to_string()]);
            for setting in [
                "unix_socket_directories=",
                "dynamic_shared_memory_type=mmap",
                "max_connections=300",
                "log_min_messages=warning",
                "timezone=UTC",
            ] {
                command.args(["-c", setting]);
            }
            let mut process = Process::spawn("postgres", &mut command)?;
            match process.ready(START, |_| self.is_ready().then_some(())).await {
                Ok(()) => {
                    self.port = port;
                    self.process = Some(process);
                    return Ok(());
                }
                Err(error) => last = Some(error),
            }
        }
        Err(last.context("no attempt")?.context("start Postgres"))
    }

    /// Reads the server's own word: the last line of its lock file becomes `ready` when it accepts sessions.
    fn is_ready(&self) -> bool {
        std::fs::read_to_string(self.data().join("postmaster.pid")).is_ok_and(|lock| lock.trim_end().ends_with("ready"))
    }

    /// Makes an empty database and returns its URL.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn create_database(&self) -> Result<String> {
        let name = format!("ax_{}", self.databases.fetch_add(1, Ordering::Relaxed));
        let mut connection = PgConnection::connect(&self.url("postgres")).await.context("connect to Postgres")?;
        sqlx::query(sqlx::AssertSqlSafe(format!("create database {name}"))).execute(&mut connection).await?;
        connection.close().await?;
        Ok(self.url(&name))
    }

    /// Returns the URL of the database `name`, whether it exists or not.
    #[must_use]
    pub fn url(&self, name: &str) -> String {
        format!("postgres://ax@127.0.0.1:{}/{name}", self.port)
    }

    /// Returns the running server process. Its sessions are processes of their own, which a signal to it does not reach.
    ///
    /// # Errors
    /// When it is stopped.
    pub fn process(&mut self) -> Result<&mut Process> {
        self.process.as_mut().context("this Postgres is stopped")
    }

    /// Stops the server at once, ending its sessions (SIGQUIT: as after a crash, it recovers at the next start).
    ///
    /// # Errors
    /// When it is not running or does not end.
    pub async fn stop(&mut self) -> Result<()> {
        let process = self.process()?;
        process.signal(Signal::QUIT)?;
        process.wait(START).await?;
        self.process = None;
        Ok(())
    }

    /// Starts a stopped server on the same port with the same data.
    ///
    /// # Errors
    /// When it is running or does not come up.
    pub async fn start_again(&mut self) -> Result<()> {
        if self.process.is_some() {
            bail!("this Postgres is running");
        }
        self.run().await
    }

    fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.programs.join(name));
        command.current_dir(self.folder.path()).env("LC_ALL", "C");
        if let Some((uid, gid)) = self.user {
            command.uid(uid).gid(gid);
        }
        command
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            // In order, so that it removes its shared memory; Process kills it should it not listen.
            process.thaw().ok();
            process.signal(Signal::QUIT).ok();
            let start = std::time::Instant::now();
            while matches!(process.exited(), Ok(None)) && start.elapsed() < Duration::from_secs(5) {
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

/// Finds the folder of `initdb` and `postgres`: in `PATH`, else the newest of Debian's.
fn programs() -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut debian: Vec<PathBuf> = std::fs::read_dir("/usr/lib/postgresql")
        .map(|entries| entries.flatten().map(|entry| entry.path().join("bin")).collect())
        .unwrap_or_default();
    debian.sort_by_key(|folder| std::cmp::Reverse(version(folder)));
    std::env::split_paths(&path)
        .chain(debian)
        .find(|folder| folder.join("initdb").exists() && folder.join("postgres").exists())
        .context(
            "PostgreSQL is missing: no initdb and postgres in PATH or /usr/lib/postgresql; scripts/setup installs it",
        )
}

fn version(folder: &std::path::Path) -> Option<u32> {
    folder.parent()?.file_name()?.to_str()?.parse().ok()
}

/// Returns the user and group under which Postgres has to run, or `None` when the tests' own user will do.
fn unprivileged() -> Result<Option<(u32, u32)>> {
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
