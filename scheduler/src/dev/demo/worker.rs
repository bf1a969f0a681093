//! Workers for the groups of the examples: what each handler does is made up, how it does it is not.

use std::time::Duration;

use anyhow::Context as _;
use ax_shared::{Group, Prefix};
use ax_worker::{Failure, Job, Worker};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::Demo;

/// Runs that a worker executes at once.
const AT_ONCE: u32 = 4;
/// How long runs may go on when the demo ends.
const GRACE: Duration = Duration::from_secs(3);

/// Starts a worker for each group.
pub(super) async fn start(nats_url: &str, prefix: &Prefix, stop: CancellationToken) -> anyhow::Result<Demo> {
    let mut workers = Vec::new();
    for group in ["data-sync", "payment", "demo"] {
        let client = ax_worker::connect(nats_url).await.context("connect the demo worker")?;
        let worker = Worker::builder(client, Group::new(group)?)
            .prefix(prefix.clone())
            .concurrency(AT_ONCE)
            .grace(GRACE)
            .handler("sync_order_to_ods", copy_rows)?
            .handler("sync_payment_to_ods", copy_rows)?
            .handler("export_orders", export)?
            .handler("payment.check_timeout", check_timeouts)?
            .handler("payment.reconcile", reconcile)?
            .handler("demo.heartbeat", heartbeat)?
            .handler("demo.welcome", welcome)?
            .handler("demo.echo", echo)?;
        let stop = stop.clone();
        workers.push(tokio::spawn(async move {
            if let Err(e) = worker.run(stop).await {
                tracing::error!(error = %e, "the demo worker ended");
            }
        }));
    }
    Ok(Demo { workers })
}

async fn copy_rows(job: Job) -> Result<Value, Failure> {
    work(&job, 80, 400).await;
    Ok(json!({"copied": pick(&job, 1000, 9000), "db": job.payload["db"]}))
}

async fn export(job: Job) -> Result<Value, Failure> {
    work(&job, 2000, 4000).await;
    Ok(json!({"file": format!("orders-{}.parquet", job.run_id)}))
}

async fn check_timeouts(job: Job) -> Result<Value, Failure> {
    work(&job, 20, 120).await;
    Ok(json!({"cancelled": pick(&job, 0, 5)}))
}

/// Fails in its first attempt now and then, so that a retry can be seen.
async fn reconcile(job: Job) -> Result<Value, Failure> {
    work(&job, 30, 200).await;
    if job.attempt == 1 && pick(&job, 0, 2) == 0 {
        return Err(Failure::retry("the provider's API answered 503"));
    }
    Ok(json!({"differences": 0}))
}

async fn heartbeat(job: Job) -> Result<Value, Failure> {
    work(&job, 5, 40).await;
    Ok(Value::Null)
}

async fn welcome(job: Job) -> Result<Value, Failure> {
    Ok(json!({"said": job.payload["message"]}))
}

/// For tasks of the reader's own: answers with the payload.
async fn echo(job: Job) -> Result<Value, Failure> {
    Ok(job.payload.clone())
}

/// Takes `min`..`max` milliseconds.
async fn work(job: &Job, min: u64, max: u64) {
    tokio::time::sleep(Duration::from_millis(pick(job, min, max))).await;
}

/// A number in `min`..=`max` that the run decides, so that a repeated run does the same.
fn pick(job: &Job, min: u64, max: u64) -> u64 {
    let bits = job.run_id.0.as_u128() as u64;
    min + bits % (max - min + 1)
}
