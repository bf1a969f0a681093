//! Tables and times for people.

use ax_shared::Timestamp;
use serde_json::Value;

use super::say;

/// Prints rows under headings, each column as wide as its widest cell.
pub(super) fn table(headings: &[&str], rows: &[Vec<String>]) {
    let width = |text: &str| text.chars().map(|c| if is_wide(c) { 2 } else { 1 }).sum::<usize>();
    let mut widths: Vec<usize> = headings.iter().map(|h| width(h)).collect();
    for row in rows {
        for (i, cell) in row.iter().enumerate() {
            widths[i] = widths[i].max(width(cell));
        }
    }
    let line = |cells: &[&str]| {
        let mut text = String::new();
        for (i, cell) in cells.iter().enumerate() {
            text.push_str(cell);
            text.push_str(&" ".repeat(widths[i] - width(cell) + 2));
        }
        say(text.trim_end());
    };
    line(headings);
    for row in rows {
        line(&row.iter().map(String::as_str).collect::<Vec<_>>());
    }
}

/// Characters that terminals show two cells wide: the East Asian blocks.
fn is_wide(c: char) -> bool {
    matches!(u32::from(c), 0x1100..=0x115f | 0x2e80..=0xa4cf | 0xac00..=0xd7a3 | 0xf900..=0xfaff | 0xfe30..=0xfe6f
        | 0xff00..=0xff60 | 0xffe0..=0xffe6 | 0x1f300..=0x1faff | 0x20000..=0x3fffd)
}

/// A text field, or nothing.
pub(super) fn text(value: &Value, field: &str) -> String {
    match &value[field] {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// An instant in local time; the date only where it is not today's.
pub(super) fn local(value: &Value) -> String {
    let Some(at) = value.as_str().and_then(|t| t.parse::<Timestamp>().ok()) else { return String::new() };
    let zone = jiff::tz::TimeZone::system();
    let there = zone.to_datetime(at.to_jiff());
    if there.date() == zone.to_datetime(jiff::Timestamp::now()).date() {
        there.strftime("%H:%M:%S").to_string()
    } else {
        there.strftime("%Y-%m-%d %H:%M:%S").to_string()
    }
}

/// Tells on standard error that a list goes on.
pub(super) fn more(answer: &Value) {
    use std::io::Write as _;
    if !answer["next_cursor"].is_null() {
        let _ = writeln!(std::io::stderr(), "… there are more: --limit N shows up to 500, --json has the cursor");
    }
}
