//! One term of leadership: the takeover in its order, then the loops, then the end.
//!
//! Order: lease (held by the caller) → streams and buckets verified → epoch, written to the database and to the key →
//! definitions and consumers → unfinished runs → AX_EVENTS read to its end and settled → runs that are due without a
//! known message looked up in AX_TRIGGERS → loops. Settling comes before publishing, so that nothing that has ended is
//! published again; the look-up comes before publishing, so that what was published without being recorded is adopted.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ax_shared::wire::{GroupConfig, GroupConsumer};
use ax_shared::{ConsumerName, Group, RunId};
use futures::StreamExt;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::lead::still_ours;
use super::{
    Context, EndOfTerm, HeldLease, Wake, adopt, compensate, deliver, effects, fire, flush, plan, reconcile, settle,
};
use crate::core::run::Run;
use crate::core::shard::{LookedUp, Shard};
use crate::metrics as names;
use crate::ports::{BusError, EventsPosition, Guard, LeaseWrite, Publisher, StoreError, StreamState};

/// Runs looked up in the stream at once.
const LOOK_UPS: usize = 64;

/// Everything the loops of one term share.
pub struct Term {
    pub(crate) cx: Context,
    pub(crate) epoch: u64,
    pub(crate) shard: super::ShardCell,
    pub(crate) lease: Arc<Mutex<HeldLease>>,
    pub(crate) wake: Wake,
    /// The publishing connection; None while it is being opened.
    pub(crate) publisher: watch::Sender<Option<Arc<dyn Publisher>>>,
    /// Sequence up to which AX_EVENTS has been applied.
    pub(crate) applied: super::Progress,
    /// Revision of the definitions that are loaded. Only planning loads them, since it has to plan what changed.
    pub(crate) definitions: super::Progress,
    pub(crate) blocked: super::BlockedSender,
    pub(crate) last_commit_ms: super::Millis,
    /// Held by whoever takes runs up from SQL: of two at once, the slower would bring back what has ended meanwhile.
    pub(crate) taking_up: tokio::sync::Mutex<()>,
    /// A write that makes rows was not answered: they may be in SQL and not in memory.
    pub(crate) rows_in_doubt: AtomicBool,
    pub(crate) ended: CancellationToken,
}

impl Term {
    /// Runs a term until it ends. `lease` is renewed by the caller, who also cancels `ended` when it is lost or the
    /// program stops. On return nothing of the term is under way any more, and what could be written is.
    pub(crate) async fn run(
        cx: Context,
        lease: Arc<Mutex<HeldLease>>,
        answering: Guard,
        ended: CancellationToken,
    ) -> EndOfTerm {
        let began = cx.clock.boot();
        let begun = tokio::select! {
            biased;
            () = ended.cancelled() => return EndOfTerm::Stopped,
            begun = begin(cx, lease, ended.clone()) => begun,
        };
        let (term, blocked) = match begun {
            Ok(begun) => begun,
            Err(e) => return e,
        };
        let value = term.lease.lock().expect("lease").value.clone();
        let serving = match term.cx.bus.serve_leader(value).await {
            Ok(guard) => guard,
            Err(e) => return EndOfTerm::Takeover(e.into()),
        };
        drop(answering);
        metrics::gauge!(names::LEADER.name).set(1.0);
        metrics::counter!(names::TAKEOVERS.name).increment(1);
        let (runs, tasks) = {
            let shard = term.shard();
            (shard.live_runs(), shard.tasks().iter().count())
        };
        tracing::info!(
            epoch = term.epoch,
            runs,
            tasks,
            took_ms = (term.cx.clock.boot() - began).as_millis() as u64,
            "leading"
        );

        let (effects_in, effects_out) = mpsc::unbounded_channel();
        let mut loops: JoinSet<EndOfTerm> = JoinSet::new();
        loops.spawn(plan::run(term.clone()));
        loops.spawn(adopt::run(term.clone()));
        loops.spawn(adopt::hints(term.clone()));
        loops.spawn(fire::run(term.clone()));
        loops.spawn(deliver::run(term.clone()));
        loops.spawn(settle::run(term.clone()));
        loops.spawn(reconcile::run(term.clone(), blocked));
        loops.spawn(compensate::run(term.clone()));
        loops.spawn(effects::run(term.clone(), effects_out));
        loops.spawn(flush::watch(term.clone()));
        let flushing = tokio::spawn(flush::run(term.clone(), effects_in));

        let mut end = None;
        while let Some(joined) = loops.join_next().await {
            let reason = joined.unwrap_or_else(|e| {
                tracing::error!(error = %e, "a loop of the leader panicked; stepping down");
                EndOfTerm::LeaseLost("a loop panicked")
            });
            ended.cancel();
            if matches!(end, None | Some(EndOfTerm::Stopped)) {
                end = Some(reason);
            }
        }
        // The last flush comes after every loop that could change something.
        if let Ok(reason) = flushing.await
            && matches!(end, None | Some(EndOfTerm::Stopped))
        {
            end = Some(reason);
        }
        drop(serving);
        metrics::gauge!(names::LEADER.name).set(0.0);
        end.unwrap_or(EndOfTerm::Stopped)
    }
}

