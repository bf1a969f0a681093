//! The pure core: no async, no I/O, no clock, no randomness. Time, ids and jitter arrive as arguments.

pub mod command;
pub mod definitions;
pub mod delivery;
pub mod events;
pub mod lease;
pub mod run;
pub mod schedule;
pub mod settle;
pub mod shard;
pub mod tasks;
pub mod token;
pub mod trace;
pub mod trigger;
pub mod wheel;
