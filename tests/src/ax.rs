//! The built `ax` program: server nodes, and commands that run to their end.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;
use tokio::io::AsyncWriteExt;

use crate::api::Api;
use crate::process::Process;
use crate::{Scratch, dev};

/// How long a node may take to serve. Generous: a debug build on a busy machine with two cores.
const START: Duration = Duration::from_secs(60);
/// How long a command may take.
const COMMAND: Duration = Duration::from_secs(60);
/// What a node prints, once, when its HTTP side accepts connections.
const LISTENING: &str = "ax: listening on ";

/// Finds the `ax` program: `AX_BIN`, else the build that belongs to the running test, brought up to date by cargo first.
///
/// # Errors
/// When it does not build.
pub fn program() -> Result<PathBuf> {
    static PROGRAM: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    PROGRAM.get_or_init(|| build().map_err(|error| format!("{error:#}"))).clone().map_err(|error| anyhow!(error))
}

fn build() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os("AX_BIN") {
        return Ok(PathBuf::from(named));
    }
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        // With the places where a test can stop it; they do nothing unless one is named.
        .args(["build", "--quiet", "--package", "ax-scheduler", "--bin", "ax", "--features", "failpoints"])
        .current_dir(dev::root())
        .stdin(Stdio::null())
        .output()
        .context("run cargo")?;
    if !output.status.success() {
        bail!("cargo build of ax: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    // Test programs lie in <target>/debug/deps, ax beside that folder.
    let own = std::env::current_exe().context("find the test program")?;
    let found = own.ancestors().skip(1).take(3).map(|folder| folder.join("ax")).find(|file| file.is_file());
    found.with_context(|| format!("no program `ax` near {}", own.display()))
}

/// Returns a command for `ax` that sees none of the caller's `AX_*` settings and no `ax.toml`.
///
/// # Errors
/// When the program does not build.
pub fn command(folder: &Path) -> Result<Command> {
    let mut command = Command::new(program()?);
    command.current_dir(folder);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("AX_") || name.to_string_lossy().starts_with("OTEL_") {
            command.env_remove(name);
        }
    }
    command.env("RUST_BACKTRACE", "1");
    Ok(command)
}

/// How a node is started.
#[derive(Debug, Clone, Default)]
pub struct ServerOptions {
    /// Sets `AX_NATS_URL`.
    pub nats_url: String,
    /// Sets `AX_DATABASE_URL`.
    pub database_url: String,
    /// Sets `AX_NODE_ID`.
    pub node_id: String,
    /// Sets `AX_HTTP_ADDR`; a free port of the loopback when `None`.
    pub http_addr: Option<String>,
    /// Sets further environment variables.
    pub env: Vec<(String, String)>,
}

/// A running `ax server`.
#[derive(Debug)]
pub struct Node {
    process: Process,
    url: String,
    _folder: Scratch,
}

impl Node {
    /// Starts a node and waits until it serves HTTP.
    ///
    /// # Errors
    /// When it ends instead, or takes too long; with its output.
    pub async fn start(options: &ServerOptions) -> Result<Self> {
        let (mut process, folder) = spawn(options)?;
        let url = process.ready(START, |output| output.after(LISTENING)).await?;
        Ok(Self { process, url, _folder: folder })
    }

    /// Starts a node that has to refuse: returns its exit code and what it wrote.
    ///
    /// # Errors
    /// When it serves, or does neither for too long.
    pub async fn refused(options: &ServerOptions) -> Result<(Option<i32>, String)> {
        let (mut process, _folder) = spawn(options)?;
        let status = process.wait(START).await.with_context(|| process.output().text())?;
        Ok((status.code(), process.output().text()))
    }

    /// Returns the address of its HTTP side, such as `http://127.0.0.1:40123`.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns a client of its API.
    #[must_use]
    pub fn api(&self) -> Api {
        Api::new(&self.url)
    }

    /// Returns its process, for freezing, thawing and its output.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// Kills it without warning.
    ///
    /// # Errors
    /// When it had ended before.
    pub fn kill9(&mut self) -> Result<()> {
        self.process.kill9()
    }

    /// Asks it to end (SIGTERM) and waits for that.
    ///
    /// # Errors
    /// When it does not end within half a minute.
    pub async fn terminate(&mut self) -> Result<ExitStatus> {
        self.process.terminate(Duration::from_secs(30)).await
    }
}

fn spawn(options: &ServerOptions) -> Result<(Process, Scratch)> {
    let folder = Scratch::new("node")?;
    let mut command = command(folder.path())?;
    command
        .arg("server")
        .env("AX_NATS_URL", &options.nats_url)
        .env("AX_DATABASE_URL", &options.database_url)
        .env("AX_NODE_ID", &options.node_id)
        .env("AX_HTTP_ADDR", options.http_addr.as_deref().unwrap_or("127.0.0.1:0"))
        .envs(options.env.iter().map(|(name, value)| (name, value)));
    Ok((Process::spawn(format!("ax server {}", options.node_id), &mut command)?, folder))
}

/// What a command that ran to its end left behind.
#[derive(Debug, Clone)]
pub struct Finished {
    /// The exit code; `None` after a signal.
    pub code: Option<i32>,
    /// The standard output.
    pub stdout: String,
    /// The standard error.
    pub stderr: String,
}

impl Finished {
    /// Returns itself when the command succeeded.
    ///
    /// # Errors
    /// When it did not; with its output.
    pub fn ok(self) -> Result<Self> {
        if self.code == Some(0) {
            return Ok(self);
        }
        bail!("exit code {:?}\n{}{}", self.code, self.stdout, self.stderr);
    }

    /// Reads the standard output as JSON.
    ///
    /// # Errors
    /// When it is none.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.stdout).with_context(|| format!("read as JSON: {}{}", self.stdout, self.stderr))
    }
}

/// Runs `command` to its end with `input` on its standard input.
///
/// # Errors
/// When it cannot be started or takes longer than a minute.
pub async fn finish(command: Command, input: &[u8]) -> Result<Finished> {
    let mut command = tokio::process::Command::from(command);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().with_context(|| format!("start {:?}", command.as_std().get_program()))?;
    let mut stdin = child.stdin.take().context("no standard input")?;
    let run = async {
        // A command that reads no input closes it: no error.
        let write = async {
            stdin.write_all(input).await.ok();
            drop(stdin);
        };
        let (output, ()) = tokio::join!(child.wait_with_output(), write);
        output.context("wait for a command")
    };
    let output = tokio::time::timeout(COMMAND, run).await.context("a command takes too long")??;
    Ok(Finished {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// Runs `ax` with `arguments` against the API at `url`, in the repository's root.
///
/// # Errors
/// When it cannot be started or takes longer than a minute. A failing command is no error here, see [`Finished::ok`].
pub async fn run(url: &str, arguments: &[&str]) -> Result<Finished> {
    run_with(url, arguments, b"").await
}

/// Runs `ax` like [`run`], with `input` on its standard input.
///
/// # Errors
/// As [`run`].
pub async fn run_with(url: &str, arguments: &[&str], input: &[u8]) -> Result<Finished> {
    let mut command = command(&dev::root())?;
    command.env("AX_API_URL", url).args(arguments);
    finish(command, input).await
}
