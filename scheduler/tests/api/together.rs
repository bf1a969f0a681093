//! Several processes at once, on a database that they share.

use std::sync::Arc;

use anyhow::Result;
use ax_scheduler::api::service::ApplyOptions;
use ax_scheduler::bus::nats::{NatsBus, NatsConfig};
use ax_scheduler::loops::clock::SystemClock;
use ax_scheduler::ports::Bus as _;
use ax_tests::nats::Nats;
use ax_tests::postgres;
use serde_json::json;

use crate::world::{caller, service, task};

/// Three replicas of a program register the same tasks as they start.
#[tokio::test(flavor = "multi_thread")]
async fn three_processes_that_apply_the_same_tasks_make_each_once() -> Result<()> {
    let url = postgres::database().await?;
    let nats = Nats::start().await?;
    let mut nodes = Vec::new();
    for i in 0..3 {
        let store = ax_scheduler::store::open(&url).await?;
        store.migrate().await?;
        let bus = NatsBus::connect(NatsConfig::new(nats.url())).await?;
        if i == 0 {
            bus.prepare(store.database_id().await?).await?;
        }
        nodes.push(Arc::new(service(store, bus, Arc::new(SystemClock::new()), false)));
    }
    for round in 0..5 {
        let tasks: Vec<_> = (0..5).map(|i| task(&format!("r{round}.t{i}"), json!({"cron_expr": "EVERY 1s"}))).collect();
        let document = json!({"tasks": tasks});
        let caller = caller();
        let reports = futures::future::try_join_all(
            nodes.iter().map(|node| node.apply(&caller, &document, ApplyOptions::default())),
        )
        .await?;
        let created: Vec<usize> = reports.iter().map(|report| report.created.len()).collect();
        let unchanged: usize = reports.iter().map(|report| report.unchanged.len()).sum();
        assert_eq!((created.iter().sum::<usize>(), unchanged), (5, 10), "{reports:?}");
        assert!(created.contains(&5), "a document is applied whole: {created:?}");
    }
    Ok(())
}
