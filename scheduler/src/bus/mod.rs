//! Implementations of the [`Bus`](crate::ports::Bus).

pub mod nats;
