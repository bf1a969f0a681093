//! The Quartz dialect: six or seven fields, seconds first, Sunday = 1.

use super::cron::{Cron, DayRule, FIRST_YEAR, LAST_YEAR, Years};
use super::error::{Part, ScheduleError, quote};
use super::field::{Field, MONTHS, WEEKDAYS, number, split_step};

const PLAIN: &str = "`*`, a number or a range, each with an optional `/step`, or a list of these";
const NAMED: &str = "`*`, a number, a three-letter name or a range, each with an optional `/step`, or a list of these";
const DAYS: &str = "`*`, `?`, a number or a range, each with an optional `/step`, a list of these, or one of `L`, `L-3`, `LW`, `L-3W`, `15W`";
const WEEK: &str = "`*`, `?`, 1–7 (1 = Sunday), SUN–SAT or a range, each with an optional `/step`, a list of these, or one of `L`, `6L`, `6#3`";

const SECOND: Field = Field::numbers(Part::Second, 0, 59, PLAIN);
const MINUTE: Field = Field::numbers(Part::Minute, 0, 59, PLAIN);
const HOUR: Field = Field::numbers(Part::Hour, 0, 23, PLAIN);
const DAY: Field = Field::numbers(Part::Day, 1, 31, DAYS);
const MONTH: Field = Field { part: Part::Month, min: 1, max: 12, names: &MONTHS, first_name: 1, expected: NAMED };
const WEEKDAY: Field = Field { part: Part::Weekday, min: 1, max: 7, names: &WEEKDAYS, first_name: 1, expected: WEEK };
const YEAR: Field = Field::numbers(Part::Year, FIRST_YEAR, LAST_YEAR, PLAIN);

/// Reads six fields and a year field.
pub(super) fn parse(fields: [&str; 6], year: Option<&str>) -> Result<Cron, ScheduleError> {
    let [second, minute, hour, day, month, weekday] = fields;
    let seconds = bits(&SECOND, second)?;
    let minutes = bits(&MINUTE, minute)?;
    let hours = bits(&HOUR, hour)? as u32;
    let dom_rule = if open(day) { None } else { Some(day_rule(day)?) };
    let months = bits(&MONTH, month)? as u16;
    let dow_rule = if open(weekday) { None } else { Some(weekday_rule(weekday)?) };
    let years = year.map_or(Ok(None), years)?;
    let days = match (dom_rule, dow_rule) {
        (Some(_), Some(_)) => {
            return Err(ScheduleError::BothDays { day: quote(day), weekday: quote(weekday) });
        }
        (Some(rule), None) | (None, Some(rule)) => rule,
        (None, None) if day == "?" && weekday == "?" => return Err(ScheduleError::NoDay),
        (None, None) => DayRule::Both { dom: DayRule::ANY_DAY, dow: DayRule::ANY_WEEKDAY },
    };
    let interval = minute.starts_with('*') || hour.starts_with('*');
    Ok(Cron { seconds, minutes, hours, days, months, years, interval })
}

/// Whether a day field leaves the choice to the other one.
fn open(field: &str) -> bool {
    field == "?" || field == "*"
}

fn bits(field: &Field, list: &str) -> Result<u64, ScheduleError> {
    let mut bits = 0;
    values(field, list, |value| bits |= 1 << value)?;
    Ok(bits)
}

fn years(list: &str) -> Result<Option<Box<Years>>, ScheduleError> {
    if list == "*" {
        return Ok(None);
    }
    let mut years = Years::default();
    values(&YEAR, list, |year| years.insert(year))?;
    Ok(Some(Box::new(years)))
}

fn values(field: &Field, list: &str, mut add: impl FnMut(u32)) -> Result<(), ScheduleError> {
    for item in field.items(list)? {
        if item.contains('?') {
            return Err(match field.part {
                Part::Day | Part::Weekday => field.not_understood(item),
                part => ScheduleError::QuestionMark { part },
            });
        }
        let (range, step) = split_step(item);
        let (from, span) = if range == "*" || (range.is_empty() && step.is_some()) {
            (field.min, field.size() - 1)
        } else if let Some((from, to)) = range.split_once('-') {
            let (from, to) = (field.value(from, item)?, field.value(to, item)?);
            if from > to && field.part == Part::Year {
                return Err(ScheduleError::Backward { part: field.part, range: quote(range) });
            }
            (from, if from > to { to + field.size() - from } else { to - from })
        } else {
            let value = field.value(range, item)?;
            (value, if step.is_some() { field.max - value } else { 0 })
        };
        let step = step.map_or(Ok(1), |step| field.step(step, item, greatest_step(field), false))?;
        for ahead in (0..=span).step_by(step as usize) {
            add(field.min + (from - field.min + ahead) % field.size());
        }
    }
    Ok(())
}

