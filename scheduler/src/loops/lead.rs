//! Waits for the lease, leads while it is held, and begins anew.
//!
//! After a crash nobody waits out the TTL: followers ask `ax.internal.leader` every 200 ms, and two answers "no
//! responders" in a row, on a connection that has been up for a second, mean that the process is gone. That may be
//! wrong; it is safe because of the fence: the old leader's writes fail on the epoch and its publishing connection on
//! the lease. After a takeover that proved wrong the TTL alone decides for a minute.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{Chain, Context, EndOfTerm, HeldLease, SharedBool, Term, pause};
use crate::core::lease::{Silence, Trust};
use crate::metrics as names;
use crate::ports::{LeaderAnswer, LeaseEntry, LeaseValue, LeaseWrite};

/// How often a follower asks.
const ASK_EVERY: Duration = Duration::from_millis(200);
/// How long it waits for an answer.
const ASK_TIMEOUT: Duration = Duration::from_millis(500);

/// Who this node is in the election.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// Configured name.
    pub node_id: String,
    /// Random instance id.
    pub instance: Uuid,
    /// Set while this node leads.
    pub leading: SharedBool,
}

/// Follows and leads until `stop` is cancelled; then hands the lease over at once.
pub async fn run(cx: Context, candidate: Candidate, stop: CancellationToken) {
    let mut silence = Silence::default();
    while !stop.is_cancelled() {
        if let Some(held) = follow(&cx, &candidate, &mut silence, &stop).await {
            lead(&cx, &candidate, held, &mut silence, &stop).await;
        }
        if !pause(ASK_EVERY, &stop).await {
            return;
        }
    }
}

/// One look at the lease; Some when it is ours now.
async fn follow(
    cx: &Context,
    candidate: &Candidate,
    silence: &mut Silence,
    stop: &CancellationToken,
) -> Option<HeldLease> {
    let answer = tokio::select! {
        biased;
        () = stop.cancelled() => return None,
        answer = cx.bus.ask_leader(ASK_TIMEOUT) => answer,
    };
    let mut silent = true;
    match answer {
        Ok(LeaderAnswer::Alive(leader)) => {
            cx.epoch.fetch_max(leader.epoch, Ordering::Relaxed);
            silence.answered();
            return None;
        }
        Ok(LeaderAnswer::TimedOut) => {
            silence.answered();
            silent = false;
        }
        Ok(LeaderAnswer::NoResponders) => {}
        Err(e) => {
            silence.answered();
            tracing::debug!(error = %e, "the leader cannot be asked");
            return None;
        }
    }
    let entry = match cx.bus.lease().await {
        Ok(entry) => entry,
        Err(e) => {
            tracing::debug!(error = %e, "the lease cannot be read");
            return None;
        }
    };
    if let Some(entry) = &entry {
        if silent {
            silence.no_responders(entry.value.instance);
        }
        if !silence.means_dead(cx.clock.boot(), cx.bus.connected_for()) {
            return None;
        }
    }
    // Nobody takes the lease without a working database.
    if let Err(e) = cx.store.ping().await {
        tracing::warn!(error = %Chain(&e), "the lease is free, but the database is away; not taking it");
        return None;
    }
    take(cx, candidate, entry, silence).await
}

async fn take(
    cx: &Context,
    candidate: &Candidate,
    entry: Option<LeaseEntry>,
    silence: &mut Silence,
) -> Option<HeldLease> {
    let before = entry.as_ref().map_or(0, |e| e.value.epoch);
    let value = LeaseValue {
        node_id: candidate.node_id.clone(),
        instance: candidate.instance,
        epoch: before.max(cx.epoch.load(Ordering::Relaxed)),
        since: cx.clock.now(),
    };
    let sent_at = cx.clock.boot();
    match cx.bus.lease_take(&value, entry.as_ref().map(|e| e.revision)).await {
        Ok(LeaseWrite::Won(revision)) => {
            if let Some(entry) = entry {
                tracing::warn!(from = entry.value.node_id, "the leader is gone; taking over before its lease expires");
                if let Ok(LeaderAnswer::Alive(_)) = cx.bus.ask_leader(ASK_TIMEOUT).await {
                    tracing::error!("the leader taken for dead is alive; for a minute only the lease decides");
                    silence.proved_wrong(cx.clock.boot());
                }
            }
            Some(HeldLease { value, revision, trust: Trust::new(cx.settings.lease_ttl, sent_at) })
        }
        Ok(LeaseWrite::Lost) => None,
        Err(e) => {
            tracing::warn!(error = %e, "the lease could not be taken");
            None
        }
    }
}

