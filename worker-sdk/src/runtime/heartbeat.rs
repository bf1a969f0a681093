//! Tells every 3 s that the worker lives, in KV `ax_workers`; the entry dies with its bucket's max_age of 10 s.

use std::sync::Arc;
use std::time::Duration;

use async_nats::HeaderMap;
use ax_shared::wire::WorkerEntry;
use bytes::Bytes;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::Shared;

const BEAT_EVERY: Duration = Duration::from_secs(3);

pub(super) async fn beat(shared: Arc<Shared>, done: CancellationToken) {
    let subject = format!("$KV.{}.{}.{}", shared.prefix.bucket("workers"), shared.group, shared.worker_id);
    let host = host();
    let mut every = tokio::time::interval(BEAT_EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while done.run_until_cancelled(every.tick()).await.is_some() {
        let mut running: Vec<_> = shared.running().keys().copied().collect();
        running.sort();
        let entry = WorkerEntry {
            worker_id: shared.worker_id.clone(),
            group: shared.group.clone(),
            host: host.clone(),
            pid: std::process::id(),
            sdk: concat!("rust ", env!("CARGO_PKG_VERSION")).into(),
            capacity: shared.capacity.total(),
            running,
        };
        if let Ok(body) = serde_json::to_vec(&entry) {
            put(&shared, &subject, HeaderMap::new(), body.into()).await;
        }
    }
    let mut headers = HeaderMap::new();
    headers.insert("KV-Operation", "DEL");
    put(&shared, &subject, headers, Bytes::new()).await;
}

async fn put(shared: &Shared, subject: &str, headers: HeaderMap, body: Bytes) {
    let stored = async { shared.jetstream.publish_with_headers(subject.to_owned(), headers, body).await?.await };
    match tokio::time::timeout(super::ANSWER_WITHIN, stored).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tracing::debug!(%error, "the heartbeat was not stored"),
        Err(_) => tracing::debug!("the heartbeat was not answered"),
    }
}

/// Host, process id and a random part.
pub(super) fn made_up_id() -> String {
    let random = uuid::Uuid::now_v7().simple().to_string();
    key_safe(&format!("{}-{}-{}", host(), std::process::id(), &random[random.len() - 6..]))
}

/// An id that can be a token of a key.
pub(super) fn key_safe(id: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || c == '_' || c == '-' { c } else { '-' };
    let id: String = id.chars().map(safe).take(64).collect();
    if id.is_empty() { "worker".into() } else { id }
}

fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = name.or_else(|| std::env::var("HOSTNAME").ok()).or_else(|| std::env::var("COMPUTERNAME").ok());
    name.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).unwrap_or_else(|| "unknown".into())
}
