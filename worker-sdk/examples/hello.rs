//! The smallest worker: a handler is an async function of a payload and a context.
//!
//! `NATS_URL=nats://127.0.0.1:4222 cargo run -p ax-worker --example hello`, then give it something to do:
//! `ax task trigger hello --payload '"world"'`.

use std::time::Duration;

use ax_worker::{Context, Failure, Nats, Task, Worker, WorkerError};

async fn hello(name: String, cx: Context) -> Result<String, Failure> {
    cx.log(format!("attempt {} of run {}", cx.attempt(), cx.run_id()));
    Ok(format!("hello, {name}"))
}

#[tokio::main]
async fn main() -> Result<(), WorkerError> {
    Worker::new(Nats::from_env(), "hello")
        .task(Task::new("hello", Duration::from_secs(10), 0).payload("nobody"))
        .handler("hello", hello)
        .run()
        .await
}
