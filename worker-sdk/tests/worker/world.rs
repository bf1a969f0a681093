//! A nats-server as the scheduler would prepare it, and triggers published by hand.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use async_nats::jetstream::consumer::pull;
use async_nats::jetstream::stream::{Config, DiscardPolicy, RetentionPolicy};
use async_nats::jetstream::{self, kv, object_store};
use ax_shared::{Profile, RunId};
use ax_tests::eventually;
use ax_tests::nats::Nats;
use ax_worker::{Context as Cx, Failure, Worker};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

pub(crate) const SOON: Duration = Duration::from_secs(20);

/// A server with the streams and buckets of an installation, and a group `g`.
pub(crate) struct World {
    pub(crate) nats: Nats,
    pub(crate) context: jetstream::Context,
    consumers: Mutex<Vec<Value>>,
}

pub(crate) struct Running {
    stop: CancellationToken,
    task: JoinHandle<Result<(), ax_worker::WorkerError>>,
}

impl Running {
    pub(crate) async fn stop(self) -> Result<()> {
        self.stop.cancel();
        Ok(tokio::time::timeout(SOON, self.task).await.context("the worker does not stop")???)
    }
}

/// What differs from a plain trigger.
pub(crate) struct Trigger {
    pub(crate) run_id: RunId,
    pub(crate) handler: &'static str,
    pub(crate) timeout_ms: u64,
    pub(crate) retries: u32,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) payload: Value,
    pub(crate) upstream: Value,
}

impl Default for Trigger {
    fn default() -> Self {
        Self {
            run_id: RunId(Uuid::now_v7()),
            handler: "work",
            timeout_ms: 60_000,
            retries: 0,
            headers: Vec::new(),
            payload: Value::Null,
            upstream: json!({}),
        }
    }
}

impl World {
    pub(crate) async fn new() -> Result<Self> {
        let nats = Nats::start().await?;
        let context = nats.jetstream().await?;
        let triggers = Config {
            name: "AX_TRIGGERS".into(),
            subjects: vec!["ax.trigger.>".into()],
            retention: RetentionPolicy::WorkQueue,
            discard: DiscardPolicy::New,
            ..Config::default()
        };
        context.create_stream(triggers).await?;
        let events = Config { name: "AX_EVENTS".into(), subjects: vec!["ax.event.>".into()], ..Config::default() };
        context.create_stream(events).await?;
        let logs = Config { name: "AX_LOGS".into(), subjects: vec!["ax.log.>".into()], ..Config::default() };
        context.create_stream(logs).await?;
        for (name, seconds) in [("ax_groups", 0), ("ax_workers", 10)] {
            let max_age = Duration::from_secs(seconds);
            context.create_key_value(kv::Config { bucket: name.into(), max_age, ..Default::default() }).await?;
        }
        context.create_object_store(object_store::Config { bucket: "ax_results".into(), ..Default::default() }).await?;
        Ok(Self { nats, context, consumers: Mutex::default() })
    }

    /// Makes a consumer as the scheduler would and adds it to the group.
    pub(crate) async fn consumer(&self, timeout_ms: u64, retries: u32) -> Result<String> {
        self.consumer_with(timeout_ms, retries, 1.0, None).await
    }

    /// The same with the largest weight of its tasks, and perhaps an ack deadline that the worker does not expect.
    pub(crate) async fn consumer_with(
        &self,
        timeout_ms: u64,
        retries: u32,
        max_weight: f64,
        ack_wait: Option<Duration>,
    ) -> Result<String> {
        let profile = Profile::of(timeout_ms, retries);
        let name = format!("g-default-{profile}");
        let config = pull::Config {
            durable_name: Some(name.clone()),
            filter_subject: format!("ax.trigger.g.default.{profile}.>"),
            ack_wait: ack_wait.unwrap_or(Duration::from_secs(profile.ack_wait_s().into())),
            max_deliver: profile.max_deliver().into(),
            max_ack_pending: -1,
            ..pull::Config::default()
        };
        self.context.create_consumer_on_stream(config, "AX_TRIGGERS").await?;
        let all = {
            let mut consumers = self.consumers.lock().unwrap_or_else(PoisonError::into_inner);
            let queue = "default";
            consumers.push(json!({ "name": name, "queue": queue, "profile": profile, "max_weight": max_weight }));
            consumers.clone()
        };
        let groups = self.context.get_key_value("ax_groups").await?;
        groups.put("g", json!({ "consumers": all }).to_string().into()).await?;
        Ok(name)
    }

