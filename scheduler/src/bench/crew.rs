//! The worker processes of a phase, and what they received.

use ax_shared::Prefix;

use super::Options;
use super::parts::Parts;
use super::record::{self, Receipt};
use super::usage::{Meter, Watched};

/// Workers that run.
#[derive(Debug)]
pub(super) struct Crew {
    workers: Vec<(Watched, std::path::PathBuf)>,
}

/// Starts the workers of a phase and waits until they have connected.
pub(super) async fn start(
    options: &Options,
    parts: &mut Parts,
    meter: &mut Meter,
    phase: &str,
    prefix: &Prefix,
    plain: bool,
) -> anyhow::Result<Crew> {
    let mut workers = Vec::new();
    for number in 1..=options.workers {
        let record = parts.folder().join(format!("{phase}-{number}.record"));
        let (path, concurrency) = (record.to_string_lossy().into_owned(), options.concurrency.to_string());
        let mut arguments = vec!["bench-worker", "--record", &path, "--concurrency", &concurrency];
        arguments.extend(["--prefix", prefix.as_str()]);
        match (plain, options.fault) {
            (true, _) => arguments.push("--plain"),
            (false, Some(super::Fault::Drop)) => arguments.extend(["--fault", "drop"]),
            (false, Some(super::Fault::Double)) => arguments.extend(["--fault", "double"]),
            (false, None) => {}
        }
        let watched = parts.start_part(&format!("{phase} worker {number}"), &arguments).await?;
        let watched = Watched { name: format!("worker {number}"), ..watched };
        meter.add(watched.clone());
        workers.push((watched, record));
    }
    Ok(Crew { workers })
}

/// Ends them in good order; answers what they received.
pub(super) async fn end(parts: &mut Parts, crew: Crew) -> anyhow::Result<Vec<Receipt>> {
    let mut receipts = Vec::new();
    for (worker, record) in crew.workers {
        parts.end(&worker).await?;
        receipts.extend(record::read(&record)?);
    }
    Ok(receipts)
}
