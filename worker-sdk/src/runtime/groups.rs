//! Which consumers the group has: KV `ax_groups`, watched, and read again every 30 s in case the watch went deaf.

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::kv::{Operation, Store};
use ax_shared::wire::GroupConfig;
use futures::StreamExt;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::Shared;

const RESCAN_EVERY: Duration = Duration::from_secs(30);
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Keeps `found` at what the group's key says, until `done`.
pub(super) async fn follow(shared: Arc<Shared>, found: watch::Sender<GroupConfig>, done: CancellationToken) {
    loop {
        let following = async {
            if let Err(error) = follow_once(&shared, &found).await {
                tracing::debug!(%error, "following the group's consumers begins anew");
            }
            tokio::time::sleep(TRY_AGAIN_AFTER).await;
        };
        if done.run_until_cancelled(following).await.is_none() {
            return;
        }
    }
}

async fn follow_once(shared: &Shared, found: &watch::Sender<GroupConfig>) -> Result<(), async_nats::Error> {
    let store: Store = shared.jetstream.get_key_value(shared.prefix.bucket("groups")).await?;
    let key = shared.group.as_str();
    let mut changes = store.watch_with_history(key).await?;
    let mut rescan = tokio::time::interval(RESCAN_EVERY);
    loop {
        let entry = tokio::select! {
            entry = changes.next() => match entry {
                Some(entry) => Some(entry?),
                None => return Ok(()),
            },
            _ = rescan.tick() => store.entry(key).await?,
        };
        let config = match entry {
            Some(entry) if entry.operation == Operation::Put => serde_json::from_slice(&entry.value)?,
            _ => GroupConfig::default(),
        };
        found.send_if_modified(|now| {
            let changed = *now != config;
            if changed {
                tracing::info!(group = key, consumers = config.consumers.len(), "consumers of the group");
                *now = config;
            }
            changed
        });
    }
}
