//! Workers made with the Rust SDK, as processes, under a real scheduler: what they do is in the history.

mod interrupted;
mod outcomes;
mod program;
mod soak;
