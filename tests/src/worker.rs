//! Raw workers: those of `examples/` as users run them, and pulls by hand for tests that want to misbehave.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use async_nats::jetstream::consumer::PullConsumer;
use async_nats::jetstream::{self, Message};
use futures::StreamExt;
use serde_json::Value;

use crate::process::Process;
use crate::{Deadline, dev, eventually};

/// Starts the Python worker of `examples/raw-worker` for one executor group.
///
/// # Errors
/// When Python is missing.
pub fn python(nats_url: &str, group: &str) -> Result<Process> {
    let script = dev::examples().join("raw-worker/worker.py");
    Process::spawn(
        format!("python worker {group}"),
        Command::new(dev::python()?).arg("-u").arg(script).arg(group).env("NATS_URL", nats_url),
    )
}

/// Starts the shell worker of `examples/` for one consumer.
///
/// # Errors
/// When the `nats` program is missing.
pub fn shell(nats_url: &str, consumer: &str) -> Result<Process> {
    let nats = dev::nats_cli()?;
    let folder = nats.parent().context("the nats program lies nowhere")?;
    let path = std::env::var("PATH").unwrap_or_default();
    Process::spawn(
        format!("shell worker {consumer}"),
        Command::new("sh")
            .arg(dev::examples().join("shell-worker.sh"))
            .arg(consumer)
            .env("NATS_URL", nats_url)
            .env("PATH", format!("{}:{path}", folder.display())),
    )
}

/// Returns a command of the `nats` program against `nats_url`.
///
/// # Errors
/// When the program is missing.
pub fn nats_cli(nats_url: &str, arguments: &[&str]) -> Result<Command> {
    let mut command = Command::new(dev::nats_cli()?);
    command.env("NATS_URL", nats_url).args(arguments);
    Ok(command)
}

/// Reads which consumers an executor group has, as a raw worker does: from the bucket `ax_groups`.
///
/// # Errors
/// When the bucket is not there.
pub async fn consumers(context: &jetstream::Context, group: &str) -> Result<Vec<String>> {
    let bucket = context.get_key_value("ax_groups").await.context("open ax_groups")?;
    let Some(entry) = bucket.get(group).await.context("read ax_groups")? else {
        return Ok(Vec::new());
    };
    let entry: Value = serde_json::from_slice(&entry)?;
    let names = entry["consumers"].as_array().context("no list of consumers")?;
    names.iter().map(|item| Ok(item["name"].as_str().context("a consumer without a name")?.to_owned())).collect()
}

/// A worker in the test's own hands: it pulls from one consumer and decides about each message.
#[derive(Debug, Clone)]
pub struct Hands {
    consumer: PullConsumer,
    context: jetstream::Context,
}

impl Hands {
    /// Takes hold of the consumer `name`, once it exists.
    ///
    /// # Errors
    /// When it does not come into being.
    pub async fn on(context: &jetstream::Context, name: &str) -> Result<Self> {
        let consumer = eventually(Deadline::seconds(20), &format!("consumer {name}"), || async {
            Ok(Some(context.get_consumer_from_stream(name, "AX_TRIGGERS").await?))
        })
        .await?;
        Ok(Self { consumer, context: context.clone() })
    }

    /// Takes the next message, waiting up to `limit` for it.
    ///
    /// # Errors
    /// When the consumer is gone.
    pub async fn take(&self, limit: Duration) -> Result<Option<Message>> {
        let mut batch = self.consumer.batch().max_messages(1).expires(limit).messages().await?;
        match batch.next().await {
            Some(message) => Ok(Some(message.map_err(|error| anyhow::anyhow!(error))?)),
            None => Ok(None),
        }
    }

    /// Takes the next message.
    ///
    /// # Errors
    /// When none comes within 20 seconds.
    pub async fn next(&self) -> Result<Message> {
        let limit = Duration::from_secs(20);
        self.take(limit).await?.context("no trigger came")
    }

    /// Sends an event about the run of `message`, confirmed by the stream, as the wire format asks: `fields` are added to
    /// `run_id` and `attempt`.
    ///
    /// # Errors
    /// When the stream does not take it.
    pub async fn event(&self, message: &Message, kind: &str, fields: Value) -> Result<()> {
        let run = Trigger::of(message)?;
        let mut body = fields;
        body["run_id"] = run.run_id.clone().into();
        body["attempt"] = run.attempt.into();
        let mut headers = async_nats::HeaderMap::new();
        headers.insert("Nats-Msg-Id", format!("{}:{}:{kind}", run.run_id, run.attempt));
        let subject = format!("ax.event.{kind}.{}.{}.{}", run.group, run.task_id, run.run_id);
        self.context.publish_with_headers(subject, headers, body.to_string().into()).await?.await?;
        Ok(())
    }
}

/// What a trigger says, read from its headers and body.
#[derive(Debug, Clone)]
pub struct Trigger {
    /// The run.
    pub run_id: String,
    /// The task.
    pub task_id: String,
    /// The executor group.
    pub group: String,
    /// The number of this attempt, from 1.
    pub attempt: u64,
    /// The body.
    pub body: Value,
}

impl Trigger {
    /// Reads a trigger.
    ///
    /// # Errors
    /// When a header or the body is not as on the wire.
    pub fn of(message: &Message) -> Result<Self> {
        let headers = message.headers.as_ref().context("a trigger without headers")?;
        let header = |name: &str| {
            let value = headers.get(name).with_context(|| format!("no header {name}"))?;
            Ok::<_, anyhow::Error>(value.to_string())
        };
        let deliveries = message.info().map_err(|error| anyhow::anyhow!(error))?.delivered;
        Ok(Self {
            run_id: header("Ax-Run-Id")?,
            task_id: header("Ax-Task-Id")?,
            group: header("Ax-Group")?,
            attempt: header("Ax-Attempt-Base")?.parse::<u64>()? + u64::try_from(deliveries)?,
            body: serde_json::from_slice(&message.payload).context("the body of a trigger")?,
        })
    }
}
