//! Instants on the wire and in the core: whole milliseconds since the Unix epoch, UTC.

use std::fmt;
use std::ops::{Add, Sub};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An instant: whole milliseconds since 1970-01-01T00:00:00Z (negative before it).
///
/// On the wire it is RFC 3339 in UTC with exactly three decimals (`2026-11-30T22:12:15.000Z`); any RFC 3339
/// offset and any number of decimals are read, what is finer than a millisecond is cut off.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(i64);

impl Timestamp {
    /// The earliest instant that can be written in RFC 3339: year −9999.
    pub const MIN: Self = Self(-377_705_023_201_000);
    /// The latest instant that can be written in RFC 3339: year 9999, less a day so that every zone can show it.
    pub const MAX: Self = Self(253_402_207_200_000);

    /// Makes an instant from milliseconds since the Unix epoch, clamped to [`Self::MIN`]..=[`Self::MAX`].
    #[must_use]
    pub const fn from_millis(ms: i64) -> Self {
        if ms < Self::MIN.0 {
            Self::MIN
        } else if ms > Self::MAX.0 {
            Self::MAX
        } else {
            Self(ms)
        }
    }

    /// Milliseconds since the Unix epoch.
    #[must_use]
    pub const fn as_millis(self) -> i64 {
        self.0
    }

    /// This instant plus `ms` milliseconds (negative = earlier), clamped instead of overflowing.
    #[must_use]
    pub const fn plus_millis(self, ms: i64) -> Self {
        Self::from_millis(self.0.saturating_add(ms))
    }

    /// Milliseconds from `earlier` to this instant, negative if `earlier` is later.
    #[must_use]
    pub const fn millis_since(self, earlier: Self) -> i64 {
        self.0.saturating_sub(earlier.0)
    }

    /// The same instant for calendar work.
    #[must_use]
    pub fn to_jiff(self) -> jiff::Timestamp {
        jiff::Timestamp::from_millisecond(self.0).expect("a Timestamp is within jiff's range by construction")
    }

    /// The instant of `t`, cut down to the millisecond.
    #[must_use]
    pub fn from_jiff(t: jiff::Timestamp) -> Self {
        Self::from_millis(t.as_nanosecond().div_euclid(1_000_000).try_into().unwrap_or(i64::MAX))
    }
}

impl Add<std::time::Duration> for Timestamp {
    type Output = Self;
    fn add(self, rhs: std::time::Duration) -> Self {
        self.plus_millis(i64::try_from(rhs.as_millis()).unwrap_or(i64::MAX))
    }
}

impl Sub<std::time::Duration> for Timestamp {
    type Output = Self;
    fn sub(self, rhs: std::time::Duration) -> Self {
        self.plus_millis(-i64::try_from(rhs.as_millis()).unwrap_or(i64::MAX))
    }
}

#[cfg(feature = "openapi")]
impl utoipa::PartialSchema for Timestamp {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
        use utoipa::openapi::schema::{KnownFormat, ObjectBuilder, SchemaFormat, Type};
        let text = ObjectBuilder::new().schema_type(Type::String);
        text.format(Some(SchemaFormat::KnownFormat(KnownFormat::DateTime))).into()
    }
}

#[cfg(feature = "openapi")]
impl utoipa::ToSchema for Timestamp {}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3}", self.to_jiff())
    }
}

impl fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Timestamp {
    type Err = jiff::Error;
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        s.parse::<jiff::Timestamp>().map(Self::from_jiff)
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_written_in_utc_with_three_decimals() {
        let t: Timestamp = "2026-11-30T22:12:15+08:00".parse().unwrap();
        assert_eq!(t.to_string(), "2026-11-30T14:12:15.000Z");
        assert_eq!(serde_json::to_string(&t).unwrap(), "\"2026-11-30T14:12:15.000Z\"");
        assert_eq!(serde_json::from_str::<Timestamp>("\"1969-12-31T23:59:59.9999Z\"").unwrap().as_millis(), -1);
    }

    #[test]
    fn the_extremes_can_be_written_and_shown() {
        for t in [Timestamp::MIN, Timestamp::MAX, Timestamp::from_millis(i64::MAX), Timestamp::from_millis(i64::MIN)] {
            assert_eq!(t.to_string().parse::<Timestamp>().unwrap(), t);
        }
    }
}
