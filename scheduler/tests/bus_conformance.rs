//! What every implementation of the bus has to do, run against each.

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use async_nats::jetstream::{self, AckKind};
use ax_scheduler::bus::memory::{self, MemoryServer};
use ax_scheduler::bus::nats::{NatsBus, NatsConfig};
use ax_scheduler::loops::clock::SystemClock;
use ax_scheduler::ports::{
    Bus, BusError, Hint, LeaderAnswer, LeaseValue, LeaseWrite, NodeInfo, Outgoing, StreamMessage,
};
use ax_shared::wire::{GroupConfig, GroupConsumer, WorkerEntry};
use ax_shared::{ConsumerName, Group, Prefix, Profile, Queue, RunId, TaskId, Timestamp};
use ax_tests::nats::Nats;
use ax_tests::{Deadline, eventually};
use bytes::Bytes;
use futures::StreamExt;
use serde_json::Value;
use uuid::Uuid;

const LEASE_TTL: Duration = Duration::from_secs(3);
const SOON: Duration = Duration::from_secs(10);

/// Two nodes and a worker on one server.
struct World {
    a: Arc<dyn Bus>,
    b: Arc<dyn Bus>,
    worker: Worker,
    _nats: Option<Nats>,
}

enum Worker {
    Nats(jetstream::Context),
    Memory(memory::Hands),
}

/// One delivery: what was delivered and how to answer.
struct Taken {
    seq: u64,
    number: u32,
    payload: Bytes,
    answer: Answer,
}

enum Answer {
    Nats(Box<jetstream::Message>),
    Memory(memory::Hands, Box<memory::Delivery>),
}

impl World {
    async fn on_nats() -> Result<Self> {
        let nats = Nats::start().await?;
        let config = NatsConfig { lease_ttl: LEASE_TTL, ..NatsConfig::new(nats.url()) };
        let a = NatsBus::connect(config.clone()).await?;
        let b = NatsBus::connect(config).await?;
        let worker = Worker::Nats(nats.jetstream().await?);
        Ok(Self { a, b, worker, _nats: Some(nats) })
    }

    async fn in_memory() -> Result<Self> {
        let server = MemoryServer::new(Arc::new(SystemClock::new()), Prefix::default(), LEASE_TTL);
        let worker = Worker::Memory(server.hands());
        Ok(Self { a: server.bus(), b: server.bus(), worker, _nats: None })
    }

    async fn prepared(self) -> Result<Self> {
        self.a.prepare(Uuid::now_v7()).await?;
        Ok(self)
    }
}

impl Worker {
    async fn pull(&self, consumer: &ConsumerName) -> Result<Option<Taken>> {
        match self {
            Self::Nats(context) => {
                let consumer: jetstream::consumer::PullConsumer =
                    context.get_consumer_from_stream(consumer.to_string(), "AX_TRIGGERS").await?;
                let mut batch = consumer.fetch().max_messages(1).messages().await?;
                let Some(message) = batch.next().await else { return Ok(None) };
                let message = message.map_err(|error| anyhow!(error))?;
                let info = message.info().map_err(|error| anyhow!(error))?;
                let (seq, number) = (info.stream_sequence, u32::try_from(info.delivered)?);
                let payload = message.payload.clone();
                Ok(Some(Taken { seq, number, payload, answer: Answer::Nats(Box::new(message)) }))
            }
            Self::Memory(hands) => Ok(hands.pull(&consumer.to_string()).map(|delivery| Taken {
                seq: delivery.message.seq,
                number: delivery.number,
                payload: delivery.message.payload.clone(),
                answer: Answer::Memory(hands.clone(), Box::new(delivery)),
            })),
        }
    }

    async fn next(&self, consumer: &ConsumerName) -> Result<Taken> {
        eventually(SOON, "a delivery", || self.pull(consumer)).await
    }

    async fn event(&self, subject: &str, id: &str, body: &str) -> Result<()> {
        match self {
            Self::Nats(context) => {
                let mut headers = async_nats::HeaderMap::new();
                headers.insert("Nats-Msg-Id", id);
                let body = body.to_owned().into();
                context.publish_with_headers(subject.to_owned(), headers, body).await?.await?;
            }
            Self::Memory(hands) => hands.event(subject, Some(id), body.to_owned()),
        }
        Ok(())
    }

