//! The corrected clock: boot-time clock plus an offset measured against a reference.
//!
//! Invariant: a step of this machine's wall clock changes nothing at once. The offset follows a reference that agrees
//! with it to within a second gently, and a step of more than that is believed after three samples that agree.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ax_shared::Timestamp;
use tokio_util::sync::CancellationToken;

use super::pause;
use crate::metrics as names;
use crate::ports::{Clock, Store};

const MEASURE_EVERY: Duration = Duration::from_secs(30);
/// Samples per measurement; the one with the shortest round trip counts.
const SAMPLES: usize = 5;
/// A difference beyond this is a step, in microseconds.
const STEP_US: i64 = 1_000_000;

/// This machine's clock, corrected.
#[derive(Debug)]
pub struct SystemClock {
    /// Corrected time minus boot time, in microseconds.
    base_us: AtomicI64,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl SystemClock {
    /// Starts from the wall clock.
    #[must_use]
    pub fn new() -> Self {
        Self { base_us: AtomicI64::new(wall_us() - micros(boot_time())) }
    }

    /// Corrected clock minus this machine's wall clock, in milliseconds.
    #[must_use]
    pub fn offset_ms(&self) -> f64 {
        let corrected = micros(boot_time()) + self.base_us.load(Ordering::Relaxed);
        (corrected - wall_us()) as f64 / 1000.0
    }

    fn now_us(&self) -> i64 {
        micros(boot_time()) + self.base_us.load(Ordering::Relaxed)
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(self.now_us().div_euclid(1000))
    }

    fn boot(&self) -> Duration {
        boot_time()
    }
}

fn boot_time() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(t.tv_sec.try_into().unwrap_or(0), t.tv_nsec.try_into().unwrap_or(0))
}

fn wall_us() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, micros)
}

fn micros(d: Duration) -> i64 {
    i64::try_from(d.as_micros()).unwrap_or(i64::MAX)
}

/// What a measurement does to the base.
#[derive(Debug, Default)]
pub struct Filter {
    steps: Vec<i64>,
}

impl Filter {
    /// The new base after a measured one, in microseconds.
    pub fn next(&mut self, base_us: i64, measured_us: i64) -> i64 {
        let difference = measured_us - base_us;
        if difference.abs() <= STEP_US {
            self.steps.clear();
            return base_us + difference / 4;
        }
        if self.steps.last().is_some_and(|last| (last - measured_us).abs() > STEP_US) {
            self.steps.clear();
        }
        self.steps.push(measured_us);
        if self.steps.len() < 3 {
            return base_us;
        }
        self.steps.clear();
        measured_us
    }
}

/// Measures once; the first measurement is believed as it is. Err when the reference does not answer.
///
/// # Errors
/// The database's, as text.
pub async fn measure_first(clock: &SystemClock, store: &Arc<dyn Store>) -> Result<(), crate::ports::StoreError> {
    let measured = measure(store).await?;
    clock.base_us.store(measured, Ordering::Relaxed);
    Ok(())
}

/// Measures every 30 s until stopped.
pub async fn run(clock: Arc<SystemClock>, store: Arc<dyn Store>, stop: CancellationToken) {
    let mut filter = Filter::default();
    while pause(MEASURE_EVERY, &stop).await {
        match measure(&store).await {
            Ok(measured) => {
                let base = clock.base_us.load(Ordering::Relaxed);
                let next = filter.next(base, measured);
                if (next - base).abs() > STEP_US {
                    tracing::warn!(step_ms = (next - base) / 1000, "the reference clock has stepped");
                }
                clock.base_us.store(next, Ordering::Relaxed);
                metrics::gauge!(names::CLOCK_OFFSET.name).set(clock.offset_ms() / 1000.0);
            }
            Err(e) => tracing::debug!(error = %e, "the reference clock did not answer"),
        }
    }
}

/// Reference minus boot time at the round-trip midpoint, in microseconds.
async fn measure(store: &Arc<dyn Store>) -> Result<i64, crate::ports::StoreError> {
    let mut best: Option<(Duration, i64)> = None;
    for _ in 0..SAMPLES {
        let sent = boot_time();
        let reference = store.server_time().await?;
        let received = boot_time();
        // Whole milliseconds were cut off: half of one is the best guess of what is missing.
        let reference_us = reference.map_or_else(wall_us, |t| t.as_millis() * 1000 + 500);
        let sample = reference_us - (micros(sent) + micros(received)) / 2;
        if best.is_none_or(|(round_trip, _)| received - sent < round_trip) {
            best = Some((received - sent, sample));
        }
    }
    Ok(best.map_or_else(|| wall_us() - micros(boot_time()), |(_, base)| base))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_differences_are_followed_gently_and_steps_only_when_three_agree() {
        let mut filter = Filter::default();
        assert_eq!(filter.next(0, 4000), 1000);
        assert_eq!(filter.next(0, 3_600_000_000), 0);
        assert_eq!(filter.next(0, 4000), 1000, "an outlier is forgotten");
        assert_eq!(filter.next(0, 3_600_000_000), 0);
        assert_eq!(filter.next(0, -3_600_000_000), 0, "two that disagree are no step");
        assert_eq!(filter.next(0, -3_600_000_100), 0);
        assert_eq!(filter.next(0, -3_600_000_200), -3_600_000_200);
    }

    #[test]
    fn the_clock_agrees_with_the_wall_clock_at_first() {
        assert!(SystemClock::new().offset_ms().abs() < 1000.0);
    }
}
