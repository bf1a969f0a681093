//! The floor: the same messages at the same instants by plain JetStream, publish → pull → ack. What no scheduler on
//! JetStream can be better than, measured beside it.

use std::time::Duration;

use anyhow::{Context as _, bail};
use async_nats::jetstream::{self, consumer, stream};
use ax_shared::{Group, Prefix, Profile, Queue};
use serde::Serialize;

use super::judge::{Judgement, judge};
use super::load::{GROUP, Load, Window};
use super::parts::Parts;
use super::progress::Progress;
use super::publisher::{PUBLISHED, Published};
use super::traffic::{Counted, NatsTraffic};
use super::usage::{Meter, ProcessUsage};
use super::{Options, Stretch, crew};

/// The consumer that the floor's workers pull.
pub(super) const CONSUMER: &str = "floor";
/// Between the start of the parts and the first instant.
const WARM_UP: Duration = Duration::from_secs(2);
/// How long the last messages may take to be acknowledged.
const DRAINED_WITHIN: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct FloorReport {
    pub(super) seconds: i64,
    #[serde(flatten)]
    pub(super) judgement: Judgement,
    pub(super) publisher: Published,
    pub(super) nats: Option<NatsTraffic>,
    pub(super) processes: Vec<ProcessUsage>,
}

/// Measures it once, with workers of its own that end with it.
pub(super) async fn measure(
    options: &Options,
    parts: &mut Parts,
    progress: &mut Progress,
    name: &str,
) -> anyhow::Result<FloorReport> {
    progress.phase(&format!("{name}: plain JetStream, {} s", options.floor_length.as_secs()));
    let prefix = parts.names().floor.clone();
    let jetstream = jetstream::new(super::connect(parts.nats_url()).await?);
    let mut stream = make_stream(&jetstream, &prefix, options.load).await?;
    let mut meter = Meter::begin(&parts.lasting());
    let workers = crew::start(options, parts, &mut meter, name, &prefix, true).await?;

    let window = super::window(WARM_UP, options.floor_length);
    let publisher = start_publisher(options, parts, name, &prefix, window).await?;
    meter.add(publisher.clone());
    let counted = Counted { nats_monitor: parts.nats_monitor(), ..Counted::default() };
    let Stretch { before, after } = super::measure_stretch(parts, progress, &mut meter, &counted, window, name).await?;

    let line = parts.line(&publisher, PUBLISHED, DRAINED_WITHIN).await?;
    let published: Published = serde_json::from_str(&line).context("read what the publisher did")?;
    drain(&mut stream, published.confirmed).await?;
    let processes = meter.end();
    parts.end(&publisher).await?;
    let receipts = crew::end(parts, workers).await?;
    jetstream.delete_stream(prefix.triggers_stream()).await.context("remove the floor's stream")?;

    let judgement = judge(options.load, window, &receipts);
    let nats = after.nats_since(&before, judgement.owed);
    Ok(FloorReport { seconds: window.seconds(), judgement, publisher: published, nats, processes })
}

/// A work queue like that of the triggers, and a consumer like that of the tasks' profile, without sampling.
async fn make_stream(jetstream: &jetstream::Context, prefix: &Prefix, load: Load) -> anyhow::Result<stream::Stream> {
    let definition = load.parsed(0).map_err(|why| anyhow::anyhow!("the definition of a task: {why}"))?;
    let profile = Profile::of(definition.timeout_ms, definition.max_retry);
    let made = jetstream
        .create_stream(stream::Config {
            name: prefix.triggers_stream(),
            description: Some("the floor of a benchmark".into()),
            subjects: vec![prefix.all_triggers()],
            retention: stream::RetentionPolicy::WorkQueue,
            storage: stream::StorageType::File,
            allow_direct: true,
            duplicate_window: Duration::from_secs(120),
            ..stream::Config::default()
        })
        .await
        .context("make the floor's stream")?;
    let filter = prefix.triggers_of(&Group::new(GROUP)?, &Queue::default_lane(), profile);
    made.create_consumer(consumer::pull::Config {
        durable_name: Some(CONSUMER.into()),
        filter_subject: filter,
        ack_policy: consumer::AckPolicy::Explicit,
        ack_wait: Duration::from_secs(profile.ack_wait_s().into()),
        max_deliver: profile.max_deliver().into(),
        max_ack_pending: -1,
        ..consumer::pull::Config::default()
    })
    .await
    .context("make the floor's consumer")?;
    Ok(made)
}

async fn start_publisher(
    options: &Options,
    parts: &mut Parts,
    name: &str,
    prefix: &Prefix,
    window: Window,
) -> anyhow::Result<super::usage::Watched> {
    let text = |number: i64| number.to_string();
    let arguments = [
        "bench-publisher",
        "--prefix",
        prefix.as_str(),
        "--tasks",
        &text(options.load.tasks().into()),
        "--period",
        &text(i64::try_from(options.load.period().as_secs())?),
        "--from",
        &text(window.from_s),
        "--to",
        &text(window.to_s),
    ];
    let started = parts.start_part(&format!("{name} publisher"), &arguments).await?;
    Ok(super::usage::Watched { name: "publisher".into(), ..started })
}

/// Waits until every message was acknowledged: a work queue that is empty.
async fn drain(stream: &mut stream::Stream, confirmed: u64) -> anyhow::Result<()> {
    let deadline = tokio::time::Instant::now() + DRAINED_WITHIN;
    loop {
        let state = &stream.info().await.context("ask about the floor's stream")?.state;
        if state.messages == 0 && state.last_sequence >= confirmed {
            return Ok(());
        }
        if tokio::time::Instant::now() > deadline {
            bail!("{} messages of the floor were not acknowledged", state.messages);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
