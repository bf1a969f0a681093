//! The unix dialect: five fields and nicknames, as Debian's cron reads them.

use super::cron::{Cron, DayRule};
use super::error::{Part, ScheduleError, quote};
use super::field::{Field, MONTHS, WEEKDAYS, split_step};

const PLAIN: &str = "`*`, a number or a range, each with an optional `/step`, or a list of these";
const NAMED: &str = "`*`, a number, a three-letter name or a range, each with an optional `/step`, or a list of these";

const MINUTE: Field = Field::numbers(Part::Minute, 0, 59, PLAIN);
const HOUR: Field = Field::numbers(Part::Hour, 0, 23, PLAIN);
const DAY: Field = Field::numbers(Part::Day, 1, 31, PLAIN);
const MONTH: Field = Field { part: Part::Month, min: 1, max: 12, names: &MONTHS, first_name: 1, expected: NAMED };
/// 0 and 7 are Sunday.
const WEEKDAY: Field = Field { part: Part::Weekday, min: 0, max: 7, names: &WEEKDAYS, first_name: 0, expected: NAMED };

/// The five fields that a nickname stands for.
pub(super) fn nickname(word: &str) -> Result<[&'static str; 5], ScheduleError> {
    match word {
        "@yearly" | "@annually" => Ok(["0", "0", "1", "1", "*"]),
        "@monthly" => Ok(["0", "0", "1", "*", "*"]),
        "@weekly" => Ok(["0", "0", "*", "*", "0"]),
        "@daily" | "@midnight" => Ok(["0", "0", "*", "*", "*"]),
        "@hourly" => Ok(["0", "*", "*", "*", "*"]),
        "@reboot" => Err(ScheduleError::Reboot),
        "@every" => Err(ScheduleError::AtEvery),
        _ => Err(ScheduleError::UnknownNickname { word: quote(word) }),
    }
}

/// Reads five fields.
pub(super) fn parse([minute, hour, day, month, weekday]: [&str; 5]) -> Result<Cron, ScheduleError> {
    let minutes = set(&MINUTE, minute)?;
    let hours = set(&HOUR, hour)?;
    let dom = set(&DAY, day)? as u32;
    let months = set(&MONTH, month)? as u16;
    let with_seven = set(&WEEKDAY, weekday)?;
    let dow = (with_seven | with_seven >> 7) as u8 & 0x7f;
    let days = if day.starts_with('*') || weekday.starts_with('*') {
        DayRule::Both { dom, dow }
    } else {
        DayRule::Either { dom, dow }
    };
    Ok(Cron {
        seconds: 1,
        minutes,
        hours: hours as u32,
        days,
        months,
        years: None,
        interval: minute.starts_with('*') || hour.starts_with('*'),
    })
}

fn set(field: &Field, list: &str) -> Result<u64, ScheduleError> {
    let mut bits = 0;
    for item in field.items(list)? {
        if let Some(reason) = foreign(item) {
            return Err(ScheduleError::Unsupported { part: field.part, item: quote(item), reason });
        }
        let (range, step) = split_step(item);
        let (from, to) = if range == "*" {
            (field.min, field.max)
        } else if let Some((from, to)) = range.split_once('-') {
            let (from, mut to) = (field.value(from, item)?, field.value(to, item)?);
            if field.part == Part::Weekday && to == 0 && from > 0 {
                to = 7; // MON-SUN
            }
            if from > to {
                return Err(ScheduleError::Backward { part: field.part, range: quote(range) });
            }
            (from, to)
        } else {
            let value = field.value(range, item)?;
            (value, if step.is_some() { field.max } else { value })
        };
        let step = step.map_or(Ok(1), |step| field.step(step, item, field.size(), true))?;
        bits |= (from..=to).step_by(step as usize).fold(0, |bits, value| bits | 1 << value);
    }
    Ok(bits)
}

/// Recognises what other dialects would understand.
fn foreign(item: &str) -> Option<&'static str> {
    let upper = item.to_ascii_uppercase();
    let value = upper.trim_end_matches(['L', 'W']);
    let marked = upper.starts_with("L-")
        || value.len() < upper.len() && (value.bytes().all(|b| b.is_ascii_digit()) || WEEKDAYS.contains(&value));
    if item.contains(['?', '#']) || marked {
        Some("`? L W #` are Quartz syntax, which has 6 or 7 fields (the first one seconds)")
    } else if item.contains('~') || upper == "H" || upper.starts_with("H/") || upper.starts_with("H(") {
        Some("random and hashed values are not supported: choose the minutes yourself")
    } else {
        None
    }
}
