//! Percentiles of times.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// The longest time that is told apart: an hour, in microseconds.
const AT_MOST_US: u64 = 3_600_000_000;

/// Collects times in microseconds.
#[derive(Debug)]
pub(super) struct Times {
    histogram: Histogram<u64>,
    least_us: i64,
    sum_us: i128,
}

/// Percentiles in milliseconds; all zero when nothing was measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Percentiles {
    /// How many were measured.
    pub(super) count: u64,
    /// The least; negative = too early.
    pub(super) min: f64,
    pub(super) mean: f64,
    pub(super) p50: f64,
    pub(super) p95: f64,
    pub(super) p99: f64,
    pub(super) max: f64,
}

impl Times {
    pub(super) fn new() -> Self {
        let histogram = Histogram::new_with_bounds(1, AT_MOST_US, 3).expect("the bounds are in order");
        Self { histogram, least_us: i64::MAX, sum_us: 0 }
    }

    /// Adds one; what came too early counts as in time, and is told by the least.
    pub(super) fn add_us(&mut self, us: i64) {
        self.histogram.saturating_record(u64::try_from(us).unwrap_or(0));
        self.least_us = self.least_us.min(us);
        self.sum_us += i128::from(us);
    }

    pub(super) fn percentiles(&self) -> Percentiles {
        let count = self.histogram.len();
        if count == 0 {
            return Percentiles::default();
        }
        let at = |quantile| ms(self.histogram.value_at_quantile(quantile) as f64);
        Percentiles {
            count,
            min: ms(self.least_us as f64),
            mean: ms(self.sum_us as f64 / count as f64),
            p50: at(0.50),
            p95: at(0.95),
            p99: at(0.99),
            max: ms(self.histogram.max() as f64),
        }
    }
}

/// Microseconds as milliseconds, to the microsecond.
fn ms(us: f64) -> f64 {
    us.round() / 1000.0
}

impl FromIterator<i64> for Times {
    fn from_iter<T: IntoIterator<Item = i64>>(microseconds: T) -> Self {
        let mut times = Self::new();
        for us in microseconds {
            times.add_us(us);
        }
        times
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_sorted_times() {
        let times: Times = (1..=1000).map(|n| n * 1000).collect();
        let p = times.percentiles();
        assert_eq!((p.count, p.min), (1000, 1.0));
        for (told, exact) in [(p.p50, 500.0), (p.p95, 950.0), (p.p99, 990.0), (p.max, 1000.0), (p.mean, 500.5)] {
            assert!((told - exact).abs() <= exact / 500.0, "{told} {exact}");
        }
        assert_eq!(Times::new().percentiles(), Percentiles::default());
    }

    #[test]
    fn what_comes_too_early_is_told() {
        let p = [-2500, 1000].into_iter().collect::<Times>().percentiles();
        assert_eq!((p.min, p.count), (-2.5, 2));
        assert!(p.p50 <= 0.001, "{p:?}");
    }
}
