//! Time that goes on while the machine sleeps, and the wall clock.
//!
//! Whether an ack deadline has passed is asked of boot time: a worker that was frozen, or whose machine was suspended,
//! must not believe that no time went by.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ax_shared::Timestamp;

/// An instant of boot time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Boot(Duration);

impl Boot {
    /// Now.
    pub(crate) fn now() -> Self {
        Self(boot())
    }

    /// This instant plus `span`.
    pub(crate) fn plus(self, span: Duration) -> Self {
        Self(self.0.saturating_add(span))
    }

    /// Time from `earlier` to this instant; zero when that lies ahead of it.
    pub(crate) fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// Time since this instant; zero when it lies ahead.
    pub(crate) fn elapsed(self) -> Duration {
        boot().saturating_sub(self.0)
    }
}

#[cfg(target_os = "linux")]
fn boot() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(not(target_os = "linux"))]
fn boot() -> Duration {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    START.get_or_init(std::time::Instant::now).elapsed()
}

/// The wall clock, in whole milliseconds.
pub(crate) fn wall() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_millis(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}
