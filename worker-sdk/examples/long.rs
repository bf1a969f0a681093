//! A long run: progress, stopping when asked to, and work that blocks its thread.

use std::time::{Duration, Instant};

use ax_worker::{Context, Failure, Nats, Task, Worker, WorkerError};

/// Waits politely: dropped at its next await when its time is up.
async fn wait(steps: u32, cx: Context) -> Result<u32, Failure> {
    for step in 0..steps {
        tokio::time::sleep(Duration::from_millis(100)).await;
        cx.progress(f64::from(step) * 100.0 / f64::from(steps), format!("step {step} of {steps}"));
    }
    Ok(steps)
}

/// Computes: it cannot be dropped, so it belongs on a thread of its own, and asks whether to go on.
async fn compute(millis: u64, cx: Context) -> Result<u64, Failure> {
    let work = move || {
        let (start, mut rounds) = (Instant::now(), 0);
        while start.elapsed() < Duration::from_millis(millis) && !cx.is_cancelled() {
            rounds += 1;
        }
        rounds
    };
    Ok(tokio::task::spawn_blocking(work).await?)
}

#[tokio::main]
async fn main() -> Result<(), WorkerError> {
    let task = |id| Task::new(id, Duration::from_secs(2), 0).payload(10);
    let worker = Worker::new(Nats::from_env(), "long").concurrency(4).grace(Duration::from_secs(5));
    worker
        .task(task("long.wait"))
        .task(task("long.compute"))
        .handler("long.wait", wait)
        .handler("long.compute", compute)
        .run()
        .await
}
