//! The pure core: what is decided, without I/O, clock or randomness.

pub mod schedule;
pub mod wheel;
