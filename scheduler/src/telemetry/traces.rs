//! The spans of runs, made when what they tell is over: `publish` with the answer of the stream, the rest when the run
//! has ended and that is written.
//!
//! ```text
//! run            from the making of its row until its end
//!   plan         … until its instant
//!   publish      from the delivery queue into the stream; the parent of what the worker does
//!   attempt …    from its start until its outcome, one for each
//! ```
//!
//! All ids follow from the run, so that these parts may be told by different leaders. A leader that dies between a
//! commit and the sending takes the spans of those runs with it: traces are for looking at, SQL is the history.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ax_shared::subjects::header;
use ax_shared::{RunId, Timestamp};
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};

use super::export::Export;
use super::otel::OtelConfig;
use crate::core::run::{Attempt, AttemptOutcome, Run, RunState};
use crate::core::trace::{self, Sampler, TraceParent};
use crate::ports::{Outgoing, StreamMessage};

/// How long the last spans may take when the node stops.
const STOP: Duration = Duration::from_secs(2);

/// Tells a receiver of traces about runs; the default tells nobody and costs nothing.
#[derive(Debug, Clone, Default)]
pub struct Traces {
    sampler: Sampler,
    parent_based: bool,
    export: Option<Arc<Export>>,
}

/// A publish that is under way, for its span.
#[derive(Debug)]
pub struct Publishing {
    parent: TraceParent,
    run_id: RunId,
    subject: String,
    message_id: String,
    bytes: usize,
    began_at: Timestamp,
}

/// What a span says beside its ids.
pub(super) struct Told {
    pub(super) kind: SpanKind,
    pub(super) name: Cow<'static, str>,
    pub(super) start: SystemTime,
    pub(super) end: SystemTime,
    pub(super) attributes: Vec<KeyValue>,
    pub(super) status: Status,
}

impl Traces {
    /// Begins to export, if the configuration names a receiver. What is wrong with it is logged, not refused.
    #[must_use]
    pub fn start(config: &OtelConfig, node_id: &str) -> Self {
        for complaint in &config.complaints {
            tracing::warn!(complaint, "a setting of OpenTelemetry is not understood");
        }
        let export = config.endpoint.as_deref().and_then(|endpoint| match Export::start(config, endpoint, node_id) {
            Ok(export) => Some(Arc::new(export)),
            Err(e) => {
                tracing::error!(error = %crate::loops::Chain(&e), "traces cannot be exported");
                None
            }
        });
        Self { sampler: config.sampler, parent_based: config.parent_based, export }
    }

    /// Whether spans are exported at all.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.export.is_some()
    }

    /// Which traces are kept.
    #[must_use]
    pub fn sampler(&self) -> Sampler {
        self.sampler
    }

    /// Whether requests follow the decision of the trace that they come with.
    pub(super) fn is_parent_based(&self) -> bool {
        self.parent_based
    }

    /// Sends what waits, for at most 2 s. Further spans are dropped.
    pub async fn stop(&self) {
        if let Some(export) = &self.export {
            export.stop(STOP).await;
        }
    }

    /// A publish begins; None when there is nothing to tell about it.
    #[must_use]
    pub fn publishing(&self, run_id: RunId, message: &Outgoing, now: impl Fn() -> Timestamp) -> Option<Publishing> {
        self.export.as_ref()?;
        let value = |name: &str| message.headers.iter().find(|(n, _)| *n == name).map(|(_, v)| v.as_str());
        let parent = TraceParent::parse(value(header::TRACEPARENT)?).filter(|parent| parent.sampled)?;
        Some(Publishing {
            parent,
            run_id,
            subject: message.subject.clone(),
            message_id: value(header::MSG_ID)?.to_owned(),
            bytes: message.payload.len(),
            began_at: now(),
        })
    }

    /// The stream has answered: None = it has the message, Some = it refused it, and why.
    pub fn published(&self, publishing: Publishing, at: Timestamp, refused: Option<&str>) {
        let Some(export) = self.export.as_ref().filter(|export| export.has_room(1)) else { return };
        let Publishing { parent, run_id, subject, message_id, bytes, began_at } = publishing;
        let attributes = vec![
            KeyValue::new("messaging.system", "nats"),
            KeyValue::new("messaging.operation.name", "publish"),
            KeyValue::new("messaging.operation.type", "send"),
            KeyValue::new("messaging.destination.name", subject),
            KeyValue::new("messaging.message.id", message_id),
            KeyValue::new("messaging.message.body.size", bytes as i64),
            KeyValue::new("ax.run_id", run_id.to_string()),
        ];
        let status = refused.map_or(Status::Unset, |why| Status::error(why.to_owned()));
        let (start, end) = span_of(began_at, at);
        let told = Told { kind: SpanKind::Producer, name: "publish".into(), start, end, attributes, status };
        export.send(told.span(parent.trace_id, parent.span_id, trace::run_span(run_id), false));
    }

    /// A message was found in the stream that a leader before this one published without having told of it.
    pub fn found(&self, run_id: RunId, message: &StreamMessage) {
        if self.export.is_none() {
            return;
        }
        let value = |name: &str| message.headers.get(name).map(String::as_str);
        let parent = value(header::TRACEPARENT).and_then(TraceParent::parse).filter(|parent| parent.sampled);
        if let Some(parent) = parent {
            let publishing = Publishing {
                parent,
                run_id,
                subject: message.subject.clone(),
                message_id: value(header::MSG_ID).unwrap_or_default().to_owned(),
                bytes: message.payload.len(),
                began_at: message.at,
            };
            self.published(publishing, message.at, None);
        }
    }

    /// A run has ended, and that is written.
    pub fn ended(&self, run: &Run, attempts: &[Attempt]) {
        let trace_id = trace::trace_id(run.run_id);
        let Some(export) = self.export.as_ref().filter(|_| self.sampler.keeps(trace_id)) else { return };
        if !export.has_room(2 + attempts.len()) {
            return;
        }
        let root = trace::run_span(run.run_id);
        let finished_at = run.finished_at.unwrap_or(run.created_at);
        let planned_until = run.publish_at.min(finished_at);
        let (start, end) = span_of(run.created_at, planned_until);
        let plan = Told {
            kind: SpanKind::Internal,
            name: "plan".into(),
            start,
            end,
            attributes: vec![KeyValue::new("ax.run_id", run.run_id.to_string())],
            status: Status::Unset,
        };
        export.send(plan.span(trace_id, trace::plan_span(run.run_id), root, false));
        for attempt in attempts {
            let id = trace::attempt_span(run.run_id, attempt.attempt);
            export.send(of_attempt(run, attempt, finished_at).span(trace_id, id, root, false));
        }
        // The answer of the stream may be here later than the instant at which the worker was done.
        let (start, end) = span_of(run.created_at, finished_at.max(run.published_at.unwrap_or(finished_at)));
        let run = Told {
            kind: SpanKind::Internal,
            name: "run".into(),
            start,
            end,
            attributes: of_run(run),
            status: status(run.state, run.reason.as_deref()),
        };
        export.send(run.span(trace_id, root, SpanId::INVALID, false));
    }

    /// Hands over a span of another kind.
    pub(super) fn send(&self, span: SpanData) {
        if let Some(export) = &self.export {
            export.send(span);
        }
    }
}

