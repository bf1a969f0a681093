//! The trace of a run: ids that follow from the run, and which traces are kept.
//!
//! Every id is derived, so that whoever settles a run after a takeover, and every log line, names the same spans.

use std::fmt;

use ax_shared::RunId;
use opentelemetry::trace::{SpanId, TraceId};
use sha2::{Digest, Sha256};

/// The trace of a run: the same 128 bits.
#[must_use]
pub fn trace_id(run_id: RunId) -> TraceId {
    TraceId::from_bytes(*run_id.0.as_bytes())
}

/// The root span `run`.
#[must_use]
pub fn run_span(run_id: RunId) -> SpanId {
    derived(&[run_id.0.as_bytes(), b":run"])
}

/// The span `plan`.
#[must_use]
pub fn plan_span(run_id: RunId) -> SpanId {
    derived(&[run_id.0.as_bytes(), b":plan"])
}

/// The span `attempt` of one attempt.
#[must_use]
pub fn attempt_span(run_id: RunId, attempt: u32) -> SpanId {
    derived(&[run_id.0.as_bytes(), b":attempt:", &attempt.to_be_bytes()])
}

/// The span `publish` of a message: the parent of what its worker does, whoever publishes it.
#[must_use]
pub fn publish_span(message_id: &str) -> SpanId {
    derived(&[message_id.as_bytes()])
}

fn derived(parts: &[&[u8]]) -> SpanId {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part);
    }
    let mut span = [0u8; 8];
    span.copy_from_slice(&hash.finalize()[..8]);
    // An all-zero span id is invalid.
    span[7] |= 1;
    SpanId::from_bytes(span)
}

/// A span as another process sees it, in the header `traceparent`.
///
/// Source: <https://www.w3.org/TR/trace-context/#traceparent-header>, version 00.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceParent {
    /// The trace.
    pub trace_id: TraceId,
    /// The span.
    pub span_id: SpanId,
    /// Whether the trace is kept.
    pub sampled: bool,
}

impl TraceParent {
    /// Reads a header's value; None when it is not valid. Later versions may have more fields at the end.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut fields = text.trim().split('-');
        let mut next = |digits: usize| {
            let lower_hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
            fields.next().filter(|field| field.len() == digits && field.bytes().all(lower_hex))
        };
        let (version, trace, span, flags) = (next(2)?, next(32)?, next(16)?, next(2)?);
        if version == "ff" || (version == "00" && fields.next().is_some()) {
            return None;
        }
        let (trace_id, span_id) = (TraceId::from_hex(trace).ok()?, SpanId::from_hex(span).ok()?);
        if trace_id == TraceId::INVALID || span_id == SpanId::INVALID {
            return None;
        }
        Some(Self { trace_id, span_id, sampled: u8::from_str_radix(flags, 16).ok()? & 1 == 1 })
    }
}

impl fmt::Display for TraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{}-{}-{:02x}", self.trace_id, self.span_id, u8::from(self.sampled))
    }
}

/// Which traces are kept, decided by the trace id alone, so that every node decides alike.
///
/// What decides is a hash of the id. A run's id begins with its time, has the same two bits in its ninth byte as every
/// UUID, and of runs that were made in one millisecond it counts on in its middle: the SDKs' own ratio samplers, which
/// read the last 7 or 8 bytes as if they were random, would keep all or none of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampler {
    reject_below: u64,
}

impl Sampler {
    /// Keeps every trace.
    pub const ALWAYS: Self = Self { reject_below: 0 };
    /// Keeps none.
    pub const NEVER: Self = Self { reject_below: RANDOMNESS };

    /// Keeps this share of the traces, 0 to 1.
    #[must_use]
    pub fn ratio(share: f64) -> Self {
        Self { reject_below: RANDOMNESS - (share.clamp(0.0, 1.0) * RANDOMNESS as f64) as u64 }
    }

    /// Whether the trace is kept.
    #[must_use]
    pub fn keeps(self, trace_id: TraceId) -> bool {
        match self {
            Self::ALWAYS => true,
            Self::NEVER => false,
            Self { reject_below } => {
                let hash = Sha256::digest(trace_id.to_bytes());
                hash[..7].iter().fold(0u64, |all, byte| all << 8 | u64::from(*byte)) >= reject_below
            }
        }
    }
}

impl Default for Sampler {
    fn default() -> Self {
        Self::ALWAYS
    }
}

/// One more than the largest number in 7 bytes.
const RANDOMNESS: u64 = 1 << 56;

#[cfg(test)]
mod tests {
    use super::*;
    use ax_shared::{TaskId, Timestamp};

    fn runs(count: i64) -> impl Iterator<Item = RunId> {
        let task = TaskId::new("sync.orders").unwrap();
        let at = |n: i64| Timestamp::from_millis(1_790_000_000_000 + n * 60_000);
        // Half of them are of a schedule, half were asked for at the same moment.
        (0..count).map(move |n| if n % 2 == 0 { RunId::scheduled(&task, at(n)) } else { RunId(uuid::Uuid::now_v7()) })
    }

    #[test]
    fn a_ratio_keeps_its_share_of_the_runs_and_a_larger_one_keeps_what_a_smaller_one_did() {
        for share in [0.01, 0.1, 0.25, 0.5, 0.9] {
            let (sampler, larger) = (Sampler::ratio(share), Sampler::ratio(share + 0.05));
            for odd in [0, 1] {
                let runs: Vec<RunId> = runs(20_000).skip(odd).step_by(2).collect();
                let kept = runs.iter().filter(|run| sampler.keeps(trace_id(**run))).count() as f64 / runs.len() as f64;
                assert!((kept - share).abs() < 0.02, "{share}: {kept}");
                assert!(runs.iter().all(|run| !sampler.keeps(trace_id(*run)) || larger.keeps(trace_id(*run))));
            }
        }
        assert!(runs(1000).all(|run| Sampler::ALWAYS.keeps(trace_id(run)) && !Sampler::NEVER.keeps(trace_id(run))));
        assert_eq!((Sampler::ratio(1.0), Sampler::ratio(0.0)), (Sampler::ALWAYS, Sampler::NEVER));
    }

    #[test]
    fn a_traceparent_is_read_as_the_standard_says() {
        let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let parent = TraceParent::parse(text).unwrap();
        assert!(parent.sampled);
        assert_eq!(parent.to_string(), text);
        assert!(TraceParent::parse("cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-03-what").unwrap().sampled);
        assert!(!TraceParent::parse("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-02").unwrap().sampled);
        for wrong in [
            "",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        ] {
            assert_eq!(TraceParent::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn the_spans_of_a_run_differ_and_stay_the_same() {
        let run = runs(1).next().unwrap();
        let spans = [run_span(run), plan_span(run), attempt_span(run, 1), attempt_span(run, 2), publish_span("x:1")];
        for (n, span) in spans.iter().enumerate() {
            assert!(spans[..n].iter().all(|other| other != span));
        }
        assert_eq!(run_span(run), spans[0]);
    }
}
