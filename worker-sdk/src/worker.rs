//! Setting a worker up.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use async_nats::Client;
use ax_shared::ids::InvalidName;
use ax_shared::{Group, Handler, Prefix};
use futures::FutureExt;
use futures::future::BoxFuture;
use serde::Serialize;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use crate::runtime;
use crate::{Failure, Job};

/// Why a worker cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// It is not an address of NATS.
    #[error("not an address of NATS: {0:?}")]
    Address(String, #[source] std::io::Error),
    /// No server answers, or it refuses the credentials.
    #[error("cannot connect to NATS")]
    Connect(#[source] async_nats::ConnectError),
    /// A handler's name has a form that no task can name.
    #[error(transparent)]
    Handler(#[from] InvalidName),
    /// Nothing to do.
    #[error("the worker has no handler")]
    NoHandler,
}

/// A handler without its types.
pub(crate) type Run = Arc<dyn Fn(Job) -> BoxFuture<'static, Result<Value, Failure>> + Send + Sync>;

/// Entry to the builder.
#[derive(Debug)]
pub struct Worker;

impl Worker {
    /// Begins to set up a worker of `group`.
    #[must_use]
    pub fn builder(client: Client, group: Group) -> Builder {
        Builder {
            client,
            group,
            prefix: Prefix::default(),
            worker_id: None,
            handlers: BTreeMap::new(),
            capacity: 1.0,
            grace: Duration::from_secs(30),
        }
    }
}

/// Settings of a worker.
pub struct Builder {
    pub(crate) client: Client,
    pub(crate) group: Group,
    pub(crate) prefix: Prefix,
    pub(crate) worker_id: Option<String>,
    pub(crate) handlers: BTreeMap<Handler, Run>,
    pub(crate) capacity: f64,
    pub(crate) grace: Duration,
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let handlers: Vec<_> = self.handlers.keys().collect();
        f.debug_struct("Builder").field("group", &self.group).field("handlers", &handlers).finish_non_exhaustive()
    }
}

impl Builder {
    /// Registers what executes tasks whose handler is `name`. A second one of the same name takes its place.
    ///
    /// # Errors
    /// [`WorkerError::Handler`] for a name that no task can have.
    pub fn handler<F, R, T>(mut self, name: &str, handler: F) -> Result<Self, WorkerError>
    where
        F: Fn(Job) -> R + Send + Sync + 'static,
        R: Future<Output = Result<T, Failure>> + Send + 'static,
        T: Serialize + Send + 'static,
    {
        let run: Run = Arc::new(move |job| {
            let answer = handler(job);
            async move {
                let answer = answer.await?;
                serde_json::to_value(answer)
                    .map_err(|error| Failure::give_up(format!("the result is not JSON: {error}")))
            }
            .boxed()
        });
        self.handlers.insert(Handler::new(name)?, run);
        Ok(self)
    }

    /// Runs of weight 1 that are executed at once. Defaults to 1.
    #[must_use]
    pub fn concurrency(mut self, runs: u32) -> Self {
        self.capacity = f64::from(runs.max(1));
        self
    }

    /// How long runs may go on after the shutdown has begun, before they are handed back. Defaults to 30 s.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Prefix of the installation. Defaults to `ax`.
    #[must_use]
    pub fn prefix(mut self, prefix: Prefix) -> Self {
        self.prefix = prefix;
        self
    }

    /// Name under which the worker is listed, unique in its group; characters other than A–Z a–z 0–9 _ - become `-`.
    /// Defaults to host, process id and a random part.
    #[must_use]
    pub fn worker_id(mut self, id: &str) -> Self {
        self.worker_id = Some(id.to_owned());
        self
    }

    /// Works until `shutdown` is cancelled; then pulls no more, lets runs finish within the grace, hands back the rest
    /// and returns. Meanwhile NATS may come and go.
    ///
    /// # Errors
    /// [`WorkerError::NoHandler`] when none is registered.
    pub async fn run(self, shutdown: CancellationToken) -> Result<(), WorkerError> {
        if self.handlers.is_empty() {
            return Err(WorkerError::NoHandler);
        }
        runtime::run(self, shutdown).await;
        Ok(())
    }
}
