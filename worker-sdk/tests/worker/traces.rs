//! The lines and spans of an attempt carry the run's trace.

use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use ax_worker::Context as Cx;
use serde_json::Value;
use tracing_subscriber::layer::SubscriberExt as _;

use crate::world::{Trigger, World};

const TRACE: &str = "01a22d9d190084d4982b1df6c53dacf2";
const SPAN: &str = "b89938903a706129";

/// What was logged, as text.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn trigger() -> Trigger {
    let headers = vec![("traceparent", format!("00-{TRACE}-{SPAN}-01"))];
    Trigger { headers, ..Trigger::default() }
}

#[tokio::test]
async fn the_lines_received_started_finished_carry_run_and_trace() -> Result<()> {
    let lines = Lines::default();
    let writer = lines.clone();
    let json = tracing_subscriber::fmt::layer().json().flatten_event(true).with_writer(move || writer.clone());
    let _log = tracing::subscriber::set_default(tracing_subscriber::registry().with(json));
    let world = World::new().await?;
    world.consumer(60_000, 0).await?;
    let worker = world.start(|w| w.handler("work", nothing_but_a_line));
    let run = world.publish(trigger()).await?;
    world.settled().await?;
    worker.stop().await?;
    let text = String::from_utf8(lines.0.lock().unwrap_or_else(PoisonError::into_inner).clone())?;
    let lines: Vec<Value> = text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    for word in ["received", "started", "finished"] {
        let line = lines.iter().find(|line| line["message"] == word).with_context(|| format!("{word}: {text}"))?;
        assert_eq!((&line["run_id"], &line["task_id"]), (&Value::from(run.to_string()), &Value::from("some.task")));
        assert_eq!((&line["trace_id"], &line["span_id"], &line["attempt"]), (&TRACE.into(), &SPAN.into(), &1.into()));
    }
    // What the handler writes itself lies in the span of the attempt.
    let own = lines.iter().find(|line| line["message"] == "in the handler").context("no line of the handler")?;
    assert_eq!((&own["span"]["name"], &own["span"]["run_id"]), (&"attempt".into(), &run.to_string().into()));
    assert_eq!(own["span"]["trace_id"], TRACE);
    Ok(())
}

async fn nothing_but_a_line(_: Value, _: Cx) -> Result<(), ax_worker::Failure> {
    tracing::info!("in the handler");
    Ok(())
}

#[cfg(feature = "opentelemetry")]
#[tokio::test]
async fn the_span_of_an_attempt_is_a_child_of_the_one_that_published_it() -> Result<()> {
    use opentelemetry::trace::TracerProvider as _;
    use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData, SpanExporter};

    #[derive(Debug, Clone, Default)]
    struct Spans(Arc<Mutex<Vec<SpanData>>>);
    impl SpanExporter for Spans {
        async fn export(&self, batch: Vec<SpanData>) -> opentelemetry_sdk::error::OTelSdkResult {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(batch);
            Ok(())
        }
    }

    let spans = Spans::default();
    let provider = SdkTracerProvider::builder().with_simple_exporter(spans.clone()).build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
    let _log = tracing::subscriber::set_default(tracing_subscriber::registry().with(layer));
    let inner = |_: Value, _: Cx| async {
        tracing::info_span!("inner").in_scope(|| ());
        Ok(())
    };
    let world = World::new().await?;
    world.consumer(60_000, 0).await?;
    let worker = world.start(|w| w.handler("work", inner));
    world.publish(trigger()).await?;
    world.settled().await?;
    worker.stop().await?;
    let spans = spans.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let named = |name: &str| spans.iter().find(|span| span.name == name).with_context(|| format!("no span {name}"));
    let (attempt, inner) = (named("attempt")?, named("inner")?);
    assert_eq!(attempt.span_context.trace_id().to_string(), TRACE);
    assert_eq!(attempt.parent_span_id.to_string(), SPAN);
    assert_eq!(inner.parent_span_id, attempt.span_context.span_id());
    assert_eq!(inner.span_context.trace_id(), attempt.span_context.trace_id());
    Ok(())
}
