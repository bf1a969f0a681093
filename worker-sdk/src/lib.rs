//! Worker for ax: pulls the triggers of an executor group and runs handlers.
//!
//! ```no_run
//! use ax_shared::Group;
//! use ax_worker::{Failure, Job, Worker};
//! use serde_json::{Value, json};
//! use tokio_util::sync::CancellationToken;
//!
//! async fn greet(job: Job) -> Result<Value, Failure> {
//!     let name = job.payload["name"].as_str().unwrap_or("world");
//!     Ok(json!({ "greeting": format!("hello, {name}") }))
//! }
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let client = ax_worker::connect("nats://127.0.0.1:4222").await?;
//! let stop = CancellationToken::new();
//! Worker::builder(client, Group::new("demo")?).handler("greet", greet)?.concurrency(4).run(stop).await?;
//! # Ok(())
//! # }
//! ```
//!
//! A run is delivered at least once: a handler has to be idempotent, and [`Job::run_id`] is the key for that. An error
//! is tried again as often as the task allows; [`Failure::give_up`] ends the run.
//!
//! ```text
//!   groups     which consumers there are      pull     takes exactly as many messages as there is room for
//!   execute    one delivery: started → handler → outcome → ack       heartbeat   tells that the worker lives
//!   outbox     events and acks, confirmed
//! ```
//!
//! Invariant: an outcome is stored before its message is acked; what is not confirmed is delivered again.

mod connect;
mod failure;
mod job;
mod runtime;
mod worker;

pub use connect::connect;
pub use failure::{Failure, GiveUp};
pub use job::Job;
pub use worker::{Builder, Worker, WorkerError};
