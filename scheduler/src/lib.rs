//! The ax scheduler.
//!
//! ```text
//! definition → wheel → plan (rows, 2 s ahead) → fire at the due instant → delivery queue → AX_TRIGGERS → worker
//!      → AX_EVENTS → settle (state, retries, history) → page, metrics, notices
//! ```
//!
//! [`core`] decides and does no I/O; [`ports`] says what it needs of the outside world; [`loops`] carry it out;
//! `store` and `bus` implement the ports; `app` puts it together.

pub mod api;
pub mod app;
pub mod bench;
pub mod bus;
pub mod cli;
pub mod config;
pub mod core;
pub mod dashboard;
pub mod dev;
pub mod failpoint;
pub mod loops;
pub mod metrics;
pub mod ports;
pub mod store;
pub mod telemetry;

/// Version of the program.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
