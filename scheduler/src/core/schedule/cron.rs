//! A cron expression as bit sets, matched against a wall clock that knows no zone.
//!
//! Wall-clock times are seconds since 1970-01-01T00:00:00 *local*, of a calendar in which every day has 86,400 of
//! them. What a zone makes of such a time is the business of `walk`.

use super::calendar::{DAY, date, day_number, month_length, weekday};
use super::field::{count_below, next_bit, prev_bit};

pub(super) const FIRST_YEAR: u32 = 1970;
pub(super) const LAST_YEAR: u32 = 2199;
/// How far a search goes: the calendar repeats after 400 years, so what is not found in them never comes.
pub(super) const SEARCH_YEARS: i64 = 400;

/// A set of the years 1970–2199.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Years([u64; 4]);

impl Years {
    pub(super) fn insert(&mut self, year: u32) {
        let bit = year - FIRST_YEAR;
        self.0[bit as usize / 64] |= 1 << (bit % 64);
    }

    fn contains(&self, year: i64) -> bool {
        (i64::from(FIRST_YEAR)..=i64::from(LAST_YEAR)).contains(&year) && {
            let bit = (year - i64::from(FIRST_YEAR)) as usize;
            self.0[bit / 64] >> (bit % 64) & 1 == 1
        }
    }
}

/// Which days of a month match. Days are bits 1–31, weekdays bits 0 (Sunday) to 6.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DayRule {
    /// Day of month and weekday must match.
    Both { dom: u32, dow: u8 },
    /// Day of month or weekday must match.
    Either { dom: u32, dow: u8 },
    /// So many days before the last one, or the weekday (Monday to Friday) nearest to that.
    Last { before: u8, weekday: bool },
    /// The weekday (Monday to Friday) nearest to a day, in the same month.
    NearestWeekday { day: u8 },
    /// The last one of a weekday.
    LastWeekday { weekday: u8 },
    /// The nth one of a weekday.
    NthWeekday { weekday: u8, nth: u8 },
}

impl DayRule {
    pub(super) const ANY_DAY: u32 = u32::MAX - 1;
    pub(super) const ANY_WEEKDAY: u8 = 0x7f;

    /// The matching days of a month of `length` days whose first is the weekday `first`.
    fn days(self, length: u32, first: u32) -> u32 {
        let month = ((1u64 << (length + 1)) - 2) as u32;
        let weekday_of = |day: u32| (first + day - 1) % 7;
        let first_of = |weekday: u8| 1 + (u32::from(weekday) + 7 - first) % 7;
        let nearest = |day: u32| match weekday_of(day) {
            0 if day == length => day - 2,
            0 => day + 1,
            6 if day == 1 => 3,
            6 => day - 1,
            _ => day,
        };
        let days = match self {
            Self::Both { dom, dow } => dom & weekdays(dow, first),
            Self::Either { dom, dow } => dom | weekdays(dow, first),
            Self::Last { before, .. } if u32::from(before) >= length => 0,
            Self::Last { before, weekday: false } => 1 << (length - u32::from(before)),
            Self::Last { before, weekday: true } => 1 << nearest(length - u32::from(before)),
            Self::NearestWeekday { day } if u32::from(day) > length => 0,
            Self::NearestWeekday { day } => 1 << nearest(u32::from(day)),
            Self::LastWeekday { weekday } => {
                let first = first_of(weekday);
                1 << (first + (length - first) / 7 * 7)
            }
            Self::NthWeekday { weekday, nth } => 1u64.wrapping_shl(first_of(weekday) + 7 * (u32::from(nth) - 1)) as u32,
        };
        days & month
    }
}

/// The days 1–31 that fall on the weekdays of `dow` if the 1st falls on `first`.
fn weekdays(dow: u8, first: u32) -> u32 {
    let dow = u64::from(dow);
    let week = ((dow | dow << 7) >> first) & 0x7f;
    let weeks = 1 | 1 << 7 | 1 << 14 | 1 << 21 | 1 << 28;
    ((week * weeks) << 1) as u32
}

