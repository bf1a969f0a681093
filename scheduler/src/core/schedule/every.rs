//! Intervals: `EVERY 30s`, `EVERY 1h30m`, `EVERY 2 hours`, `PT30S`.

use super::error::{ScheduleError, quote};

/// The shortest interval, milliseconds.
pub(super) const MIN_MS: i64 = 100;
/// The longest one: 100 years of 365.25 days.
const MAX_MS: i64 = 3_155_760_000_000;

const EXPECTED: &str = "expected numbers with units from large to small, such as 30s, 1h30m, 2 hours or 500ms";
const EXPECTED_ISO: &str = "expected hours, minutes and seconds, such as PT30S, PT1H30M or PT0.5S";
const LONE_M: &str = "write m or minutes, since M may mean months";

/// Recognises an interval and reads it, milliseconds; `None` if the expression is something else.
pub(super) fn parse(expr: &str) -> Option<Result<i64, ScheduleError>> {
    let (head, rest) = expr.split_once(|c: char| c.is_ascii_whitespace()).unwrap_or((expr, ""));
    if head.eq_ignore_ascii_case("EVERY") {
        return Some(checked(rest, words(rest.trim())));
    }
    let upper = expr.to_ascii_uppercase();
    let iso = upper.strip_prefix('P')?;
    let of_duration = |c: char| c.is_ascii_digit() || "TYMWDHS.,-+".contains(c);
    (!iso.is_empty() && iso.chars().all(of_duration)).then(|| checked(expr, iso8601(iso)))
}

/// What is wrong with the text of an interval.
enum Fault {
    Text(&'static str),
    Days,
    TooLong,
}

fn checked(text: &str, interval: Result<i64, Fault>) -> Result<i64, ScheduleError> {
    let text = quote(text.trim());
    match interval {
        Ok(ms) if ms < MIN_MS => Err(ScheduleError::IntervalTooShort { text, min_ms: MIN_MS }),
        Ok(ms) if ms <= MAX_MS => Ok(ms),
        Ok(_) | Err(Fault::TooLong) => Err(ScheduleError::IntervalTooLong { text }),
        Err(Fault::Days) => Err(ScheduleError::IntervalInDays { text }),
        Err(Fault::Text(reason)) => Err(ScheduleError::Interval { text, reason }),
    }
}

/// Reads `1h30m`, `1h 30m`, `2 hours`, or an ISO 8601 duration.
fn words(text: &str) -> Result<i64, Fault> {
    if let Some(iso) = text.to_ascii_uppercase().strip_prefix('P') {
        return iso8601(iso);
    }
    let mut rest = text;
    let (mut total, mut larger) = (0i64, i64::MAX);
    while !rest.is_empty() {
        let number = take(&mut rest, |c| c.is_ascii_digit());
        rest = rest.trim_start();
        let unit = take(&mut rest, |c| c.is_ascii_alphabetic());
        rest = rest.trim_start();
        let ms = unit_ms(unit)?;
        if number.is_empty() || ms >= larger {
            return Err(Fault::Text(EXPECTED));
        }
        larger = ms;
        total = sum(total, number, ms)?;
    }
    if larger == i64::MAX { Err(Fault::Text(EXPECTED)) } else { Ok(total) }
}

fn unit_ms(unit: &str) -> Result<i64, Fault> {
    if unit == "M" {
        return Err(Fault::Text(LONE_M));
    }
    match unit.to_ascii_lowercase().as_str() {
        "ms" | "millisecond" | "milliseconds" => Ok(1),
        "s" | "sec" | "secs" | "second" | "seconds" => Ok(1_000),
        "m" | "min" | "mins" | "minute" | "minutes" => Ok(60_000),
        "h" | "hr" | "hrs" | "hour" | "hours" => Ok(3_600_000),
        "d" | "day" | "days" | "w" | "week" | "weeks" | "month" | "months" | "y" | "year" | "years" => Err(Fault::Days),
        _ => Err(Fault::Text(EXPECTED)),
    }
}

/// Reads what follows the `P` of an ISO 8601 duration (upper case): hours, minutes, and seconds down to the millisecond.
fn iso8601(text: &str) -> Result<i64, Fault> {
    let (date, time) = text.split_once('T').unwrap_or((text, ""));
    if !date.is_empty() {
        let is_date = date.ends_with(['Y', 'M', 'W', 'D']);
        return Err(if is_date { Fault::Days } else { Fault::Text(EXPECTED_ISO) });
    }
    let mut rest = time;
    let (mut total, mut larger) = (0i64, i64::MAX);
    while !rest.is_empty() {
        let number = take(&mut rest, |c| c.is_ascii_digit() || c == '.');
        let unit = take(&mut rest, |c| c.is_ascii_alphabetic());
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let ms = match unit {
            "H" => 3_600_000,
            "M" => 60_000,
            "S" => 1_000,
            _ => return Err(Fault::Text(EXPECTED_ISO)),
        };
        let malformed = whole.is_empty() || ms >= larger || number.ends_with('.');
        if malformed || (!fraction.is_empty() && unit != "S") || fraction.contains('.') {
            return Err(Fault::Text(EXPECTED_ISO));
        }
        let (millis, finer) = fraction.split_at(fraction.len().min(3));
        if finer.bytes().any(|b| b != b'0') {
            return Err(Fault::Text("milliseconds are the finest unit"));
        }
        larger = ms;
        total = sum(total, whole, ms)?;
        if !millis.is_empty() {
            total = sum(total, millis, 10i64.pow(3 - millis.len() as u32))?;
        }
    }
    if larger == i64::MAX { Err(Fault::Text(EXPECTED_ISO)) } else { Ok(total) }
}

/// Adds `number` (digits) times `ms`.
fn sum(total: i64, number: &str, ms: i64) -> Result<i64, Fault> {
    let number: i64 = number.parse().map_err(|_| Fault::TooLong)?;
    number.checked_mul(ms).and_then(|part| total.checked_add(part)).ok_or(Fault::TooLong)
}

/// Cuts the longest start of `rest` whose characters are all `of` a kind.
fn take<'a>(rest: &mut &'a str, of: impl Fn(char) -> bool) -> &'a str {
    let end = rest.find(|c| !of(c)).unwrap_or(rest.len());
    let (taken, left) = rest.split_at(end);
    *rest = left;
    taken
}
