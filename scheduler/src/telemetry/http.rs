//! A span for each request, joined with the trace that the caller is in.

use std::time::SystemTime;

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use opentelemetry::KeyValue;
use opentelemetry::trace::{SpanId, SpanKind, Status, TraceId};
use uuid::Uuid;

use super::Traces;
use super::traces::Told;
use crate::core::trace::TraceParent;

/// Addresses that machines ask every few seconds, and about which nobody wants a trace.
const SILENT: [&str; 3] = ["/healthz", "/readyz", "/metrics"];

/// Serves a request and tells about it. A live stream counts until it begins.
pub async fn traced(State(traces): State<Traces>, request: Request, next: Next) -> Response {
    let parent = request.headers().get("traceparent").and_then(|v| v.to_str().ok()).and_then(TraceParent::parse);
    let route = request.extensions().get::<MatchedPath>().map(|route| route.as_str().to_owned());
    let trace_id = parent.map_or_else(random_trace, |parent| parent.trace_id);
    let kept = match parent {
        Some(parent) if traces.is_parent_based() => parent.sampled,
        _ => traces.sampler().keeps(trace_id),
    };
    if !kept || route.as_deref().is_some_and(|route| SILENT.contains(&route)) {
        return next.run(request).await;
    }
    let start = SystemTime::now();
    let method = request.method().clone();
    let path: String = request.uri().path().chars().take(300).collect();
    let response = next.run(request).await;
    let status = response.status();
    let mut attributes = vec![
        KeyValue::new("http.request.method", method.as_str().to_owned()),
        KeyValue::new("http.response.status_code", i64::from(status.as_u16())),
        KeyValue::new("url.path", path),
        KeyValue::new("url.scheme", "http"),
    ];
    let name = match route {
        Some(route) => {
            let name = format!("{method} {route}");
            attributes.push(KeyValue::new("http.route", route));
            name
        }
        None => method.to_string(),
    };
    let failed = status.is_server_error();
    if failed {
        attributes.push(KeyValue::new("error.type", status.as_u16().to_string()));
    }
    let told = Told {
        kind: SpanKind::Server,
        name: name.into(),
        start,
        end: SystemTime::now().max(start),
        attributes,
        status: if failed { Status::error("") } else { Status::Unset },
    };
    let parent_span = parent.map_or(SpanId::INVALID, |parent| parent.span_id);
    traces.send(told.span(trace_id, random_span(), parent_span, parent.is_some()));
    response
}

fn random_trace() -> TraceId {
    let (high, low) = (random_span().to_bytes(), random_span().to_bytes());
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&high);
    bytes[8..].copy_from_slice(&low);
    TraceId::from_bytes(bytes)
}

fn random_span() -> SpanId {
    let random = Uuid::new_v4().into_bytes();
    let mut bytes = [0; 8];
    // The first 6 and the last 7 bytes of a UUID of version 4 are random.
    bytes[..4].copy_from_slice(&random[..4]);
    bytes[4..].copy_from_slice(&random[12..]);
    bytes[7] |= u8::from(bytes == [0; 8]);
    SpanId::from_bytes(bytes)
}
