//! One child process: its output, its signals, its exit.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::{eventually, guard};

/// How many of the last lines are shown when a test fails.
const SHOWN: usize = 80;

/// A child process in a process group of its own. Dropping it kills the group and prints the end of its output, which the
/// test runner shows only for a test that failed.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    status: Option<ExitStatus>,
    output: Output,
}

/// The lines that a process has written so far, standard output and standard error together.
#[derive(Debug, Clone, Default)]
pub struct Output {
    lines: Arc<Mutex<Vec<String>>>,
}

impl Output {
    /// Returns all lines so far.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns everything so far as one text.
    #[must_use]
    pub fn text(&self) -> String {
        self.lines().join("\n")
    }

    /// Returns what follows `prefix` on the first line that starts with it.
    #[must_use]
    pub fn after(&self, prefix: &str) -> Option<String> {
        self.lines().iter().find_map(|line| line.strip_prefix(prefix).map(|rest| rest.trim().to_owned()))
    }

    fn follow(&self, stream: impl Read + Send + 'static) -> JoinHandle<()> {
        let lines = Arc::clone(&self.lines);
        std::thread::spawn(move || {
            let mut reader = BufReader::new(stream);
            let mut line = Vec::new();
            while matches!(reader.read_until(b'\n', &mut line), Ok(read) if read > 0) {
                let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                lines.lock().unwrap_or_else(PoisonError::into_inner).push(text);
                line.clear();
            }
        })
    }
}

impl Process {
    /// Starts `command` with no input. `name` labels its output.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(name: impl Into<String>, command: &mut Command) -> Result<Self> {
        let name = name.into();
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .with_context(|| format!("start {name}: {}", Path::new(command.get_program()).display()))?;
        guard::watch_group(child.id())?;
        let output = Output::default();
        output.follow(child.stdout.take().context("no standard output")?);
        output.follow(child.stderr.take().context("no standard error")?);
        Ok(Self { name, child, status: None, output })
    }

    /// Returns the process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns what it has written so far; it goes on growing.
    #[must_use]
    pub fn output(&self) -> &Output {
        &self.output
    }

    /// Sends a signal to the process and its children.
    ///
    /// # Errors
    /// When it has ended.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).context("no process id")?;
        kill_process_group(pid, signal).with_context(|| format!("signal {signal:?} to {}", self.name))
    }

    /// Stops it where it is (SIGSTOP), as a long pause of its machine would.
    ///
    /// # Errors
    /// When it has ended.
    pub fn freeze(&self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    /// Lets it go on (SIGCONT).
    ///
    /// # Errors
    /// When it has ended.
    pub fn thaw(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    /// Kills it without warning and waits for its end.
    ///
    /// # Errors
    /// When it had ended before.
    pub fn kill9(&mut self) -> Result<()> {
        if let Some(status) = self.exited()? {
            bail!("{} had ended by itself: {status}", self.name);
        }
        self.signal(Signal::KILL)?;
        let status = self.child.wait().context("wait for a killed process")?;
        self.ended(status);
        Ok(())
    }

    /// Asks it to end (SIGTERM) and waits for that.
    ///
    /// # Errors
    /// When it is still there after `limit`.
    pub async fn terminate(&mut self, limit: Duration) -> Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        self.wait(limit).await
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When it is still there after `limit`.
    pub async fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let what = format!("{} ends", self.name);
        let this = Mutex::new(self);
        eventually(limit, &what, || async { this.lock().unwrap_or_else(PoisonError::into_inner).exited() }).await
    }

    /// Returns its exit status if it has ended.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn exited(&mut self) -> Result<Option<ExitStatus>> {
        if self.status.is_none()
            && let Some(status) = self.child.try_wait().context("ask for the exit status")?
        {
            self.ended(status);
        }
        Ok(self.status)
    }

    /// Waits until `ready` returns a value.
    ///
    /// # Errors
    /// When the deadline passes or the process ends first; with its output.
    pub async fn ready<T>(&mut self, limit: Duration, ready: impl Fn(&Output) -> Option<T>) -> Result<T> {
        let what = format!("{} is ready", self.name);
        let output = self.output.clone();
        let this = Mutex::new(self);
        let found = eventually(limit, &what, || async {
            if let Some(value) = ready(&output) {
                return Ok(Some(Ok(value)));
            }
            Ok(this.lock().unwrap_or_else(PoisonError::into_inner).exited()?.map(Err))
        })
        .await;
        match found {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(status)) => bail!("{what}: it ended with {status}\n{}", output.text()),
            Err(error) => Err(error.context(output.text())),
        }
    }

    fn ended(&mut self, status: ExitStatus) {
        self.status = Some(status);
        // Children that it left behind, then the group's number is free for others.
        self.signal(Signal::KILL).ok();
        guard::forget_group(self.child.id());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.exited().ok().flatten().is_none() {
            self.signal(Signal::KILL).ok();
            if let Ok(status) = self.child.wait() {
                self.ended(status);
            }
        }
        let lines = self.output.lines();
        let end = self.status.map_or_else(String::new, |status| match status.signal() {
            Some(signal) => format!("signal {signal}"),
            None => status.to_string(),
        });
        eprintln!("---- {} ({end}), last lines of {} ----", self.name, lines.len());
        for line in lines.iter().skip(lines.len().saturating_sub(SHOWN)) {
            eprintln!("{line}");
        }
    }
}
