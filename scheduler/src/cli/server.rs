//! `ax server`, `ax dev`, `ax migrate`, `ax config`.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::{Failure, USAGE, say};
use crate::config::{Layer, ServerConfig};
use crate::dev::{self, DevOptions};
use crate::{app, telemetry};

/// `ax server`.
#[derive(Debug, Args)]
pub(super) struct ServerArgs {
    #[command(flatten)]
    layer: Layer,
}

/// `ax dev`.
#[derive(Debug, Args)]
pub(super) struct DevArgs {
    /// Add the example tasks and a worker that executes them
    #[arg(long)]
    demo: bool,
    /// Where its data lies
    #[arg(long, value_name = "DIR", default_value = ".ax")]
    dir: PathBuf,
    #[command(flatten)]
    layer: Layer,
}

/// `ax migrate`.
#[derive(Debug, Args)]
pub(super) struct MigrateArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    layer: Layer,
}

/// `ax config`.
#[derive(Debug, Args)]
pub(super) struct ConfigArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    layer: Layer,
}

fn effective(layer: Layer, file: Layer) -> Result<ServerConfig, Failure> {
    ServerConfig::new(layer.over(file)).map_err(|e| Failure { code: USAGE, error: e.into() })
}

pub(super) async fn server(args: ServerArgs, file: Layer, stop: CancellationToken) -> Result<(), Failure> {
    let config = effective(args.layer, file)?;
    telemetry::start(&config.log, config.log_format);
    Ok(app::server(config.node(), stop).await?)
}

pub(super) async fn dev(args: DevArgs, file: Layer, stop: CancellationToken) -> Result<(), Failure> {
    let mut layer = args.layer.over(file);
    // The live view is what a person reads; the log only says what goes wrong.
    layer.log.get_or_insert_with(|| "warn".into());
    let config = effective(layer, Layer::default())?;
    telemetry::start(&config.log, config.log_format);
    let options = DevOptions {
        folder: args.dir,
        nats_url: config.nats_given.then(|| config.nats_urls.join(",")),
        demo: args.demo,
        database_given: config.database_given,
        node: config.node(),
    };
    Ok(dev::run(options, stop).await?)
}

pub(super) async fn migrate(args: MigrateArgs, file: Layer) -> Result<(), Failure> {
    let config = effective(args.layer, file)?;
    let store = crate::store::open(&config.database_url).await?;
    let applied = store.migrate().await?;
    let id = store.database_id().await?;
    if args.json {
        say(json!({"database_id": id, "applied": applied}));
    } else if applied.is_empty() {
        say(format_args!("database {id} is up to date"));
    } else {
        say(format_args!("database {id}: applied {}", applied.join(", ")));
    }
    Ok(())
}

pub(super) fn config(args: ConfigArgs, file: Layer) -> Result<(), Failure> {
    let config = effective(args.layer, file)?;
    let shown = config.shown();
    if args.json {
        let object: serde_json::Map<_, _> = shown.into_iter().map(|(k, v)| (k.to_owned(), v.into())).collect();
        say(serde_json::Value::Object(object));
    } else {
        for (key, value) in shown {
            say(format_args!("{key:<16} {value}"));
        }
    }
    Ok(())
}