/// Quartz takes steps up to 59 for seconds and minutes, 23 for hours, and the field's size elsewhere
/// (`CronExpression.checkIncrementRange`).
fn greatest_step(field: &Field) -> u32 {
    match field.part {
        Part::Second | Part::Minute | Part::Hour => field.max,
        _ => field.size(),
    }
}

fn day_rule(list: &str) -> Result<DayRule, ScheduleError> {
    alone(&DAY, list, |item| special_day(item).is_some())?;
    match special_day(list) {
        Some(rule) => rule,
        None => Ok(DayRule::Both { dom: bits(&DAY, list)? as u32, dow: DayRule::ANY_WEEKDAY }),
    }
}

/// Reads `L`, `L-n`, `LW`, `L-nW` and `nW`; `None` if it is none of them.
fn special_day(item: &str) -> Option<Result<DayRule, ScheduleError>> {
    let upper = item.to_ascii_uppercase();
    let (rest, weekday) = match upper.strip_suffix('W') {
        Some(rest) => (rest, true),
        None => (upper.as_str(), false),
    };
    if rest == "L" {
        return Some(Ok(DayRule::Last { before: 0, weekday }));
    }
    if let Some(before) = rest.strip_prefix("L-") {
        let value = number(before)?;
        if value > 30 {
            return Some(Err(ScheduleError::OffsetOutOfRange { value: quote(before), item: quote(item) }));
        }
        return Some(Ok(DayRule::Last { before: value as u8, weekday }));
    }
    if !weekday {
        return None;
    }
    number(rest)?;
    Some(DAY.value(rest, item).map(|day| DayRule::NearestWeekday { day: day as u8 }))
}

fn weekday_rule(list: &str) -> Result<DayRule, ScheduleError> {
    alone(&WEEKDAY, list, |item| special_weekday(item).is_some())?;
    match special_weekday(list) {
        Some(rule) => rule,
        None => Ok(DayRule::Both { dom: DayRule::ANY_DAY, dow: (bits(&WEEKDAY, list)? >> 1) as u8 }),
    }
}

/// Reads `L`, `6L`, `FRIL`, `6#3` and `FRI#3`; `None` if it is none of them.
fn special_weekday(item: &str) -> Option<Result<DayRule, ScheduleError>> {
    if item.eq_ignore_ascii_case("L") {
        return Some(Ok(DayRule::Both { dom: DayRule::ANY_DAY, dow: 1 << 6 }));
    }
    if let Some((weekday, nth)) = item.split_once('#') {
        return Some(nth_weekday(weekday, nth, item));
    }
    let weekday = item.strip_suffix(['L', 'l'])?;
    if weekday.contains(['-', '/', ',']) {
        return None;
    }
    Some(WEEKDAY.value(weekday, item).map(|value| DayRule::LastWeekday { weekday: value as u8 - 1 }))
}

fn nth_weekday(weekday: &str, nth: &str, item: &str) -> Result<DayRule, ScheduleError> {
    let weekday = WEEKDAY.value(weekday, item)? as u8 - 1;
    match number(nth) {
        Some(nth @ 1..=5) => Ok(DayRule::NthWeekday { weekday, nth: nth as u8 }),
        Some(_) => Err(ScheduleError::NthOutOfRange { value: quote(nth), item: quote(item) }),
        None => Err(WEEKDAY.not_understood(item)),
    }
}

/// Refuses a list that holds an item which must stand alone.
fn alone(field: &Field, list: &str, special: impl Fn(&str) -> bool) -> Result<(), ScheduleError> {
    if !list.contains(',') {
        return Ok(());
    }
    match list.split(',').find(|item| special(item)) {
        Some(item) => Err(ScheduleError::StandsAlone { part: field.part, item: quote(item), list: quote(list) }),
        None => Ok(()),
    }
}
