//! The composition root: the only place that names concrete types. Ordered start, ordered drain.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use ax_shared::Timestamp;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::api::nats::NatsDoor;
use crate::api::tokens::Tokens;
use crate::bus::nats::{NatsBus, NatsConfig};
use crate::loops::clock::{self, SystemClock};
use crate::loops::lead::{self, Candidate};
use crate::loops::{Context, Settings};
use crate::ports::{Bus, Clock, Guard, NodeInfo, Store};
use crate::telemetry::otel::OtelConfig;
use crate::telemetry::{self, Traces};

/// What a node is started with.
#[derive(Debug, Clone)]
pub struct NodeOptions {
    /// Name of this node, unique among those that run.
    pub node_id: String,
    /// The database.
    pub database_url: String,
    /// NATS, with the prefix and the lifetime of the lease.
    pub nats: NatsConfig,
    /// Address of the HTTP API; port 0 takes a free one. Anything but loopback takes tokens in the database.
    pub http_addr: SocketAddr,
    /// Whether definitions that leave important fields to their defaults are refused.
    pub strict: bool,
    /// How the loops go.
    pub settings: Settings,
    /// Where traces go. Defaults to nowhere.
    pub otel: OtelConfig,
}

/// A running scheduler node.
pub struct Node {
    http_addr: SocketAddr,
    store: Arc<dyn Store>,
    bus: Arc<dyn Bus>,
    lead: JoinHandle<()>,
    http: JoinHandle<std::io::Result<()>>,
    door: NatsDoor,
    clock: JoinHandle<()>,
    stop: CancellationToken,
    stop_http: CancellationToken,
    traces: Traces,
    _serving: Guard,
}

/// How long another node with the same name may take to answer.
const ASK_NODE: Duration = Duration::from_millis(500);
/// How long requests under way may take to finish when the node stops.
const DRAIN_HTTP: Duration = Duration::from_secs(5);

impl Node {
    /// Starts a node: address, database, NATS, name, clock, API, election, in this order, so that what cannot work is
    /// told before anybody sees this node. It stops when `stop` is cancelled.
    ///
    /// # Errors
    /// What cannot work, with its cause.
    pub async fn start(options: NodeOptions, stop: CancellationToken) -> anyhow::Result<Self> {
        let listener = crate::api::http::bind(options.http_addr).await?;
        let http_addr = listener.local_addr().context("the address of the HTTP listener")?;

        let store = crate::store::open(&options.database_url).await?;
        let applied = store.migrate().await?;
        if !applied.is_empty() {
            tracing::info!(steps = applied.join(", "), "the database's schema was brought up to date");
        }
        let database_id = store.database_id().await?;
        let clock = Arc::new(SystemClock::new());
        let tokens = Arc::new(Tokens::read(store.clone(), clock.clone()).await?);
        let access = crate::api::http::admit(http_addr, tokens.clone())?;

        let prefix = options.nats.prefix.clone();
        let nats = NatsBus::connect(options.nats.clone()).await?;
        let client = nats.client();
        let bus: Arc<dyn Bus> = nats;
        bus.prepare(database_id).await?;

        let instance = Uuid::new_v4();
        let serving = join(&bus, &options, instance).await?;

        clock::measure_first(&clock, &store).await.context("measure the offset to the database's clock")?;
        let measuring = tokio::spawn(clock::run(clock.clone(), store.clone(), stop.child_token()));

        let candidate =
            Candidate { node_id: options.node_id.clone(), instance, leading: Arc::new(AtomicBool::new(false)) };
        let epoch = Arc::new(AtomicU64::new(0));
        let info = describe(&candidate, &epoch, &clock, http_addr);
        let told = bus.serve_node(&options.node_id, info).await?;
        drop(serving);

        let service = Arc::new(crate::api::service::Service::new(
            store.clone(),
            bus.clone(),
            clock.clone(),
            crate::api::service::Settings {
                node_id: options.node_id.clone(),
                prefix: prefix.clone(),
                strict: options.strict,
            },
        ));
        let stop_http = CancellationToken::new();
        let metrics = crate::metrics::install().ok();
        if let Some(handle) = metrics.clone() {
            tokio::spawn(crate::metrics::keep_up(handle));
        }
        let traces = Traces::start(&options.otel, &options.node_id);
        let door = NatsDoor::open(client, prefix.clone(), service.clone()).await.context("serve the API over NATS")?;
        let mut router = crate::api::http::router(service, access, metrics, stop_http.clone());
        if traces.is_on() {
            router = router.layer(axum::middleware::from_fn_with_state(traces.clone(), telemetry::http::traced));
        }
        tokio::spawn(tokens.keep_up(stop_http.clone()));
        let http = tokio::spawn(crate::api::http::serve(listener, router, stop_http.clone()));

        let cx = Context {
            store: store.clone(),
            bus: bus.clone(),
            clock,
            prefix,
            settings: options.settings,
            epoch,
            traces: traces.clone(),
        };
        let lead = tokio::spawn(lead::run(cx, candidate, stop.clone()));
        tracing::info!(node_id = options.node_id, %http_addr, %database_id, "node started");
        Ok(Self { http_addr, store, bus, lead, http, door, clock: measuring, stop, stop_http, traces, _serving: told })
    }

