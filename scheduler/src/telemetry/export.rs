//! Spans on their way to the receiver: a bounded queue, one task that sends.
//!
//! A batch that is not taken is sent again for a minute, then dropped. Meanwhile the queue fills, and what does not fit
//! is dropped, too. Both are counted; the log tells of it once a minute.

use std::sync::Mutex;
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanExporter as _};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::otel::OtelConfig;
use crate::metrics as names;

/// How long a batch is tried.
const TRY_FOR: Duration = Duration::from_secs(60);
/// First and longest pause between two tries.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(5));
/// How often the log tells of a receiver that takes nothing.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// The way to the receiver.
#[derive(Debug)]
pub(super) struct Export {
    queue: mpsc::Sender<SpanData>,
    stop: CancellationToken,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Export {
    /// Starts the sending task. Connects when there is something to send.
    pub(super) fn start(config: &OtelConfig, endpoint: &str, node_id: &str) -> Result<Self, ExporterBuildError> {
        let mut exporter = SpanExporter::builder().with_tonic().with_endpoint(endpoint).build()?;
        exporter.set_resource(&resource(node_id));
        let (queue, spans) = mpsc::channel(config.queue);
        let stop = CancellationToken::new();
        let sender = Sender {
            exporter,
            batch: config.batch,
            delay: config.delay,
            stop: stop.clone(),
            endpoint: crate::config::without_password(endpoint),
            failing_since: None,
            warned_at: None,
        };
        let task = Mutex::new(Some(tokio::spawn(sender.run(spans))));
        Ok(Self { queue, stop, task })
    }

    /// Whether `count` more spans fit; if not, they are counted as dropped. Asked before they are built.
    pub(super) fn has_room(&self, count: usize) -> bool {
        let room = self.queue.capacity() >= count;
        if !room {
            dropped("queue_full", count);
        }
        room
    }

    /// Hands a span over, or drops it.
    pub(super) fn send(&self, span: SpanData) {
        if self.queue.try_send(span).is_err() {
            dropped("queue_full", 1);
        }
    }

    /// Sends what waits, for at most `limit`, and ends.
    pub(super) async fn stop(&self, limit: Duration) {
        self.stop.cancel();
        let task = self.task.lock().expect("nobody panics with the task").take();
        if let Some(mut task) = task
            && tokio::time::timeout(limit, &mut task).await.is_err()
        {
            task.abort();
            tracing::warn!("the last spans could not be sent in time");
        }
    }
}

fn dropped(reason: &'static str, count: usize) {
    metrics::counter!(names::SPANS_DROPPED.name, "reason" => reason).increment(count as u64);
}

/// Who speaks: the variables come before what ax says of itself.
fn resource(node_id: &str) -> Resource {
    let given = Resource::builder().build();
    let unnamed = given.get(&"service.name".into()).is_none_or(|name| name.as_str().starts_with("unknown_service"));
    let mut builder = Resource::builder_empty().with_attributes([
        KeyValue::new("service.version", crate::VERSION),
        KeyValue::new("service.instance.id", node_id.to_owned()),
    ]);
    builder = builder.with_attributes(given.iter().map(|(key, value)| KeyValue::new(key.clone(), value.clone())));
    if unnamed {
        builder = builder.with_service_name("ax");
    }
    builder.build()
}

/// The sending task.
struct Sender {
    exporter: SpanExporter,
    batch: usize,
    delay: Duration,
    stop: CancellationToken,
    endpoint: String,
    failing_since: Option<Instant>,
    warned_at: Option<Instant>,
}

impl Sender {
    async fn run(mut self, mut spans: mpsc::Receiver<SpanData>) {
        loop {
            let mut batch = Vec::new();
            tokio::select! {
                () = self.stop.cancelled() => {}
                first = spans.recv() => match first {
                    Some(first) => batch.push(first),
                    None => return,
                },
            }
            let full_at = Instant::now() + self.delay;
            while batch.len() < self.batch && !self.stop.is_cancelled() {
                tokio::select! {
                    () = self.stop.cancelled() => {}
                    () = tokio::time::sleep_until(full_at) => break,
                    next = spans.recv() => match next {
                        Some(next) => batch.push(next),
                        None => break,
                    },
                }
            }
            if self.stop.is_cancelled() {
                // Whatever has been handed over by now goes out, too.
                while batch.len() < self.batch
                    && let Ok(span) = spans.try_recv()
                {
                    batch.push(span);
                }
                if batch.is_empty() {
                    return;
                }
            }
            self.deliver(batch).await;
        }
    }

    async fn deliver(&mut self, batch: Vec<SpanData>) {
        let began = Instant::now();
        let mut pause = PAUSES.0;
        loop {
            let stopping = self.stop.is_cancelled();
            let error = match self.exporter.export(batch.clone()).await {
                Ok(()) => {
                    metrics::counter!(names::SPANS_EXPORTED.name).increment(batch.len() as u64);
                    self.recovered();
                    return;
                }
                Err(error) => error,
            };
            self.failed(&error);
            if stopping || began.elapsed() >= TRY_FOR {
                dropped("not_taken", batch.len());
                return;
            }
            tokio::select! {
                () = self.stop.cancelled() => {}
                () = tokio::time::sleep(pause) => {}
            }
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    fn failed(&mut self, error: &dyn std::error::Error) {
        let now = Instant::now();
        let since = *self.failing_since.get_or_insert(now);
        if self.warned_at.is_none_or(|at| now - at >= WARN_EVERY) {
            self.warned_at = Some(now);
            tracing::warn!(
                endpoint = self.endpoint,
                error = %crate::loops::Chain(error),
                for_s = (now - since).as_secs(),
                "the receiver of traces takes none; runs are not affected"
            );
        }
    }

    fn recovered(&mut self) {
        if let Some(since) = self.failing_since.take() {
            self.warned_at = None;
            tracing::info!(endpoint = self.endpoint, after_s = since.elapsed().as_secs(), "traces are taken again");
        }
    }
}
