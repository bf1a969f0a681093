//! What a node tells about itself: log lines, and spans for a collector of traces.
//!
//! Log lines go to standard error, for people on a terminal, one JSON object a line elsewhere. Spans go to an OTLP
//! receiver, if one is named ([`otel`]): they are built from what is known of a run when it has ended ([`Traces`]), and
//! leave over a bounded queue that drops what does not fit ([`export`]). Nothing here can hold up a run.

mod export;
pub mod http;
pub mod otel;
mod traces;

use std::io::IsTerminal as _;
use std::str::FromStr as _;

use tracing_subscriber::EnvFilter;

use crate::config::LogFormat;

pub use traces::{Publishing, Traces};

/// Begins to log what `filter` selects. A second call changes nothing.
pub fn start(filter: &str, format: Option<LogFormat>) {
    let filter = EnvFilter::from_str(filter).unwrap_or_else(|_| EnvFilter::new("info"));
    let terminal = std::io::stderr().is_terminal();
    let json = match format {
        Some(format) => format == LogFormat::Json,
        None => !terminal,
    };
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = if json {
        lines.json().flatten_event(true).with_current_span(false).with_span_list(false).try_init()
    } else {
        lines.with_ansi(terminal && std::env::var_os("NO_COLOR").is_none()).try_init()
    };
    let _ = started;
}