    /// Where the API listens.
    #[must_use]
    pub fn http_addr(&self) -> SocketAddr {
        self.http_addr
    }

    /// The node's bus, for what runs beside it.
    #[must_use]
    pub fn bus(&self) -> Arc<dyn Bus> {
        self.bus.clone()
    }

    /// The node's database.
    #[must_use]
    pub fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    /// Runs until stopped: hands the lease over first, then lets requests under way finish, then sends the last spans.
    ///
    /// # Errors
    /// When the API ended by itself.
    pub async fn wait(self) -> anyhow::Result<()> {
        let Self { lead, mut http, door, clock, stop, stop_http, traces, .. } = self;
        tokio::select! {
            () = stop.cancelled() => {}
            ended = &mut http => {
                stop.cancel();
                let _ = lead.await;
                ended.context("the HTTP server panicked")?.context("the HTTP server ended")?;
                anyhow::bail!("the HTTP server ended");
            }
        }
        let _ = lead.await;
        stop_http.cancel();
        let _ = tokio::join!(tokio::time::timeout(DRAIN_HTTP, http), door.close());
        // Last, so that the spans of what ended meanwhile go out, too.
        traces.stop().await;
        let _ = clock.await;
        Ok(())
    }
}

/// Claims this node's name: refused while another process answers to it.
async fn join(bus: &Arc<dyn Bus>, options: &NodeOptions, instance: Uuid) -> anyhow::Result<Guard> {
    if let Some(other) = bus.ask_node(&options.node_id, ASK_NODE).await? {
        anyhow::bail!(
            "node id {:?} is in use by process {} on {} (started {}); give this node another one (AX_NODE_ID)",
            options.node_id,
            other.pid,
            other.host,
            other.started_at,
        );
    }
    // Answer from now on, then ask once more: of two processes that start at the same moment each sees the other.
    let node_id = options.node_id.clone();
    let placeholder = NodeInfo {
        node_id: node_id.clone(),
        instance,
        version: crate::VERSION.into(),
        leader: false,
        epoch: 0,
        clock_offset_ms: 0.0,
        started_at: SystemClock::new().now(),
        http_addr: String::new(),
        host: host(),
        pid: std::process::id(),
    };
    let serving = bus.serve_node(&node_id, Arc::new(move || placeholder.clone())).await?;
    for other in bus.ask_nodes(ASK_NODE).await? {
        // The one with the smaller instance id stays.
        if other.node_id == node_id && other.instance < instance {
            anyhow::bail!("node id {node_id:?} is in use by process {} on {}", other.pid, other.host);
        }
    }
    Ok(serving)
}

fn describe(
    candidate: &Candidate,
    epoch: &Arc<AtomicU64>,
    clock: &Arc<SystemClock>,
    http_addr: SocketAddr,
) -> Arc<dyn Fn() -> NodeInfo + Send + Sync> {
    let (candidate, epoch, clock) = (candidate.clone(), epoch.clone(), clock.clone());
    let (host, started_at): (String, Timestamp) = (host(), clock.now());
    Arc::new(move || NodeInfo {
        node_id: candidate.node_id.clone(),
        instance: candidate.instance,
        version: crate::VERSION.into(),
        leader: candidate.leading.load(Ordering::Relaxed),
        epoch: epoch.load(Ordering::Relaxed),
        clock_offset_ms: clock.offset_ms(),
        started_at,
        http_addr: http_addr.to_string(),
        host: host.clone(),
        pid: std::process::id(),
    })
}

/// This machine's name, as the kernel tells it.
#[must_use]
pub fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Runs a node until `stop` is cancelled, telling once on standard output where it listens.
///
/// # Errors
/// What cannot work, with its cause.
pub async fn server(options: NodeOptions, stop: CancellationToken) -> anyhow::Result<()> {
    let node = tokio::select! {
        () = stop.cancelled() => return Ok(()),
        node = Node::start(options, stop.clone()) => node?,
    };
    announce(node.http_addr());
    node.wait().await
}

/// Tells where the API listens, in the one line that programs wait for.
pub(crate) fn announce(http_addr: SocketAddr) {
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "ax: listening on http://{http_addr}");
    let _ = out.flush();
}
