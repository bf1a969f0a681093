//! A typed payload, a state that all handlers share, and a schedule that is written where the code is.

use std::sync::Mutex;
use std::time::Duration;

use ax_worker::{Context, Failure, Nats, Task, Worker, WorkerError};
use serde::{Deserialize, Serialize};

/// Stands for a database: remembers which runs it has counted already.
#[derive(Default)]
struct Warehouse(Mutex<std::collections::HashSet<String>>);

#[derive(Serialize, Deserialize)]
struct Copy {
    table: String,
}

#[derive(Serialize)]
struct Copied {
    rows: usize,
}

async fn copy(job: Copy, cx: Context<Warehouse>) -> Result<Copied, Failure> {
    let mut done = cx.state().0.lock().map_err(|_| "the warehouse is broken")?;
    // A run may be delivered twice: its key tells whether this has been done before.
    if done.insert(cx.idempotency_key()) {
        cx.log(format!("copying {} as of {}", job.table, cx.trigger_time()));
    }
    Ok(Copied { rows: done.len() })
}

#[tokio::main]
async fn main() -> Result<(), WorkerError> {
    let payload = Copy { table: "orders".into() };
    let every = Task::new("orders.copy", Duration::from_secs(60), 3).every(Duration::from_secs(1)).payload(payload);
    let worker = Worker::new(Nats::from_env(), "orders").state(Warehouse::default()).concurrency(4);
    worker.task(every).handler("orders.copy", copy).run().await
}
