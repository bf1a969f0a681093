//! A scheduler process: the real loops and the real API on ports of the simulation.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use ax_scheduler::api::service::{Service, Settings as ApiSettings};
use ax_scheduler::loops::lead::{self, Candidate};
use ax_scheduler::loops::{Context, Settings};
use ax_scheduler::telemetry::Traces;
use ax_shared::Prefix;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::link::{Link, NodeClock};
use crate::ports::{HORIZON, SimBus, SimStore};
use crate::rng::Rng;
use crate::world::World;

/// Lifetime of the lease.
pub(crate) const LEASE_TTL: Duration = Duration::from_secs(5);

/// A process that runs.
pub(crate) struct Node {
    pub(crate) link: Arc<Link>,
    pub(crate) service: Arc<Service>,
    stop: CancellationToken,
    lead: JoinHandle<()>,
}

impl Node {
    /// Starts a process; `life` counts all that there have been.
    pub(crate) fn start(world: &Arc<World>, name: &str, life: u64, rng: Rng, offset_ms: i64) -> Self {
        let link = Link::new(world.clone(), name.to_owned(), rng, offset_ms);
        world.say(format_args!("{name} starts, {offset_ms} ms off"));
        let (store, bus) = (Arc::new(SimStore(link.clone())), Arc::new(SimBus(link.clone())));
        let clock = Arc::new(NodeClock(link.clone()));
        let settings = Settings { lease_ttl: LEASE_TTL, plan_horizon: HORIZON, ..Settings::default() };
        let cx = Context {
            store: store.clone(),
            bus: bus.clone(),
            clock: clock.clone(),
            prefix: Prefix::default(),
            settings,
            epoch: Arc::new(AtomicU64::new(0)),
            traces: Traces::default(),
        };
        let candidate = Candidate {
            node_id: name.to_owned(),
            instance: Uuid::from_u128(u128::from(life)),
            leading: Arc::new(AtomicBool::new(false)),
        };
        let stop = CancellationToken::new();
        let lead = tokio::spawn(lead::run(cx, candidate, stop.clone()));
        let api = ApiSettings { node_id: name.to_owned(), prefix: Prefix::default(), strict: false };
        let service = Arc::new(Service::new(store, bus, clock, api));
        Self { link, service, stop, lead }
    }

    /// Kills the process between two of its calls.
    pub(crate) fn kill(self) {
        if !self.link.is_dead() {
            self.link.world.died(&self.link.node);
        }
        self.link.kill();
        // What it still does in its own memory is of no consequence; let it come to rest.
        self.stop.cancel();
        self.lead.abort();
    }

    /// Stops the process cleanly; it is gone when it has come to its end, or after 10 s.
    pub(crate) fn stop(self) {
        self.link.world.say(format_args!("{} is stopped", self.link.node));
        self.stop.cancel();
        tokio::spawn(async move {
            let ended = tokio::time::timeout(Duration::from_secs(10), self.lead).await;
            self.link.world.say(format_args!("{} has stopped ({})", self.link.node, ended.is_ok()));
            self.link.kill();
        });
    }
}
