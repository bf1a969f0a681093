//! What only a real nats-server shows: restarts, old and crippled servers, other databases, server-made events.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ax_scheduler::bus::nats::{NatsBus, NatsConfig};
use ax_scheduler::ports::{Bus, BusError, LeaderAnswer, LeaseValue, LeaseWrite, Outgoing, PublishError, StreamMessage};
use ax_shared::{ConsumerName, Group, Profile, Queue, RunId, TaskId, Timestamp};
use ax_tests::nats::{Nats, NatsCluster, NatsOptions};
use ax_tests::worker::Hands;
use ax_tests::{Deadline, dev, eventually};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use serde_json::Value;
use uuid::Uuid;

async fn connect(nats: &Nats) -> Result<Arc<NatsBus>> {
    Ok(NatsBus::connect(NatsConfig::new(nats.url())).await?)
}

async fn ready() -> Result<(Nats, Arc<NatsBus>)> {
    let nats = Nats::start().await?;
    let bus = connect(&nats).await?;
    bus.prepare(Uuid::now_v7()).await?;
    Ok((nats, bus))
}

fn consumer(group: &str, timeout_ms: u64, retries: u32) -> Result<ConsumerName> {
    Ok(ConsumerName {
        group: Group::new(group)?,
        queue: Queue::default_lane(),
        profile: Profile::of(timeout_ms, retries),
    })
}

fn trigger(consumer: &ConsumerName, run: RunId) -> Outgoing {
    let ConsumerName { group, queue, profile } = consumer;
    Outgoing {
        subject: format!("ax.trigger.{group}.{queue}.{profile}.task.{run}"),
        headers: vec![("Nats-Msg-Id", format!("{run}:1")), ("Ax-Run-Id", run.to_string())],
        payload: Bytes::from_static(b"{}"),
    }
}

fn run() -> RunId {
    RunId(Uuid::now_v7())
}

fn lease(node: &str) -> LeaseValue {
    LeaseValue { node_id: node.into(), instance: Uuid::now_v7(), epoch: 1, since: Timestamp::from_millis(0) }
}

/// The first event after `after` whose subject begins with `subject`.
async fn event(bus: &NatsBus, after: u64, subject: &str) -> Result<StreamMessage> {
    let mut events = bus.read_events(after).await?;
    let found = async {
        while let Some(event) = events.next().await {
            let event = event?;
            if event.subject.starts_with(subject) {
                return Ok(event);
            }
        }
        bail!("the events have ended")
    };
    tokio::time::timeout(Duration::from_secs(10), found).await.with_context(|| format!("no {subject}"))?
}

#[tokio::test]
async fn a_wrong_address_fails_soon_and_says_why() -> Result<()> {
    let start = Instant::now();
    let port = ax_tests::nats::free_ports(1)?[0];
    match NatsBus::connect(NatsConfig::new(format!("nats://127.0.0.1:{port}"))).await {
        Err(BusError::Unavailable(why)) => {
            assert!(why.contains(&port.to_string()) && why.contains("refused"), "{why}");
        }
        other => bail!("{other:?}"),
    }
    for (url, word) in [("http://127.0.0.1:4222", "scheme"), ("nats://", "host"), ("", "address")] {
        match NatsBus::connect(NatsConfig::new(url)).await {
            Err(BusError::Refused(why)) => assert!(why.contains(word), "{url:?}: {why}"),
            other => bail!("{url:?}: {other:?}"),
        }
    }
    assert!(start.elapsed() < Duration::from_secs(5));
    Ok(())
}

#[tokio::test]
async fn something_that_does_not_speak_nats_is_given_up_soon() -> Result<()> {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let start = Instant::now();
    let config = NatsConfig::new(format!("nats://{}", silent.local_addr()?));
    assert!(matches!(NatsBus::connect(config).await, Err(BusError::Unavailable(_))));
    assert!(start.elapsed() < Duration::from_secs(6), "{:?}", start.elapsed());
    Ok(())
}

