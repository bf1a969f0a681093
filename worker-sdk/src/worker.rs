//! Setting a worker up.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ax_shared::ids::InvalidName;
use ax_shared::{Group, Handler, Prefix};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use crate::handler::{Run, erase};
use crate::runtime;
use crate::task::Task;
use crate::{Context, Failure, Nats};

/// Why a worker cannot begin, or has ended.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// It is not an address of NATS; what stands before its @ is masked.
    #[error("not an address of NATS: {0:?}")]
    Address(String, #[source] std::io::Error),
    /// The credentials file cannot be read.
    #[error("cannot read the credentials file {}", .0.display())]
    Credentials(PathBuf, #[source] std::io::Error),
    /// No server answers, or it refuses the credentials.
    #[error("cannot connect to NATS")]
    Connect(#[source] async_nats::ConnectError),
    /// The name of a group, handler or task has a form that none can have.
    #[error(transparent)]
    Name(#[from] InvalidName),
    /// Nothing to do.
    #[error("the worker has no handler")]
    NoHandler,
    /// A definition names a handler that this worker lacks.
    #[error("the task {task} is to be executed by the handler {handler}, which this worker does not have")]
    TaskWithoutHandler {
        /// The task.
        task: String,
        /// The handler that it names.
        handler: String,
    },
    /// A definition's payload cannot be written as JSON.
    #[error("the payload of the task {0} is not JSON")]
    Payload(String, #[source] serde_json::Error),
    /// The scheduler refuses the definitions: nothing of them is applied.
    #[error("the definitions are refused: {said}: {problem}")]
    Refused {
        /// In a few words.
        said: String,
        /// The problem document, with field and rule of each fault.
        problem: Value,
    },
    /// The worker's own thread does not start, or has ended too soon.
    #[error("the worker's thread")]
    Thread(#[source] std::io::Error),
    /// The signals that ask a program to end cannot be heard.
    #[error("cannot listen to signals")]
    Signals(#[source] std::io::Error),
}

/// A worker of an executor group, being set up; [`run`](Self::run) begins the work.
///
/// ```no_run
/// use ax_worker::{Context, Failure, Nats, Worker};
///
/// async fn greet(name: String, cx: Context) -> Result<String, Failure> {
///     cx.log("about to greet");
///     Ok(format!("hello, {name}"))
/// }
///
/// # async fn run() -> Result<(), ax_worker::WorkerError> {
/// Worker::new(Nats::from_env(), "demo").handler("greet", greet).concurrency(4).run().await
/// # }
/// ```
pub struct Worker<S = ()> {
    settings: Settings,
    group: String,
    state: Arc<S>,
    /// The first thing that is wrong with it; told when it begins.
    wrong: Option<WorkerError>,
}

/// What a worker is to be, checked.
pub(crate) struct Settings {
    pub(crate) nats: Nats,
    pub(crate) group: Group,
    pub(crate) prefix: Prefix,
    pub(crate) worker_id: Option<String>,
    pub(crate) handlers: BTreeMap<Handler, Run>,
    pub(crate) tasks: Vec<Value>,
    pub(crate) capacity: f64,
    pub(crate) grace: Duration,
}

impl<S> std::fmt::Debug for Worker<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let handlers: Vec<_> = self.settings.handlers.keys().collect();
        f.debug_struct("Worker").field("group", &self.group).field("handlers", &handlers).finish_non_exhaustive()
    }
}

impl Worker {
    /// Begins to set up a worker of `group`. What is wrong with it is told when it begins to run.
    pub fn new(nats: impl Into<Nats>, group: &str) -> Self {
        let (checked, wrong) = match Group::new(group) {
            Ok(group) => (group, None),
            Err(error) => (placeholder(), Some(error.into())),
        };
        let settings = Settings {
            nats: nats.into(),
            group: checked,
            prefix: Prefix::default(),
            worker_id: None,
            handlers: BTreeMap::new(),
            tasks: Vec::new(),
            capacity: 1.0,
            grace: Duration::from_secs(30),
        };
        Self { settings, group: group.to_owned(), state: Arc::new(()), wrong }
    }
}

/// Stands for a group whose name is wrong, in a worker that will not begin.
fn placeholder() -> Group {
    Group::new("none").expect("it is a valid name")
}

impl<S: Send + Sync + 'static> Worker<S> {
    /// Gives the handlers that are registered *from here on* a state: what they share, such as a pool of connections.
    #[must_use]
    pub fn state<T: Send + Sync + 'static>(self, state: T) -> Worker<T> {
        Worker { settings: self.settings, group: self.group, state: Arc::new(state), wrong: self.wrong }
    }

    /// Registers what executes tasks whose handler is `name`. The payload is read as the handler's first argument; a
    /// payload of another shape ends the run as failed. A second handler of the same name takes the first one's place.
    #[must_use]
    pub fn handler<T, F, R, O>(mut self, name: &str, handler: F) -> Self
    where
        T: DeserializeOwned + Send + 'static,
        F: Fn(T, Context<S>) -> R + Send + Sync + 'static,
        R: Future<Output = Result<O, Failure>> + Send + 'static,
        O: Serialize,
    {
        match Handler::new(name) {
            Ok(name) => {
                self.settings.handlers.insert(name, erase(handler, self.state.clone()));
            }
            Err(error) => self.refuse(error.into()),
        }
        self
    }

    /// Registers a definition: when the worker begins it is created or, if it differs, updated. It belongs to the
    /// worker's group. All definitions of a worker are applied as a whole; if they are refused, the worker ends with
    /// [`WorkerError::Refused`]. While no scheduler answers, the worker works, and goes on asking.
    #[must_use]
    pub fn task(mut self, task: Task) -> Self {
        match task.document(&self.settings.group) {
            Ok(document) => self.settings.tasks.push(document),
            Err(error) => self.refuse(error),
        }
        self
    }

    /// Runs of weight 1 that are executed at once. Defaults to 1.
    #[must_use]
    pub fn concurrency(mut self, runs: u32) -> Self {
        self.settings.capacity = f64::from(runs.max(1));
        self
    }

    /// How long runs may go on after the worker was asked to stop, before they are handed back. Defaults to 30 s.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.settings.grace = grace;
        self
    }

    /// Prefix of the installation. Defaults to `ax`.
    #[must_use]
    pub fn prefix(mut self, prefix: Prefix) -> Self {
        self.settings.prefix = prefix;
        self
    }

    /// Name under which the worker is listed, unique in its group; characters other than A–Z a–z 0–9 _ - become `-`.
    /// Defaults to host, process id and a random part.
    #[must_use]
    pub fn worker_id(mut self, id: &str) -> Self {
        self.settings.worker_id = Some(id.to_owned());
        self
    }

    /// Works until SIGTERM or SIGINT (Ctrl-C); then pulls no more, lets runs finish within the grace, hands back the
    /// rest and returns. A second signal ends the grace. Meanwhile NATS may come and go.
    ///
    /// # Errors
    /// When the worker cannot begin (see [`WorkerError`]), or when its definitions are refused.
    pub async fn run(self) -> Result<(), WorkerError> {
        runtime::run(self.checked()?, Shutdown::Signals).await
    }

    /// Works like [`run`](Self::run) until `shutdown` is cancelled, and leaves signals alone.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub async fn run_until(self, shutdown: CancellationToken) -> Result<(), WorkerError> {
        runtime::run(self.checked()?, Shutdown::Token(shutdown)).await
    }

    fn refuse(&mut self, error: WorkerError) {
        self.wrong.get_or_insert(error);
    }

    fn checked(self) -> Result<Settings, WorkerError> {
        if let Some(error) = self.wrong {
            return Err(error);
        }
        if self.settings.handlers.is_empty() {
            return Err(WorkerError::NoHandler);
        }
        for task in &self.settings.tasks {
            let text = |field: &str| task[field].as_str().unwrap_or_default();
            if !self.settings.handlers.contains_key(text("handler")) {
                let (task, handler) = (text("task_id").to_owned(), text("handler").to_owned());
                return Err(WorkerError::TaskWithoutHandler { task, handler });
            }
        }
        Ok(self.settings)
    }
}

