//! The command line. Each command is thin: the service behind the API does the work.

mod client;
mod next;
mod output;
mod runs;
mod server;
mod tasks;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tokio_util::sync::CancellationToken;

use crate::config::Layer;

/// A distributed task scheduler on NATS JetStream.
#[derive(Debug, Parser)]
#[command(
    name = "ax",
    version,
    about,
    max_term_width = 110,
    after_help = "Exit codes: 0 done, 1 refused or failed, \
2 wrong call, 3 nobody answers. Flags come before AX_* variables, those before ax.toml, that before the defaults."
)]
pub struct Cli {
    /// Configuration file [default: ax.toml, if there is one]
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run everything on one machine: a private nats-server, SQLite, the scheduler, its API and page
    Dev(server::DevArgs),
    /// Run a scheduler node
    Server(server::ServerArgs),
    /// Create or change tasks from JSON documents
    Apply(tasks::ApplyArgs),
    /// List, show, delete, pause, resume or trigger tasks
    #[command(subcommand)]
    Task(tasks::TaskCommand),
    /// List, show or find runs
    #[command(subcommand)]
    Run(runs::RunCommand),
    /// Show the next fires of an expression or a task
    Next(next::NextArgs),
    /// Show the next fires of all tasks
    Upcoming(runs::UpcomingArgs),
    /// Put runs of tasks into their queues
    Enqueue(tasks::EnqueueArgs),
    /// List the scheduler nodes that answer
    Nodes(runs::NodesArgs),
    /// Bring the database's schema up to date, without starting anything
    Migrate(server::MigrateArgs),
    /// Show the effective configuration of a server, secrets hidden
    Config(server::ConfigArgs),
}

/// Why a command ended without doing its work, with the exit code that says so.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    pub(crate) error: anyhow::Error,
}

/// Refused or failed.
pub(crate) const REFUSED: u8 = 1;
/// Wrong call.
pub(crate) const USAGE: u8 = 2;
/// Nobody answers.
pub(crate) const UNREACHABLE: u8 = 3;

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(e: E) -> Self {
        Self { code: REFUSED, error: e.into() }
    }
}

/// Runs a command to its end, or until `stop` is cancelled; tells what went wrong on standard error.
pub async fn run(cli: Cli, stop: CancellationToken) -> ExitCode {
    let file = match Layer::from_file(cli.config.as_deref()) {
        Ok(file) => file,
        Err(e) => return tell(Failure { code: USAGE, error: e.into() }),
    };
    let done = match cli.command {
        Command::Dev(args) => server::dev(args, file, stop).await,
        Command::Server(args) => server::server(args, file, stop).await,
        Command::Apply(args) => tasks::apply(args, &file).await,
        Command::Task(command) => tasks::task(command, &file).await,
        Command::Run(command) => runs::run(command, &file).await,
        Command::Next(args) => next::next(args, &file).await,
        Command::Upcoming(args) => runs::upcoming(args, &file).await,
        Command::Enqueue(args) => tasks::enqueue(args, &file).await,
        Command::Nodes(args) => runs::nodes(args, &file).await,
        Command::Migrate(args) => server::migrate(args, file).await,
        Command::Config(args) => server::config(args, file),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => tell(failure),
    }
}

fn tell(failure: Failure) -> ExitCode {
    use std::io::Write as _;
    // The whole chain of causes on one line, each told once.
    let mut text = String::new();
    for cause in failure.error.chain() {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            if !text.is_empty() {
                text.push_str(": ");
            }
            text.push_str(&cause);
        }
    }
    let _ = writeln!(std::io::stderr(), "ax: {text}");
    ExitCode::from(failure.code)
}

/// Writes a line to standard output; a reader that has gone away is no error.
pub(crate) fn say(text: impl std::fmt::Display) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stdout(), "{text}");
}