    async fn register(&self, entry: WorkerEntry) -> Result<()> {
        match self {
            Self::Nats(context) => {
                let key = format!("{}.{}", entry.group, entry.worker_id);
                let bucket = context.get_key_value("ax_workers").await?;
                bucket.put(key, serde_json::to_vec(&entry)?.into()).await?;
            }
            Self::Memory(hands) => hands.register(entry),
        }
        Ok(())
    }
}

impl Taken {
    async fn ack(&self) -> Result<()> {
        match &self.answer {
            Answer::Nats(message) => message.double_ack().await.map_err(|error| anyhow!(error)),
            Answer::Memory(hands, delivery) => {
                hands.ack(delivery);
                Ok(())
            }
        }
    }

    async fn nak(&self, delay: Duration) -> Result<()> {
        match &self.answer {
            Answer::Nats(message) => {
                message.double_ack_with(AckKind::Nak(Some(delay))).await.map_err(|error| anyhow!(error))
            }
            Answer::Memory(hands, delivery) => {
                hands.nak(delivery, delay);
                Ok(())
            }
        }
    }

    async fn term(&self) -> Result<()> {
        match &self.answer {
            Answer::Nats(message) => message.double_ack_with(AckKind::Term).await.map_err(|error| anyhow!(error)),
            Answer::Memory(hands, delivery) => {
                hands.term(delivery);
                Ok(())
            }
        }
    }
}

fn consumer(timeout_ms: u64, retries: u32) -> Result<ConsumerName> {
    let profile = Profile::of(timeout_ms, retries);
    Ok(ConsumerName { group: Group::new("data-sync")?, queue: Queue::default_lane(), profile })
}

fn run() -> RunId {
    RunId(Uuid::now_v7())
}

fn trigger(consumer: &ConsumerName, run: RunId, number: u32) -> Outgoing {
    let ConsumerName { group, queue, profile } = consumer;
    Outgoing {
        subject: format!("ax.trigger.{group}.{queue}.{profile}.some.task.{run}"),
        headers: vec![("Nats-Msg-Id", format!("{run}:{number}")), ("Ax-Run-Id", run.to_string())],
        payload: format!("{{\"number\":{number}}}").into(),
    }
}

fn lease(node: &str) -> LeaseValue {
    LeaseValue { node_id: node.into(), instance: Uuid::now_v7(), epoch: 7, since: Timestamp::from_millis(1000) }
}

fn node(node_id: &str) -> NodeInfo {
    NodeInfo {
        node_id: node_id.into(),
        instance: Uuid::now_v7(),
        version: "1".into(),
        leader: false,
        epoch: 1,
        clock_offset_ms: 0.5,
        started_at: Timestamp::from_millis(0),
        http_addr: "127.0.0.1:1".into(),
        host: "h".into(),
        pid: 1,
    }
}

async fn soon<T>(what: &str, work: impl Future<Output = Option<T>>) -> Result<T> {
    tokio::time::timeout(SOON, work).await.with_context(|| format!("{what} did not come"))?.context("it has ended")
}

/// The next event whose subject begins with `subject`, and its body.
async fn event(world: &World, after: u64, subject: &str) -> Result<(StreamMessage, Value)> {
    let mut events = world.b.read_events(after).await?;
    loop {
        let event = soon(subject, events.next()).await??;
        if event.subject.starts_with(subject) {
            let body = serde_json::from_slice(&event.payload)?;
            return Ok((event, body));
        }
    }
}

async fn one_holder_at_a_time_has_the_lease(world: World) -> Result<()> {
    let world = world.prepared().await?;
    let (mine, theirs) = (lease("a"), lease("b"));
    assert_eq!(world.a.lease().await?, None);
    let (first, second) = tokio::join!(world.a.lease_take(&mine, None), world.b.lease_take(&theirs, None));
    let (first, second) = (first?, second?);
    let (winner, holder, loser, revision) = match (first, second) {
        (LeaseWrite::Won(revision), LeaseWrite::Lost) => (&mine, &world.a, &world.b, revision),
        (LeaseWrite::Lost, LeaseWrite::Won(revision)) => (&theirs, &world.b, &world.a, revision),
        other => bail!("{other:?}"),
    };
    let entry = loser.lease().await?.context("nobody has it")?;
    assert_eq!((&entry.value, entry.revision), (winner, revision));
    let LeaseWrite::Won(renewed) = holder.lease_take(winner, Some(revision)).await? else { bail!("not renewed") };
    assert!(renewed > revision);
    assert_eq!(loser.lease_take(&theirs, Some(revision)).await?, LeaseWrite::Lost, "an old revision takes nothing");
    // Taken over by compare-and-set on what was seen, as a follower does that found the leader dead.
    let LeaseWrite::Won(taken) = loser.lease_take(&theirs, Some(renewed)).await? else { bail!("not taken over") };
    assert_eq!(holder.lease_take(winner, Some(renewed)).await?, LeaseWrite::Lost, "the zombie has lost it");
    assert_eq!(holder.lease_release(renewed).await?, LeaseWrite::Lost, "and deletes nothing");
    assert_eq!(holder.lease().await?.map(|entry| entry.revision), Some(taken));
    Ok(())
}