/// What asks a worker to stop.
pub(crate) enum Shutdown {
    Signals,
    Token(CancellationToken),
}

/// The same, listened to.
pub(crate) enum Listening {
    #[cfg(unix)]
    Signals(tokio::signal::unix::Signal, tokio::signal::unix::Signal),
    #[cfg(not(unix))]
    Signals,
    Token(CancellationToken),
}

impl Shutdown {
    /// Begins to listen.
    pub(crate) fn listen(self) -> Result<Listening, WorkerError> {
        match self {
            #[cfg(unix)]
            Self::Signals => {
                use tokio::signal::unix::{SignalKind, signal};
                let hear = |kind| signal(kind).map_err(WorkerError::Signals);
                Ok(Listening::Signals(hear(SignalKind::terminate())?, hear(SignalKind::interrupt())?))
            }
            #[cfg(not(unix))]
            Self::Signals => Ok(Listening::Signals),
            Self::Token(token) => Ok(Listening::Token(token)),
        }
    }
}

impl Listening {
    /// Returns when the worker is asked to stop.
    pub(crate) async fn asked(&mut self) {
        match self {
            Self::Token(token) => token.cancelled().await,
            #[cfg(unix)]
            Self::Signals(terminate, interrupt) => {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
            }
            #[cfg(not(unix))]
            Self::Signals => {
                let _ = tokio::signal::ctrl_c().await;
            }
        }
    }

    /// Returns when the worker is asked to stop a second time.
    pub(crate) async fn asked_again(&mut self) {
        match self {
            Self::Token(_) => std::future::pending().await,
            _ => self.asked().await,
        }
    }
}
