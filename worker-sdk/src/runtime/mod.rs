//! What a worker does while it runs.

mod capacity;
mod execute;
mod groups;
mod heartbeat;
mod outbox;
mod pull;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_nats::Client;
use async_nats::jetstream::{Context, context::ContextBuilder};
use ax_shared::wire::GroupConfig;
use ax_shared::{Group, Handler, Prefix, RunId};
use futures::StreamExt;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::capacity::Capacity;
use crate::worker::{Builder, Run};

/// What an answer of NATS may take before it is asked for again.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// What the parts of a worker share.
struct Shared {
    client: Client,
    jetstream: Context,
    prefix: Prefix,
    group: Group,
    worker_id: String,
    handlers: BTreeMap<Handler, Run>,
    capacity: Capacity,
    /// What is executed now, and how to cancel it.
    running: Mutex<HashMap<RunId, CancellationToken>>,
    /// The highest epoch that a trigger had.
    epoch: AtomicU64,
    /// Cancelled when the grace is over.
    release: CancellationToken,
}

impl Shared {
    fn running(&self) -> std::sync::MutexGuard<'_, HashMap<RunId, CancellationToken>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) async fn run(builder: Builder, shutdown: CancellationToken) {
    let jetstream = ContextBuilder::new().timeout(ANSWER_WITHIN).build(builder.client.clone());
    let shared = Arc::new(Shared {
        client: builder.client,
        jetstream,
        prefix: builder.prefix,
        group: builder.group,
        worker_id: builder.worker_id.as_deref().map_or_else(heartbeat::made_up_id, heartbeat::key_safe),
        handlers: builder.handlers,
        capacity: Capacity::new(builder.capacity),
        running: Mutex::default(),
        epoch: AtomicU64::new(0),
        release: CancellationToken::new(),
    });
    tracing::info!(group = %shared.group, worker_id = %shared.worker_id, "worker started");
    // Ends what serves the runs only after the last of them.
    let done = CancellationToken::new();
    let (found, consumers) = watch::channel(GroupConfig::default());
    let services = TaskTracker::new();
    services.spawn(heartbeat::beat(shared.clone(), done.clone()));
    services.spawn(groups::follow(shared.clone(), found, done.clone()));
    services.spawn(hear_cancellations(shared.clone(), done.clone()));

    let runs = TaskTracker::new();
    pull::pull(&shared, consumers, &runs, &shutdown).await;
    runs.close();
    if tokio::time::timeout(builder.grace, runs.wait()).await.is_err() {
        tracing::info!(runs = runs.len(), "the grace is over: handing back what still runs");
        shared.release.cancel();
        runs.wait().await;
    }
    done.cancel();
    services.close();
    services.wait().await;
    tracing::info!(group = %shared.group, worker_id = %shared.worker_id, "worker stopped");
}

/// Cancels runs as the scheduler asks.
async fn hear_cancellations(shared: Arc<Shared>, done: CancellationToken) {
    let subject = format!("{}.control.cancel.{}.*", shared.prefix.as_str(), shared.group);
    let Ok(mut orders) = shared.client.subscribe(subject).await else { return };
    while let Some(Some(order)) = done.run_until_cancelled(orders.next()).await {
        let run = order.subject.rsplit('.').next().and_then(|run| run.parse::<RunId>().ok());
        if let Some(cancel) = run.and_then(|run| shared.running().get(&run).cloned()) {
            cancel.cancel();
        }
    }
}
