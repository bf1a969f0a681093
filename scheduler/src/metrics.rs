//! Every metric: its name, unit and meaning in one place.

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
    /// Meaning, for people.
    pub help: &'static str,
}

macro_rules! metrics {
    ($($(#[$doc:meta])* $id:ident = $kind:ident $name:literal $unit:ident $help:literal;)*) => {
        $(
            #[doc = $help]
            pub const $id: Metric =
                Metric { name: $name, kind: Kind::$kind, unit: Unit::$unit, help: $help };
        )*
        /// Every metric.
        pub const ALL: &[Metric] = &[$($id),*];
    };
}

metrics! {
    FIRES = Counter "ax_fires_total" Count "Runs that came due and were decided on, by kind.";
    RUNS = Counter "ax_runs_total" Count "Runs that entered a state, by state.";
    SKIPPED = Counter "ax_skipped_total" Count "Runs that ended without executing, by reason.";
    MISSED = Counter "ax_missed_total" Count "Instants that were missed, by reason.";
    LATENESS = Histogram "ax_lateness_seconds" Seconds "A worker's receipt of a run minus the instant at which it was due.";
    QUEUE_LENGTH = Gauge "ax_queue_length" Count "Runs that are due and wait to be handed over, by group.";
    OUTSTANDING = Gauge "ax_outstanding" Count "Runs that are handed over and have not ended, by group.";
    IN_DOUBT = Gauge "ax_in_doubt" Count "Runs whose message is gone and whose outcome is not known.";
    WHEEL_ENTRIES = Gauge "ax_wheel_entries" Count "Tasks in the timing wheel.";
    PLANNED_UNTIL = Gauge "ax_planned_until_seconds" Seconds "The planning watermark, Unix time.";
    LEADER = Gauge "ax_leader" Count "1 while this node leads, else 0.";
    EPOCH = Gauge "ax_epoch" Count "Fencing number of the present leader.";
    TAKEOVERS = Counter "ax_takeovers_total" Count "Times that this node became leader.";
    CLOCK_OFFSET = Gauge "ax_clock_offset_seconds" Seconds "Corrected clock minus the machine's clock.";
    PUBLISH = Counter "ax_publish_total" Count "Publishes to the trigger stream, by result.";
    PUBLISHER_LOST = Counter "ax_publisher_lost_total" Count "Publishing connections that were lost and replaced.";
    EVENTS = Counter "ax_events_total" Count "Events read from the event stream, by kind.";
    EVENTS_MALFORMED = Counter "ax_events_malformed_total" Count "Events that could not be read and were passed over.";
    EVENTS_GAPS = Counter "ax_events_gaps_total" Count "Gaps and new incarnations of the event stream.";
    EVENTS_READER_RESTARTS = Counter "ax_events_reader_restarts_total" Count "Times that reading the event stream began anew.";
    SIGNALS_EXPIRED = Counter "ax_signals_expired_total" Count "Signals of sequences that no run ever owned.";
    RECONCILED = Counter "ax_reconciled_total" Count "Runs compared with the trigger stream, by result.";
    MESSAGES_LOST = Counter "ax_messages_lost_total" Count "Trigger messages that vanished with their stream.";
    CONSUMERS_RECREATED = Counter "ax_consumers_recreated_total" Count "Consumers that were gone and were made again.";
    FLUSH_RUNS = Histogram "ax_flush_runs" Count "Runs written by one flush.";
    SQL = Histogram "ax_sql_seconds" Seconds "Time of database operations, by op.";
    NATS = Histogram "ax_nats_seconds" Seconds "Time of NATS requests, by op.";
    NATS_REQUESTS = Counter "ax_nats_requests_total" Count "Requests to the API over NATS, by operation and status.";
    HTTP_REQUESTS = Counter "ax_http_requests_total" Count "HTTP requests, by route and status.";
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
        for metric in ALL {
            assert!(seen.insert(metric.name), "{}", metric.name);
            assert!(metric.name.starts_with("ax_"), "{}", metric.name);
            assert_eq!(metric.name.ends_with("_total"), metric.kind == Kind::Counter, "{}", metric.name);
            assert_eq!(metric.name.ends_with("_seconds"), metric.unit == Unit::Seconds, "{}", metric.name);
        }
    }
}
