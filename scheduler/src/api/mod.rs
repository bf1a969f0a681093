//! What users and programs ask of ax: one [`service::Service`], two doors to it.
//!
//! The service knows nothing of its doors: requests are [`fields::Fields`] or plain values, answers are serialisable
//! structs, refusals are one [`ApiError`] which every door words as the same RFC 9457 problem. What there is to ask is
//! one table, [`operation`], which both doors serve: [`http`] and [`nats`].

mod error;
pub mod fields;
pub mod http;
pub mod nats;
pub mod openapi;
pub mod operation;
pub mod service;
mod strict;
pub mod tokens;
pub mod view;

pub use error::{ApiError, Problem};