#[tokio::test]
async fn a_server_without_jetstream_is_refused_with_the_remedy() -> Result<()> {
    let nats = Nats::start_with(NatsOptions { without_jetstream: true, ..NatsOptions::default() }).await?;
    match NatsBus::connect(NatsConfig::new(nats.url())).await {
        Err(BusError::Incompatible(why)) => assert!(why.contains("-js"), "{why}"),
        other => bail!("{other:?}"),
    }
    Ok(())
}

#[tokio::test]
async fn an_account_without_jetstream_is_refused_with_the_remedy() -> Result<()> {
    let config = "accounts { A { users: [{ user: a, password: \"p@ss\" }] } }".to_owned();
    let nats = Nats::start_with(NatsOptions { config, ..NatsOptions::default() }).await?;
    let with = |user: &str| NatsConfig::new(nats.url().replace("nats://", &format!("nats://{user}@")));
    match NatsBus::connect(with("a:p%40ss")).await {
        Err(BusError::Incompatible(why)) => assert!(why.contains("JetStream is not enabled"), "{why}"),
        other => bail!("{other:?}"),
    }
    match NatsBus::connect(with("a:wrong")).await {
        Err(BusError::Refused(why)) => assert!(why.contains("credentials") && !why.contains("wrong"), "{why}"),
        other => bail!("{other:?}"),
    }
    Ok(())
}

#[tokio::test]
async fn an_old_server_is_refused_by_name_and_version() -> Result<()> {
    let program = Some(dev::old_nats_server()?);
    let nats = Nats::start_with(NatsOptions { program, ..NatsOptions::default() }).await?;
    match NatsBus::connect(NatsConfig::new(nats.url())).await {
        Err(BusError::Incompatible(why)) => assert!(why.contains("nats-server 2.9."), "{why}"),
        other => bail!("{other:?}"),
    }
    Ok(())
}

#[tokio::test]
async fn nodes_that_prepare_at_once_agree_on_one_database() -> Result<()> {
    let nats = Nats::start().await?;
    let (a, b) = (connect(&nats).await?, connect(&nats).await?);
    let database = Uuid::now_v7();
    let both = tokio::join!(a.prepare(database), b.prepare(database));
    both.0?;
    both.1?;
    a.prepare(database).await?;
    let other = Uuid::now_v7();
    match b.prepare(other).await {
        Err(BusError::Incompatible(why)) => {
            assert!(why.contains(&other.to_string()) && why.contains(&database.to_string()), "{why}");
        }
        other => bail!("{other:?}"),
    }
    Ok(())
}

#[tokio::test]
async fn of_two_databases_that_claim_a_server_at_once_one_is_refused() -> Result<()> {
    let nats = Nats::start().await?;
    let (a, b) = (connect(&nats).await?, connect(&nats).await?);
    let (first, second) = tokio::join!(a.prepare(Uuid::now_v7()), b.prepare(Uuid::now_v7()));
    assert!(first.is_ok() != second.is_ok(), "{first:?} {second:?}");
    Ok(())
}

#[tokio::test]
async fn streams_are_as_the_contract_says() -> Result<()> {
    let (nats, _bus) = ready().await?;
    let context = nats.jetstream().await?;
    let mut names: Vec<String> = context.stream_names().try_collect().await?;
    names.sort();
    assert_eq!(
        names,
        [
            "AX_DEAD",
            "AX_EVENTS",
            "AX_LOGS",
            "AX_TRIGGERS",
            "KV_ax_dag",
            "KV_ax_dedup",
            "KV_ax_groups",
            "KV_ax_leader",
            "KV_ax_workers",
            "OBJ_ax_results"
        ]
    );
    let config = |name: &'static str| {
        let context = context.clone();
        async move { anyhow::Ok(context.get_stream(name).await?.cached_info().config.clone()) }
    };
    let triggers = config("AX_TRIGGERS").await?;
    assert_eq!(triggers.subjects, ["ax.trigger.>"]);
    assert_eq!(triggers.retention, async_nats::jetstream::stream::RetentionPolicy::WorkQueue);
    assert_eq!(triggers.storage, async_nats::jetstream::stream::StorageType::File);
    assert!(triggers.allow_direct && triggers.deny_purge && !triggers.deny_delete);
    assert_eq!(triggers.duplicate_window, Duration::from_secs(120));
    let events = config("AX_EVENTS").await?;
    assert_eq!(events.max_age, Duration::from_secs(24 * 3600));
    assert!(events.max_bytes > 0);
    assert_eq!(events.subjects.len(), 5);
    assert_eq!(config("AX_LOGS").await?.max_age, Duration::from_secs(7 * 24 * 3600));
    assert_eq!(config("AX_DEAD").await?.max_age, Duration::from_secs(30 * 24 * 3600));
    assert_eq!(config("KV_ax_leader").await?.max_age, Duration::from_secs(5));
    assert_eq!(config("KV_ax_workers").await?.max_age, Duration::from_secs(10));
    for name in names {
        let config = context.get_stream(&name).await?.cached_info().config.clone();
        assert!(config.description.is_some_and(|text| !text.is_empty()), "{name} has no description");
        assert!(config.metadata.contains_key("ax_role"), "{name} has no metadata");
        assert_eq!(config.num_replicas, 1);
    }
    // Usable through a client's own idea of buckets, too.
    context.get_key_value("ax_groups").await?.put("g", "{}".into()).await?;
    context.get_object_store("ax_results").await?.put("x", &mut &b"abc"[..]).await?;
    Ok(())
}

