//! The ax scheduler.
//!
//! ```text
//! definition → wheel → plan (rows, 2 s ahead) → fire at the due instant → delivery queue → AX_TRIGGERS → worker
//!      → AX_EVENTS → settle (state, retries, history) → page, metrics, notices
//! ```
//!
//! [`core`] decides and does no I/O; [`ports`] says what it needs of the outside world; `loops` carry it out.

pub mod api;
pub mod bus;
pub mod core;
pub mod dashboard;
pub mod loops;
pub mod metrics;
pub mod ports;
pub mod store;