async fn a_released_lease_is_free_at_once(world: World) -> Result<()> {
    let world = world.prepared().await?;
    for round in 0..3 {
        let LeaseWrite::Won(revision) = world.a.lease_take(&lease("a"), None).await? else { bail!("round {round}") };
        assert!(matches!(world.a.lease_release(revision).await?, LeaseWrite::Won(_)));
        assert_eq!(world.b.lease().await?, None);
        let LeaseWrite::Won(revision) = world.b.lease_take(&lease("b"), None).await? else { bail!("round {round}") };
        assert!(matches!(world.b.lease_release(revision).await?, LeaseWrite::Won(_)));
    }
    Ok(())
}

async fn a_lease_that_is_not_renewed_expires(world: World) -> Result<()> {
    let world = world.prepared().await?;
    let LeaseWrite::Won(old) = world.a.lease_take(&lease("a"), None).await? else { bail!("not won") };
    assert_eq!(world.b.lease_take(&lease("b"), None).await?, LeaseWrite::Lost);
    eventually(SOON, "it expires", || async { Ok(world.b.lease().await?.is_none().then_some(())) }).await?;
    assert_eq!(world.a.lease_take(&lease("a"), Some(old)).await?, LeaseWrite::Lost);
    assert!(matches!(world.b.lease_take(&lease("b"), None).await?, LeaseWrite::Won(_)));
    Ok(())
}

async fn a_leader_answers_until_its_guard_is_dropped(world: World) -> Result<()> {
    let world = world.prepared().await?;
    let wait = Duration::from_secs(2);
    assert_eq!(world.b.ask_leader(wait).await?, LeaderAnswer::NoResponders);
    let value = lease("a");
    let guard = world.a.serve_leader(value.clone()).await?;
    assert_eq!(world.b.ask_leader(wait).await?, LeaderAnswer::Alive(value.clone()));
    assert_eq!(world.a.ask_leader(wait).await?, LeaderAnswer::Alive(value));
    drop(guard);
    eventually(Deadline::seconds(5), "nobody answers", || async {
        Ok((world.b.ask_leader(wait).await? == LeaderAnswer::NoResponders).then_some(()))
    })
    .await
}

async fn nodes_answer_for_themselves_and_all_together(world: World) -> Result<()> {
    let world = world.prepared().await?;
    let wait = Duration::from_millis(500);
    assert_eq!(world.a.ask_node("one", wait).await?, None);
    assert!(world.a.ask_nodes(wait).await?.is_empty());
    let (one, two) = (node("one"), node("two"));
    let (told_one, told_two) = (one.clone(), two.clone());
    let first = world.a.serve_node("one", Arc::new(move || told_one.clone())).await?;
    let _second = world.b.serve_node("two", Arc::new(move || told_two.clone())).await?;
    assert_eq!(world.b.ask_node("one", wait).await?, Some(one.clone()));
    assert_eq!(world.b.ask_node("two", wait).await?, Some(two.clone()));
    let mut all = world.a.ask_nodes(wait).await?;
    all.sort_by(|a, b| a.node_id.cmp(&b.node_id));
    assert_eq!(all, [one, two]);
    drop(first);
    eventually(Deadline::seconds(5), "it is silent", || async {
        Ok(world.b.ask_node("one", wait).await?.is_none().then_some(()))
    })
    .await
}

