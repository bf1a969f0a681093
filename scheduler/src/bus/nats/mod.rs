//! The bus on NATS JetStream.
//!
//! ```text
//!   connect    options, addresses, what a server must be
//!   api        one request and its answer, with a deadline and a duration in the metrics
//!   topology   streams and buckets, made or corrected
//!   lease      compare-and-set on the leader key        asks       leader, nodes, hints
//!   publisher  the connection that never comes back     triggers   what is in AX_TRIGGERS
//!   consumers  pull consumers and the poke              events     the one ordered reader
//!   kv         groups, workers, idempotency keys        notices    told and heard, never stored
//! ```
//!
//! Invariants: nothing waits longer than its deadline; nothing is handed to a connection that is down, so that no
//! request is sent after its caller has given up; whatever decides something is read from the stream's leader, never
//! by direct get.

mod api;
mod asks;
mod connect;
mod consumers;
mod events;
mod kv;
mod lease;
mod notices;
mod publisher;
mod topology;
mod triggers;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use ax_shared::wire::{GroupConfig, WorkerEntry};
use ax_shared::{ConsumerName, Group, Prefix, RunId, TaskId};
use bytes::Bytes;
use futures::stream::BoxStream;
use uuid::Uuid;

use self::api::Api;
use self::connect::Uptime;
use crate::ports::{
    Bus, BusError, ConsumerState, Guard, Hint, LeaderAnswer, LeaseEntry, LeaseValue, LeaseWrite, NodeInfo, Publisher,
    StreamMessage, StreamState,
};

/// How to reach NATS and what to call things there.
#[derive(Debug, Clone)]
pub struct NatsConfig {
    /// Addresses, each perhaps several separated by commas: `nats://host:4222`, `tls://…`, with `user:password@` or
    /// `token@` where the server wants them.
    pub urls: Vec<String>,
    /// Credentials file (`.creds`).
    pub creds: Option<PathBuf>,
    /// What goes before every subject, stream and bucket. Defaults to `ax`.
    pub prefix: Prefix,
    /// Name of the connections, as the server lists them.
    pub name: String,
    /// How long the lease lives without renewal: the max_age of its bucket. Defaults to 5 s.
    pub lease_ttl: Duration,
}

impl NatsConfig {
    /// The defaults, at one address.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            urls: vec![url.into()],
            creds: None,
            prefix: Prefix::default(),
            name: "ax".into(),
            lease_ttl: Duration::from_secs(5),
        }
    }

    /// Opens a connection of its own, for what runs beside a node. The server is not checked.
    ///
    /// # Errors
    /// [`BusError::Unavailable`] when no server answers, [`BusError::Refused`] for a wrong address or wrong credentials.
    pub(crate) async fn client(&self) -> Result<async_nats::Client, BusError> {
        connect::general(self, &Uptime::default()).await
    }
}

/// The bus on a NATS connection that reconnects for ever.
#[derive(Debug)]
pub struct NatsBus {
    config: NatsConfig,
    api: Api,
    uptime: Uptime,
}

impl NatsBus {
    /// Connects and checks the server. Takes at most about 5 s.
    ///
    /// # Errors
    /// [`BusError::Unavailable`] when no server answers, [`BusError::Refused`] for a wrong address or wrong
    /// credentials, [`BusError::Incompatible`] for a server that is too old or has no JetStream.
    pub async fn connect(config: NatsConfig) -> Result<Arc<Self>, BusError> {
        let uptime = Uptime::default();
        let client = connect::general(&config, &uptime).await?;
        let bus = Self { api: Api::new(client), config, uptime };
        bus.check_server().await?;
        Ok(Arc::new(bus))
    }

    /// The connection, for a door that is no part of the bus.
    #[must_use]
    pub fn client(&self) -> async_nats::Client {
        self.api.client().clone()
    }
}

#[async_trait]
impl Bus for NatsBus {
    async fn prepare(&self, database_id: Uuid) -> Result<(), BusError> {
        self.check_server().await?;
        self.prepare_topology(database_id).await
    }

    fn connected_for(&self) -> Duration {
        if self.api.is_connected() { self.uptime.elapsed() } else { Duration::ZERO }
    }

