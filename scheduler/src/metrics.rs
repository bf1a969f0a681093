//! Every metric: its name, unit, labels and meaning in one place.

mod process;

use metrics::Unit;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

/// What a metric counts or measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// A distribution.
    Histogram,
}

/// One metric.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// Name as it is scraped.
    pub name: &'static str,
    /// What it does.
    pub kind: Kind,
    /// Unit of its values.
    pub unit: Unit,
    /// Names of its labels, in order.
    pub labels: &'static [&'static str],
    /// Meaning, for people.
    pub help: &'static str,
}

macro_rules! metrics {
    ($all:ident: $($id:ident = $kind:ident $name:literal $unit:ident [$($label:literal),*] $help:literal;)*) => {
        $(
            #[doc = $help]
            pub const $id: Metric =
                Metric { name: $name, kind: Kind::$kind, unit: Unit::$unit, labels: &[$($label),*], help: $help };
        )*
        /// All of them, in the order in which people read about them.
        pub const $all: &[Metric] = &[$($id),*];
    };
}

metrics! {
    ALL:
    FIRES = Counter "ax_fires_total" Count ["kind"] "Runs that came due and were decided on, by kind.";
    RUNS = Counter "ax_runs_total" Count ["state"] "Runs that entered a state, by state.";
    SKIPPED = Counter "ax_skipped_total" Count ["reason"] "Runs that ended without executing, by reason.";
    MISSED = Counter "ax_missed_total" Count ["reason"] "Instants that were missed, by reason.";
    LATENESS = Histogram "ax_lateness_seconds" Seconds [] "A worker's receipt of a run minus the instant at which it was due.";
    QUEUE_LENGTH = Gauge "ax_queue_length" Count ["group"] "Runs that are due and wait to be handed over, by group.";
    OUTSTANDING = Gauge "ax_outstanding" Count ["group"] "Runs that are handed over and have not ended, by group.";
    IN_DOUBT = Gauge "ax_in_doubt" Count [] "Runs whose message is gone and whose outcome is not known.";
    WHEEL_ENTRIES = Gauge "ax_wheel_entries" Count [] "Tasks in the timing wheel.";
    PLANNED_UNTIL = Gauge "ax_planned_until_seconds" Seconds [] "The planning watermark, Unix time.";
    LEADER = Gauge "ax_leader" Count [] "1 while this node leads, else 0.";
    EPOCH = Gauge "ax_epoch" Count [] "Fencing number of the present leader.";
    TAKEOVERS = Counter "ax_takeovers_total" Count [] "Times that this node became leader.";
    CLOCK_OFFSET = Gauge "ax_clock_offset_seconds" Seconds [] "Corrected clock minus the machine's clock.";
    PUBLISH = Counter "ax_publish_total" Count ["result"] "Publishes to the trigger stream, by result.";
    PUBLISHER_LOST = Counter "ax_publisher_lost_total" Count [] "Publishing connections that were lost and replaced.";
    EVENTS = Counter "ax_events_total" Count ["kind"] "Messages read from the event stream, by kind.";
    EVENTS_MALFORMED = Counter "ax_events_malformed_total" Count [] "Events that could not be read and were passed over.";
    EVENTS_GAPS = Counter "ax_events_gaps_total" Count [] "Gaps and new incarnations of the event stream.";
    EVENTS_READER_RESTARTS = Counter "ax_events_reader_restarts_total" Count [] "Times that reading the event stream began anew.";
    SIGNALS_EXPIRED = Counter "ax_signals_expired_total" Count [] "Signals of sequences that no run ever owned.";
    RECONCILED = Counter "ax_reconciled_total" Count ["result"] "Runs compared with the trigger stream, by result.";
    MESSAGES_LOST = Counter "ax_messages_lost_total" Count [] "Trigger messages that vanished with their stream.";
    ORPHANS_DELETED = Counter "ax_orphans_deleted_total" Count [] "Trigger messages of runs that had ended before they were published, deleted.";
    CONSUMERS_RECREATED = Counter "ax_consumers_recreated_total" Count [] "Consumers that were gone and were made again.";
    FLUSH_RUNS = Histogram "ax_flush_runs" Count [] "Runs written by one flush.";
    SQL = Histogram "ax_sql_seconds" Seconds ["op", "db"] "Time of database operations, by op.";
    NATS = Histogram "ax_nats_seconds" Seconds ["op"] "Time of NATS requests, by op.";
    NATS_REQUESTS = Counter "ax_nats_requests_total" Count ["operation", "status"] "Requests to the API over NATS, by operation and status.";
    HTTP_REQUESTS = Counter "ax_http_requests_total" Count ["route", "status"] "HTTP requests, by route and status.";
    SPANS_EXPORTED = Counter "ax_spans_exported_total" Count [] "Spans that the receiver of traces took.";
    SPANS_DROPPED = Counter "ax_spans_dropped_total" Count ["reason"] "Spans that were not exported, by reason: queue_full, not_taken.";
}

// Under the names that every exporter uses for them; read when somebody asks.
metrics! {
    PROCESS:
    CPU = Counter "process_cpu_seconds_total" Seconds [] "CPU time of this process, user and system.";
    RESIDENT_MEMORY = Gauge "process_resident_memory_bytes" Bytes [] "Memory of this process that is in RAM.";
    VIRTUAL_MEMORY = Gauge "process_virtual_memory_bytes" Bytes [] "Address space of this process.";
    OPEN_FDS = Gauge "process_open_fds" Count [] "Open file descriptors.";
    MAX_FDS = Gauge "process_max_fds" Count [] "File descriptors that may be open.";
    START_TIME = Gauge "process_start_time_seconds" Seconds [] "When this process began to record, Unix time.";
}

