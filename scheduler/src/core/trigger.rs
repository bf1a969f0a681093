//! The trigger message of a run.

use ax_shared::subjects::header;
use ax_shared::wire::{TriggerBody, WIRE_VERSION};
use ax_shared::{Prefix, Profile, TaskDefinition};

use crate::core::run::Run;
use crate::core::trace::{self, Sampler, TraceParent};
use crate::ports::Outgoing;

/// Makes the message of `run` under a definition; its id is `<run_id>:<message number>`, so that the stream drops what
/// is published twice.
#[must_use]
pub fn message(prefix: &Prefix, run: &Run, definition: &TaskDefinition, epoch: u64, sampler: Sampler) -> Outgoing {
    let profile = run.profile.unwrap_or_else(|| Profile::of(definition.timeout_ms, definition.max_retry));
    let backoff = &definition.retry_backoff;
    let mut headers = vec![
        (header::VERSION, WIRE_VERSION.to_string()),
        (header::MSG_ID, message_id(run)),
        (header::RUN_ID, run.run_id.to_string()),
        (header::TASK_ID, run.task_id.to_string()),
        (header::HANDLER, run.handler.to_string()),
        (header::GROUP, run.group.to_string()),
        (header::TRIGGER_TIME, run.trigger_at.to_string()),
        (header::PUBLISH_AT, run.publish_at.to_string()),
        (header::TIMEOUT_MS, definition.timeout_ms.to_string()),
        (header::MAX_ATTEMPTS, run.max_attempts.to_string()),
        (header::ATTEMPT_BASE, run.attempt_base.to_string()),
        (
            header::RETRY_BACKOFF,
            format!("{},{},{},{}", backoff.initial_ms, backoff.multiplier, backoff.max_ms, backoff.jitter_ms),
        ),
        (header::PRIORITY, run.priority.to_string()),
        (header::WEIGHT, definition.weight.to_string()),
        (header::EPOCH, epoch.to_string()),
        (header::FLOW_ID, run.flow_id.to_string()),
        (header::TRACEPARENT, traceparent(run, sampler).to_string()),
    ];
    if run.message_no > 1 {
        headers.push((header::REPUBLISHED, "true".into()));
    }
    let body = TriggerBody {
        run_id: run.run_id,
        task_id: run.task_id.clone(),
        handler: run.handler.clone(),
        trigger_time: run.trigger_at,
        kind: run.kind,
        payload: run.payload.clone().unwrap_or_else(|| definition.payload.clone()),
        upstream: serde_json::Value::Object(serde_json::Map::new()),
        attempt_base: run.attempt_base,
    };
    Outgoing {
        subject: prefix.trigger(&run.address(), &run.queue, profile),
        headers,
        payload: serde_json::to_vec(&body).expect("a trigger body is plain data").into(),
    }
}

/// `Nats-Msg-Id` of a run's current message.
#[must_use]
pub fn message_id(run: &Run) -> String {
    format!("{}:{}", run.run_id, run.message_no)
}

/// W3C trace context of a run's message: the trace is the run, the parent span the publishing of this message.
#[must_use]
pub fn traceparent(run: &Run, sampler: Sampler) -> TraceParent {
    let trace_id = trace::trace_id(run.run_id);
    TraceParent { trace_id, span_id: trace::publish_span(&message_id(run)), sampled: sampler.keeps(trace_id) }
}
