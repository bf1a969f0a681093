//! The worker against a real nats-server, with triggers published by hand.

mod aside;
mod between;
mod definitions;
mod living;
mod outcomes;
mod pulling;
mod redelivery;
mod traces;
mod world;