    pub(crate) async fn publish(&self, trigger: Trigger) -> Result<RunId> {
        let run_id = trigger.run_id;
        let mut headers = async_nats::HeaderMap::new();
        headers.insert("Ax-Version", "1");
        headers.insert("Ax-Timeout-Ms", trigger.timeout_ms.to_string());
        headers.insert("Ax-Max-Attempts", (trigger.retries + 1).to_string());
        headers.insert("Ax-Attempt-Base", "0");
        headers.insert("Ax-Retry-Backoff", "10,1,10,0");
        for (name, value) in trigger.headers {
            headers.insert(name, value);
        }
        let profile = Profile::of(trigger.timeout_ms, trigger.retries);
        let body = json!({
            "run_id": run_id, "task_id": "some.task", "handler": trigger.handler, "kind": "manual",
            "trigger_time": "2026-11-30T00:00:00.000Z", "payload": trigger.payload, "upstream": trigger.upstream,
            "attempt_base": 0,
        });
        let subject = format!("ax.trigger.g.default.{profile}.some.task.{run_id}");
        self.context.publish_with_headers(subject, headers, body.to_string().into()).await?.await?;
        Ok(run_id)
    }

    pub(crate) fn start<S: Send + Sync + 'static>(&self, with: impl FnOnce(Worker) -> Worker<S>) -> Running {
        Self::start_at(self.nats.url(), with)
    }

    /// The same with a way of its own to the server.
    pub(crate) fn start_at<S: Send + Sync + 'static>(url: String, with: impl FnOnce(Worker) -> Worker<S>) -> Running {
        let worker = with(Worker::new(url, "g"));
        let stop = CancellationToken::new();
        let task = tokio::spawn(worker.run_until(stop.clone()));
        Running { stop, task }
    }

    /// Every event so far: (kind, message id, body).
    pub(crate) async fn events(&self) -> Result<Vec<(String, String, Value)>> {
        let stream = self.context.get_stream("AX_EVENTS").await?;
        let count = stream.cached_info().state.last_sequence;
        let mut events = Vec::new();
        for seq in 1..=count {
            let message = stream.get_raw_message(seq).await?;
            let kind = message.subject.split('.').nth(2).context("no kind")?.to_owned();
            let id = message.headers.get("Nats-Msg-Id").map(ToString::to_string).unwrap_or_default();
            events.push((kind, id, serde_json::from_slice(&message.payload)?));
        }
        Ok(events)
    }

    pub(crate) async fn kinds(&self) -> Result<Vec<String>> {
        Ok(self.events().await?.into_iter().map(|(kind, ..)| kind).collect())
    }

    pub(crate) async fn messages(&self) -> Result<u64> {
        Ok(self.context.get_stream("AX_TRIGGERS").await?.cached_info().state.messages)
    }

    pub(crate) async fn settled(&self) -> Result<()> {
        eventually(SOON, "every trigger is settled", || async { Ok((self.messages().await? == 0).then_some(())) }).await
    }

    pub(crate) async fn until_event(&self, kind: &str) -> Result<Value> {
        eventually(SOON, &format!("the event {kind}"), || async {
            Ok(self.events().await?.into_iter().find(|(there, ..)| there == kind).map(|(.., body)| body))
        })
        .await
    }
}

pub(crate) async fn nothing(_: Value, _: Cx) -> Result<Value, Failure> {
    Ok(Value::Null)
}
