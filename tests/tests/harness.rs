//! The harness itself: what it starts is real, keeps its data over a restart, and is gone afterwards.

use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use ax_tests::nats::{Nats, NatsCluster, NatsOptions};
use ax_tests::postgres::{self, Postgres};
use ax_tests::process::Process;
use ax_tests::{Deadline, dev, eventually};
use sqlx::{Connection, PgConnection};

#[tokio::test]
async fn a_nats_server_keeps_port_and_data_over_a_kill() -> Result<()> {
    let mut nats = Nats::start().await?;
    let url = nats.url();
    let bucket = async_nats::jetstream::kv::Config { bucket: "kept".into(), ..Default::default() };
    nats.jetstream().await?.create_key_value(bucket).await?.put("key", "value".into()).await?;
    nats.kill9()?;
    nats.start_again().await?;
    ensure!(nats.url() == url);
    let kept = nats.jetstream().await?.get_key_value("kept").await?.get("key").await?;
    ensure!(kept.as_deref() == Some(b"value".as_slice()), "{kept:?}");
    Ok(())
}

#[tokio::test]
async fn three_nats_servers_form_a_cluster() -> Result<()> {
    let mut cluster = NatsCluster::start().await?;
    let context = async_nats::jetstream::new(cluster.client().await?);
    let config = async_nats::jetstream::stream::Config { name: "THREE".into(), num_replicas: 3, ..Default::default() };
    context.create_stream(config).await?;
    cluster.nodes[2].kill9()?;
    eventually(Deadline::seconds(30), "two of three take a message", || async {
        Ok(Some(context.publish("THREE", "x".into()).await?.await?))
    })
    .await?;
    cluster.nodes[2].start_again().await
}

#[tokio::test]
async fn the_old_nats_server_is_old_and_one_without_jetstream_has_none() -> Result<()> {
    let old = Nats::start_with(NatsOptions { program: Some(dev::old_nats_server()?), ..Default::default() }).await?;
    ensure!(old.client().await?.server_info().version.starts_with("2.9."));
    let plain = Nats::start_with(NatsOptions { without_jetstream: true, ..Default::default() }).await?;
    ensure!(plain.jetstream().await?.query_account().await.is_err());
    Ok(())
}

#[tokio::test]
async fn postgres_has_default_durability_and_a_database_for_each_test() -> Result<()> {
    let (one, two) = (postgres::database().await?, postgres::database().await?);
    ensure!(one != two);
    let mut connection = PgConnection::connect(&one).await?;
    for (setting, value) in [("fsync", "on"), ("synchronous_commit", "on")] {
        let (shown,): (String,) =
            sqlx::query_as("select current_setting($1)").bind(setting).fetch_one(&mut connection).await?;
        ensure!(shown == value, "{setting} is {shown}");
    }
    Ok(())
}

#[tokio::test]
async fn postgres_keeps_port_and_data_over_a_stop() -> Result<()> {
    let mut postgres = Postgres::start().await?;
    let url = postgres.create_database().await?;
    PgConnection::connect(&url).await?.close().await?;
    postgres.stop().await?;
    ensure!(PgConnection::connect(&url).await.is_err());
    postgres.start_again().await?;
    PgConnection::connect(&url).await?.close().await?;
    Ok(())
}

#[tokio::test]
async fn a_dropped_process_takes_its_children_with_it() -> Result<()> {
    let mut shell = Process::spawn("sh", Command::new("sh").args(["-c", "sleep 600 & echo $!; wait"]))?;
    let child = shell.ready(Duration::from_secs(10), |output| output.after("")).await?;
    drop(shell);
    eventually(Deadline::seconds(10), "the child is gone", || async {
        let gone = !Command::new("kill").args(["-0", &child]).stderr(std::process::Stdio::null()).status()?.success();
        Ok(gone.then_some(()))
    })
    .await
}