async fn hints_and_notices_are_heard_by_those_who_listen(world: World) -> Result<()> {
    let world = world.prepared().await?;
    // Over the connection that is to hear: what others tell now may arrive later.
    world.a.hint(Hint::Runs).await;
    world.a.tell("ax.notice.failed.g.t.r".into(), "nobody listens".into()).await;
    let mut hints = world.a.hints().await?;
    let mut heard = world.a.hear("ax.notice.>").await?;
    world.b.hint(Hint::Definitions).await;
    world.a.hint(Hint::Runs).await;
    let mut seen = BTreeSet::new();
    for _ in 0..2 {
        seen.insert(format!("{:?}", soon("a hint", hints.next()).await?));
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), ["Definitions", "Runs"]);
    world.b.tell("ax.other.x".into(), "not asked for".into()).await;
    world.b.tell("ax.notice.running.g.t.r".into(), "hello".into()).await;
    let notice = soon("a notice", heard.next()).await?;
    assert_eq!(notice, ("ax.notice.running.g.t.r".to_owned(), Bytes::from("hello")));
    Ok(())
}

async fn a_publish_is_stored_once_under_its_id(world: World) -> Result<()> {
    let world = world.prepared().await?;
    let name = consumer(60_000, 0)?;
    let publisher = world.a.publisher().await?;
    let (one, two) = (run(), run());
    let first = publisher.publish(trigger(&name, one, 1)).await?;
    assert!(!first.duplicate);
    let again = world.b.publisher().await?.publish(trigger(&name, one, 1)).await?;
    assert_eq!((again.seq, again.duplicate), (first.seq, true));
    let next = publisher.publish(trigger(&name, one, 2)).await?;
    let other = publisher.publish(trigger(&name, two, 1)).await?;
    assert_eq!((next.seq, other.seq), (first.seq + 1, first.seq + 2));

    let state = world.b.triggers().await?;
    assert_eq!((state.first_seq, state.last_seq, state.messages), (1, 3, 3));
    assert!(!state.incarnation.is_empty());
    let stored = world.b.trigger_at(first.seq).await?.context("not there")?;
    let sent = trigger(&name, one, 1);
    assert_eq!((&stored.subject, &stored.payload, stored.seq), (&sent.subject, &sent.payload, first.seq));
    let headers = sent.headers.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    assert_eq!(stored.headers, headers);
    let last = world.b.last_trigger(&sent.subject).await?.context("not there")?;
    assert_eq!(last.seq, next.seq);
    assert_eq!(world.b.trigger_at(99).await?, None);
    assert_eq!(world.b.last_trigger("ax.trigger.x.default.t1r0.t.r").await?, None);

    assert!(publisher.delete(next.seq).await?);
    assert!(!publisher.delete(next.seq).await?, "gone already");
    assert!(!publisher.delete(99).await?, "never was");
    assert_eq!(world.b.trigger_at(next.seq).await?, None);
    let state = world.b.triggers().await?;
    assert_eq!((state.last_seq, state.messages), (3, 2));
    publisher.close().await;
    assert!(publisher.is_closed());
    assert!(publisher.publish(trigger(&name, run(), 1)).await.is_err());
    Ok(())
}

async fn an_empty_stream_has_no_messages(world: World) -> Result<()> {
    let world = world.prepared().await?;
    let empty = world.a.triggers().await?;
    assert_eq!((empty.last_seq, empty.messages), (0, 0));
    let name = consumer(60_000, 0)?;
    let publisher = world.a.publisher().await?;
    let seq = publisher.publish(trigger(&name, run(), 1)).await?.seq;
    publisher.delete(seq).await?;
    let emptied = world.a.triggers().await?;
    assert_eq!((emptied.first_seq, emptied.last_seq, emptied.messages), (2, 1, 0));
    assert_eq!(emptied.incarnation, empty.incarnation);
    assert_ne!(empty.incarnation, world.a.events().await?.incarnation);
    Ok(())
}

