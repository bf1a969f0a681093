//! One process that we started.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Command;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::Parts;
use crate::bench::usage::Watched;

/// How much of a log is shown when a process fails.
const SHOWN_LINES: usize = 15;

/// A running process in a group of its own; killed when dropped.
#[derive(Debug)]
pub(super) struct Child {
    name: String,
    pid: u32,
    process: tokio::process::Child,
    log: PathBuf,
    lines: UnboundedReceiver<String>,
}

impl Child {
    /// Starts `command`, its standard error going to `<name>.log` in the folder.
    pub(super) fn spawn(parts: &Parts, name: &str, command: std::process::Command) -> anyhow::Result<Self> {
        let log = parts.folder().join(format!("{}.log", name.replace(' ', "-")));
        let file = std::fs::File::create(&log).with_context(|| format!("make {}", log.display()))?;
        let mut process = Command::from(command)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(file)
            // A Ctrl-C in the terminal is for us: we end the parts in their order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("start {name}"))?;
        let pid = process.id().with_context(|| format!("{name} ended at once"))?;
        parts.guard.watch(pid);
        let (told, lines) = unbounded_channel();
        let output = process.stdout.take().context("no standard output")?;
        tokio::spawn(async move {
            let mut output = BufReader::new(output).lines();
            while let Ok(Some(line)) = output.next_line().await {
                let _ = told.send(line);
            }
        });
        Ok(Self { name: name.to_owned(), pid, process, log, lines })
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    pub(super) fn watched(&self) -> Watched {
        Watched { name: self.name.clone(), pid: self.pid, family: false }
    }

    /// Waits for a line of its output that begins with `prefix`; answers the rest of it.
    pub(super) async fn line(&mut self, prefix: &str, within: Duration) -> anyhow::Result<String> {
        let found = async {
            while let Some(line) = self.lines.recv().await {
                if let Some(rest) = line.strip_prefix(prefix) {
                    return Some(rest.trim().to_owned());
                }
            }
            None
        };
        match tokio::time::timeout(within, found).await {
            Ok(Some(rest)) => Ok(rest),
            Ok(None) => bail!("{} ended:\n{}", self.name, tail(&self.log)),
            Err(_) => bail!("{} said nothing within {} s:\n{}", self.name, within.as_secs(), tail(&self.log)),
        }
    }

    /// Fails when it has ended.
    pub(super) fn check(&mut self) -> anyhow::Result<()> {
        match self.process.try_wait().with_context(|| format!("look at {}", self.name))? {
            None => Ok(()),
            Some(status) => bail!("{} ended ({status}):\n{}", self.name, tail(&self.log)),
        }
    }

    /// Waits until it ends by itself, which has to be in good order.
    pub(super) async fn ended(mut self, parts: &Parts, within: Duration) -> anyhow::Result<()> {
        match tokio::time::timeout(within, self.process.wait()).await {
            Ok(Ok(status)) => {
                parts.guard.forget(self.pid);
                if status.success() {
                    return Ok(());
                }
                bail!("{} ended ({status}):\n{}", self.name, tail(&self.log))
            }
            Ok(Err(error)) => Err(error).with_context(|| format!("wait for {}", self.name)),
            Err(_) => bail!("{} does not end:\n{}", self.name, tail(&self.log)),
        }
    }

    pub(super) fn signal(&self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(pid, signal);
        }
    }

    /// Asks it to end and waits for that.
    pub(super) async fn stop(self, parts: &Parts, within: Duration) -> anyhow::Result<()> {
        self.signal(Signal::TERM);
        self.ended(parts, within).await
    }
}

fn tail(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n")
}
