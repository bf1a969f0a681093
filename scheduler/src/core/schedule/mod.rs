//! Schedules: when a task is due.
//!
//! A schedule is an expression and a time zone. The number of fields decides the dialect and nothing is guessed:
//! five are unix cron, six or seven are Quartz, `@daily` and its like are unix, `EVERY 30s` and `PT30S` are
//! intervals. See `docs/adr/0001-own-schedule-walk.md` for why the walk is our own.
//!
//! Everything here is a pure function of its arguments, of bounded work, and never panics: an expression that is
//! accepted has a next fire or `None`, and that is all that can happen.
//!
//! ```
//! use ax_scheduler::core::schedule::Schedule;
//! let daily = Schedule::parse("30 2 * * *", "America/New_York")?;
//! let saturday = "2027-03-13T12:00:00Z".parse()?;
//! // 02:30 does not exist on 14 March: it is made up at the first instant after the gap.
//! assert_eq!(daily.next_after(saturday, saturday).unwrap().to_string(), "2027-03-14T07:00:00.000Z");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod calendar;
mod cron;
mod error;
mod every;
mod field;
mod quartz;
mod unix;
mod walk;
mod zone;

use ax_shared::Timestamp;

use self::cron::Cron;
use self::error::quote;
pub use self::error::{Part, ScheduleError};
use self::zone::Zone;
pub use self::zone::tzdata_version;

/// The longest expression that is read, bytes.
pub const MAX_EXPRESSION_BYTES: usize = 256;

/// A parsed expression in its time zone: when a task is due.
///
/// Holds 48 bytes; zones are shared. Two schedules are equal when they mean the same fields in the same zone.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    rule: Rule,
    zone: &'static Zone,
}

#[derive(Debug, Clone, PartialEq)]
enum Rule {
    /// Milliseconds.
    Every(i64),
    Cron(Cron),
}

const _: () = assert!(size_of::<Schedule>() <= 48);

/// First, last and number of a schedule's instants in some span of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stretch {
    /// The earliest instant.
    pub first: Timestamp,
    /// The latest instant, equal to `first` if there is only one.
    pub last: Timestamp,
    /// How many there are, at least 1.
    pub count: u64,
}

impl Schedule {
    /// Reads an expression and a zone (IANA name in any case, aliases work).
    ///
    /// # Errors
    /// Whatever is not exactly understood, is out of range, or can never fire. What fires no more after now is left
    /// to [`Self::ensure_fires_after`], since a stored schedule may have come to its end.
    pub fn parse(expr: &str, zone: &str) -> Result<Self, ScheduleError> {
        if expr.len() > MAX_EXPRESSION_BYTES {
            return Err(ScheduleError::TooLong { length: expr.len(), max: MAX_EXPRESSION_BYTES });
        }
        let rule = match every::parse(expr.trim_ascii()) {
            Some(interval) => Rule::Every(interval?),
            None => Rule::Cron(parse_cron(expr)?),
        };
        Ok(Self { rule, zone: Zone::find(zone)? })
    }

    /// The zone's present name: `Europe/Kyiv` for a schedule given in `europe/kiev`.
    #[must_use]
    pub fn canonical_zone(&self) -> &str {
        self.zone.name()
    }

    /// Whether this is an interval (`EVERY 30s`), whose instants are counted from an anchor.
    #[must_use]
    pub fn is_every(&self) -> bool {
        matches!(self.rule, Rule::Every(_))
    }

    /// The interval, milliseconds; `None` for a cron expression.
    #[must_use]
    pub fn interval_ms(&self) -> Option<i64> {
        match self.rule {
            Rule::Every(interval) => Some(interval),
            Rule::Cron(_) => None,
        }
    }

    /// The first instant strictly after `after`; `None` if there is none within 400 years, or none any more.
    ///
    /// An interval fires at `anchor` + k · interval, k ≥ 1; a cron expression does not look at `anchor`.
    #[must_use]
    pub fn next_after(&self, after: Timestamp, anchor: Timestamp) -> Option<Timestamp> {
        match &self.rule {
            Rule::Every(interval) => {
                let k = after.millis_since(anchor).div_euclid(*interval).max(0) + 1;
                instant(anchor.as_millis().checked_add(interval.checked_mul(k)?)?)
            }
            Rule::Cron(cron) => instant(walk::next(cron, self.zone, second_after(after))?.checked_mul(1_000)?),
        }
    }

