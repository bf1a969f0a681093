//! A nats-server, a database and nodes: what most tests start from.

use anyhow::Result;
use async_nats::jetstream;
use serde_json::{Value, json};

use crate::api::Api;
use crate::ax::{Node, ServerOptions};
use crate::nats::{Nats, NatsOptions};
use crate::{Deadline, Scratch, postgres};

/// Which database the nodes use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Database {
    /// A database of its own in the Postgres that the tests of one process share.
    Postgres,
    /// A file of its own.
    Sqlite,
}

/// A nats-server and a database of the test's own.
#[derive(Debug)]
pub struct World {
    /// The server.
    pub nats: Nats,
    /// The database's URL.
    pub database_url: String,
    // Dropped last: the database file may lie in it.
    _folder: Scratch,
}

impl World {
    /// Starts the surroundings; no node yet.
    ///
    /// # Errors
    /// When a part does not start.
    pub async fn start(database: Database) -> Result<Self> {
        Self::start_with(database, NatsOptions::default()).await
    }

    /// Starts the surroundings with a nats-server of another kind.
    ///
    /// # Errors
    /// When a part does not start.
    pub async fn start_with(database: Database, options: NatsOptions) -> Result<Self> {
        let folder = Scratch::new("world")?;
        let nats = Nats::start_with(options).await?;
        let database_url = match database {
            Database::Postgres => postgres::database().await?,
            Database::Sqlite => format!("sqlite://{}", folder.join("ax.db").display()),
        };
        Ok(Self { nats, database_url, _folder: folder })
    }

    /// Returns how a node called `node_id` is started here.
    #[must_use]
    pub fn options(&self, node_id: &str) -> ServerOptions {
        ServerOptions {
            nats_url: self.nats.url(),
            database_url: self.database_url.clone(),
            node_id: node_id.to_owned(),
            ..ServerOptions::default()
        }
    }

    /// Starts a node and waits until it serves.
    ///
    /// # Errors
    /// When it does not.
    pub async fn node(&self, node_id: &str) -> Result<Node> {
        Node::start(&self.options(node_id)).await
    }

    /// Starts a node and waits until it leads.
    ///
    /// # Errors
    /// When it does not.
    pub async fn leader(&self, node_id: &str) -> Result<(Node, Api)> {
        let node = self.node(node_id).await?;
        let api = node.api();
        api.has_leader(Deadline::seconds(30)).await?;
        Ok((node, api))
    }

    /// Connects to JetStream.
    ///
    /// # Errors
    /// When the server does not answer.
    pub async fn jetstream(&self) -> Result<jetstream::Context> {
        self.nats.jetstream().await
    }
}

/// Returns a definition that leaves nothing to a default which ax would warn about: group `test`, timeout one minute, no
/// retries. The fields of `more` are added, or replace these.
#[must_use]
pub fn task(task_id: &str, more: Value) -> Value {
    let mut definition = json!({
        "task_id": task_id,
        "executor_group": "test",
        "timeout_ms": 60_000,
        "max_retry": 0,
        "dedup_window_seconds": 60,
    });
    if let (Some(definition), Value::Object(more)) = (definition.as_object_mut(), more) {
        definition.extend(more);
    }
    definition
}
