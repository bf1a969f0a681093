//! Runs a handler once, under its timeout, and stops it when it has to stop: flag, grace, abort.

use std::sync::Arc;
use std::time::Duration;

use ax_shared::Timestamp;
use serde_json::value::RawValue;
use tokio::runtime::Handle;
use tokio::task::{JoinError, JoinHandle};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use crate::Failure;
use crate::clock::{self, Boot};
use crate::context::Attempt;
use crate::handler::Run;

/// How long a handler may take to stop by itself before it is dropped, and then how long to be dropped.
pub(super) const STOP_WITHIN: Duration = Duration::from_secs(1);

/// How an attempt ended.
#[derive(Debug)]
pub(crate) enum End {
    Succeeded(Box<RawValue>),
    Failed(Failure),
    TimedOut,
    /// Somebody asked for that.
    Cancelled,
    /// The worker stops.
    Released,
    /// A later attempt of the run has begun: nothing about this one matters any more.
    Superseded,
}

/// What can stop an attempt beside its timeout.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stops {
    pub(crate) cancel: CancellationToken,
    pub(crate) release: CancellationToken,
    pub(crate) supersede: CancellationToken,
}

/// What came of it.
pub(crate) struct Ended {
    pub(crate) end: End,
    pub(crate) started_at: Timestamp,
    pub(crate) finished_at: Timestamp,
    /// A handler that blocks its thread: it cannot be stopped, and its answer is not heard.
    pub(crate) still: Option<Still>,
}

/// A handler that has not stopped, with its task; ready when it has.
pub(crate) type Still = JoinHandle<Answered>;

/// A handler's answer and when it came, counted from the beginning of the attempt.
type Answered = (Result<Box<RawValue>, Failure>, Duration);

/// Makes the attempt, the handler being a task of `runtime`: a panic ends it alone. `stopping` is awaited beside the
/// grace, when the handler did not end by itself.
pub(crate) async fn make(
    runtime: &Handle,
    run: &Run,
    attempt: Arc<Attempt>,
    payload: Box<RawValue>,
    span: tracing::Span,
    stops: &Stops,
    stopping: impl Future<Output = ()>,
) -> Ended {
    let timeout = attempt.facts.timeout;
    let flag = attempt.cancelled.clone();
    let started_at = clock::wall();
    let begun = Boot::now();
    let answer = run(attempt, payload);
    let mut task = runtime.spawn(async move { (answer.await, begun.elapsed()) }.instrument(span));
    let mut still = None;
    let end = tokio::select! {
        biased;
        ended = &mut task => end_of(ended, timeout),
        why = async {
            tokio::select! {
                biased;
                () = stops.supersede.cancelled() => End::Superseded,
                () = tokio::time::sleep(timeout) => End::TimedOut,
                () = stops.cancel.cancelled() => End::Cancelled,
                () = stops.release.cancelled() => End::Released,
            }
        } => {
            flag.cancel();
            let (_, end) = tokio::join!(stopping, stop(&mut task, why, timeout));
            if !task.is_finished() {
                still = Some(task);
            }
            end
        }
    };
    // Whatever the handler left behind learns that nobody waits for it.
    flag.cancel();
    Ended { end, started_at, finished_at: clock::wall(), still }
}

/// Waits for the handler to stop by itself, then drops it at its next await.
async fn stop(task: &mut Still, why: End, timeout: Duration) -> End {
    if let Ok(ended) = tokio::time::timeout(STOP_WITHIN, &mut *task).await {
        // What it did in its last moment counts if it is a success that came in time.
        let end = end_of(ended, timeout);
        return match why {
            End::Released | End::Cancelled if matches!(end, End::Succeeded(_)) => end,
            End::Succeeded(_) | End::Failed(_) | End::TimedOut | End::Cancelled | End::Released | End::Superseded => {
                why
            }
        };
    }
    task.abort();
    // Until it is dropped it may still act.
    let _ = tokio::time::timeout(STOP_WITHIN, &mut *task).await;
    why
}

/// What an answer amounts to. One that came too late is a timeout, also when this process was frozen meanwhile and the
/// timeout is seen only now.
fn end_of(ended: Result<Answered, JoinError>, timeout: Duration) -> End {
    match ended {
        Ok((_, took)) if took > timeout => End::TimedOut,
        Ok((Ok(result), _)) => End::Succeeded(result),
        Ok((Err(failure), _)) => End::Failed(failure),
        Err(error) => match error.try_into_panic() {
            Ok(panic) => {
                let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
                let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
                End::Failed(Failure::retry(text.unwrap_or_else(|| "the handler panicked".into())).of_kind("panic"))
            }
            // The program's runtime is shutting down under the worker.
            Err(_) => End::Released,
        },
    }
}
