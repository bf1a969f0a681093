//! What the bus in memory can do beyond NATS: cut connections, drop, double and lose, on a clock in the test's hands.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use ax_scheduler::bus::memory::MemoryServer;
use ax_scheduler::ports::{Bus, BusError, Clock, LeaderAnswer, LeaseValue, LeaseWrite, Outgoing, PublishError};
use ax_shared::{ConsumerName, Group, Prefix, Profile, Queue, Timestamp};
use bytes::Bytes;
use futures::{FutureExt, StreamExt};
use uuid::Uuid;

/// Stands still until it is set.
#[derive(Debug, Default)]
struct ManualClock(AtomicU64);

impl ManualClock {
    fn forward(&self, ms: u64) {
        self.0.fetch_add(ms, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(1_790_000_000_000 + self.0.load(Ordering::SeqCst) as i64)
    }

    fn boot(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::SeqCst))
    }
}

fn world() -> (Arc<ManualClock>, MemoryServer) {
    let clock = Arc::new(ManualClock::default());
    (clock.clone(), MemoryServer::new(clock, Prefix::default(), Duration::from_secs(5)))
}

fn name() -> Result<ConsumerName> {
    Ok(ConsumerName { group: Group::new("g")?, queue: Queue::default_lane(), profile: Profile::of(1000, 0) })
}

fn trigger(id: &str) -> Outgoing {
    Outgoing {
        subject: format!("ax.trigger.g.default.t1r0.t.{id}"),
        headers: vec![("Nats-Msg-Id", id.to_owned())],
        payload: Bytes::new(),
    }
}

#[tokio::test]
async fn time_passes_only_with_the_clock() -> Result<()> {
    let (clock, server) = world();
    let (bus, hands) = (server.bus(), server.hands());
    bus.ensure_consumer(&name()?).await?;
    bus.publisher().await?.publish(trigger("1")).await?;
    let value = LeaseValue { node_id: "a".into(), instance: Uuid::nil(), epoch: 1, since: clock.now() };
    assert_eq!(bus.lease_take(&value, None).await?, LeaseWrite::Won(1));
    let first = hands.pull("g-default-t1r0").context("nothing to pull")?;
    clock.forward(2999);
    bus.poke("g-default-t1r0").await?;
    assert_eq!(bus.events().await?.last_seq, 0);
    clock.forward(1);
    bus.poke("g-default-t1r0").await?;
    assert_eq!(bus.events().await?.last_seq, 1, "MAX_DELIVERIES, three seconds after the only delivery");
    hands.ack(&first);
    assert_eq!(bus.triggers().await?.messages, 1, "the consumer has let go of it");
    clock.forward(2000);
    assert_eq!(bus.lease().await?, None);
    Ok(())
}

#[tokio::test]
async fn a_cut_connection_fails_everything_and_its_publisher_stays_dead() -> Result<()> {
    let (clock, server) = world();
    let (bus, other) = (server.bus(), server.bus());
    let publisher = bus.publisher().await?;
    let mut events = bus.read_events(0).await?;
    let value = LeaseValue { node_id: "a".into(), instance: Uuid::nil(), epoch: 1, since: clock.now() };
    let _guard = bus.serve_leader(value.clone()).await?;
    bus.cut();
    assert!(matches!(bus.lease().await, Err(BusError::Unavailable(_))));
    assert_eq!(bus.connected_for(), Duration::ZERO);
    assert!(matches!(publisher.publish(trigger("1")).await, Err(PublishError::Closed)));
    assert!(matches!(events.next().await, Some(Err(BusError::Unavailable(_)))));
    assert!(events.next().await.is_none());
    assert_eq!(other.ask_leader(Duration::ZERO).await?, LeaderAnswer::NoResponders);
    bus.mend();
    assert_eq!(other.ask_leader(Duration::ZERO).await?, LeaderAnswer::Alive(value));
    assert!(publisher.is_closed());
    assert!(bus.publisher().await?.publish(trigger("1")).await.is_ok());
    Ok(())
}

#[tokio::test]
async fn faults_drop_double_and_lose_what_they_say() -> Result<()> {
    let (_clock, server) = world();
    let (bus, hands) = (server.bus(), server.hands());
    bus.ensure_consumer(&name()?).await?;
    let publisher = bus.publisher().await?;
    server.faults(|faults| (faults.lose_publishes, faults.lose_pubacks) = (1, 1));
    assert!(matches!(publisher.publish(trigger("1")).await, Err(PublishError::Transient(_))));
    assert_eq!(bus.triggers().await?.last_seq, 0);
    assert!(matches!(publisher.publish(trigger("1")).await, Err(PublishError::Transient(_))));
    assert_eq!(bus.triggers().await?.last_seq, 1);
    assert!(publisher.publish(trigger("1")).await?.duplicate);

    server.faults(|faults| faults.drop_metrics = true);
    hands.ack(&hands.pull("g-default-t1r0").context("nothing to pull")?);
    assert_eq!((bus.triggers().await?.messages, bus.events().await?.last_seq), (0, 0));

    server.faults(|faults| faults.double_events = true);
    hands.event("ax.event.started.g.t.r", Some("r:1:started"), "{}");
    assert_eq!(bus.events().await?.last_seq, 2);

    let mut events = bus.read_events(0).await?;
    assert!(matches!(events.next().await, Some(Ok(_))));
    let before = bus.events().await?.incarnation;
    server.recreate_events();
    assert!(matches!(events.next().now_or_never(), Some(Some(Err(_)))), "another stream is no continuation");
    assert_ne!(bus.events().await?.incarnation, before);
    Ok(())
}
