//! The micro service protocol of NATS (ADR-32 of nats-architecture-and-design): what `nats micro ls|info|stats` asks.
//!
//! async-nats has an implementation, which counts as an error only what is answered without a body. Refusals of ax have
//! one, the problem, so this is its own.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use async_nats::{Client, Subject, SubscribeError, Subscriber};
use ax_shared::Timestamp;
use futures::StreamExt as _;
use futures::stream::{SelectAll, select_all};
use serde_json::{Value, json};

/// Of several instances that listen on a subject in this group one gets each request.
pub(super) const QUEUE_GROUP: &str = "q";

/// One instance of a service.
#[derive(Debug)]
pub(super) struct Micro {
    pub(super) name: String,
    /// Of this instance.
    pub(super) id: String,
    /// Semantic version.
    pub(super) version: String,
    pub(super) description: String,
    pub(super) metadata: Value,
    pub(super) started_at: Timestamp,
    pub(super) endpoints: Vec<Endpoint>,
}

/// A subject that the service answers on, and what has been asked there.
#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) name: String,
    pub(super) subject: String,
    pub(super) metadata: Value,
    pub(super) counts: Counts,
}

/// What has been asked of an endpoint.
#[derive(Debug, Default)]
pub(super) struct Counts(Mutex<Counted>);

#[derive(Debug, Default)]
struct Counted {
    requests: u64,
    errors: u64,
    last_error: String,
    took: Duration,
}

impl Counts {
    /// Counts a request that took so long; `error` is `CODE:TEXT` if it was refused.
    pub(super) fn add(&self, took: Duration, error: Option<String>) {
        let mut counted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counted.requests += 1;
        counted.took += took;
        if let Some(error) = error {
            counted.errors += 1;
            counted.last_error = error;
        }
    }
}

/// Subscribes to what is asked of services.
pub(super) async fn questions(client: &Client, micro: &Micro) -> Result<SelectAll<Subscriber>, SubscribeError> {
    let mut all = Vec::new();
    for verb in ["PING", "INFO", "STATS"] {
        for end in [String::new(), format!(".{}", micro.name), format!(".{}.{}", micro.name, micro.id)] {
            all.push(client.subscribe(format!("$SRV.{verb}{end}")).await?);
        }
    }
    Ok(select_all(all))
}

/// Answers what is asked of this instance, without end.
pub(super) async fn answer(client: &Client, micro: &Micro, mut questions: SelectAll<Subscriber>) {
    while let Some(question) = questions.next().await {
        let Some(reply) = question.reply else { continue };
        let Some(answer) = micro.tell(&question.subject) else { continue };
        // Fails only when the connection has ended for good.
        let _ = client.publish(reply, answer.to_string().into()).await;
    }
}

impl Micro {
    fn tell(&self, asked: &Subject) -> Option<Value> {
        let mut told = json!({"name": self.name, "id": self.id, "version": self.version, "metadata": self.metadata});
        match asked.split('.').nth(1)? {
            "PING" => told["type"] = "io.nats.micro.v1.ping_response".into(),
            "INFO" => {
                told["type"] = "io.nats.micro.v1.info_response".into();
                told["description"] = self.description.as_str().into();
                told["endpoints"] = self.endpoints.iter().map(Endpoint::info).collect();
            }
            "STATS" => {
                told["type"] = "io.nats.micro.v1.stats_response".into();
                told["started"] = self.started_at.to_string().into();
                told["endpoints"] = self.endpoints.iter().map(Endpoint::stats).collect();
            }
            _ => return None,
        }
        Some(told)
    }
}

impl Endpoint {
    fn info(&self) -> Value {
        json!({"name": self.name, "subject": self.subject, "queue_group": QUEUE_GROUP, "metadata": self.metadata})
    }

    /// Times are in nanoseconds.
    fn stats(&self) -> Value {
        let counted = self.counts.0.lock().unwrap_or_else(PoisonError::into_inner);
        let nanos = u64::try_from(counted.took.as_nanos()).unwrap_or(u64::MAX);
        json!({
            "name": self.name,
            "subject": self.subject,
            "queue_group": QUEUE_GROUP,
            "num_requests": counted.requests,
            "num_errors": counted.errors,
            "last_error": counted.last_error,
            "processing_time": nanos,
            "average_processing_time": nanos / counted.requests.max(1),
        })
    }
}
