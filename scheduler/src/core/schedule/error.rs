//! Why a schedule is refused, in words that name the field and the value.

use std::fmt;

/// A part of an expression, as messages name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Seconds, Quartz only.
    Second,
    /// Minutes.
    Minute,
    /// Hours.
    Hour,
    /// Days of the month.
    Day,
    /// Months.
    Month,
    /// Days of the week.
    Weekday,
    /// Years, Quartz only.
    Year,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Second => "second",
            Self::Minute => "minute",
            Self::Hour => "hour",
            Self::Day => "day",
            Self::Month => "month",
            Self::Weekday => "weekday",
            Self::Year => "year",
        })
    }
}

/// Why an expression or a zone is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// Nothing but blanks.
    #[error("the expression is empty: expected {FIELDS}, a nickname such as `@daily`, or `EVERY 30s`")]
    Empty,
    /// Longer than any sensible expression.
    #[error("the expression is {length} bytes long, at most {max} are allowed")]
    TooLong {
        /// Bytes found.
        length: usize,
        /// Bytes allowed.
        max: usize,
    },
    /// Neither 5, 6 nor 7 fields.
    #[error("found {found} {}, expected {FIELDS}", if *found == 1 { "field" } else { "fields" })]
    FieldCount {
        /// Fields found.
        found: usize,
    },
    /// `CRON_TZ=` or `TZ=` in front of the fields.
    #[error("`{prefix}` is not read from the expression: put the time zone into the field timezone")]
    ZonePrefix {
        /// The word in front.
        prefix: String,
    },
    /// An `@word` that is not a nickname.
    #[error(
        "`{word}` is not a nickname: known are @yearly @annually @monthly @weekly @daily @midnight @hourly, alone and in lower case"
    )]
    UnknownNickname {
        /// The word as given.
        word: String,
    },
    /// `@every 30s`, the notation of other schedulers.
    #[error("`@every` is written `EVERY`, for example `EVERY 30s`")]
    AtEvery,
    /// `@reboot`.
    #[error("`@reboot` is not supported: a schedule belongs to no machine's start")]
    Reboot,
    /// A number outside of its field.
    #[error("{part} {value} is out of range {min}–{max}")]
    OutOfRange {
        /// The field.
        part: Part,
        /// The value as given.
        value: String,
        /// Least value allowed.
        min: u32,
        /// Greatest value allowed.
        max: u32,
    },
    /// A step of zero, or one beyond the field's size where the dialect refuses that.
    #[error("{part} step {step} is out of range 1–{max}")]
    StepOutOfRange {
        /// The field.
        part: Part,
        /// The step as given.
        step: String,
        /// Greatest step allowed.
        max: u32,
    },
    /// `L-31`: further from the end than any month is long.
    #[error("day offset {value} in `{item}` is out of range 0–30")]
    OffsetOutOfRange {
        /// The offset as given.
        value: String,
        /// The item that holds it.
        item: String,
    },
    /// `6#6`: a month has at most five of a weekday.
    #[error("week {value} in weekday `{item}` is out of range 1–5")]
    NthOutOfRange {
        /// The number after `#` as given.
        value: String,
        /// The item that holds it.
        item: String,
    },
    /// Not a number, name, range or step of this field.
    #[error("{part} `{item}` is not understood: expected {expected}")]
    NotUnderstood {
        /// The field.
        part: Part,
        /// The item as given.
        item: String,
        /// What could stand there.
        expected: &'static str,
    },
    /// Two commas in a row, or one at an end.
    #[error("{part} `{list}` has an empty item")]
    EmptyItem {
        /// The field.
        part: Part,
        /// The whole field as given.
        list: String,
    },
    /// A range whose end is before its start.
    #[error("{part} range `{range}` runs backward")]
    Backward {
        /// The field.
        part: Part,
        /// The range as given.
        range: String,
    },
    /// `? L W #` in five fields, or `H ~` anywhere.
    #[error("{part} `{item}`: {reason}")]
    Unsupported {
        /// The field.
        part: Part,
        /// The item as given.
        item: String,
        /// What to do instead.
        reason: &'static str,
    },
    /// `L`, `W` or `#` as one of several items.
    #[error("{part} `{item}` must stand alone, not in the list `{list}`")]
    StandsAlone {
        /// The field.
        part: Part,
        /// The item.
        item: String,
        /// The whole field as given.
        list: String,
    },
    /// `?` in a field that is not a day field.
    #[error("`?` may stand for day or weekday only, not for {part}: write `*`")]
    QuestionMark {
        /// The field.
        part: Part,
    },
    /// `?` in both day fields.
    #[error("`?` stands for both day and weekday: put it in one and `*` or values in the other")]
    NoDay,
    /// Values in both day fields of a Quartz expression.
    #[error("day `{day}` and weekday `{weekday}` are both restricted: put `?` in one")]
    BothDays {
        /// The day-of-month field as given.
        day: String,
        /// The day-of-week field as given.
        weekday: String,
    },
    /// No date of the calendar matches.
    #[error("this schedule never fires: no date matches its day, month and year fields")]
    NeverFires,
    /// All its instants are past, or there is none in this zone.
    #[error("this schedule has no fire after now")]
    NoFireAfterNow,
    /// Text after `EVERY` (or after `PT`) that is no interval.
    #[error("interval `{text}` is not understood: {reason}")]
    Interval {
        /// The interval as given.
        text: String,
        /// What could stand there.
        reason: &'static str,
    },
    /// An interval in days or longer units, whose length depends on the calendar.
    #[error("interval `{text}` is in days or longer: use PT24H or a cron expression")]
    IntervalInDays {
        /// The interval as given.
        text: String,
    },
    /// An interval below the minimum.
    #[error("interval `{text}` is below the minimum of {min_ms} ms")]
    IntervalTooShort {
        /// The interval as given.
        text: String,
        /// The minimum, milliseconds.
        min_ms: i64,
    },
    /// An interval that no one will live to see.
    #[error("interval `{text}` is above the maximum of 100 years")]
    IntervalTooLong {
        /// The interval as given.
        text: String,
    },
    /// No zone given.
    #[error("the time zone is empty: expected an IANA name such as Europe/Berlin or UTC")]
    EmptyZone,
    /// An offset instead of a zone.
    #[error("time zone `{zone}` is an offset: expected an IANA name such as Europe/Berlin or UTC")]
    OffsetZone {
        /// The zone as given.
        zone: String,
    },
    /// No zone of that name in the compiled-in database.
    #[error("time zone `{zone}` is unknown: expected an IANA name such as Europe/Berlin or UTC")]
    UnknownZone {
        /// The zone as given.
        zone: String,
    },
}

const FIELDS: &str = "5 fields (minute hour day month weekday) or 6–7 (second minute hour day month weekday [year])";

impl ScheduleError {
    /// The field of a task definition that is at fault: `cron_expr` or `timezone`.
    #[must_use]
    pub fn field(&self) -> &'static str {
        match self {
            Self::EmptyZone | Self::OffsetZone { .. } | Self::UnknownZone { .. } => "timezone",
            _ => "cron_expr",
        }
    }
}

/// Makes a piece of the user's input fit for a message: no control characters, at most 64 characters.
pub(super) fn quote(text: &str) -> String {
    let mut quoted: String = text.chars().take(64).flat_map(char::escape_debug).collect();
    if text.chars().nth(64).is_some() {
        quoted.push('…');
    }
    quoted
}
