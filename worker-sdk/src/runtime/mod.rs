//! What a worker does while it runs.
//!
//! All of it lives on an OS thread of its own with a connection of its own; only handlers run on the program's runtime.
//! So a handler that blocks every thread there stops neither the heartbeat nor the clock that its timeout is taken from,
//! nor what other runs have to tell.

mod attempt;
mod capacity;
mod execute;
mod groups;
mod heartbeat;
mod hold;
mod outbox;
mod outcome;
mod pull;
mod register;
mod trigger;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_nats::Client;
use async_nats::connection::State;
use async_nats::jetstream::{Context, context::ContextBuilder};
use ax_shared::wire::GroupConfig;
use ax_shared::{Group, Handler, Prefix, RunId};
use futures::{FutureExt, StreamExt};
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::capacity::Capacity;
use self::execute::Entry;
use crate::WorkerError;
use crate::context::Fetch;
use crate::handler::Run;
use crate::worker::{Settings, Shutdown};

pub(crate) use self::attempt::{Ended, Stops, make};
pub(crate) use self::outcome::{Answer, Outcome, Span, started};
pub(crate) use self::trigger::Trigger;

/// What an answer of NATS may take before it is asked for again.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// After a failure others get the first chance to take the run.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_millis(100);

/// What the parts of a worker share.
struct Shared {
    client: Client,
    jetstream: Context,
    prefix: Prefix,
    group: Group,
    worker_id: String,
    handlers: BTreeMap<Handler, Run>,
    capacity: Capacity,
    /// What is executed now.
    running: Mutex<HashMap<RunId, Entry>>,
    /// Attempts begun.
    attempts: AtomicU64,
    /// The highest epoch that a trigger had.
    epoch: AtomicU64,
    /// Nothing is pulled before this.
    pause: watch::Sender<Instant>,
    /// Cancelled when the grace is over.
    release: CancellationToken,
    /// Where handlers run.
    runtime: Handle,
    fetch: Fetch,
}

impl Shared {
    fn running(&self) -> std::sync::MutexGuard<'_, HashMap<RunId, Entry>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether what is sent now leaves now. Without a connection the client keeps it and sends it later.
    fn is_connected(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Lets other workers pull first.
    fn pause_pulling(&self) {
        self.pause.send_replace(Instant::now() + PAUSE_AFTER_FAILURE);
    }
}

/// Runs a worker on a thread of its own until it has stopped. When this future is dropped it stops at once, handing back
/// what runs.
pub(crate) async fn run(settings: Settings, shutdown: Shutdown) -> Result<(), WorkerError> {
    let runtime = Handle::current();
    let log = tracing::dispatcher::get_default(Clone::clone);
    let dropped = CancellationToken::new();
    let guard = dropped.clone().drop_guard();
    let (ended, end) = oneshot::channel();
    let thread = std::thread::Builder::new().name("ax-worker".into()).spawn(move || {
        let _log = tracing::dispatcher::set_default(&log);
        let own = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let result = match own {
            Ok(own) => own.block_on(serve(settings, shutdown, dropped, runtime)),
            Err(error) => Err(WorkerError::Thread(error)),
        };
        let _ = ended.send(result);
    });
    thread.map_err(WorkerError::Thread)?;
    let result = end.await;
    guard.disarm();
    result.unwrap_or_else(|_| Err(WorkerError::Thread(std::io::Error::other("the worker's thread panicked"))))
}

async fn serve(
    settings: Settings,
    shutdown: Shutdown,
    dropped: CancellationToken,
    runtime: Handle,
) -> Result<(), WorkerError> {
    // Before anything else, so that no signal ends the program without asking.
    let mut shutdown = shutdown.listen()?;
    let client = settings.nats.connect().await?;
    let jetstream = ContextBuilder::new().timeout(ANSWER_WITHIN).build(client.clone());
    let shared = Arc::new(Shared {
        fetch: fetch(&jetstream, &settings.prefix),
        client,
        jetstream,
        prefix: settings.prefix,
        group: settings.group,
        worker_id: settings.worker_id.as_deref().map_or_else(heartbeat::made_up_id, heartbeat::key_safe),
        handlers: settings.handlers,
        capacity: Capacity::new(settings.capacity),
        running: Mutex::default(),
        attempts: AtomicU64::new(0),
        epoch: AtomicU64::new(0),
        pause: watch::channel(Instant::now()).0,
        release: CancellationToken::new(),
        runtime,
    });
    tracing::info!(group = %shared.group, worker_id = shared.worker_id, "worker started");
    // Ends what serves the runs only after the last of them.
    let done = CancellationToken::new();
    let stop = CancellationToken::new();
    let (found, consumers) = watch::channel(GroupConfig::default());
    let services = TaskTracker::new();
    services.spawn(heartbeat::beat(shared.clone(), done.clone()));
    services.spawn(groups::follow(shared.clone(), found, done.clone()));
    services.spawn(hear_cancellations(shared.clone(), done.clone()));
    let register = async {
        if settings.tasks.is_empty() {
            return Ok(());
        }
        let registered = register::register(shared.clone(), settings.tasks, stop.clone()).await;
        if registered.is_err() {
            stop.cancel();
        }
        registered
    };

    let runs = TaskTracker::new();
    let work = async {
        pull::pull(&shared, consumers, &runs, &stop).await;
        runs.close();
        if tokio::time::timeout(settings.grace, runs.wait()).await.is_err() {
            tracing::info!(runs = runs.len(), "the grace is over: handing back what still runs");
            shared.release.cancel();
            runs.wait().await;
        }
        done.cancel();
    };
    let watch = async {
        tokio::select! {
            () = shutdown.asked() => stop.cancel(),
            () = dropped.cancelled() => {
                stop.cancel();
                shared.release.cancel();
            }
            () = stop.cancelled() => {}
        }
        // Asked once more, or abandoned: no grace.
        tokio::select! {
            () = shutdown.asked_again() => shared.release.cancel(),
            () = dropped.cancelled() => shared.release.cancel(),
            () = done.cancelled() => {}
        }
    };
    let (registered, (), ()) = tokio::join!(register, work, watch);
    services.close();
    services.wait().await;
    // What was published last is on its way before the connection ends with this runtime.
    let _ = tokio::time::timeout(ANSWER_WITHIN, shared.client.flush()).await;
    tracing::info!(group = %shared.group, worker_id = shared.worker_id, "worker stopped");
    registered
}

/// How handlers load large results: on the worker's runtime, where its connection lives.
fn fetch(jetstream: &Context, prefix: &Prefix) -> Fetch {
    let (jetstream, prefix, own) = (jetstream.clone(), prefix.clone(), Handle::current());
    Arc::new(move |name| {
        let fetched = own.spawn(outbox::fetch(jetstream.clone(), prefix.clone(), name));
        async move { fetched.await.unwrap_or_else(|_| Err("the worker has stopped".into())) }.boxed()
    })
}

/// Cancels runs as the scheduler asks.
async fn hear_cancellations(shared: Arc<Shared>, done: CancellationToken) {
    let subject = format!("{}.control.cancel.{}.*", shared.prefix.as_str(), shared.group);
    let Ok(mut orders) = shared.client.subscribe(subject).await else { return };
    while let Some(Some(order)) = done.run_until_cancelled(orders.next()).await {
        let run = order.subject.rsplit('.').next().and_then(|run| run.parse::<RunId>().ok());
        if let Some(entry) = run.and_then(|run| shared.running().get(&run).cloned()) {
            entry.cancel.cancel();
        }
    }
}
