//! The trace of a run, as its trigger names it.
//!
//! Source: <https://www.w3.org/TR/trace-context/#traceparent-header>, version 00; of later versions what is defined here.

use crate::context::Facts;

/// The span that set off an attempt; empty when the trigger names none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Parent {
    pub(crate) trace_id: String,
    pub(crate) span_id: String,
    sampled: bool,
}

impl Parent {
    /// Reads a `traceparent`; None for what is none.
    pub(crate) fn parse(header: &str) -> Option<Self> {
        let mut parts = header.split('-');
        let (version, trace_id, span_id, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let hex = |text: &str, length: usize| {
            text.len() == length && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
        };
        let some = |id: &str| id.bytes().any(|b| b != b'0');
        let ok = hex(version, 2)
            && version != "ff"
            && (version != "00" || parts.next().is_none())
            && hex(trace_id, 32)
            && some(trace_id)
            && hex(span_id, 16)
            && some(span_id)
            && hex(flags, 2);
        let sampled = u8::from_str_radix(flags, 16).ok()? & 1 == 1;
        ok.then(|| Self { trace_id: trace_id.to_owned(), span_id: span_id.to_owned(), sampled })
    }

    /// The span of an attempt: entered whenever the handler works. With the feature `opentelemetry` it is a child of
    /// the span that published the trigger, so that a run and its handlers are one trace.
    pub(crate) fn span(&self, facts: &Facts, worker_id: &str) -> tracing::Span {
        let span = tracing::info_span!(
            "attempt",
            run_id = %facts.run.run_id,
            task_id = %facts.run.task_id,
            attempt = facts.attempt,
            handler = %facts.handler,
            worker_id,
            trace_id = self.trace_id,
        );
        #[cfg(feature = "opentelemetry")]
        self.adopt(&span);
        span
    }

    #[cfg(feature = "opentelemetry")]
    fn adopt(&self, span: &tracing::Span) {
        use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceId, TraceState};
        use tracing_opentelemetry::OpenTelemetrySpanExt as _;

        let (Ok(trace), Ok(id)) = (TraceId::from_hex(&self.trace_id), SpanId::from_hex(&self.span_id)) else { return };
        let flags = if self.sampled { TraceFlags::SAMPLED } else { TraceFlags::NOT_SAMPLED };
        let parent = SpanContext::new(trace, id, flags, true, TraceState::NONE);
        // Nobody exports spans in this program: nothing to join.
        let _ = span.set_parent(opentelemetry::Context::new().with_remote_span_context(parent));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-01a22d9d190084d4982b1df6c53dacf2-b89938903a706129-01";

    #[test]
    fn a_traceparent_is_read_and_what_is_none_is_left_alone() {
        let parent = Parent::parse(GOOD).unwrap();
        assert_eq!(
            (parent.trace_id.as_str(), parent.span_id.as_str()),
            ("01a22d9d190084d4982b1df6c53dacf2", "b89938903a706129")
        );
        assert!(parent.sampled);
        assert!(Parent::parse("cc-01a22d9d190084d4982b1df6c53dacf2-b89938903a706129-00-what-comes-later").is_some());
        for bad in [
            "",
            "00",
            "00-01a22d9d190084d4982b1df6c53dacf2-b89938903a706129-01-more",
            "ff-01a22d9d190084d4982b1df6c53dacf2-b89938903a706129-01",
            "00-00000000000000000000000000000000-b89938903a706129-01",
            "00-01a22d9d190084d4982b1df6c53dacf2-0000000000000000-01",
            "00-01A22D9D190084D4982B1DF6C53DACF2-b89938903a706129-01",
            "00-01a22d9d190084d4982b1df6c53dacf2-b89938903a706129-zz",
        ] {
            assert_eq!(Parent::parse(bad), None, "{bad}");
        }
    }
}