fn takeover(e: impl Into<anyhow::Error>) -> EndOfTerm {
    EndOfTerm::Takeover(e.into())
}

fn from_store(e: StoreError) -> EndOfTerm {
    if matches!(e, StoreError::Fenced { .. }) { EndOfTerm::Fenced(e) } else { takeover(e) }
}

async fn begin(
    cx: Context,
    lease: Arc<Mutex<HeldLease>>,
    ended: CancellationToken,
) -> Result<(Arc<Term>, mpsc::UnboundedReceiver<super::Blocked>), EndOfTerm> {
    let database_id = cx.store.database_id().await.map_err(from_store)?;
    cx.bus.prepare(database_id).await.map_err(takeover)?;

    let at_least = lease.lock().expect("lease").value.epoch;
    let state = cx.store.acquire(at_least, cx.clock.now()).await.map_err(from_store)?;
    announce_epoch(&cx, &lease, state.epoch).await?;
    cx.epoch.fetch_max(state.epoch, Ordering::Relaxed);
    metrics::gauge!(names::EPOCH.name).set(state.epoch as f64);

    let mut shard = Shard::new(cx.prefix.clone(), &state);
    shard.set_sampler(cx.traces.sampler());
    let events = cx.bus.events().await.map_err(takeover)?;

    let (rev, rows) = cx.store.definitions(0).await.map_err(from_store)?;
    for (id, e) in shard.load_tasks(rev, rows, cx.clock.now()) {
        tracing::error!(task_id = %id, error = %e, "a stored schedule does not compile; its task is left out");
    }
    let runs = cx.store.unfinished(state.epoch).await.map_err(from_store)?;
    let triggers = recorded_triggers(&cx, &runs).await.map_err(takeover)?;
    shard.set_triggers_incarnation(&triggers.incarnation, triggers.last_seq);
    let ids: Vec<RunId> = runs.iter().filter(|r| r.attempt > 0 && !r.state.is_final()).map(|r| r.run_id).collect();
    let mut attempts = Vec::new();
    for ids in ids.chunks(1000) {
        attempts.extend(cx.store.attempts(ids).await.map_err(from_store)?);
    }
    let signals = cx.store.signals(state.epoch, &triggers.incarnation).await.map_err(from_store)?;
    shard.load_signals(signals);
    let unknown = shard.load_runs(runs, attempts, cx.clock.now());

    // After the runs are loaded: what is outstanding while events are lost is in doubt.
    if let Some(position) = resume_at(&state.settled, &events) {
        shard.restart_events(position.incarnation, position.seq);
    }
    ensure_consumers(&cx, shard.consumers()).await.map_err(takeover)?;
    publish_groups(&cx, &shard).await.map_err(takeover)?;

    read_to_end(&cx, &mut shard, events.last_seq).await.map_err(takeover)?;
    let triggers = cx.bus.triggers().await.map_err(takeover)?;
    let lost = shard.forget_signals_above(triggers.last_seq);
    if lost > 0 {
        tracing::error!(lost, last = triggers.last_seq, "AX_TRIGGERS has lost messages that nobody had recorded");
    }

    let (blocked, blocked_out) = mpsc::unbounded_channel();
    let applied = super::Progress::new(shard.settled().seq);
    let definitions = super::Progress::new(shard.definitions_rev());
    let term = Arc::new(Term {
        epoch: state.epoch,
        shard: Mutex::new(shard),
        lease,
        wake: Wake::default(),
        publisher: watch::Sender::new(None),
        applied,
        definitions,
        blocked,
        last_commit_ms: AtomicU64::new(cx.clock.boot().as_millis() as u64),
        taking_up: tokio::sync::Mutex::default(),
        rows_in_doubt: AtomicBool::new(false),
        ended,
        cx,
    });
    adopt_messages(&term, unknown).await?;
    Ok((term, blocked_out))
}

