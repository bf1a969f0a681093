//! Real parts for tests: nats-server, Postgres, `ax` nodes, raw workers, each on a free port and in a folder of its own.
//!
//! ```text
//!   guard    ends everything that a test process started, however that process ended
//!   process  one child process: its output, its signals, its exit
//!   nats     nats-server: one, three in a cluster, without JetStream, an old one
//!   postgres one throw-away cluster per test process, a database per test
//!   ax       the built `ax` program: nodes and one-shot commands
//!   api      a client of /api/v1 that returns what was answered, status and body
//!   ledger   whether each scheduled instant ran, once
//!   otlp     a receiver of traces
//!   worker   the raw workers of examples/ and other Python
//!   world    all of it together, as most tests want it
//! ```
//!
//! Invariant: nothing here sleeps for a fixed time in the hope that something has happened meanwhile: [`eventually`] waits
//! for a level with a deadline and says what it saw last.
//!
//! The programs are those that `scripts/setup` put under `.dev/`; the environment can name others (see [`dev`]).

pub mod api;
pub mod ax;
pub mod dev;
mod guard;
pub mod ledger;
pub mod nats;
pub mod otlp;
pub mod postgres;
pub mod process;
mod wait;
pub mod worker;
pub mod world;

pub use guard::Scratch;
pub use wait::{Deadline, eventually, holds, lasts};
