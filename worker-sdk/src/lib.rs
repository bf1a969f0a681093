#![doc = include_str!("../../docs/worker-sdk.md")]
//!
//! # Inside
//!
//! ```text
//!   groups     which consumers there are      pull     takes exactly as many messages as there is room for
//!   execute    one delivery: started → handler → outcome → ack       heartbeat   tells that the worker lives
//!   attempt    handler under its timeout      outcome  what is told, how it is answered      hold   whose a message is
//!   outbox     events and acks, confirmed     register definitions from code
//! ```
//!
//! Invariant: an outcome is stored before its message is acked; what is not confirmed is delivered again. Invariant:
//! once its ack deadline has passed, a delivery is answered by nobody but its next receiver.

mod clock;
mod context;
mod failure;
mod handler;
mod nats;
mod runtime;
mod task;
pub mod testing;
mod trace;
mod worker;

pub use ax_shared::{Group, Prefix, RunId, TaskId, Timestamp};
pub use context::{Context, LogLine};
pub use failure::{Failure, GiveUp};
pub use nats::Nats;
pub use task::Task;
pub use tokio_util::sync::CancellationToken;
pub use worker::{Worker, WorkerError};
