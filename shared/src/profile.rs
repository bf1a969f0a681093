//! The (timeout, retries) class of a consumer.

use std::fmt;

/// Ack deadlines that consumers exist for, in seconds; a task's timeout is rounded up to the next one.
pub const TIMEOUT_CLASSES_S: [u32; 11] = [1, 5, 15, 30, 60, 300, 900, 3600, 14_400, 86_400, 604_800];

/// A class of tasks that can share a consumer: timeout rounded up to seconds of [`TIMEOUT_CLASSES_S`], and retries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Profile {
    timeout_s: u32,
    max_retry: u8,
}

impl Profile {
    /// The class of a task with `timeout_ms` (≤ 7 days, larger is clamped) and `max_retry` (≤ 100, larger is clamped).
    #[must_use]
    pub fn of(timeout_ms: u64, max_retry: u32) -> Self {
        let last = TIMEOUT_CLASSES_S[TIMEOUT_CLASSES_S.len() - 1];
        let timeout_s = TIMEOUT_CLASSES_S.into_iter().find(|s| u64::from(*s) * 1000 >= timeout_ms).unwrap_or(last);
        Self { timeout_s, max_retry: max_retry.min(100) as u8 }
    }

    /// Reads `t<seconds>r<retries>`; None unless the seconds are one of the classes and the retries ≤ 100.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (seconds, retries) = text.strip_prefix('t')?.split_once('r')?;
        let timeout_s = seconds.parse().ok().filter(|s| TIMEOUT_CLASSES_S.contains(s))?;
        let max_retry = retries.parse().ok().filter(|r| *r <= 100)?;
        let profile = Self { timeout_s, max_retry };
        (profile.to_string() == text).then_some(profile)
    }

    /// Timeout of the class in seconds.
    #[must_use]
    pub fn timeout_s(self) -> u32 {
        self.timeout_s
    }

    /// Ack deadline of the consumer in seconds: the timeout and two more, so that a worker's own exact timeout wins.
    #[must_use]
    pub fn ack_wait_s(self) -> u32 {
        self.timeout_s + 2
    }

    /// Deliveries of one message: retries + 1.
    #[must_use]
    pub fn max_deliver(self) -> u32 {
        u32::from(self.max_retry) + 1
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "t{}r{}", self.timeout_s, self.max_retry)
    }
}

impl serde::Serialize for Profile {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for Profile {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| serde::de::Error::custom(format!("{text:?} is not a profile")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_is_rounded_up_to_the_next_class() {
        for (ms, name) in [
            (1, "t1r3"),
            (1000, "t1r3"),
            (1001, "t5r3"),
            (60_000, "t60r3"),
            (60_001, "t300r3"),
            (1_200_000, "t3600r3"),
            (604_800_000, "t604800r3"),
        ] {
            assert_eq!(Profile::of(ms, 3).to_string(), name);
            assert_eq!(Profile::parse(name), Some(Profile::of(ms, 3)));
        }
        assert_eq!(Profile::of(60_000, 3).ack_wait_s(), 62);
        for bad in ["t2r0", "t1r101", "t01r0", "t1r+1", "t1", "r1"] {
            assert_eq!(Profile::parse(bad), None, "{bad}");
        }
    }
}