#[tokio::test]
async fn settings_that_ax_relies_on_are_corrected_and_those_of_the_operator_kept() -> Result<()> {
    let nats = Nats::start().await?;
    let context = nats.jetstream().await?;
    let bus = connect(&nats).await?;
    let database = Uuid::now_v7();
    bus.prepare(database).await?;
    let mut config = context.get_stream("AX_TRIGGERS").await?.cached_info().config.clone();
    config.duplicate_window = Duration::from_secs(1);
    config.max_bytes = 1 << 30;
    config.metadata.insert("team".into(), "data".into());
    context.update_stream(config).await?;
    let mut config = context.get_stream("AX_EVENTS").await?.cached_info().config.clone();
    config.subjects.truncate(1);
    config.max_age = Duration::from_secs(48 * 3600);
    context.update_stream(config).await?;
    bus.prepare(database).await?;
    let triggers = context.get_stream("AX_TRIGGERS").await?.cached_info().config.clone();
    assert_eq!((triggers.duplicate_window, triggers.max_bytes), (Duration::from_secs(120), 1 << 30));
    assert_eq!(triggers.metadata.get("team").map(String::as_str), Some("data"));
    let events = context.get_stream("AX_EVENTS").await?.cached_info().config.clone();
    assert_eq!((events.subjects.len(), events.max_age), (5, Duration::from_secs(48 * 3600)));
    Ok(())
}

#[tokio::test]
async fn a_stream_that_cannot_be_corrected_is_refused_by_name() -> Result<()> {
    let nats = Nats::start().await?;
    let config = async_nats::jetstream::stream::Config {
        name: "AX_TRIGGERS".into(),
        subjects: vec!["ax.trigger.>".into()],
        ..Default::default()
    };
    nats.jetstream().await?.create_stream(config).await?;
    match connect(&nats).await?.prepare(Uuid::now_v7()).await {
        Err(BusError::Incompatible(why)) => {
            assert!(why.contains("AX_TRIGGERS") && why.contains("retention"), "{why}");
        }
        other => bail!("{other:?}"),
    }
    Ok(())
}

#[tokio::test]
async fn a_server_with_little_room_gets_smaller_streams() -> Result<()> {
    let store = tempfile::tempdir()?;
    let config = format!("jetstream {{ max_file_store: 600MB, store_dir: {:?} }}", store.path());
    let nats = Nats::start_with(NatsOptions { config, without_jetstream: true, ..NatsOptions::default() }).await?;
    connect(&nats).await?.prepare(Uuid::now_v7()).await?;
    let context = nats.jetstream().await?;
    let events = context.get_stream("AX_EVENTS").await?.cached_info().config.max_bytes;
    let logs = context.get_stream("AX_LOGS").await?.cached_info().config.max_bytes;
    assert!((64 << 20..600 << 20).contains(&events) && (64 << 20..600 << 20).contains(&logs), "{events} {logs}");
    Ok(())
}