async fn an_acked_message_leaves_and_makes_a_metric(world: World) -> Result<()> {
    let world = world.prepared().await?;
    let name = consumer(60_000, 3)?;
    world.a.ensure_consumer(&name).await?;
    world.b.ensure_consumer(&name).await?;
    assert_eq!(world.a.consumers().await?.len(), 1);
    let publisher = world.a.publisher().await?;
    let seq = publisher.publish(trigger(&name, run(), 1)).await?.seq;
    let state = world.a.consumer(&name).await?.context("no consumer")?;
    assert_eq!((state.name.as_str(), state.delivered_seq, state.pending), ("data-sync-default-t60r3", 0, 1));
    let taken = world.worker.next(&name).await?;
    assert_eq!((taken.seq, taken.number, taken.payload.as_ref()), (seq, 1, &b"{\"number\":1}"[..]));
    let state = world.a.consumer(&name).await?.context("no consumer")?;
    assert_eq!((state.delivered_seq, state.pending, state.ack_pending), (seq, 0, 1));
    assert!(world.worker.pull(&name).await?.is_none(), "it is with one worker");
    taken.ack().await?;
    let metric = "$JS.EVENT.METRIC.CONSUMER.ACK.AX_TRIGGERS.data-sync-default-t60r3";
    let (message, body) = event(&world, 0, metric).await?;
    assert_eq!((&body["stream_seq"], &body["deliveries"]), (&seq.into(), &1.into()));
    assert!(body["timestamp"].is_string() && body["ack_time"].is_u64());
    assert!(message.at.as_millis() > 0);
    assert_eq!(world.a.trigger_at(seq).await?, None);
    assert_eq!(world.a.consumer(&name).await?.map(|state| state.ack_pending), Some(0));
    world.a.remove_consumer(&name.to_string()).await?;
    world.a.remove_consumer(&name.to_string()).await?;
    assert_eq!(world.a.consumer(&name).await?, None);
    Ok(())
}

async fn a_naked_message_comes_again_and_a_termed_one_does_not(world: World) -> Result<()> {
    let world = world.prepared().await?;
    let name = consumer(60_000, 3)?;
    world.a.ensure_consumer(&name).await?;
    let seq = world.a.publisher().await?.publish(trigger(&name, run(), 1)).await?.seq;
    world.worker.next(&name).await?.nak(Duration::from_millis(300)).await?;
    assert!(world.worker.pull(&name).await?.is_none(), "not before its delay");
    let (naked, body) = event(&world, 0, "$JS.EVENT.ADVISORY.CONSUMER.MSG_NAKED.AX_TRIGGERS.").await?;
    assert_eq!((&body["stream_seq"], &body["deliveries"]), (&seq.into(), &1.into()));
    let again = world.worker.next(&name).await?;
    assert_eq!((again.seq, again.number), (seq, 2));
    again.term().await?;
    let terminated = "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.AX_TRIGGERS.";
    let (_, body) = event(&world, naked.seq, terminated).await?;
    assert_eq!((&body["stream_seq"], &body["deliveries"]), (&seq.into(), &2.into()));
    assert_eq!(world.a.trigger_at(seq).await?, None);
    assert!(world.worker.pull(&name).await?.is_none());
    Ok(())
}

async fn a_missed_ack_deadline_delivers_again_and_a_poke_tells_when_it_was_the_last(world: World) -> Result<()> {
    let world = world.prepared().await?;
    let name = consumer(1_000, 1)?;
    world.a.ensure_consumer(&name).await?;
    let publisher = world.a.publisher().await?;
    let dead = publisher.publish(trigger(&name, run(), 1)).await?.seq;
    assert_eq!(world.worker.next(&name).await?.number, 1);
    // The deadline is three seconds here: the class and two more.
    let again = world.worker.next(&name).await?;
    assert_eq!((again.seq, again.number), (dead, 2));
    again.nak(Duration::ZERO).await?;
    let waiting = publisher.publish(trigger(&name, run(), 1)).await?.seq;
    let exhausted = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.AX_TRIGGERS.data-sync-default-t1r1";
    let told = eventually(SOON, "MAX_DELIVERIES", || async {
        world.a.poke(&name.to_string()).await?;
        let last = world.a.events().await?.last_seq;
        let mut events = world.b.read_events(0).await?;
        for _ in 0..last {
            let event = soon("an event", events.next()).await??;
            if event.subject == exhausted {
                return Ok(Some(serde_json::from_slice::<Value>(&event.payload)?));
            }
        }
        Ok(None)
    })
    .await?;
    assert_eq!((&told["stream_seq"], &told["deliveries"]), (&dead.into(), &2.into()));
    assert!(world.a.trigger_at(dead).await?.is_some(), "it stays until it is deleted");
    // What tells a leader that missed the advisory: delivered, there, and nothing that anybody could still answer.
    let state = world.a.consumer(&name).await?.context("no consumer")?;
    assert_eq!((state.delivered_seq, state.pending, state.ack_pending), (dead, 1, 0));
    let taken = world.worker.next(&name).await?;
    assert_eq!((taken.seq, taken.number), (waiting, 1), "the poke took nothing");
    assert!(world.a.poke("nobody-default-t1r0").await.is_err());
    Ok(())
}