    /// Whether `at` is one of the instants.
    #[must_use]
    pub fn contains(&self, at: Timestamp, anchor: Timestamp) -> bool {
        match &self.rule {
            Rule::Every(interval) => at > anchor && at.millis_since(anchor) % interval == 0,
            Rule::Cron(cron) => {
                let second = at.as_millis().div_euclid(1_000);
                at.as_millis() == second * 1_000 && walk::last(cron, self.zone, second, second).is_some()
            }
        }
    }

    /// The newest instant in (`after`, `until`].
    #[must_use]
    pub fn last_in(&self, after: Timestamp, until: Timestamp, anchor: Timestamp) -> Option<Timestamp> {
        match &self.rule {
            Rule::Every(interval) => {
                let k = until.millis_since(anchor).div_euclid(*interval);
                let last = anchor.plus_millis(interval.checked_mul(k)?);
                (k >= 1 && last > after).then_some(last)
            }
            Rule::Cron(cron) => {
                let last = walk::last(cron, self.zone, second_after(after), until.as_millis().div_euclid(1_000))?;
                instant(last.checked_mul(1_000)?)
            }
        }
    }

    /// First, last and number of the instants in (`after`, `until`]; `None` if there are none.
    ///
    /// The work grows with the months and offset changes in the span, not with the instants.
    #[must_use]
    pub fn stretch(&self, after: Timestamp, until: Timestamp, anchor: Timestamp) -> Option<Stretch> {
        let first = self.next_after(after, anchor).filter(|first| *first <= until)?;
        let last = self.last_in(after, until, anchor)?;
        let count = match &self.rule {
            Rule::Every(interval) => last.millis_since(first).unsigned_abs() / interval.unsigned_abs() + 1,
            Rule::Cron(cron) => {
                walk::count(cron, self.zone, first.as_millis() / 1_000, until.as_millis().div_euclid(1_000))
            }
        };
        Some(Stretch { first, last, count })
    }

    /// Checks, when a task is registered, that the schedule has an instant after `now`.
    ///
    /// # Errors
    /// [`ScheduleError::NoFireAfterNow`].
    pub fn ensure_fires_after(&self, now: Timestamp) -> Result<(), ScheduleError> {
        match self.next_after(now, now) {
            Some(_) => Ok(()),
            None => Err(ScheduleError::NoFireAfterNow),
        }
    }
}

/// The first whole second after an instant.
fn second_after(after: Timestamp) -> i64 {
    after.as_millis().div_euclid(1_000) + 1
}

/// The instant at `ms`, if it can be written.
fn instant(ms: i64) -> Option<Timestamp> {
    (ms <= Timestamp::MAX.as_millis()).then(|| Timestamp::from_millis(ms))
}

fn parse_cron(expr: &str) -> Result<Cron, ScheduleError> {
    let fields: Vec<&str> = expr.split_ascii_whitespace().collect();
    let Some(head) = fields.first() else {
        return Err(ScheduleError::Empty);
    };
    if let Some((name, _)) = head.split_once('=')
        && ["TZ", "CRON_TZ"].iter().any(|known| name.eq_ignore_ascii_case(known))
    {
        return Err(ScheduleError::ZonePrefix { prefix: quote(head) });
    }
    if head.eq_ignore_ascii_case("@every") {
        return Err(ScheduleError::AtEvery);
    }
    let cron = match fields[..] {
        [word] if word.starts_with('@') => unix::parse(unix::nickname(word)?)?,
        [word, ..] if word.starts_with('@') => {
            return Err(ScheduleError::UnknownNickname { word: quote(&fields.join(" ")) });
        }
        [minute, hour, day, month, weekday] => unix::parse([minute, hour, day, month, weekday])?,
        [second, minute, hour, day, month, weekday] => {
            quartz::parse([second, minute, hour, day, month, weekday], None)?
        }
        [second, minute, hour, day, month, weekday, year] => {
            quartz::parse([second, minute, hour, day, month, weekday], Some(year))?
        }
        _ => return Err(ScheduleError::FieldCount { found: fields.len() }),
    };
    if cron.has_date() { Ok(cron) } else { Err(ScheduleError::NeverFires) }
}