/// AX_TRIGGERS, believed to be shorter than what these runs are recorded with from two looks only.
async fn recorded_triggers(cx: &Context, runs: &[Run]) -> Result<StreamState, BusError> {
    let triggers = cx.bus.triggers().await?;
    let of_this = runs.iter().filter_map(|run| run.message.as_ref()).filter(|m| m.incarnation == triggers.incarnation);
    let known = of_this.map(|m| m.seq).max().unwrap_or(0);
    if triggers.last_seq < known {
        tracing::error!(
            last = triggers.last_seq,
            known,
            "AX_TRIGGERS seems to have lost its end; what it held is looked for and published again"
        );
    }
    settle::triggers_with_end(cx, &triggers.incarnation, known).await
}

/// Writes the epoch to the key, which also proves that the lease is still ours after the database said yes.
async fn announce_epoch(cx: &Context, lease: &Mutex<HeldLease>, epoch: u64) -> Result<(), EndOfTerm> {
    loop {
        let (value, revision) = {
            let mut held = lease.lock().expect("lease");
            held.value.epoch = epoch;
            (held.value.clone(), held.revision)
        };
        let sent_at = cx.clock.boot();
        if let LeaseWrite::Won(revision) = cx.bus.lease_take(&value, Some(revision)).await.map_err(takeover)? {
            let mut held = lease.lock().expect("lease");
            held.revision = held.revision.max(revision);
            held.trust.renewed(sent_at);
            return Ok(());
        }
        // The renewal writes the same key: a miss against an older revision of our own is none.
        let moved = lease.lock().expect("lease").revision != revision;
        if !moved && !still_ours(cx, lease).await {
            return Err(EndOfTerm::LeaseLost("another node took it during the takeover"));
        }
        if lease.lock().expect("lease").revision == revision {
            return Err(EndOfTerm::LeaseLost("the key does not take the epoch"));
        }
    }
}

/// Where to read AX_EVENTS from, if not where the database says.
pub(crate) fn resume_at(settled: &EventsPosition, events: &StreamState) -> Option<EventsPosition> {
    let anew = EventsPosition { incarnation: events.incarnation.clone(), seq: 0 };
    if settled.incarnation != events.incarnation {
        if !settled.incarnation.is_empty() {
            metrics::counter!(names::EVENTS_GAPS.name).increment(1);
            tracing::error!(
                was = settled.incarnation,
                is = events.incarnation,
                "AX_EVENTS is another stream than before; what was told in the old one is lost, reconciling"
            );
        }
        return Some(anew);
    }
    if events.last_seq < settled.seq {
        metrics::counter!(names::EVENTS_GAPS.name).increment(1);
        tracing::error!(last = events.last_seq, settled = settled.seq, "AX_EVENTS has lost its end; reading it anew");
        return Some(anew);
    }
    if events.first_seq > settled.seq + 1 {
        metrics::counter!(names::EVENTS_GAPS.name).increment(1);
        tracing::error!(
            first = events.first_seq,
            settled = settled.seq,
            "AX_EVENTS has dropped events that were not settled; runs they were about are in doubt"
        );
        return Some(EventsPosition { seq: events.first_seq - 1, ..anew });
    }
    None
}

async fn read_to_end(cx: &Context, shard: &mut Shard, last_seq: u64) -> Result<(), BusError> {
    while shard.settled().seq < last_seq {
        let mut events = cx.bus.read_events(shard.settled().seq).await?;
        while shard.settled().seq < last_seq {
            match tokio::time::timeout(Duration::from_secs(5), events.next()).await {
                Ok(Some(Ok(message))) => {
                    shard.apply_event(&message, cx.clock.now());
                }
                Ok(Some(Err(e))) => return Err(e),
                Ok(None) => break,
                Err(_) => {
                    // What is missing up to the end may have been removed (age, size): look again.
                    let now = cx.bus.events().await?;
                    if now.first_seq > last_seq || now.messages == 0 {
                        return Ok(());
                    }
                    return Err(BusError::Unavailable("AX_EVENTS did not deliver its end within 5 s".into()));
                }
            }
        }
    }
    Ok(())
}

