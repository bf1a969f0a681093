//! The pure core: no async, no I/O, no clock, no randomness. Time, ids and jitter arrive as arguments.

pub mod definitions;
pub mod run;
