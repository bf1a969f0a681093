//! ax scheduler
pub mod core;
