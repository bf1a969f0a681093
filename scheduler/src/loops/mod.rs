//! The background loops: one file each, each woken by a signal *and* by a timer, each idempotent.
//!
//! [`lead`] waits for the lease and runs a [`term`] while it holds it. Within a term `plan`, `adopt`, `fire`, `deliver`,
//! `settle`, `flush`, `effects`, `reconcile` and `compensate` share one [`Term`]; the first of them that ends ends the
//! term. What a loop does when NATS or SQL is away is to try again; only the loss of the lease or of the fence ends it.

mod adopt;
pub mod clock;
mod command;
mod compensate;
mod deliver;
mod effects;
mod fire;
mod flush;
pub mod lead;
mod orphans;
mod plan;
mod reconcile;
mod settle;
pub mod term;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use ax_shared::{Prefix, RunId};
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

use crate::core::lease::Trust;
use crate::core::shard::Shard;
use crate::ports::{Bus, Clock, LeaseValue, Publisher, Store, StoreError};
use crate::telemetry::Traces;

pub use term::Term;

/// What the loops need of their surroundings.
#[derive(Clone)]
pub struct Context {
    /// The database.
    pub store: Arc<dyn Store>,
    /// NATS.
    pub bus: Arc<dyn Bus>,
    /// The corrected clock.
    pub clock: Arc<dyn Clock>,
    /// Subjects and names.
    pub prefix: Prefix,
    /// How the loops go.
    pub settings: Settings,
    /// The highest epoch that this node has seen or held.
    pub epoch: Arc<AtomicU64>,
    /// Where traces of runs go.
    pub traces: Traces,
}

/// How the loops go. Durations are real time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Lifetime of the lease. Defaults to 5 s.
    pub lease_ttl: Duration,
    /// How far ahead runs are committed. Defaults to 2 s.
    pub plan_horizon: Duration,
    /// How often the compensation looks for what was missed. Defaults to 60 s.
    pub sweep_interval: Duration,
    /// How long changes are collected before they are written. Defaults to 20 ms.
    pub flush_interval: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            lease_ttl: Duration::from_secs(5),
            plan_horizon: Duration::from_secs(2),
            sweep_interval: Duration::from_secs(60),
            flush_interval: Duration::from_millis(20),
        }
    }
}

/// Why a term ended.
#[derive(Debug, thiserror::Error)]
pub enum EndOfTerm {
    /// The program stops.
    #[error("stopped")]
    Stopped,
    /// Another node has the lease, or it could not be renewed in time.
    #[error("the lease is lost: {0}")]
    LeaseLost(&'static str),
    /// The database has a higher epoch.
    #[error(transparent)]
    Fenced(StoreError),
    /// The term could not begin; it is tried again.
    #[error("takeover failed: {0}")]
    Takeover(#[source] anyhow::Error),
}

/// The lease as this node holds it.
#[derive(Debug)]
pub(crate) struct HeldLease {
    pub(crate) value: LeaseValue,
    pub(crate) revision: u64,
    pub(crate) trust: Trust,
}

/// Signals between the loops of a term.
#[derive(Debug, Default)]
pub(crate) struct Wake {
    pub(crate) plan: Notify,
    pub(crate) adopt: Notify,
    pub(crate) fire: Notify,
    pub(crate) deliver: Notify,
    pub(crate) flush: Notify,
}

impl Term {
    /// The shard. Never held across an await.
    pub(crate) fn shard(&self) -> MutexGuard<'_, Shard> {
        self.shard.lock().expect("no loop panics while it holds the shard")
    }

    /// Whether this node may act as leader now.
    pub(crate) fn may_act(&self) -> bool {
        self.lease.lock().expect("lease").trust.holds(self.cx.clock.boot())
    }

    /// The publishing connection, if it is up.
    pub(crate) fn publisher(&self) -> Option<Arc<dyn Publisher>> {
        self.publisher.borrow().clone().filter(|p| !p.is_closed())
    }

    /// Remembers that the database took a write of ours just now.
    pub(crate) fn note_commit(&self) {
        self.last_commit_ms.store(self.cx.clock.boot().as_millis() as u64, Ordering::Relaxed);
    }

    /// Time since the database last took a write of ours.
    pub(crate) fn since_commit(&self) -> Duration {
        self.cx.clock.boot().saturating_sub(Duration::from_millis(self.last_commit_ms.load(Ordering::Relaxed)))
    }

    /// Judges the answer of a database operation: Some = done; None = try again, after a wait that is over by now.
    ///
    /// # Errors
    /// When the fence answered or the term has ended.
    pub(crate) async fn done<T>(
        &self,
        what: &'static str,
        answer: Result<T, StoreError>,
    ) -> Result<Option<T>, EndOfTerm> {
        match answer {
            Ok(value) => {
                self.note_commit();
                Ok(Some(value))
            }
            Err(e @ StoreError::Fenced { .. }) => Err(EndOfTerm::Fenced(e)),
            Err(e) => {
                self.rows_in_doubt.store(true, Ordering::Relaxed);
                tracing::warn!(error = %Chain(&e), what, "the database did not do it; trying again");
                if pause(AGAIN, &self.ended).await { Ok(None) } else { Err(EndOfTerm::Stopped) }
            }
        }
    }
}

/// Wait before a database operation is tried again.
const AGAIN: Duration = Duration::from_millis(250);

/// A due run and the runs that hold it back.
pub(crate) type Blocked = (RunId, Vec<RunId>);

/// Shows an error with all its sources.
pub struct Chain<'a>(pub &'a (dyn std::error::Error + 'a));

impl std::fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut source = self.0.source();
        while let Some(e) = source {
            write!(f, ": {e}")?;
            source = e.source();
        }
        Ok(())
    }
}

/// Waits for a signal, at most `timeout`; false when the term has ended.
pub(crate) async fn wait(signal: &Notify, timeout: Duration, ended: &CancellationToken) -> bool {
    tokio::select! {
        biased;
        () = ended.cancelled() => false,
        () = signal.notified() => true,
        () = tokio::time::sleep(timeout) => true,
    }
}

/// Waits; false when the term has ended.
pub(crate) async fn pause(timeout: Duration, ended: &CancellationToken) -> bool {
    tokio::select! {
        biased;
        () = ended.cancelled() => false,
        () = tokio::time::sleep(timeout) => true,
    }
}

pub(crate) type SharedBool = Arc<AtomicBool>;

/// How far something has come, for those that wait for it; they go on in the order in which they began to wait.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    at: AtomicU64,
    moved: Notify,
}

impl Progress {
    pub(crate) fn new(at: u64) -> Self {
        Self { at: AtomicU64::new(at), moved: Notify::new() }
    }

    /// It is at `at` now, which may be less than before: what it counts may begin anew.
    pub(crate) fn set(&self, at: u64) {
        self.at.store(at, Ordering::SeqCst);
        self.moved.notify_waiters();
    }

    pub(crate) fn get(&self) -> u64 {
        self.at.load(Ordering::SeqCst)
    }

    /// Waits until it has come to `at`.
    pub(crate) async fn reached(&self, at: u64) {
        loop {
            let moved = self.moved.notified();
            let mut moved = std::pin::pin!(moved);
            // Before looking, so that what moves while looking wakes.
            moved.as_mut().enable();
            if self.get() >= at {
                return;
            }
            moved.await;
        }
    }
}

pub(crate) type BlockedSender = mpsc::UnboundedSender<Blocked>;
pub(crate) type ShardCell = Mutex<Shard>;
pub(crate) type Millis = AtomicU64;