/// Looks up the message of every run that may have been published without a record of it.
async fn adopt_messages(term: &Arc<Term>, unknown: Vec<RunId>) -> Result<(), EndOfTerm> {
    let runs: Vec<Run> = {
        let shard = term.shard();
        unknown.iter().filter_map(|id| shard.run(*id).cloned()).filter(|r| r.message.is_none()).collect()
    };
    let found = futures::stream::iter(runs)
        .map(|run| async move {
            let subject = match run.profile {
                Some(profile) => term.cx.prefix.trigger(&run.address(), &run.queue, profile),
                None => effects::any_trigger(&term.cx.prefix, &run),
            };
            let mut found = term.cx.bus.last_trigger(&subject).await?;
            // A leader in between may have published it under a newer definition, and died before that was stored.
            if found.is_none() && run.profile.is_some() {
                found = term.cx.bus.last_trigger(&effects::any_trigger(&term.cx.prefix, &run)).await?;
            }
            Ok::<_, BusError>((run.run_id, found))
        })
        .buffer_unordered(LOOK_UPS);
    let mut found = std::pin::pin!(found);
    let mut stale = Vec::new();
    while let Some(looked_up) = found.next().await {
        let (run_id, message) = looked_up.map_err(takeover)?;
        let Some(message) = message else {
            term.shard().not_found(run_id, term.cx.clock.now());
            continue;
        };
        let adopted = term.shard().adopt_message(run_id, &message);
        match adopted {
            Some(LookedUp::Stale { seq }) => stale.push(seq),
            Some(LookedUp::Adopted) => term.cx.traces.found(run_id, &message),
            None => {}
        }
    }
    if !stale.is_empty() {
        let publisher = term.cx.bus.publisher().await.map_err(takeover)?;
        for seq in stale {
            if !term.may_act() {
                return Err(EndOfTerm::LeaseLost("it ran out during the takeover"));
            }
            publisher.delete(seq).await.map_err(takeover)?;
        }
        publisher.close().await;
    }
    Ok(())
}

pub(crate) async fn ensure_consumers(
    cx: &Context,
    names: impl IntoIterator<Item = ConsumerName>,
) -> Result<(), BusError> {
    let mut made = futures::stream::iter(names)
        .map(|name| async move { cx.bus.ensure_consumer(&name).await.map_err(|e| (name, e)) })
        .buffer_unordered(16);
    while let Some(result) = made.next().await {
        if let Err((name, e)) = result {
            tracing::error!(consumer = %name, error = %e, "the consumer could not be made");
            return Err(e);
        }
    }
    Ok(())
}

/// Tells workers which consumers to pull, where that has changed.
pub(crate) async fn publish_groups(cx: &Context, shard: &Shard) -> Result<(), BusError> {
    publish_group_configs(cx, group_configs(shard)).await
}

/// What KV `ax_groups` should say.
pub(crate) fn group_configs(shard: &Shard) -> BTreeMap<Group, GroupConfig> {
    let mut weights: BTreeMap<ConsumerName, f64> = shard.consumers().into_iter().map(|name| (name, 0.0)).collect();
    for task in shard.tasks().iter() {
        let weight = weights.entry(task.consumer()).or_default();
        *weight = weight.max(task.row.definition.weight);
    }
    let mut groups: BTreeMap<Group, GroupConfig> = BTreeMap::new();
    for (name, weight) in weights {
        groups.entry(name.group.clone()).or_default().consumers.push(GroupConsumer {
            name: name.to_string(),
            queue: name.queue.clone(),
            profile: name.profile.to_string(),
            max_weight: if weight > 0.0 { weight } else { 1.0 },
        });
    }
    groups
}

pub(crate) async fn publish_group_configs(cx: &Context, wanted: BTreeMap<Group, GroupConfig>) -> Result<(), BusError> {
    let present = cx.bus.groups().await?;
    for (group, config) in &wanted {
        let paused = present.get(group).is_some_and(|c| c.paused);
        let config = GroupConfig { paused, ..config.clone() };
        if present.get(group) != Some(&config) {
            cx.bus.put_group(group, Some(&config)).await?;
        }
    }
    for group in present.keys().filter(|g| !wanted.contains_key(*g)) {
        cx.bus.put_group(group, None).await?;
    }
    Ok(())
}