#[tokio::test]
async fn a_lease_that_is_not_renewed_expires_with_its_bucket() -> Result<()> {
    let nats = Nats::start().await?;
    let config = NatsConfig { lease_ttl: Duration::from_secs(1), ..NatsConfig::new(nats.url()) };
    let bus = NatsBus::connect(config).await?;
    bus.prepare(Uuid::now_v7()).await?;
    let LeaseWrite::Won(first) = bus.lease_take(&lease("a"), None).await? else { bail!("free lease not won") };
    assert_eq!(bus.lease_take(&lease("b"), None).await?, LeaseWrite::Lost);
    eventually(Deadline::seconds(5), "the lease expires", || async { Ok(bus.lease().await?.is_none().then_some(())) })
        .await?;
    assert_eq!(bus.lease_take(&lease("a"), Some(first)).await?, LeaseWrite::Lost, "renewing an expired lease");
    let LeaseWrite::Won(second) = bus.lease_take(&lease("b"), None).await? else { bail!("expired lease not won") };
    assert!(second > first);
    Ok(())
}

#[tokio::test]
async fn a_lease_survives_a_restart_of_the_server() -> Result<()> {
    let (mut nats, bus) = ready().await?;
    let LeaseWrite::Won(revision) = bus.lease_take(&lease("a"), None).await? else { bail!("free lease not won") };
    nats.kill9()?;
    eventually(Deadline::seconds(5), "the bus sees that it is cut off", || async {
        Ok(bus.connected_for().is_zero().then_some(()))
    })
    .await?;
    let start = Instant::now();
    assert!(matches!(bus.lease().await, Err(BusError::Unavailable(_))));
    assert!(matches!(bus.ask_leader(Duration::from_millis(200)).await, Err(BusError::Unavailable(_))));
    bus.tell("ax.notice.x".into(), Bytes::new()).await;
    assert!(start.elapsed() < Duration::from_millis(500), "nothing waits on a connection that is down");
    nats.start_again().await?;
    eventually(Deadline::seconds(10), "the bus is back", || async {
        Ok((!bus.connected_for().is_zero()).then_some(()))
    })
    .await?;
    match bus.lease_take(&lease("a"), Some(revision)).await? {
        LeaseWrite::Won(_) => Ok(()),
        LeaseWrite::Lost => bail!("the lease was lost with the server"),
    }
}

#[tokio::test]
async fn a_publisher_never_comes_back_after_the_server_restarts() -> Result<()> {
    let (mut nats, bus) = ready().await?;
    let name = consumer("g", 60_000, 0)?;
    let publisher = bus.publisher().await?;
    publisher.publish(trigger(&name, run())).await?;
    nats.kill9()?;
    // Handed over while the connection is lost: must neither hang nor be sent later.
    let orphan = run();
    let start = Instant::now();
    let lost = publisher.publish(trigger(&name, orphan)).await;
    assert!(matches!(lost, Err(PublishError::Closed | PublishError::Transient(_))), "{lost:?}");
    assert!(start.elapsed() < Duration::from_secs(3));
    nats.start_again().await?;
    eventually(Deadline::seconds(10), "the bus is back", || async { Ok(bus.triggers().await.ok().map(|_| ())) })
        .await?;
    eventually(Deadline::seconds(5), "the publisher is closed", || async { Ok(publisher.is_closed().then_some(())) })
        .await?;
    let after = publisher.publish(trigger(&name, run())).await;
    assert!(matches!(after, Err(PublishError::Closed)), "{after:?}");
    assert!(matches!(publisher.delete(1).await, Err(PublishError::Closed)));
    // A new one serves the same stream; its publish comes after anything the old one could have sent.
    let next = bus.publisher().await?;
    let ack = next.publish(trigger(&name, run())).await?;
    assert_eq!(ack.seq, 2, "the old connection has sent nothing");
    assert!(bus.last_trigger(&trigger(&name, orphan).subject).await?.is_none());
    Ok(())
}

