//! The nodes, whether this one can do its work, and what happens live.

use std::time::Duration;

use bytes::Bytes;
use futures::stream::BoxStream;

use super::Service;
use crate::api::ApiError;
use crate::api::view::{Nodes, Readiness};

/// How long nodes have to answer.
const NODES_WAIT: Duration = Duration::from_millis(300);
/// How long the database has to prove that it is there.
const READY_WAIT: Duration = Duration::from_secs(3);

impl Service {
    /// The nodes that answer.
    ///
    /// # Errors
    /// NATS is away.
    pub async fn nodes(&self) -> Result<Nodes, ApiError> {
        let mut nodes = self.bus.ask_nodes(NODES_WAIT).await?;
        nodes.sort_by(|a, b| (&a.node_id, a.instance).cmp(&(&b.node_id, b.instance)));
        Ok(Nodes { nodes })
    }

    /// Whether this node can do its work: the database takes writes and is migrated, NATS is connected. Answers within
    /// seconds, whatever is the matter.
    pub async fn readiness(&self) -> Readiness {
        let database = match tokio::time::timeout(READY_WAIT, async {
            self.store.ping().await?;
            self.store.database_id().await
        })
        .await
        {
            Ok(Ok(_)) => "ok".to_owned(),
            Ok(Err(e)) => e.to_string(),
            Err(_) => "the database does not answer".to_owned(),
        };
        let nats = if self.bus.connected_for().is_zero() { "NATS is not connected" } else { "ok" }.to_owned();
        Readiness { ready: database == "ok" && nats == "ok", database, nats }
    }

    /// State changes of runs as they happen: (state, body). What happens while nobody listens is not told again.
    ///
    /// # Errors
    /// NATS is away.
    pub async fn notices(&self) -> Result<BoxStream<'static, (String, Bytes)>, ApiError> {
        use futures::StreamExt;
        let prefix = format!("{}.notice.", self.settings.prefix.as_str());
        let stream = self.bus.hear(&self.settings.prefix.all_notices()).await?;
        let stream = stream.map(move |(subject, body)| {
            let rest = subject.strip_prefix(&prefix).unwrap_or(&subject);
            (rest.split('.').next().unwrap_or_default().to_owned(), body)
        });
        Ok(stream.boxed())
    }
}
