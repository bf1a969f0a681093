//! The API over a real socket: the service on a real NATS and the store in memory, with a clock that the test sets.

mod away;
mod door;
mod openapi;
mod pages;
mod runs;
mod schedules;
mod tasks;
mod together;
mod tokens;
mod world;