#[tokio::test]
async fn a_frozen_server_stalls_nobody_for_long() -> Result<()> {
    let (mut nats, bus) = ready().await?;
    let publisher = bus.publisher().await?;
    let name = consumer("g", 60_000, 0)?;
    nats.process()?.freeze()?;
    let start = Instant::now();
    let (published, deleted, lease, leader, opened) = tokio::join!(
        publisher.publish(trigger(&name, run())),
        publisher.delete(1),
        bus.lease(),
        bus.ask_leader(Duration::from_secs(1)),
        bus.publisher(),
    );
    assert!(start.elapsed() < Duration::from_secs(6), "{:?}", start.elapsed());
    assert!(matches!(published, Err(PublishError::Transient(_))), "{published:?}");
    assert!(matches!(deleted, Err(PublishError::Transient(_))), "{deleted:?}");
    assert!(matches!(lease, Err(BusError::Unavailable(_))), "{lease:?}");
    assert!(matches!(leader, Ok(LeaderAnswer::TimedOut)), "{leader:?}");
    assert!(matches!(opened, Err(BusError::Unavailable(_))));
    let closing = Instant::now();
    publisher.close().await;
    assert!(closing.elapsed() < Duration::from_secs(2), "closing does not wait for the server");
    nats.process()?.thaw()?;
    Ok(())
}

#[tokio::test]
async fn closing_a_publisher_fails_what_is_under_way() -> Result<()> {
    let (mut nats, bus) = ready().await?;
    let publisher = bus.publisher().await?;
    nats.process()?.freeze()?;
    let name = consumer("g", 60_000, 0)?;
    let (under_way, ()) = tokio::join!(publisher.publish(trigger(&name, run())), publisher.close());
    assert!(publisher.is_closed());
    assert!(matches!(under_way, Err(PublishError::Closed)), "{under_way:?}");
    nats.process()?.thaw()?;
    Ok(())
}

#[tokio::test]
async fn what_a_stream_refuses_for_good_is_told_from_what_may_pass() -> Result<()> {
    let nats =
        Nats::start_with(NatsOptions { config: "max_payload: 100KB\n".to_owned(), ..NatsOptions::default() }).await?;
    let bus = connect(&nats).await?;
    let publisher = bus.publisher().await?;
    let name = consumer("g", 60_000, 0)?;
    let early = publisher.publish(trigger(&name, run())).await;
    assert!(matches!(early, Err(PublishError::Transient(_))), "no stream yet: {early:?}");
    bus.prepare(Uuid::now_v7()).await?;
    let big = Outgoing { payload: vec![b'x'; 200 * 1024].into(), ..trigger(&name, run()) };
    let too_big = publisher.publish(big).await;
    assert!(matches!(&too_big, Err(PublishError::Refused(why)) if why.contains("limit")), "{too_big:?}");
    assert!(!publisher.is_closed());
    let mut torn = trigger(&name, run());
    torn.headers.push(("Ax-Handler", "a\r\nb".into()));
    assert!(matches!(publisher.publish(torn).await, Err(PublishError::Refused(_))));
    let context = nats.jetstream().await?;
    let mut config = context.get_stream("AX_TRIGGERS").await?.cached_info().config.clone();
    config.max_message_size = 1024;
    context.update_stream(config.clone()).await?;
    let medium = Outgoing { payload: vec![b'x'; 2048].into(), ..trigger(&name, run()) };
    let refused = publisher.publish(medium).await;
    assert!(matches!(&refused, Err(PublishError::Refused(why)) if why.contains("10054")), "{refused:?}");
    config.max_message_size = -1;
    config.max_messages = 1;
    context.update_stream(config).await?;
    publisher.publish(trigger(&name, run())).await?;
    let full = publisher.publish(trigger(&name, run())).await;
    assert!(matches!(full, Err(PublishError::Transient(_))), "a full stream empties again: {full:?}");
    assert_eq!(bus.triggers().await?.messages, 1, "and forgets nothing to make room");
    Ok(())
}

