//! The demo: the tasks of `examples/tasks/` and a worker for their groups.

use std::time::Duration;

use anyhow::{Context as _, bail};
use ax_shared::Prefix;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

/// The documents of `examples/tasks/`, compiled in so that the program needs no checkout.
const DOCUMENTS: [(&str, &str); 4] = [
    ("data_sync.json", include_str!("../../../examples/tasks/data_sync.json")),
    ("demo.json", include_str!("../../../examples/tasks/demo.json")),
    ("export.json", include_str!("../../../examples/tasks/export.json")),
    ("payment.json", include_str!("../../../examples/tasks/payment.json")),
];

/// All example tasks as one document.
fn document() -> anyhow::Result<Value> {
    let mut tasks = Vec::new();
    for (name, text) in DOCUMENTS {
        let document: Value = serde_json::from_str(text).with_context(|| format!("read the example {name}"))?;
        let found = ax_shared::definition::tasks_of_document(&document)
            .map_err(|e| anyhow::anyhow!("{name}: {}", e.message))?
            .into_iter()
            .map(|(_, task)| task.clone())
            .collect::<Vec<_>>();
        tasks.extend(found);
    }
    Ok(json!({ "tasks": tasks }))
}

/// Applies the example tasks over NATS, where no token is needed.
async fn apply(nats_url: &str, prefix: &Prefix) -> anyhow::Result<()> {
    let client = async_nats::connect(nats_url).await.context("connect to apply the example tasks")?;
    let request = async_nats::Request::new().timeout(Some(Duration::from_secs(30)));
    let request = request.payload(document()?.to_string().into());
    let answer = client.send_request(prefix.api("apply"), request).await.context("apply the example tasks")?;
    let answer: Value = serde_json::from_slice(&answer.payload).context("read the answer to the example tasks")?;
    match answer.get("error") {
        Some(problem) => bail!("the example tasks were refused: {problem}"),
        None => Ok(()),
    }
}

/// The running demo.
pub(super) struct Demo {
    workers: Vec<tokio::task::JoinHandle<()>>,
}

impl Demo {
    /// Waits until its workers have stopped.
    pub(super) async fn end(self) {
        for worker in self.workers {
            let _ = worker.await;
        }
    }
}

/// Applies the tasks and starts a worker for each of their groups.
pub(super) async fn start(nats_url: &str, prefix: &Prefix, stop: CancellationToken) -> anyhow::Result<Demo> {
    apply(nats_url, prefix).await?;
    Ok(worker::start(nats_url, prefix, &stop))
}

mod worker;