/// A parsed cron expression of either dialect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cron {
    pub(super) seconds: u64,
    pub(super) minutes: u64,
    /// `None` is every year, also those that cannot be listed.
    pub(super) years: Option<Box<Years>>,
    pub(super) hours: u32,
    pub(super) days: DayRule,
    /// Bits 1–12.
    pub(super) months: u16,
    /// Whether the minute or hour field starts with `*`: fires follow the clock's hands instead of being appointments.
    pub(super) interval: bool,
}

impl Cron {
    /// The first matching wall-clock time that is ≥ `from`, within 400 years.
    pub(super) fn next_wall(&self, from: i64) -> Option<i64> {
        let (day, time) = (from.div_euclid(DAY), from.rem_euclid(DAY));
        let found = self.next_day(day)?;
        if found > day {
            return Some(found * DAY + self.first_time());
        }
        match self.next_time(time) {
            Some(time) => Some(day * DAY + time),
            None => Some(self.next_day(day + 1)? * DAY + self.first_time()),
        }
    }

    /// The last matching wall-clock time that is ≤ `from`, within 400 years.
    pub(super) fn prev_wall(&self, from: i64) -> Option<i64> {
        let (day, time) = (from.div_euclid(DAY), from.rem_euclid(DAY));
        let found = self.prev_day(day)?;
        if found < day {
            return Some(found * DAY + self.last_time());
        }
        match self.prev_time(time) {
            Some(time) => Some(day * DAY + time),
            None => Some(self.prev_day(day - 1)? * DAY + self.last_time()),
        }
    }

    /// Whether a matching wall-clock time lies in `from..to`.
    pub(super) fn matches_within(&self, from: i64, to: i64) -> bool {
        self.next_wall(from).is_some_and(|wall| wall < to)
    }

    /// How many matching wall-clock times lie in `from..to`; whole days are counted, not walked.
    pub(super) fn count_walls(&self, from: i64, to: i64) -> u64 {
        if from >= to {
            return 0;
        }
        let (first, last) = (from.div_euclid(DAY), to.div_euclid(DAY));
        let part = |day: i64, wall: i64| {
            if self.matches_day(day) { self.count_times_before(wall.rem_euclid(DAY)) } else { 0 }
        };
        self.count_days(first, last) * self.times_a_day() + part(last, to) - part(first, from)
    }

    /// Whether any date of the calendar matches.
    pub(super) fn has_date(&self) -> bool {
        let start = if self.years.is_some() { i64::from(FIRST_YEAR) } else { 2000 };
        self.next_day(day_number(start, 1, 1)).is_some()
    }

    fn matches_year(&self, year: i64) -> bool {
        self.years.as_ref().is_none_or(|years| years.contains(year))
    }

    fn days_in(&self, year: i64, month: u32) -> u32 {
        self.days.days(month_length(year, month), weekday(day_number(year, month, 1)))
    }

    fn matches_day(&self, day: i64) -> bool {
        let (year, month, day) = date(day);
        self.matches_year(year) && self.months >> month & 1 == 1 && self.days_in(year, month) >> day & 1 == 1
    }

    fn next_day(&self, from: i64) -> Option<i64> {
        let (first_year, mut month, mut day) = date(from);
        for year in first_year..=first_year + SEARCH_YEARS {
            if self.matches_year(year) {
                while let Some(found) = next_bit(u64::from(self.months), month) {
                    let least = if found == month { day } else { 1 };
                    if let Some(day) = next_bit(u64::from(self.days_in(year, found)), least) {
                        return Some(day_number(year, found, day));
                    }
                    (month, day) = (found + 1, 1);
                }
            }
            (month, day) = (1, 1);
        }
        None
    }

    fn prev_day(&self, from: i64) -> Option<i64> {
        let (last_year, mut month, mut day) = date(from);
        for year in (last_year - SEARCH_YEARS..=last_year).rev() {
            if self.matches_year(year) {
                while let Some(found) = prev_bit(u64::from(self.months), month) {
                    let most = if found == month { day } else { 31 };
                    if let Some(day) = prev_bit(u64::from(self.days_in(year, found)), most) {
                        return Some(day_number(year, found, day));
                    }
                    (month, day) = (found - 1, 31);
                }
            }
            (month, day) = (12, 31);
        }
        None
    }