/// Bounds of the buckets of times, in seconds: fine where lateness matters.
const SECONDS: &[f64] = &[
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
    10.0, 30.0, 60.0, 300.0,
];
/// Bounds of the buckets of numbers of rows.
const ROWS: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0];

/// Why metrics cannot be recorded.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// The buckets are not acceptable.
    #[error("the metrics recorder cannot be built")]
    Build(#[from] metrics_exporter_prometheus::BuildError),
    /// There is one already.
    #[error("metrics are recorded already in this process")]
    Installed,
}

/// Metrics in Prometheus' text format, with those of the process.
#[must_use]
pub fn render(handle: &PrometheusHandle) -> String {
    let mut text = handle.render();
    process::render(&mut text);
    text
}

/// Every metric as a table in Markdown, for `docs/observability.md`.
#[must_use]
pub fn table() -> String {
    let mut table = String::from("| metric | kind | labels | meaning |\n|---|---|---|---|\n");
    for metric in ALL.iter().chain(PROCESS) {
        let kind = match metric.kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        let labels: Vec<String> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
        table.push_str(&format!("| `{}` | {kind} | {} | {} |\n", metric.name, labels.join(" "), metric.help));
    }
    table
}

/// Records metrics of this process from now on; answers the handle that renders them.
///
/// # Errors
/// There is a recorder already.
pub fn install() -> Result<PrometheusHandle, MetricsError> {
    let mut builder = PrometheusBuilder::new();
    for metric in ALL.iter().filter(|metric| metric.kind == Kind::Histogram) {
        let bounds = if metric.unit == Unit::Seconds { SECONDS } else { ROWS };
        builder = builder.set_buckets_for_metric(Matcher::Full(metric.name.to_owned()), bounds)?;
    }
    let recorder = builder.build_recorder();
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder).map_err(|_| MetricsError::Installed)?;
    process::begin();
    for metric in ALL {
        match metric.kind {
            Kind::Counter => metrics::describe_counter!(metric.name, metric.unit, metric.help),
            Kind::Gauge => metrics::describe_gauge!(metric.name, metric.unit, metric.help),
            Kind::Histogram => metrics::describe_histogram!(metric.name, metric.unit, metric.help),
        }
    }
    Ok(handle)
}

/// Folds recorded samples into buckets every few seconds, so that memory stays bounded also when nobody scrapes. Never
/// ends.
pub async fn keep_up(handle: PrometheusHandle) {
    let mut every = tokio::time::interval(std::time::Duration::from_secs(5));
    loop {
        every.tick().await;
        handle.run_upkeep();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_rules_of_prometheus_and_are_unique() {
        let mut seen = std::collections::HashSet::new();
        for metric in ALL.iter().chain(PROCESS) {
            assert!(seen.insert(metric.name), "{}", metric.name);
            assert_eq!(metric.name.ends_with("_total"), metric.kind == Kind::Counter, "{}", metric.name);
            let base = metric.name.trim_end_matches("_total");
            assert_eq!(base.ends_with("_seconds"), metric.unit == Unit::Seconds, "{}", metric.name);
            assert_eq!(base.ends_with("_bytes"), metric.unit == Unit::Bytes, "{}", metric.name);
        }
        assert!(ALL.iter().all(|metric| metric.name.starts_with("ax_")));
        assert!(PROCESS.iter().all(|metric| metric.name.starts_with("process_")));
    }

    /// Each use of the recording macros below `folder`: where, and the arguments.
    fn uses(folder: &std::path::Path, found: &mut Vec<(String, String)>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                uses(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                for call in ["counter!(", "gauge!(", "histogram!("] {
                    for (at, _) in text.match_indices(call) {
                        let rest = &text[at + call.len()..];
                        let arguments = rest[..rest.find(")").unwrap_or(rest.len())].to_owned();
                        let described = text[..at].ends_with("describe_");
                        let quoted = text[..at].ends_with('"');
                        if !described && !quoted {
                            found.push((path.display().to_string(), arguments));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn no_metric_is_recorded_under_a_name_that_is_not_in_this_file() {
        let mut found = Vec::new();
        for folder in ["scheduler/src", "worker-sdk/src"] {
            uses(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(folder), &mut found);
        }
        assert!(found.len() > 25, "only {} uses were found", found.len());
        for (path, arguments) in &found {
            let name = arguments.trim().strip_prefix("names::").and_then(|rest| rest.split(".name").next());
            assert!(
                name.is_some_and(|name| name.chars().all(|c| c.is_ascii_uppercase() || c == '_')),
                "{path}: {arguments}"
            );
        }
    }

    /// `AX_REGENERATE=1 cargo test -p ax-scheduler --lib metrics` writes the table anew.
    #[test]
    fn the_table_in_the_documents_is_this_one() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/observability.md");
        let document = std::fs::read_to_string(&path).unwrap();
        let (begin, end) = ("<!-- metrics: generated -->\n", "<!-- end of metrics -->");
        let (before, rest) = document.split_once(begin).unwrap();
        let (present, after) = rest.split_once(end).unwrap();
        if std::env::var_os("AX_REGENERATE").is_some() {
            std::fs::write(&path, format!("{before}{begin}{}{end}{after}", table())).unwrap();
        } else {
            assert_eq!(present, table(), "AX_REGENERATE=1 cargo test -p ax-scheduler --lib metrics writes it anew");
        }
    }
}