impl Told {
    pub(super) fn span(self, trace_id: TraceId, span_id: SpanId, parent: SpanId, remote: bool) -> SpanData {
        SpanData {
            span_context: SpanContext::new(trace_id, span_id, TraceFlags::SAMPLED, false, TraceState::NONE),
            parent_span_id: parent,
            parent_span_is_remote: remote,
            span_kind: self.kind,
            name: self.name,
            start_time: self.start,
            end_time: self.end,
            attributes: self.attributes,
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: self.status,
            instrumentation_scope: InstrumentationScope::builder("ax").with_version(crate::VERSION).build(),
        }
    }
}

fn of_run(run: &Run) -> Vec<KeyValue> {
    let mut attributes = vec![
        KeyValue::new("ax.run_id", run.run_id.to_string()),
        KeyValue::new("ax.task_id", run.task_id.to_string()),
        KeyValue::new("ax.group", run.group.to_string()),
        KeyValue::new("ax.queue", run.queue.to_string()),
        KeyValue::new("ax.handler", run.handler.to_string()),
        KeyValue::new("ax.kind", run.kind.as_str()),
        KeyValue::new("ax.state", run.state.as_str()),
        KeyValue::new("ax.attempt", i64::from(run.attempt)),
        KeyValue::new("ax.max_attempts", i64::from(run.max_attempts)),
        KeyValue::new("ax.priority", i64::from(run.priority)),
        KeyValue::new("ax.trigger_time", run.trigger_at.to_string()),
        KeyValue::new("ax.publish_at", run.publish_at.to_string()),
    ];
    if run.flow_id != run.run_id {
        attributes.push(KeyValue::new("ax.flow_id", run.flow_id.to_string()));
    }
    attributes.extend(run.reason.clone().map(|reason| KeyValue::new("ax.reason", reason)));
    attributes.extend(run.lateness_ms.map(|lateness| KeyValue::new("ax.lateness_ms", lateness)));
    attributes.extend(run.worker_id.clone().map(|worker| KeyValue::new("ax.worker_id", worker)));
    attributes
}

/// An attempt whose start nobody told (a raw worker that failed) is a moment: its end.
fn of_attempt(run: &Run, attempt: &Attempt, finished_at: Timestamp) -> Told {
    let ended_at = attempt.finished_at.unwrap_or(finished_at);
    let (start, end) = span_of(attempt.started_at.unwrap_or(ended_at), ended_at);
    let mut attributes = vec![
        KeyValue::new("ax.run_id", run.run_id.to_string()),
        KeyValue::new("ax.task_id", run.task_id.to_string()),
        KeyValue::new("ax.group", run.group.to_string()),
        KeyValue::new("ax.attempt", i64::from(attempt.attempt)),
    ];
    attributes.extend(attempt.outcome.map(|outcome| KeyValue::new("ax.outcome", outcome.as_str())));
    attributes.extend(attempt.worker_id.clone().map(|worker| KeyValue::new("ax.worker_id", worker)));
    let status = match attempt.outcome {
        Some(AttemptOutcome::Failed | AttemptOutcome::TimedOut | AttemptOutcome::Lost) => {
            Status::error(attempt.error.clone().unwrap_or_default())
        }
        _ => Status::Unset,
    };
    Told { kind: SpanKind::Internal, name: "attempt".into(), start, end, attributes, status }
}

fn status(state: RunState, reason: Option<&str>) -> Status {
    match state {
        RunState::Failed | RunState::TimedOut | RunState::Expired | RunState::Blocked => {
            Status::error(reason.unwrap_or(state.as_str()).to_owned())
        }
        _ => Status::Unset,
    }
}

/// The times of a span; workers' clocks may be behind, and nothing ends before it begins.
fn span_of(start: Timestamp, end: Timestamp) -> (SystemTime, SystemTime) {
    let time = |at: Timestamp| SystemTime::UNIX_EPOCH + Duration::from_millis(at.as_millis().max(0) as u64);
    (time(start), time(end.max(start)))
}
