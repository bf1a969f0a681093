//! `ax bench-publisher`: the floor's publisher process. A parked thread waits for each instant, then publishes what is
//! due: the very messages that the scheduler would, made beforehand.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use async_nats::HeaderMap;
use async_nats::jetstream::Context as JetStream;
use async_nats::jetstream::context::{ContextBuilder, PublishAckFuture};
use ax_shared::{Prefix, RunKind, Timestamp};
use futures::StreamExt as _;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio_util::sync::CancellationToken;

use super::lateness::{Percentiles, Times};
use super::load::{Load, Owed, Window, run_id};
use super::parts::READY;
use super::record::{now_us, since_1970};
use crate::core::definitions::TaskRow;
use crate::core::trace::Sampler;
use crate::core::trigger;
use crate::ports::Outgoing;

/// Acks that are awaited at once: as many as the scheduler has under way.
const IN_FLIGHT: usize = 256;
/// The scheduler's patience.
const PUBLISHED_WITHIN: Duration = Duration::from_secs(2);

/// What the publisher is started with.
#[derive(Debug, Clone)]
pub struct PublisherOptions {
    /// Address of NATS.
    pub nats_url: String,
    /// Prefix of the floor.
    pub prefix: Prefix,
    /// Number of tasks.
    pub tasks: u32,
    /// Their period in seconds.
    pub period_s: u32,
    /// First second, since 1970.
    pub from_s: i64,
    /// The second at which it ends.
    pub to_s: i64,
}

/// What comes before [`Published`] on its line.
pub(super) const PUBLISHED: &str = "published ";

/// What it did; printed as one line of JSON.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Published {
    /// Messages that the stream confirmed.
    pub(super) confirmed: u64,
    /// Messages that it did not.
    pub(super) unconfirmed: u64,
    /// The thread's wake minus the instant, in milliseconds.
    pub(super) woken_ms: Percentiles,
}

/// Publishes what is owed between two instants, tells what came of it and waits for `stop`: what it took is read from
/// outside.
///
/// # Errors
/// NATS does not answer, or the load cannot be made.
pub async fn run(options: PublisherOptions, stop: CancellationToken) -> anyhow::Result<()> {
    let load = Load::new(options.tasks, options.period_s)?;
    let window = Window { from_s: options.from_s, to_s: options.to_s };
    let client = super::connect(&options.nats_url).await?;
    let jetstream = ContextBuilder::new().timeout(PUBLISHED_WITHIN).build(client);
    super::say(READY);

    let (sent, mut acks) = unbounded_channel();
    let runtime = tokio::runtime::Handle::current();
    let prefix = options.prefix;
    // The connection ends with its last handle, so it must outlive the thread: what it has sent is still to be answered.
    let publishing = jetstream.clone();
    let thread = std::thread::spawn(move || publish(&runtime, &publishing, load, window, &prefix, &sent));
    let acks = futures::stream::poll_fn(move |cx| acks.poll_recv(cx));
    let mut told = Published::default();
    let mut answers = acks.map(IntoFuture::into_future).buffer_unordered(IN_FLIGHT);
    while let Some(Some(answer)) = stop.run_until_cancelled(answers.next()).await {
        match answer {
            Ok(_) => told.confirmed += 1,
            Err(error) => {
                tracing::warn!(%error, "a message was not confirmed");
                told.unconfirmed += 1;
            }
        }
    }
    if stop.is_cancelled() {
        return Ok(());
    }
    let woken = thread.join().map_err(|_| anyhow::anyhow!("the publishing thread panicked"))??;
    told.woken_ms = woken.percentiles();
    super::say(format_args!("{PUBLISHED}{}", serde_json::to_string(&told)?));
    stop.cancelled().await;
    drop(jetstream);
    Ok(())
}

/// Runs on a thread of its own.
fn publish(
    runtime: &tokio::runtime::Handle,
    jetstream: &JetStream,
    load: Load,
    window: Window,
    prefix: &Prefix,
    sent: &UnboundedSender<PublishAckFuture>,
) -> anyhow::Result<Times> {
    let rows = (0..load.tasks()).map(|task| row(load, task)).collect::<anyhow::Result<Vec<_>>>()?;
    let mut woken = Times::new();
    for second in window.from_s..window.to_s {
        let due = load
            .owed(Window { from_s: second, to_s: second + 1 })
            .map(|owed| message(&rows[owed.task as usize], owed, prefix))
            .collect::<anyhow::Result<Vec<_>>>()?;
        park_until(second);
        woken.add_us(now_us() - second * 1_000_000);
        for (subject, headers, payload) in due {
            let ack = runtime.block_on(jetstream.publish_with_headers(subject, headers, payload)).context("publish")?;
            let _ = sent.send(ack);
        }
    }
    Ok(woken)
}

/// Sleeps as a thread: tens of microseconds late, where a timer of the runtime is a millisecond late.
fn park_until(second: i64) {
    let at = Duration::from_secs(u64::try_from(second).unwrap_or(0));
    loop {
        let left = at.saturating_sub(since_1970());
        if left.is_zero() {
            return;
        }
        std::thread::sleep(left);
    }
}

fn row(load: Load, task: u32) -> anyhow::Result<TaskRow> {
    let definition = load.parsed(task).map_err(|why| anyhow::anyhow!("the definition of task {task}: {why}"))?;
    let at = Timestamp::from_millis(0);
    Ok(TaskRow {
        definition: Arc::new(definition),
        version: 1,
        rev: 1,
        anchor_at: at,
        effective_at: at,
        delay_run_id: None,
        created_at: at,
        updated_at: at,
        deleted_at: None,
    })
}

/// The trigger of an owed instant, as the scheduler makes it.
fn message(row: &TaskRow, owed: Owed, prefix: &Prefix) -> anyhow::Result<(String, HeaderMap, bytes::Bytes)> {
    let id = run_id(owed).context("the task's name is not a task id")?;
    let run = row.new_run(id, RunKind::Cron, owed.at, owed.at, owed.at);
    let Outgoing { subject, headers, payload } = trigger::message(prefix, &run, &row.definition, 1, Sampler::ALWAYS);
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        map.insert(name, value.parse::<async_nats::HeaderValue>().context("a header's value")?);
    }
    Ok((subject, map, payload))
}
