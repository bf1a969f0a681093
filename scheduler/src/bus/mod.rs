//! Implementations of the [`Bus`](crate::ports::Bus): NATS itself, and one in memory that means the same.

pub mod memory;
pub mod nats;