#[tokio::test]
async fn the_servers_own_events_are_stored_in_order_with_the_sequence_they_concern() -> Result<()> {
    let (nats, bus) = ready().await?;
    let name = consumer("data-sync", 1_000, 1)?;
    bus.ensure_consumer(&name).await?;
    let publisher = bus.publisher().await?;
    let hands = Hands::on(&nats.jetstream().await?, &name.to_string()).await?;
    let body = |event: &StreamMessage| serde_json::from_slice::<Value>(&event.payload).unwrap_or_default();

    let acked = publisher.publish(trigger(&name, run())).await?.seq;
    hands.next().await?.ack().await.map_err(anyhow::Error::msg)?;
    let metric = event(&bus, 0, "$JS.EVENT.METRIC.CONSUMER.ACK.AX_TRIGGERS.data-sync-default-t1r1").await?;
    assert_eq!(body(&metric)["stream_seq"], acked);
    assert_eq!(body(&metric)["deliveries"], 1);

    let failed = publisher.publish(trigger(&name, run())).await?.seq;
    let nak = async_nats::jetstream::AckKind::Nak(None);
    hands.next().await?.ack_with(nak).await.map_err(anyhow::Error::msg)?;
    let naked = event(&bus, metric.seq, "$JS.EVENT.ADVISORY.CONSUMER.MSG_NAKED.AX_TRIGGERS.").await?;
    assert_eq!(body(&naked)["stream_seq"], failed);
    let again = hands.next().await?;
    again.ack_with(async_nats::jetstream::AckKind::Term).await.map_err(anyhow::Error::msg)?;
    let ended = event(&bus, naked.seq, "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.AX_TRIGGERS.").await?;
    assert_eq!((body(&ended)["stream_seq"].clone(), body(&ended)["deliveries"].clone()), (failed.into(), 2.into()));
    Ok(())
}

#[tokio::test]
async fn a_poke_provokes_max_deliveries_and_takes_nothing() -> Result<()> {
    let (nats, bus) = ready().await?;
    let name = consumer("g", 1_000, 0)?;
    bus.ensure_consumer(&name).await?;
    let publisher = bus.publisher().await?;
    let hands = Hands::on(&nats.jetstream().await?, &name.to_string()).await?;
    let dead = publisher.publish(trigger(&name, run())).await?.seq;
    hands.next().await?;
    let waiting = publisher.publish(trigger(&name, run())).await?.seq;
    let poking = async {
        let mut every = tokio::time::interval(Duration::from_millis(200));
        loop {
            every.tick().await;
            if let Err(error) = bus.poke("g-default-t1r0").await {
                return anyhow::Error::from(error);
            }
        }
    };
    let told = event(&bus, 0, "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.AX_TRIGGERS.g-default-t1r0");
    let advisory = tokio::select! {
        advisory = told => advisory?,
        error = poking => return Err(error),
    };
    assert_eq!(serde_json::from_slice::<Value>(&advisory.payload)?["stream_seq"], dead);
    let state = bus.consumer(&name).await?.context("the consumer is gone")?;
    assert_eq!(state.pending, 1, "the waiting message was not delivered: {state:?}");
    assert_eq!(state.delivered_seq, dead);
    let message = hands.next().await?;
    let info = message.info().map_err(anyhow::Error::msg)?;
    assert_eq!((info.stream_sequence, info.delivered), (waiting, 1), "and has all its deliveries");
    assert!(bus.trigger_at(dead).await?.is_some(), "the exhausted message stays until it is deleted");
    assert!(matches!(bus.poke("nobody-default-t1r0").await, Err(BusError::Unavailable(_))));
    Ok(())
}

#[tokio::test]
async fn a_consumer_is_as_the_contract_says_and_is_corrected() -> Result<()> {
    let (nats, bus) = ready().await?;
    let name = consumer("data-sync", 60_000, 3)?;
    bus.ensure_consumer(&name).await?;
    let context = nats.jetstream().await?;
    let stream = context.get_stream("AX_TRIGGERS").await?;
    let config = stream.consumer_info("data-sync-default-t60r3").await?.config;
    assert_eq!(config.filter_subject, "ax.trigger.data-sync.default.t60r3.>");
    assert_eq!(config.ack_policy, async_nats::jetstream::consumer::AckPolicy::Explicit);
    assert_eq!((config.ack_wait, config.max_deliver, config.max_ack_pending), (Duration::from_secs(62), 4, -1));
    assert_eq!((config.sample_frequency, config.backoff.len()), (100, 0));
    assert!(config.description.is_some() && config.metadata.contains_key("ax_group"));
    let changed = async_nats::jetstream::consumer::pull::Config {
        durable_name: Some("data-sync-default-t60r3".into()),
        filter_subject: config.filter_subject,
        ack_wait: Duration::from_secs(5),
        max_deliver: 9,
        max_waiting: config.max_waiting,
        ..Default::default()
    };
    stream.update_consumer(changed).await?;
    bus.ensure_consumer(&name).await?;
    let config = stream.consumer_info("data-sync-default-t60r3").await?.config;
    assert_eq!((config.ack_wait, config.max_deliver, config.max_ack_pending), (Duration::from_secs(62), 4, -1));
    assert_eq!(config.sample_frequency, 100);
    let created = |info: async_nats::jetstream::consumer::Info| info.created;
    let before = created(stream.consumer_info("data-sync-default-t60r3").await?);
    bus.ensure_consumer(&name).await?;
    assert_eq!(created(stream.consumer_info("data-sync-default-t60r3").await?), before);
    Ok(())
}