async fn an_answer_is_told_with_the_number_of_the_delivery_that_it_answers(world: World) -> Result<()> {
    let world = world.prepared().await?;
    let name = consumer(60_000, 3)?;
    world.a.ensure_consumer(&name).await?;
    let seq = world.a.publisher().await?.publish(trigger(&name, run(), 1)).await?.seq;
    let first = world.worker.next(&name).await?;
    first.nak(Duration::ZERO).await?;
    let (naked, _) = event(&world, 0, "$JS.EVENT.ADVISORY.CONSUMER.MSG_NAKED.AX_TRIGGERS.").await?;
    assert_eq!(world.worker.next(&name).await?.number, 2);
    first.ack().await?;
    let (_, body) = event(&world, naked.seq, "$JS.EVENT.METRIC.CONSUMER.ACK.AX_TRIGGERS.").await?;
    assert_eq!((&body["stream_seq"], &body["deliveries"]), (&seq.into(), &1.into()));
    assert_eq!(world.a.trigger_at(seq).await?, None);
    Ok(())
}

async fn a_message_deleted_while_a_worker_has_it_is_told_to_be_terminated(world: World) -> Result<()> {
    let world = world.prepared().await?;
    let name = consumer(60_000, 3)?;
    world.a.ensure_consumer(&name).await?;
    let publisher = world.a.publisher().await?;
    let seq = publisher.publish(trigger(&name, run(), 1)).await?.seq;
    world.worker.next(&name).await?;
    assert!(publisher.delete(seq).await?);
    let (_, body) = event(&world, 0, "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.AX_TRIGGERS.").await?;
    assert_eq!((&body["stream_seq"], &body["deliveries"]), (&seq.into(), &1.into()));
    assert_eq!(world.a.consumer(&name).await?.map(|state| state.ack_pending), Some(0));
    Ok(())
}

async fn a_consumer_delivers_its_own_lane_only(world: World) -> Result<()> {
    let world = world.prepared().await?;
    let (short, long) = (consumer(1_000, 0)?, consumer(60_000, 0)?);
    world.a.ensure_consumer(&short).await?;
    world.a.ensure_consumer(&long).await?;
    let publisher = world.a.publisher().await?;
    let seq = publisher.publish(trigger(&long, run(), 1)).await?.seq;
    assert!(world.worker.pull(&short).await?.is_none());
    assert_eq!(world.worker.next(&long).await?.seq, seq);
    Ok(())
}

async fn events_are_read_in_order_from_where_asked(world: World) -> Result<()> {
    let world = world.prepared().await?;
    let mut live = world.a.read_events(0).await?;
    for n in 1..=5 {
        world.worker.event("ax.event.started.g.t.r", &format!("r:{n}:started"), &format!("{n}")).await?;
    }
    world.worker.event("ax.event.started.g.t.r", "r:5:started", "again").await?;
    for seq in 1..=5_u64 {
        let event = soon("an event", live.next()).await??;
        assert_eq!((event.seq, event.payload.as_ref()), (seq, seq.to_string().as_bytes()));
        assert_eq!(event.headers["Nats-Msg-Id"], format!("r:{seq}:started"));
        assert_eq!(event.subject, "ax.event.started.g.t.r");
    }
    let mut later = world.b.read_events(3).await?;
    assert_eq!(soon("an event", later.next()).await??.seq, 4);
    assert_eq!(soon("an event", later.next()).await??.seq, 5);
    let mut end = world.b.read_events(5).await?;
    world.worker.event("ax.event.succeeded.g.t.r", "r:5:succeeded", "6").await?;
    for reader in [&mut live, &mut later, &mut end] {
        assert_eq!(soon("a live event", reader.next()).await??.seq, 6);
    }
    let state = world.a.events().await?;
    assert_eq!((state.first_seq, state.last_seq), (1, 6));
    Ok(())
}

