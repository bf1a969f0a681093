//! The command line. Each command is thin: the service behind the API does the work.

mod apply;
mod bench;
mod client;
mod health;
mod input;
mod next;
mod nodes;
mod output;
mod run;
mod server;
mod task;
mod token;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{LazyLock, OnceLock};

use clap::{Parser, Subcommand};
use tokio_util::sync::CancellationToken;

use crate::config::Layer;
use crate::core::schedule::tzdata_version;

/// The program's version and that of the time zones it has compiled in.
static VERSION: LazyLock<String> =
    LazyLock::new(|| format!("{} (tzdata {})", env!("CARGO_PKG_VERSION"), tzdata_version()));

/// The first write to standard output that failed. There is one such output in a process, so one place for this.
static UNWRITTEN: OnceLock<std::io::Error> = OnceLock::new();

/// A distributed task scheduler on NATS JetStream.
#[derive(Debug, Parser)]
#[command(
    name = "ax",
    version = VERSION.as_str(),
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
    #[command(
        mut_arg("nats_url", |arg| arg.help("NATS to use instead of a private nats-server")),
        mut_arg("database_url", |arg| arg.help("Database [default: ax.db in the folder of --dir]")),
        mut_arg("log", |arg| arg.help("What is logged beside the live view, e.g. info or info,ax::run=warn [default: warn]"))
    )]
    Dev(server::DevArgs),
    /// Run a scheduler node
    Server(server::ServerArgs),
    #[command(flatten)]
    Ask(Ask),
    /// Make, list and revoke the tokens that callers show
    Token(token::TokenArgs),
    /// Bring the database's schema up to date, without starting anything
    Migrate(server::MigrateArgs),
    /// Show the effective configuration of a server, secrets hidden
    Config(server::ConfigArgs),
    /// Measure how late runs are and what they cost, beside what JetStream alone can do
    Bench(bench::BenchArgs),
    #[command(hide = true)]
    BenchWorker(bench::BenchWorkerArgs),
    #[command(hide = true)]
    BenchPublisher(bench::BenchPublisherArgs),
    /// Show the version of ax and of the time zones it has compiled in
    Version,
}

/// Commands that ask a server, or need none. They hold nothing that must be written.
#[derive(Debug, Subcommand)]
enum Ask {
    /// Put task definitions out of files into force
    Apply(apply::ApplyArgs),
    /// List, show, remove, pause, resume and trigger tasks
    Task(task::TaskArgs),
    /// List, show and find runs
    Run(run::RunArgs),
    /// Show when an expression, or a task, fires next
    Next(next::NextArgs),
    /// Show what fires next over all tasks
    Upcoming(next::UpcomingArgs),
    /// Add runs beside the schedule, one or thousands
    Enqueue(task::EnqueueArgs),
    /// Show the scheduler nodes that answer
    Nodes(nodes::NodesArgs),
    /// Ask the node on this machine whether it is ready, as a container's health check does
    Health(health::HealthArgs),
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
/// Nobody answers, or not now.
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
        Command::Token(args) => token::token(args, file).await,
        Command::Migrate(args) => server::migrate(args, file).await,
        Command::Config(args) => server::config(args, file),
        Command::Bench(args) => bench::bench(args, stop).await,
        Command::BenchWorker(args) => bench::worker(args, stop).await,
        Command::BenchPublisher(args) => bench::publisher(args, stop).await,
        Command::Version => {
            say(format_args!("ax {}", *VERSION));
            Ok(())
        }
        Command::Ask(ask) => tokio::select! {
            done = ask.run(file) => done,
            () = stop.cancelled() => Err(anyhow::anyhow!("interrupted").into()),
        },
    };
    match (done, UNWRITTEN.get()) {
        (Ok(()), None) => ExitCode::SUCCESS,
        (Ok(()), Some(e)) => tell(anyhow::anyhow!("standard output cannot be written: {e}").into()),
        (Err(failure), _) => tell(failure),
    }
}

impl Ask {
    async fn run(self, file: Layer) -> Result<(), Failure> {
        match self {
            Self::Apply(args) => apply::apply(args, file).await,
            Self::Task(args) => task::task(args, file).await,
            Self::Run(args) => run::run(args, file).await,
            Self::Next(args) => next::next(args, file).await,
            Self::Upcoming(args) => next::upcoming(args, file).await,
            Self::Enqueue(args) => task::enqueue(args, file).await,
            Self::Nodes(args) => nodes::nodes(args, file).await,
            Self::Health(args) => health::health(args, file).await,
        }
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

/// Writes a line to standard output. A reader that has gone away is no error; what else goes wrong, such as a full
/// disk, fails the command when it ends.
pub(crate) fn say(text: impl std::fmt::Display) {
    use std::io::Write as _;
    if let Err(e) = writeln!(std::io::stdout(), "{text}")
        && e.kind() != std::io::ErrorKind::BrokenPipe
    {
        let _ = UNWRITTEN.set(e);
    }
}