#[tokio::test]
async fn an_idempotency_key_works_again_after_it_expired_or_was_deleted() -> Result<()> {
    let (nats, bus) = ready().await?;
    let task = TaskId::new("a.b")?;
    let (first, second, third) = (run(), run(), run());
    let window = Duration::from_secs(1);
    assert_eq!(bus.claim_key(&task, "k", first, window).await?, first);
    assert_eq!(bus.claim_key(&task, "k", second, window).await?, first);
    eventually(Deadline::seconds(10), "the key expires", || async {
        Ok((bus.claim_key(&task, "k", second, Duration::from_secs(60)).await? == second).then_some(()))
    })
    .await?;
    let bucket = nats.jetstream().await?.get_key_value("ax_dedup").await?;
    let key = bucket.keys().await?.try_next().await?.context("no key")?;
    assert!(key.starts_with("a.b."), "{key}");
    bucket.delete(&key).await?;
    // Over the delete marker, and still with a time to live.
    assert_eq!(bus.claim_key(&task, "k", third, window).await?, third);
    eventually(Deadline::seconds(10), "the key over a marker expires, too", || async {
        Ok((bus.claim_key(&task, "k", first, window).await? == first).then_some(()))
    })
    .await?;
    Ok(())
}

#[tokio::test]
async fn the_events_reader_says_when_it_has_to_begin_anew() -> Result<()> {
    let (mut nats, bus) = ready().await?;
    let context = nats.jetstream().await?;
    for n in 0..3_u32 {
        context.publish("ax.event.started.g.t.r", n.to_string().into()).await?.await?;
    }
    let mut events = bus.read_events(1).await?;
    assert_eq!(events.next().await.context("ended")??.seq, 2);
    nats.kill9()?;
    nats.start_again().await?;
    let ended = async {
        let mut last = 2;
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => {
                    assert_eq!(event.seq, last + 1);
                    last = event.seq;
                }
                Err(error) => return Ok((last, error)),
            }
        }
        bail!("ended without an error")
    };
    let (last, error) = tokio::time::timeout(Duration::from_secs(10), ended).await??;
    assert!(matches!(error, BusError::Unavailable(_)));
    assert!(events.next().await.is_none(), "nothing follows an error");
    let mut again =
        eventually(Deadline::seconds(10), "reading begins anew", || async { Ok(Some(bus.read_events(last).await?)) })
            .await?;
    if last == 2 {
        assert_eq!(again.next().await.context("ended")??.seq, 3);
    }
    Ok(())
}

#[tokio::test]
async fn a_long_backlog_of_events_is_read_completely_and_in_order() -> Result<()> {
    const COUNT: u64 = 100_000;
    let (nats, bus) = ready().await?;
    let client = nats.client().await?;
    for n in 0..COUNT {
        client.publish(format!("ax.event.started.g.t.{n}"), "{\"run_id\":1}".repeat(20).into()).await?;
    }
    client.flush().await?;
    eventually(Deadline::seconds(30), "all are stored", || async {
        Ok((bus.events().await?.last_seq == COUNT).then_some(()))
    })
    .await?;
    let start = Instant::now();
    let read: Vec<u64> = bus
        .read_events(10)
        .await?
        .take(usize::try_from(COUNT)? - 10)
        .map(|event| event.map(|event| event.seq))
        .try_collect()
        .await?;
    print_rate("events read", COUNT, start);
    assert!(read.iter().copied().eq(11..=COUNT));
    Ok(())
}

