//! What crosses the wire between ax, its workers and its users.
//!
//! Nothing here does I/O. The scheduler, the worker SDK and the tools share these types, so a name, a limit or a
//! format is written down once.

pub mod time;

pub use time::Timestamp;
