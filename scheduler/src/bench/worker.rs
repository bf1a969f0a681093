//! `ax bench-worker`: a worker process. It works on the SDK as a user's would; for the floor it pulls and acks plainly.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use async_nats::HeaderMap;
use async_nats::jetstream::{self, consumer::PullConsumer};
use ax_shared::subjects::header;
use ax_shared::{Prefix, RunId, Timestamp};
use ax_worker::{Context, Failure, Worker};
use futures::StreamExt as _;
use serde::de::IgnoredAny;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::load::{GROUP, HANDLER, task_number, work};
use super::parts::READY;
use super::record::{Receipt, Recorder, Recording, now_us};

/// How long runs may go on when the worker is asked to end: longer than any works.
const GRACE: Duration = Duration::from_secs(5);
/// With a fault planted, each so many receipts.
const FAULT_EVERY: u64 = 10;

/// A fault to plant, so that it can be seen that it is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Fault {
    /// Some runs are acknowledged and never executed.
    Drop,
    /// Some runs are executed twice.
    Double,
}

/// What a worker process is started with.
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// Address of NATS.
    pub nats_url: String,
    /// Prefix of the installation, or of the floor.
    pub prefix: Prefix,
    /// Where it writes what it received.
    pub record: PathBuf,
    /// Runs that it executes at once.
    pub concurrency: u32,
    /// Pulls and acks without the SDK.
    pub plain: bool,
    /// Plants a fault.
    pub fault: Option<Fault>,
}

/// Works until `stop` is cancelled, then writes its record.
///
/// # Errors
/// NATS does not answer, or the record cannot be written.
pub async fn run(options: WorkerOptions, stop: CancellationToken) -> anyhow::Result<()> {
    let recorder = Recorder::create(&options.record)?;
    let hands = Arc::new(Hands { receipts: recorder.recording(), seen: AtomicU64::new(0), fault: options.fault });
    if options.plain {
        plain(&options, hands, stop).await?;
    } else {
        sdk(&options, hands, stop).await?;
    }
    recorder.finish()
}

/// Where receipts go, and the fault that is planted.
struct Hands {
    receipts: Recording,
    seen: AtomicU64,
    fault: Option<Fault>,
}

impl Hands {
    /// Records a receipt; whether the run is executed.
    fn receive(&self, receipt: Receipt) -> bool {
        let seen = self.seen.fetch_add(1, Ordering::Relaxed);
        let copies = match self.fault {
            Some(fault) if seen % FAULT_EVERY == FAULT_EVERY - 1 => match fault {
                Fault::Drop => 0,
                Fault::Double => 2,
            },
            _ => 1,
        };
        for _ in 0..copies {
            self.receipts.add(receipt);
        }
        copies > 0
    }
}

async fn sdk(options: &WorkerOptions, hands: Arc<Hands>, stop: CancellationToken) -> anyhow::Result<()> {
    // The worker connects by itself; that it can is known before it says that it is ready.
    super::connect(&options.nats_url).await?;
    super::say(READY);
    let worker = Worker::new(options.nats_url.as_str(), GROUP)
        .prefix(options.prefix.clone())
        .concurrency(options.concurrency)
        .grace(GRACE)
        .handler(HANDLER, move |_: IgnoredAny, cx: Context| {
            let received_us = now_us();
            let hands = hands.clone();
            async move {
                let receipt = Receipt {
                    task: task_number(cx.task_id().as_str())
                        .ok_or_else(|| Failure::give_up("not a task of the bench"))?,
                    trigger_time: cx.trigger_time(),
                    run_id: cx.run_id(),
                    attempt: cx.attempt(),
                    received_us,
                };
                if hands.receive(receipt) {
                    tokio::time::sleep(work(cx.run_id())).await;
                }
                Ok(())
            }
        });
    Ok(worker.run_until(stop).await?)
}

/// Pull, work, ack, with nothing else.
async fn plain(options: &WorkerOptions, hands: Arc<Hands>, stop: CancellationToken) -> anyhow::Result<()> {
    let client = super::connect(&options.nats_url).await?;
    let consumer: PullConsumer = jetstream::new(client)
        .get_consumer_from_stream(super::floor::CONSUMER, options.prefix.triggers_stream())
        .await
        .map_err(|error| anyhow::anyhow!("find the floor's consumer: {error}"))?;
    let at_once = options.concurrency as usize;
    let mut messages = consumer.stream().max_messages_per_batch(at_once).messages().await.context("pull")?;
    super::say(READY);
    let room = Arc::new(Semaphore::new(at_once));
    let runs = TaskTracker::new();
    loop {
        let slot = room.clone().acquire_owned().await.context("room for a run")?;
        let message = tokio::select! {
            () = stop.cancelled() => break,
            message = messages.next() => message,
        };
        let received_us = now_us();
        let Some(message) = message else { break };
        let message = message.context("receive a message")?;
        let hands = hands.clone();
        runs.spawn(async move {
            let delivered = message.info().map_or(1, |info| u32::try_from(info.delivered).unwrap_or(u32::MAX));
            let receipt = message.headers.as_ref().and_then(|headers| receipt(headers, delivered, received_us));
            if let Some(receipt) = receipt
                && hands.receive(receipt)
            {
                tokio::time::sleep(work(receipt.run_id)).await;
            }
            let acked = message.ack().await;
            drop(slot);
            acked.map_err(|error| tracing::warn!(%error, "a message was not acknowledged"))
        });
    }
    runs.close();
    runs.wait().await;
    Ok(())
}

fn receipt(headers: &HeaderMap, attempt: u32, received_us: i64) -> Option<Receipt> {
    let text = |name| headers.get(name).map(async_nats::HeaderValue::as_str);
    Some(Receipt {
        task: task_number(text(header::TASK_ID)?)?,
        trigger_time: text(header::TRIGGER_TIME)?.parse::<Timestamp>().ok()?,
        run_id: text(header::RUN_ID)?.parse::<RunId>().ok()?,
        attempt,
        received_us,
    })
}
