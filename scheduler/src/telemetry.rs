//! Log lines: on standard error, for people on a terminal, one JSON object a line elsewhere.

use std::io::IsTerminal as _;
use std::str::FromStr as _;

use tracing_subscriber::EnvFilter;

use crate::config::LogFormat;

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
