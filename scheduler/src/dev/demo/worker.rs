//! Workers for the groups of the examples: what each handler does is made up, how it does it is not.

use std::time::Duration;

use ax_shared::Prefix;
use ax_worker::{Context, Failure, Worker};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::Demo;

/// Runs that a worker executes at once.
const AT_ONCE: u32 = 4;
/// How long runs may go on when the demo ends.
const GRACE: Duration = Duration::from_secs(3);

/// Starts a worker for each group.
pub(super) fn start(nats_url: &str, prefix: &Prefix, stop: &CancellationToken) -> Demo {
    let worker = |group: &str| {
        let worker = Worker::new(nats_url, group).prefix(prefix.clone()).concurrency(AT_ONCE).grace(GRACE);
        match group {
            "data-sync" => worker
                .handler("sync_order_to_ods", copy_rows)
                .handler("sync_payment_to_ods", copy_rows)
                .handler("export_orders", export),
            "payment" => {
                worker.handler("payment.check_timeout", check_timeouts).handler("payment.reconcile", reconcile)
            }
            _ => {
                worker.handler("demo.heartbeat", heartbeat).handler("demo.welcome", welcome).handler("demo.echo", echo)
            }
        }
    };
    let start = |group: &str| {
        let working = worker(group).run_until(stop.clone());
        tokio::spawn(async move {
            if let Err(error) = working.await {
                tracing::error!(%error, "the demo worker ended");
            }
        })
    };
    Demo { workers: ["data-sync", "payment", "demo"].map(start).into() }
}

/// What tells a table's database.
#[derive(Deserialize)]
struct Source {
    db: String,
}

async fn copy_rows(source: Source, cx: Context) -> Result<Value, Failure> {
    cx.log(format!("copying from {}", source.db));
    work(&cx, 80, 400).await;
    Ok(json!({"copied": pick(&cx, 1000, 9000), "db": source.db}))
}

async fn export(_: Value, cx: Context) -> Result<Value, Failure> {
    for part in 0..10 {
        work(&cx, 200, 400).await;
        cx.progress(f64::from(part) * 10.0, format!("part {part} of 10"));
    }
    Ok(json!({"file": format!("orders-{}.parquet", cx.run_id())}))
}

async fn check_timeouts(_: Value, cx: Context) -> Result<Value, Failure> {
    work(&cx, 20, 120).await;
    Ok(json!({"cancelled": pick(&cx, 0, 5)}))
}

/// Fails in its first attempt now and then, so that a retry can be seen.
async fn reconcile(_: Value, cx: Context) -> Result<Value, Failure> {
    work(&cx, 30, 200).await;
    if cx.attempt() == 1 && pick(&cx, 0, 2) == 0 {
        Err("the provider's API answered 503")?;
    }
    Ok(json!({"differences": 0}))
}

async fn heartbeat(_: Value, cx: Context) -> Result<(), Failure> {
    work(&cx, 5, 40).await;
    Ok(())
}

/// What `demo.welcome` is to say.
#[derive(Deserialize)]
struct Words {
    message: String,
}

async fn welcome(words: Words, _: Context) -> Result<Value, Failure> {
    Ok(json!({"said": words.message}))
}

/// For tasks of the reader's own: answers with the payload.
async fn echo(payload: Value, _: Context) -> Result<Value, Failure> {
    Ok(payload)
}

/// Takes `min`..`max` milliseconds.
async fn work(cx: &Context, min: u64, max: u64) {
    tokio::time::sleep(Duration::from_millis(pick(cx, min, max))).await;
}

/// A number in `min`..=`max` that the run decides, so that a repeated run does the same.
fn pick(cx: &Context, min: u64, max: u64) -> u64 {
    let bits = cx.run_id().0.as_u128() as u64;
    min + bits % (max - min + 1)
}
