//! How much a worker can take at once.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

/// Units of weight, counted in thousandths so that they add up.
#[derive(Debug, Clone)]
pub(super) struct Capacity(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    total: u64,
    used: Mutex<u64>,
    freed: Notify,
}

/// Room for one run; free again when dropped.
#[derive(Debug)]
pub(super) struct Slot {
    units: u64,
    of: Capacity,
}

fn units(weight: f64) -> u64 {
    (weight * 1000.0).round().max(1.0) as u64
}

impl Capacity {
    pub(super) fn new(total: f64) -> Self {
        Self(Arc::new(Inner { total: units(total), used: Mutex::new(0), freed: Notify::new() }))
    }

    /// Room for a run of up to `weight`, if there is that much. A run heavier than the whole worker gets all of it.
    pub(super) fn reserve(&self, weight: f64) -> Option<Slot> {
        let units = units(weight).min(self.0.total);
        let mut used = self.0.used.lock().unwrap_or_else(PoisonError::into_inner);
        if *used + units > self.0.total {
            return None;
        }
        *used += units;
        Some(Slot { units, of: self.clone() })
    }

    /// Runs of `weight` for which there is room now.
    pub(super) fn room(&self, weight: f64) -> u64 {
        let used = *self.0.used.lock().unwrap_or_else(PoisonError::into_inner);
        (self.0.total - used) / units(weight).min(self.0.total)
    }

    pub(super) fn total(&self) -> f64 {
        self.0.total as f64 / 1000.0
    }

    /// Returns when something has become free since the last call.
    pub(super) async fn freed(&self) {
        self.0.freed.notified().await;
    }
}

impl Slot {
    /// Gives back what a run lighter than expected does not need.
    pub(super) fn shrink(&mut self, weight: f64) {
        let needed = units(weight).min(self.units);
        self.of.free(self.units - needed);
        self.units = needed;
    }
}

impl Capacity {
    fn free(&self, units: u64) {
        if units > 0 {
            *self.0.used.lock().unwrap_or_else(PoisonError::into_inner) -= units;
            self.0.freed.notify_one();
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.of.free(self.units);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_more_is_taken_than_there_is() {
        let capacity = Capacity::new(2.0);
        let mut heavy = capacity.reserve(1.5).unwrap();
        assert!(capacity.reserve(1.0).is_none());
        assert_eq!((capacity.room(0.5), capacity.room(0.1)), (1, 5));
        heavy.shrink(1.0);
        let one = capacity.reserve(1.0).unwrap();
        assert!(capacity.reserve(0.1).is_none());
        drop((heavy, one));
        let giant = capacity.reserve(50.0).unwrap();
        assert!(capacity.reserve(0.1).is_none());
        drop(giant);
        assert_eq!(capacity.room(1.0), 2);
    }
}