    async fn lease(&self) -> Result<Option<LeaseEntry>, BusError> {
        self.read_lease().await
    }

    async fn lease_take(&self, value: &LeaseValue, expected: Option<u64>) -> Result<LeaseWrite, BusError> {
        self.take_lease(value, expected).await
    }

    async fn lease_release(&self, revision: u64) -> Result<LeaseWrite, BusError> {
        self.release_lease(revision).await
    }

    async fn ask_leader(&self, timeout: Duration) -> Result<LeaderAnswer, BusError> {
        self.ask_for_leader(timeout).await
    }

    async fn serve_leader(&self, value: LeaseValue) -> Result<Guard, BusError> {
        self.answer_as_leader(value).await
    }

    async fn serve_node(
        &self,
        node_id: &str,
        info: Arc<dyn Fn() -> NodeInfo + Send + Sync>,
    ) -> Result<Guard, BusError> {
        self.answer_as_node(node_id, info).await
    }

    async fn ask_node(&self, node_id: &str, timeout: Duration) -> Result<Option<NodeInfo>, BusError> {
        self.ask_for_node(node_id, timeout).await
    }

    async fn ask_nodes(&self, wait: Duration) -> Result<Vec<NodeInfo>, BusError> {
        self.ask_all_nodes(wait).await
    }

    async fn hint(&self, hint: Hint) {
        self.give_hint(hint).await;
    }

    async fn hints(&self) -> Result<BoxStream<'static, Hint>, BusError> {
        self.hear_hints().await
    }

    async fn triggers(&self) -> Result<StreamState, BusError> {
        self.stream_state(&self.config.prefix.triggers_stream()).await
    }

    async fn events(&self) -> Result<StreamState, BusError> {
        self.stream_state(&self.config.prefix.events_stream()).await
    }

    async fn read_events(&self, after: u64) -> Result<BoxStream<'static, Result<StreamMessage, BusError>>, BusError> {
        self.open_events(after).await
    }

    async fn trigger_at(&self, seq: u64) -> Result<Option<StreamMessage>, BusError> {
        self.trigger_by_seq(seq).await
    }

    async fn next_trigger(&self, from: u64) -> Result<Option<StreamMessage>, BusError> {
        self.trigger_from(from).await
    }

    async fn last_trigger(&self, subject: &str) -> Result<Option<StreamMessage>, BusError> {
        self.last_trigger_of(subject).await
    }

    async fn publisher(&self) -> Result<Arc<dyn Publisher>, BusError> {
        Ok(Arc::new(publisher::NatsPublisher::open(&self.config).await?))
    }

    async fn consumers(&self) -> Result<Vec<ConsumerState>, BusError> {
        self.list_consumers().await
    }

    async fn consumer(&self, name: &ConsumerName) -> Result<Option<ConsumerState>, BusError> {
        self.consumer_state(&name.to_string()).await
    }

    async fn ensure_consumer(&self, name: &ConsumerName) -> Result<(), BusError> {
        self.make_consumer(name).await
    }

    async fn remove_consumer(&self, name: &str) -> Result<(), BusError> {
        self.delete_consumer(name).await
    }

    async fn poke(&self, name: &str) -> Result<(), BusError> {
        self.poke_consumer(name).await
    }

    async fn groups(&self) -> Result<BTreeMap<Group, GroupConfig>, BusError> {
        self.read_groups().await
    }

    async fn put_group(&self, group: &Group, config: Option<&GroupConfig>) -> Result<(), BusError> {
        self.write_group(group, config).await
    }

    async fn workers(&self) -> Result<Vec<WorkerEntry>, BusError> {
        self.read_workers().await
    }

    async fn claim_key(&self, task: &TaskId, key: &str, proposed: RunId, window: Duration) -> Result<RunId, BusError> {
        self.claim(task, key, proposed, window).await
    }

    async fn tell(&self, subject: String, body: Bytes) {
        self.send_notice(subject, body).await;
    }

    async fn hear(&self, subject: &str) -> Result<BoxStream<'static, (String, Bytes)>, BusError> {
        self.subscribe_notices(subject).await
    }
}
