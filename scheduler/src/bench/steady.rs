//! `steady`: a constant load of scheduled runs, the floor right before and right after it.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::floor;
use super::history::Api;
use super::judge::{HistoryJudgement, Judgement, judge};
use super::machine::{Machine, Versions};
use super::parts::Parts;
use super::progress::Progress;
use super::report::{Ratios, Report, Shown};
use super::traffic::{Counted, NatsTraffic, SqlTraffic};
use super::usage::{Meter, ProcessUsage};
use super::{Options, Stretch, crew};

/// How long the last runs of the stretch may take to end.
const SETTLED_WITHIN: Duration = Duration::from_secs(60);

/// What was measured of ax.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct AxReport {
    pub(super) seconds: i64,
    /// From the first document sent to the last answered.
    pub(super) apply_seconds: f64,
    #[serde(flatten)]
    pub(super) judgement: Judgement,
    pub(super) history: HistoryJudgement,
    pub(super) nats: Option<NatsTraffic>,
    pub(super) sql: Option<SqlTraffic>,
    pub(super) processes: Vec<ProcessUsage>,
}

/// Measures floor, ax and floor.
pub(super) async fn measure(options: &Options, parts: &mut Parts, progress: &mut Progress) -> anyhow::Result<Report> {
    let machine = Machine::look();
    progress.phase("starting NATS and the database");
    parts.start(&options.wanted).await?;
    let nats_version = super::connect(parts.nats_url()).await?.server_info().version;
    let versions = Versions::new(nats_version, parts.database()?.version().to_owned());
    let settings = Shown::new(options, parts)?;

    let floor_before = floor::measure(options, parts, progress, "floor before").await?;
    let ax = measure_ax(options, parts, progress).await?;
    let floor_after = floor::measure(options, parts, progress, "floor after").await?;
    let ratios = Ratios::new(&floor_before, &ax, &floor_after);
    Ok(Report { workload: "steady", versions, machine, settings, floor_before, ax, floor_after, ratios })
}

async fn measure_ax(options: &Options, parts: &mut Parts, progress: &mut Progress) -> anyhow::Result<AxReport> {
    progress.phase(&format!("ax: {} tasks, {} s", options.load.tasks(), options.length.as_secs()));
    let mut meter = Meter::begin(&parts.lasting());
    let (mut nodes, mut counted) = (Vec::new(), counted(parts)?);
    for number in 1..=options.nodes {
        let (node, url) = parts.start_node(number, &options.log).await?;
        meter.add(node.clone());
        nodes.push(node);
        counted.nodes.push(url);
    }
    let api = Api::new(&counted.nodes[0])?;
    api.has_leader().await?;
    let prefix = parts.names().ax.clone();
    let workers = crew::start(options, parts, &mut meter, "ax", &prefix, false).await?;
    let began = Instant::now();
    api.apply(options.load).await?;
    let apply_seconds = (began.elapsed().as_secs_f64() * 1000.0).round() / 1000.0;

    let window = super::window(options.warm_up, options.length);
    let Stretch { before, after } = super::measure_stretch(parts, progress, &mut meter, &counted, window, "ax").await?;
    super::wait_until(parts, progress, window.to_s * 1_000_000, "ax: the last instants").await?;
    progress.phase("ax: waiting for the last runs, reading the history");
    // What has not ended by then is told by the comparison.
    api.settled(window, SETTLED_WITHIN).await?;
    let history = api.judge(options.load, window).await?;
    let processes = meter.end();
    let receipts = crew::end(parts, workers).await?;
    for node in &nodes {
        parts.end(node).await?;
    }

    let judgement = judge(options.load, window, &receipts);
    let owed = judgement.owed;
    let (nats, sql) = (after.nats_since(&before, owed), after.sql_since(&before, owed));
    Ok(AxReport { seconds: window.seconds(), apply_seconds, judgement, history, nats, sql, processes })
}

fn counted(parts: &Parts) -> anyhow::Result<Counted> {
    let database = parts.database()?;
    let postgres = database.is_postgres().then(|| database.url().to_owned());
    Ok(Counted { nats_monitor: parts.nats_monitor(), nodes: Vec::new(), postgres })
}