#[tokio::test]
async fn a_slow_reader_of_events_loses_none() -> Result<()> {
    const COUNT: u64 = 20_000;
    let (nats, bus) = ready().await?;
    let client = nats.client().await?;
    let mut events = bus.read_events(0).await?;
    let body = Bytes::from(vec![b'x'; 4096]);
    for _ in 0..COUNT {
        client.publish("ax.event.progress.g.t.r", body.clone()).await?;
    }
    client.flush().await?;
    eventually(Deadline::seconds(30), "all are stored", || async {
        Ok((bus.events().await?.last_seq == COUNT).then_some(()))
    })
    .await?;
    for seq in 1..=COUNT {
        assert_eq!(events.next().await.context("ended")??.seq, seq);
    }
    Ok(())
}

#[tokio::test]
async fn many_publishes_are_under_way_at_once() -> Result<()> {
    const COUNT: usize = 20_000;
    let (_nats, bus) = ready().await?;
    let publisher = bus.publisher().await?;
    let name = consumer("g", 60_000, 0)?;
    let start = Instant::now();
    let seqs: BTreeSet<u64> = stream::iter(0..COUNT)
        .map(|_| {
            let (publisher, message) = (publisher.clone(), trigger(&name, run()));
            async move { publisher.publish(message).await.map(|ack| ack.seq) }
        })
        .buffer_unordered(256)
        .try_collect()
        .await?;
    print_rate("published", COUNT as u64, start);
    assert!(seqs.into_iter().eq(1..=COUNT as u64), "each of them once");
    Ok(())
}

/// Shown by `cargo test -- --nocapture`: the rate that the machine at hand gives.
#[allow(clippy::print_stdout)]
fn print_rate(what: &str, count: u64, since: Instant) {
    println!("{what}: {:.0}/s", count as f64 / since.elapsed().as_secs_f64());
}

#[tokio::test]
async fn a_cluster_gets_three_replicas_and_its_quirks_mean_the_same() -> Result<()> {
    let cluster = NatsCluster::start().await?;
    let bus = NatsBus::connect(NatsConfig::new(cluster.url())).await?;
    let database = Uuid::now_v7();
    eventually(Deadline::seconds(30), "the topology is made", || async { Ok(Some(bus.prepare(database).await?)) })
        .await?;
    let context = async_nats::jetstream::new(cluster.client().await?);
    for name in ["AX_TRIGGERS", "AX_EVENTS", "KV_ax_leader"] {
        assert_eq!(context.get_stream(name).await?.cached_info().config.num_replicas, 3, "{name}");
    }
    let LeaseWrite::Won(revision) = bus.lease_take(&lease("a"), None).await? else { bail!("free lease not won") };
    let LeaseWrite::Won(_) = bus.lease_take(&lease("a"), Some(revision)).await? else { bail!("not renewed") };
    assert_eq!(bus.lease_take(&lease("zombie"), Some(revision)).await?, LeaseWrite::Lost);
    let publisher = bus.publisher().await?;
    let name = consumer("g", 60_000, 0)?;
    let message = trigger(&name, run());
    let (first, second) = tokio::join!(publisher.publish(message.clone()), publisher.publish(message.clone()));
    let seq = first?.seq;
    match second {
        Ok(ack) => assert!(ack.duplicate && ack.seq == seq),
        Err(PublishError::Transient(_)) => {}
        Err(error) => bail!("{error}"),
    }
    assert!(publisher.delete(seq).await?);
    assert!(!publisher.delete(seq).await?, "deleting again finds nothing");
    assert!(!publisher.delete(4711).await?, "a sequence that never was");
    let keys: Vec<RunId> = {
        let task = TaskId::new("t")?;
        let claims = (0..8).map(|_| bus.claim_key(&task, "k", run(), Duration::from_secs(60)));
        futures::future::try_join_all(claims).await?
    };
    assert!(keys.iter().all(|key| *key == keys[0]), "{keys:?}");
    Ok(())
}
