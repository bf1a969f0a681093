//! What a node exposes at `/metrics` is what the documents say, and it moves as runs go.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail, ensure};
use ax_tests::api::Api;
use ax_tests::world::{Database, World, task};
use ax_tests::{Deadline, dev, eventually, worker};
use serde_json::json;

/// What the table in `docs/observability.md` says of a metric.
#[derive(Debug)]
struct Declared {
    kind: String,
    labels: BTreeSet<String>,
    help: String,
}

fn declared() -> Result<BTreeMap<String, Declared>> {
    let document = std::fs::read_to_string(dev::root().join("docs/observability.md"))?;
    let (_, table) = document.split_once("<!-- metrics: generated -->").context("no table")?;
    let (table, _) = table.split_once("<!-- end of metrics -->").context("no end of the table")?;
    let rows = table.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let [name, kind, labels, help] = cells.as_slice() else { bail!("not a row: {row}") };
        let labels = labels.split_whitespace().map(|label| label.trim_matches('`').to_owned()).collect();
        let declared = Declared { kind: (*kind).to_owned(), labels, help: (*help).to_owned() };
        Ok((name.trim_matches('`').to_owned(), declared))
    })
    .collect()
}

/// One family as it was scraped.
#[derive(Debug, Default)]
struct Family {
    kind: String,
    help: String,
    labels: BTreeSet<String>,
    /// Sum over all its series; of a histogram, the number of samples.
    value: f64,
}

/// Reads Prometheus' text format; every sample has to follow the description of its family.
fn families(text: &str) -> Result<BTreeMap<String, Family>> {
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let mut help = BTreeMap::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        if let Some((name, text)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            help.insert(name.to_owned(), text.to_owned());
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            let help = help.remove(name).with_context(|| format!("{name} has no help"))?;
            ensure!(!families.contains_key(name), "{name} is there twice");
            families.insert(name.to_owned(), Family { kind: kind.to_owned(), help, ..Family::default() });
        } else {
            let (series, value) = line.rsplit_once(' ').with_context(|| line.to_owned())?;
            let value: f64 = value.parse().with_context(|| line.to_owned())?;
            let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
            let of_histogram = ["_bucket", "_sum", "_count"].iter().find_map(|part| name.strip_suffix(part));
            let base = of_histogram.filter(|base| families.get(*base).is_some_and(|family| family.kind == "histogram"));
            let family = families.get_mut(base.unwrap_or(name)).with_context(|| format!("{line}: of no family"))?;
            let labels = labels.trim_end_matches('}').split(',').filter_map(|label| label.split_once('='));
            family.labels.extend(labels.map(|(label, _)| label.to_owned()).filter(|label| label != "le"));
            if base.is_none() || name.ends_with("_count") {
                family.value += value;
            }
        }
    }
    Ok(families)
}

async fn scrape(api: &Api) -> Result<BTreeMap<String, Family>> {
    families(&api.metrics().await?)
}

#[tokio::test]
async fn every_family_is_declared_and_the_main_ones_move_as_runs_go() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let (_node, api) = world.leader("n1").await?;
    let before = scrape(&api).await?;
    api.apply(&json!({"tasks": [
        task("every", json!({"cron_expr": "EVERY 1s"})),
        task("gone", json!({})),
    ]}))
    .await?;
    let _worker = worker::python(&world.nats.url(), "test")?;
    api.trigger("gone", &json!({"delay_ms": 1000})).await?.ok()?;
    api.delete_task("gone").await?.ok()?;
    api.runs_reach("every", "succeeded", 3, Deadline::seconds(60)).await?;
    api.runs_reach("gone", "skipped", 1, Deadline::seconds(60)).await?;
    api.task("not-there").await?;

    let value = |families: &BTreeMap<String, Family>, name: &str| families.get(name).map_or(0.0, |family| family.value);
    let after = eventually(Deadline::seconds(30), "the main metrics have moved", || async {
        let after = scrape(&api).await?;
        for (name, least) in [
            ("ax_fires_total", 3.0),
            ("ax_runs_total", 4.0),
            ("ax_skipped_total", 1.0),
            ("ax_publish_total", 3.0),
            ("ax_events_total", 3.0),
            ("ax_flush_runs", 1.0),
            ("ax_sql_seconds", 1.0),
            ("ax_nats_seconds", 1.0),
            ("ax_http_requests_total", 3.0),
            ("process_cpu_seconds_total", 0.001),
        ] {
            let (was, is) = (value(&before, name), value(&after, name));
            ensure!(is - was >= least, "{name} was {was} and is {is}");
        }
        Ok(Some(after))
    })
    .await?;
    ensure!(value(&after, "ax_leader") == 1.0 && value(&after, "ax_takeovers_total") == 1.0, "{after:?}");
    ensure!(value(&after, "ax_wheel_entries") == 1.0, "{after:?}");
    ensure!(
        value(&after, "process_resident_memory_bytes") > 1e6 && value(&after, "process_open_fds") > 3.0,
        "{after:?}"
    );
    ensure!(value(&after, "process_start_time_seconds") > 1.7e9, "{after:?}");

    let declared = declared()?;
    ensure!(declared.len() > 30 && after.len() > 20, "{} declared, {} exposed", declared.len(), after.len());
    for (name, family) in &after {
        let declared = declared.get(name).with_context(|| format!("{name} is not in docs/observability.md"))?;
        ensure!(family.kind == declared.kind, "{name} is a {}, not a {}", family.kind, declared.kind);
        ensure!(family.help == declared.help, "{name}: {:?}", family.help);
        ensure!(family.labels == declared.labels, "{name} has the labels {:?}", family.labels);
    }
    Ok(())
}
