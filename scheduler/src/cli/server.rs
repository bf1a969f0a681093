//! `ax server`, `ax dev`, `ax migrate`, `ax config`.

use std::path::PathBuf;

use clap::{Args, CommandFactory as _};
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

/// Tells of `AX_*` variables that no option reads: a misspelt one would be a setting that silently is the default.
fn warn_of_unknown_variables() {
    use std::io::Write as _;
    let mut known = std::collections::BTreeSet::new();
    variables_of(&super::Cli::command(), &mut known);
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("AX_") && !known.contains(name.as_ref()) {
            let nearest = known.iter().max_by(|a, b| {
                let likeness = |other: &str| strsim::jaro_winkler(&name, other);
                likeness(a).total_cmp(&likeness(b))
            });
            let hint = nearest.filter(|other| strsim::jaro_winkler(&name, other) > 0.9);
            let hint = hint.map(|other| format!("; is {other} meant?")).unwrap_or_default();
            let _ = writeln!(std::io::stderr(), "warning: {name} is set, but no option reads it{hint}");
        }
    }
}

fn variables_of(command: &clap::Command, found: &mut std::collections::BTreeSet<String>) {
    found.extend(command.get_arguments().filter_map(|arg| Some(arg.get_env()?.to_string_lossy().into_owned())));
    for below in command.get_subcommands() {
        variables_of(below, found);
    }
}

pub(super) async fn server(args: ServerArgs, file: Layer, stop: CancellationToken) -> Result<(), Failure> {
    let config = effective(args.layer, file)?;
    warn_of_unknown_variables();
    telemetry::start(&config.log, config.log_format);
    Ok(app::server(config.node(), stop).await?)
}

pub(super) async fn dev(args: DevArgs, file: Layer, stop: CancellationToken) -> Result<(), Failure> {
    let mut layer = args.layer.over(file);
    // The live view is what a person reads; the log only says what goes wrong.
    layer.log.get_or_insert_with(|| "warn".into());
    let config = effective(layer, Layer::default())?;
    warn_of_unknown_variables();
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
    warn_of_unknown_variables();
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
