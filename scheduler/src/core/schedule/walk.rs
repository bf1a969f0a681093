//! From wall-clock times to instants: what a zone's changes of offset do to a cron expression.
//!
//! The walk goes from segment to segment (stretches of one offset). In each, the matching wall-clock times are
//! looked up in the bit sets. At a segment's start:
//!
//! - *interval* expressions fire at whatever the wall clock shows: nothing in a gap, twice in an overlap;
//! - *fixed* ones fire once for each wall-clock time: times shown before are left out (overlap), and times that were
//!   jumped over (gap of at most three hours) are made up by one fire at the start, which is the same instant as a
//!   fire that is due there anyway.
//!
//! Invariant: every function depends on its arguments alone, so `next` is strictly monotone and a restart inside an
//! overlap changes nothing. All instants are whole seconds since the Unix epoch.

use super::calendar::DAY;
use super::cron::{Cron, SEARCH_YEARS};
use super::zone::{Segment, Zone};

/// Gaps longer than this are not made up (a zone that skips a whole day, for example).
const LONGEST_GAP_MADE_UP: i64 = 3 * 3_600;
/// More than wall clocks of neighbouring segments can differ: further apart, walls are in the order of instants.
const APART: i64 = 4 * DAY;

/// The first fire at or after `from`, within 400 years.
pub(super) fn next(cron: &Cron, zone: &Zone, from: i64) -> Option<i64> {
    let last = from + SEARCH_YEARS * 366 * DAY;
    let mut at = from;
    while at <= last {
        let segment = zone.segment_at(at);
        if at <= segment.start && makes_up(cron, &segment) {
            return Some(segment.start);
        }
        let found = cron.next_wall(first_wall(cron, &segment, at));
        if let Some(wall) = found
            && wall < segment.end + segment.offset
        {
            return Some(wall - segment.offset);
        }
        at = if segment.end - at <= APART { segment.end } else { segment.end.max(found? - APART) };
    }
    None
}

/// The last fire in `from..=to`.
pub(super) fn last(cron: &Cron, zone: &Zone, from: i64, to: i64) -> Option<i64> {
    let mut at = to;
    while at >= from {
        let segment = zone.segment_at(at);
        let found = cron.prev_wall(at + segment.offset);
        if let Some(wall) = found
            && wall >= first_wall(cron, &segment, from)
        {
            return Some(wall - segment.offset);
        }
        if segment.start >= from && makes_up(cron, &segment) {
            return Some(segment.start);
        }
        at = if at - segment.start <= APART { segment.start - 1 } else { (segment.start - 1).min(found? + APART) };
    }
    None
}

/// How many fires lie in `from..=to`. The work grows with months and offset changes, not with fires.
pub(super) fn count(cron: &Cron, zone: &Zone, from: i64, to: i64) -> u64 {
    let mut count = 0;
    let mut at = from;
    while at <= to {
        let segment = zone.segment_at(at);
        let first = first_wall(cron, &segment, at);
        count += cron.count_walls(first, segment.end.min(to + 1) + segment.offset);
        if at <= segment.start && makes_up(cron, &segment) {
            let due_anyway = cron.matches_within(first, segment.start + segment.offset + 1);
            count += u64::from(!due_anyway);
        }
        at = segment.end;
    }
    count
}

/// The earliest wall-clock time of a segment, from `at` on, that may still fire.
fn first_wall(cron: &Cron, segment: &Segment, at: i64) -> i64 {
    let wall = at.max(segment.start) + segment.offset;
    if cron.interval { wall } else { wall.max(segment.reached) }
}

/// Whether a fixed expression fires at the segment's start for times that the wall clock jumped over.
fn makes_up(cron: &Cron, segment: &Segment) -> bool {
    !cron.interval
        && segment.offset > segment.offset_before
        && segment.offset - segment.offset_before <= LONGEST_GAP_MADE_UP
        && cron.matches_within(segment.reached, segment.start + segment.offset)
}
