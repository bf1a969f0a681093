//! Waiting for a level with a deadline.

use std::fmt::Debug;
use std::future::Future;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// The pause between two looks. Short against every deadline; long enough not to take the machine from what is awaited.
const PAUSE: Duration = Duration::from_millis(25);

/// How long something may take. Made from a [`Duration`].
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    limit: Duration,
}

impl Deadline {
    /// Allows `seconds`.
    #[must_use]
    pub const fn seconds(seconds: u64) -> Self {
        Self { limit: Duration::from_secs(seconds) }
    }
}

impl From<Duration> for Deadline {
    fn from(limit: Duration) -> Self {
        Self { limit }
    }
}

/// Calls `look` until it returns `Ok(Some(value))`, and returns that value.
///
/// An `Err` of `look` counts as "not yet": while a node starts, its API refuses connections.
///
/// # Errors
/// When the deadline has passed: names `what` and the last error.
pub async fn eventually<T, F, Fut>(deadline: impl Into<Deadline>, what: &str, mut look: F) -> Result<T>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<Option<T>>>,
{
    let limit = deadline.into().limit;
    let start = Instant::now();
    let mut last = String::from("it never answered");
    loop {
        // A look that hangs must not outlive the deadline either.
        let left = limit.saturating_sub(start.elapsed()).max(PAUSE);
        match tokio::time::timeout(left, look()).await {
            Ok(Ok(Some(value))) => return Ok(value),
            Ok(Ok(None)) => last = "not yet".into(),
            Ok(Err(error)) => last = format!("{error:#}"),
            Err(_) => last = format!("{last}; the last look did not return"),
        }
        if start.elapsed() >= limit {
            bail!("not within {limit:?}: {what} ({last})");
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Checks that `look` keeps returning `expected` for the whole of `span`: the one way to show that something does not happen.
///
/// # Errors
/// At the first look that shows something else, or fails.
pub async fn holds<T, F, Fut>(span: Duration, what: &str, expected: T, mut look: F) -> Result<()>
where
    T: PartialEq + Debug,
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<T>>,
{
    let start = Instant::now();
    while start.elapsed() < span {
        let seen = look().await?;
        if seen != expected {
            bail!("after {:?}: {what}: expected {expected:?}, saw {seen:?}", start.elapsed());
        }
        tokio::time::sleep(PAUSE * 4).await;
    }
    Ok(())
}

/// Lets a condition that the test has made last for `span`: an outage, a freeze, a minute of load.
pub async fn lasts(span: Duration) {
    tokio::time::sleep(span).await;
}