async fn an_idempotency_key_means_one_run_for_its_window(world: World) -> Result<()> {
    let world = world.prepared().await?;
    let (task, other) = (TaskId::new("a.b")?, TaskId::new("a")?);
    let minute = Duration::from_secs(60);
    let claims = (0..16).map(|n| {
        let bus = if n % 2 == 0 { &world.a } else { &world.b };
        bus.claim_key(&task, "key with spaces, * and 任务", run(), minute)
    });
    let claimed = futures::future::try_join_all(claims).await?;
    assert!(claimed.iter().all(|id| *id == claimed[0]), "{claimed:?}");
    let (x, y) = (run(), run());
    assert_eq!(world.a.claim_key(&other, "key with spaces, * and 任务", x, minute).await?, x, "of another task");
    assert_eq!(world.a.claim_key(&task, "another", y, minute).await?, y);
    let second = Duration::from_millis(900);
    assert_eq!(world.a.claim_key(&task, "short", x, second).await?, x);
    assert_eq!(world.b.claim_key(&task, "short", y, second).await?, x);
    eventually(SOON, "the key is forgotten", || async {
        Ok((world.b.claim_key(&task, "short", y, minute).await? == y).then_some(()))
    })
    .await
}

async fn groups_and_workers_are_read_as_they_were_written(world: World) -> Result<()> {
    let world = world.prepared().await?;
    assert!(world.a.groups().await?.is_empty());
    assert!(world.a.workers().await?.is_empty());
    let group = Group::new("data-sync")?;
    let config = GroupConfig {
        consumers: vec![GroupConsumer {
            name: "data-sync-default-t60r3".into(),
            queue: Queue::default_lane(),
            profile: "t60r3".into(),
            max_weight: 1.5,
        }],
        paused: false,
    };
    world.a.put_group(&group, Some(&config)).await?;
    world.a.put_group(&Group::new("other")?, Some(&GroupConfig::default())).await?;
    let groups = world.b.groups().await?;
    assert_eq!((groups.len(), groups.get(&group)), (2, Some(&config)));
    world.b.put_group(&group, None).await?;
    world.b.put_group(&group, None).await?;
    assert_eq!(world.a.groups().await?.into_keys().map(|g| g.to_string()).collect::<Vec<_>>(), ["other"]);
    world.a.put_group(&group, Some(&config)).await?;
    assert_eq!(world.a.groups().await?.len(), 2);
    let entry = WorkerEntry {
        worker_id: "w-1".into(),
        group,
        host: "h".into(),
        pid: 7,
        sdk: "rust".into(),
        capacity: 4.0,
        running: vec![run()],
    };
    world.worker.register(entry.clone()).await?;
    assert_eq!(world.a.workers().await?, [entry]);
    Ok(())
}

async fn a_server_belongs_to_one_database(world: World) -> Result<()> {
    let (mine, theirs) = (Uuid::now_v7(), Uuid::now_v7());
    world.a.prepare(mine).await?;
    world.b.prepare(mine).await?;
    match world.b.prepare(theirs).await {
        Err(BusError::Incompatible(why)) => {
            assert!(why.contains(&mine.to_string()) && why.contains(&theirs.to_string()), "{why}");
            Ok(())
        }
        other => bail!("{other:?}"),
    }
}

async fn a_connection_that_is_up_says_so(world: World) -> Result<()> {
    assert!(world.a.connected_for() > Duration::ZERO);
    Ok(())
}

macro_rules! conformance {
    ($($test:ident),* $(,)?) => {
        mod nats {
            $(#[tokio::test]
            async fn $test() -> anyhow::Result<()> {
                super::$test(super::World::on_nats().await?).await
            })*
        }
        mod in_memory {
            $(#[tokio::test]
            async fn $test() -> anyhow::Result<()> {
                super::$test(super::World::in_memory().await?).await
            })*
        }
    };
}

conformance!(
    one_holder_at_a_time_has_the_lease,
    a_released_lease_is_free_at_once,
    a_lease_that_is_not_renewed_expires,
    a_leader_answers_until_its_guard_is_dropped,
    nodes_answer_for_themselves_and_all_together,
    hints_and_notices_are_heard_by_those_who_listen,
    a_publish_is_stored_once_under_its_id,
    an_empty_stream_has_no_messages,
    an_acked_message_leaves_and_makes_a_metric,
    a_naked_message_comes_again_and_a_termed_one_does_not,
    a_missed_ack_deadline_delivers_again_and_a_poke_tells_when_it_was_the_last,
    an_answer_is_told_with_the_number_of_the_delivery_that_it_answers,
    a_message_deleted_while_a_worker_has_it_is_told_to_be_terminated,
    a_consumer_delivers_its_own_lane_only,
    events_are_read_in_order_from_where_asked,
    an_idempotency_key_means_one_run_for_its_window,
    groups_and_workers_are_read_as_they_were_written,
    a_server_belongs_to_one_database,
    a_connection_that_is_up_says_so,
);
