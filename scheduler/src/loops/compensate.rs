//! The sweep: looks for what was missed, and repairs it.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use ax_shared::Group;

use super::term::{ensure_consumers, group_configs, publish_group_configs};
use super::{EndOfTerm, Term, orphans, pause, reconcile, settle};
use crate::core::shard::SIGNAL_LIFE_MS;
use crate::metrics as names;
use crate::ports::BusError;

/// A run is left alone for this long after its publish before the sweep looks at its message.
const LEAVE_ALONE: Duration = Duration::from_secs(5);
/// A consumer that no task and no run needs is removed after this.
const UNUSED_LIFE: Duration = Duration::from_secs(24 * 3600);

/// Runs the loop.
pub(super) async fn run(term: Arc<Term>) -> EndOfTerm {
    let mut unused: HashMap<String, Duration> = HashMap::new();
    let mut place = 0;
    loop {
        if let Err(e) = sweep(&term, &mut unused, &mut place).await {
            tracing::warn!(error = %e, "the sweep was interrupted; the next one goes on");
        }
        // Queue lengths are told more often than there is something to sweep.
        let until = tokio::time::Instant::now() + term.cx.settings.sweep_interval;
        while tokio::time::Instant::now() < until {
            tell_queues(&term);
            let rest = until - tokio::time::Instant::now();
            if !pause(rest.min(Duration::from_secs(1)), &term.ended).await {
                return EndOfTerm::Stopped;
            }
        }
    }
}

async fn sweep(term: &Arc<Term>, unused: &mut HashMap<String, Duration>, place: &mut u64) -> Result<(), BusError> {
    let tended = tend_consumers(term, unused).await;
    reconcile::sweep(term, LEAVE_ALONE.min(term.cx.settings.sweep_interval)).await;
    tended.and(orphans::sweep(term, place).await)
}

async fn tend_consumers(term: &Arc<Term>, unused: &mut HashMap<String, Duration>) -> Result<(), BusError> {
    if !term.may_act() {
        return Ok(());
    }
    settle::look_at_triggers(term).await?;
    let (needed, groups) = {
        let mut shard = term.shard();
        let expired = shard.expire_signals(term.cx.clock.now().plus_millis(-SIGNAL_LIFE_MS));
        if expired > 0 {
            metrics::counter!(names::SIGNALS_EXPIRED.name).increment(expired as u64);
        }
        (shard.consumers(), group_configs(&shard))
    };
    let present = term.cx.bus.consumers().await?;
    let names: BTreeSet<&str> = present.iter().map(|c| c.name.as_str()).collect();
    let missing: Vec<_> = needed.iter().filter(|n| !names.contains(n.to_string().as_str())).cloned().collect();
    if !missing.is_empty() {
        metrics::counter!(names::CONSUMERS_RECREATED.name).increment(missing.len() as u64);
        ensure_consumers(&term.cx, missing).await?;
    }
    publish_group_configs(&term.cx, groups).await?;

    let now = term.cx.clock.boot();
    let needed: BTreeSet<String> = needed.iter().map(ToString::to_string).collect();
    unused.retain(|name, _| names.contains(name.as_str()) && !needed.contains(name));
    for consumer in &present {
        if consumer.pending + consumer.ack_pending > 0
            && let Err(e) = term.cx.bus.poke(&consumer.name).await
        {
            tracing::warn!(consumer = consumer.name, error = %e, "the consumer could not be poked");
        }
        if !needed.contains(&consumer.name) && consumer.pending + consumer.ack_pending == 0 {
            let since = *unused.entry(consumer.name.clone()).or_insert(now);
            if now.saturating_sub(since) >= UNUSED_LIFE {
                tracing::info!(consumer = consumer.name, "nobody has needed this consumer for 24 h; removing it");
                term.cx.bus.remove_consumer(&consumer.name).await?;
            }
        }
    }
    set_windows(term).await
}

/// Window of a group: four times what its registered workers take at once, at least 64.
async fn set_windows(term: &Arc<Term>) -> Result<(), BusError> {
    let mut capacity: HashMap<Group, f64> = HashMap::new();
    for worker in term.cx.bus.workers().await? {
        *capacity.entry(worker.group).or_default() += worker.capacity;
    }
    let mut shard = term.shard();
    let groups: Vec<Group> = shard.queue_lengths().map(|(g, _)| g.clone()).collect();
    for group in groups {
        let window = capacity.get(&group).map(|c| ((c * 4.0).ceil().max(64.0)) as usize);
        shard.set_window(&group, window);
    }
    Ok(())
}

fn tell_queues(term: &Term) {
    for (group, length) in term.shard().queue_lengths() {
        let group = group.to_string();
        metrics::gauge!(names::QUEUE_LENGTH.name, "group" => group.clone()).set(length.waiting as f64);
        metrics::gauge!(names::OUTSTANDING.name, "group" => group).set(length.outstanding as f64);
    }
}