async fn lead(cx: &Context, candidate: &Candidate, held: HeldLease, silence: &mut Silence, stop: &CancellationToken) {
    let lease = Arc::new(Mutex::new(held));
    let ended = stop.child_token();
    candidate.leading.store(true, Ordering::Relaxed);
    let renewing = tokio::spawn(renew(cx.clone(), lease.clone(), ended.clone()));
    // From now on: a takeover may take longer than the silence that others take for death.
    let value = lease.lock().expect("lease").value.clone();
    let end = match cx.bus.serve_leader(value).await {
        Ok(serving) => Term::run(cx.clone(), lease.clone(), serving, ended.clone()).await,
        Err(e) => EndOfTerm::Takeover(e.into()),
    };
    ended.cancel();
    let lost = renewing.await.unwrap_or(Some("the renewing loop panicked"));
    candidate.leading.store(false, Ordering::Relaxed);
    metrics::gauge!(names::LEADER.name).set(0.0);

    let (revision, epoch) = {
        let held = lease.lock().expect("lease");
        (held.revision, held.value.epoch)
    };
    match (&end, lost) {
        (EndOfTerm::Stopped, None) if stop.is_cancelled() => {
            tracing::info!(epoch, "stopping; the lease is handed over");
        }
        (_, Some(why)) => tracing::warn!(epoch, why, "stepping down"),
        (end, None) => tracing::warn!(epoch, error = %Chain(end), "stepping down"),
    }
    // Free the key if it still is ours, so that the next leader need not wait. After a failed takeover this node
    // gives others the first chance.
    if let Err(e) = cx.bus.lease_release(revision).await {
        tracing::debug!(error = %e, "the lease could not be released; it expires");
    }
    silence.answered();
    if !matches!(end, EndOfTerm::Stopped) {
        pause(cx.settings.lease_ttl / 5, stop).await;
    }
}

/// Renews the lease until the term ends. Answers why it was given up, if it was.
async fn renew(cx: Context, lease: Arc<Mutex<HeldLease>>, ended: CancellationToken) -> Option<&'static str> {
    let every = lease.lock().expect("lease").trust.renew_every();
    let mut next = every;
    loop {
        if !pause(next, &ended).await {
            return None;
        }
        let (value, revision, holds) = {
            let held = lease.lock().expect("lease");
            (held.value.clone(), held.revision, held.trust.holds(cx.clock.boot()))
        };
        if !holds {
            ended.cancel();
            return Some("the lease was not renewed in time");
        }
        let sent_at = cx.clock.boot();
        let answer = tokio::time::timeout(every, cx.bus.lease_take(&value, Some(revision))).await;
        next = every;
        match answer {
            Ok(Ok(LeaseWrite::Won(revision))) => {
                let mut held = lease.lock().expect("lease");
                held.revision = held.revision.max(revision);
                held.trust.renewed(sent_at);
            }
            Ok(Ok(LeaseWrite::Lost)) => {
                // The takeover writes the epoch to the same key: a miss against an older revision of our own is none.
                let newer = lease.lock().expect("lease").revision;
                if newer == revision && !still_ours(&cx, &lease).await {
                    ended.cancel();
                    return Some("another node has the lease");
                }
                next = Duration::from_millis(20);
            }
            Ok(Err(_)) | Err(_) => next = Duration::from_millis(100),
        }
    }
}

/// After a compare-and-set that missed: a write of ours whose answer was lost may have moved the revision.
pub(super) async fn still_ours(cx: &Context, lease: &Mutex<HeldLease>) -> bool {
    let instance = lease.lock().expect("lease").value.instance;
    match cx.bus.lease().await {
        Ok(Some(entry)) if entry.value.instance == instance => {
            let mut held = lease.lock().expect("lease");
            held.revision = held.revision.max(entry.revision);
            true
        }
        Ok(_) => false,
        // Not known: the trust window decides.
        Err(_) => true,
    }
}