    /// How many matching days lie in `from..to`.
    fn count_days(&self, from: i64, to: i64) -> u64 {
        if from >= to {
            return 0;
        }
        let (first_year, first_month, first_day) = date(from);
        let (last_year, last_month, last_day) = date(to);
        let mut count = 0;
        for year in (first_year..=last_year).filter(|year| self.matches_year(*year)) {
            let from_month = if year == first_year { first_month } else { 1 };
            let to_month = if year == last_year { last_month } else { 12 };
            for month in (from_month..=to_month).filter(|month| self.months >> month & 1 == 1) {
                let mut days = u64::from(self.days_in(year, month));
                if (year, month) == (first_year, first_month) {
                    days &= u64::MAX << first_day;
                }
                if (year, month) == (last_year, last_month) {
                    days &= (1 << last_day) - 1;
                }
                count += u64::from(days.count_ones());
            }
        }
        count
    }

    fn next_time(&self, from: i64) -> Option<i64> {
        let (hour, minute, second) = clock(from);
        if self.hours >> hour & 1 == 1 {
            if self.minutes >> minute & 1 == 1
                && let Some(second) = next_bit(self.seconds, second)
            {
                return Some(time(hour, minute, second));
            }
            if let Some(minute) = next_bit(self.minutes, minute + 1) {
                return Some(time(hour, minute, lowest(self.seconds)));
            }
        }
        let hour = next_bit(u64::from(self.hours), hour + 1)?;
        Some(time(hour, lowest(self.minutes), lowest(self.seconds)))
    }

    fn prev_time(&self, from: i64) -> Option<i64> {
        let (hour, minute, second) = clock(from);
        let before = |bits: u64, value: u32| value.checked_sub(1).and_then(|value| prev_bit(bits, value));
        if self.hours >> hour & 1 == 1 {
            if self.minutes >> minute & 1 == 1
                && let Some(second) = prev_bit(self.seconds, second)
            {
                return Some(time(hour, minute, second));
            }
            if let Some(minute) = before(self.minutes, minute) {
                return Some(time(hour, minute, highest(self.seconds)));
            }
        }
        let hour = before(u64::from(self.hours), hour)?;
        Some(time(hour, highest(self.minutes), highest(self.seconds)))
    }

    fn first_time(&self) -> i64 {
        time(self.hours.trailing_zeros(), lowest(self.minutes), lowest(self.seconds))
    }

    fn last_time(&self) -> i64 {
        time(highest(u64::from(self.hours)), highest(self.minutes), highest(self.seconds))
    }

    fn times_a_day(&self) -> u64 {
        u64::from(self.hours.count_ones() * self.minutes.count_ones() * self.seconds.count_ones())
    }

    /// How many matching times of a day are earlier than `time`.
    fn count_times_before(&self, time: i64) -> u64 {
        let (hour, minute, second) = clock(time);
        let per_minute = u64::from(self.seconds.count_ones());
        let mut count = count_below(u64::from(self.hours), hour) * u64::from(self.minutes.count_ones()) * per_minute;
        if self.hours >> hour & 1 == 1 {
            count += count_below(self.minutes, minute) * per_minute;
            if self.minutes >> minute & 1 == 1 {
                count += count_below(self.seconds, second);
            }
        }
        count
    }
}

/// Hour, minute and second of a time of day.
fn clock(time: i64) -> (u32, u32, u32) {
    let time = time as u32;
    (time / 3_600, time / 60 % 60, time % 60)
}

fn time(hour: u32, minute: u32, second: u32) -> i64 {
    i64::from(hour * 3_600 + minute * 60 + second)
}

fn lowest(bits: u64) -> u32 {
    bits.trailing_zeros()
}

fn highest(bits: u64) -> u32 {
    63 - bits.leading_zeros()
}
