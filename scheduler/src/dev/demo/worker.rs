//! A worker for the groups of the examples.

use ax_shared::Prefix;
use tokio_util::sync::CancellationToken;

use super::Demo;

pub(super) async fn start(_nats_url: &str, _prefix: &Prefix, _stop: CancellationToken) -> anyhow::Result<Demo> {
    Ok(Demo { workers: Vec::new() })
}
