//! What people see: aligned tables, `key value` lists, times and spans.

use ax_shared::Timestamp;
use jiff::tz::TimeZone;
use serde_json::Value;

use super::say;

/// Rows under headings, each column as wide as its widest cell.
#[derive(Debug)]
pub(super) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(super) fn new(headings: &[&str]) -> Self {
        Self { rows: vec![headings.iter().map(|h| (*h).to_owned()).collect()] }
    }

    pub(super) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().map(|cell| printable(&cell)).collect());
    }

    /// Whether there are only headings.
    pub(super) fn is_empty(&self) -> bool {
        self.rows.len() == 1
    }

    /// The table as text without a last newline.
    pub(super) fn text(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns)
            .map(|c| self.rows.iter().filter_map(|row| row.get(c)).map(|cell| width(cell)).max().unwrap_or(0))
            .collect();
        let line = |row: &Vec<String>| {
            let mut line = String::new();
            for (cell, wanted) in row.iter().zip(&widths) {
                line.push_str(cell);
                line.extend(std::iter::repeat_n(' ', wanted - width(cell) + 2));
            }
            line.trim_end().to_owned()
        };
        self.rows.iter().map(line).collect::<Vec<_>>().join("\n")
    }

    /// Prints the table, or `nothing` when there are no rows.
    pub(super) fn print(&self, nothing: &str) {
        if self.is_empty() {
            say(nothing);
        } else {
            say(self.text());
        }
    }
}

/// Prints `key value` lines, those without a value left out.
pub(super) fn print_pairs(pairs: &[(&str, String)]) {
    let widest = pairs.iter().map(|(key, _)| width(key)).max().unwrap_or(0);
    for (key, value) in pairs.iter().filter(|(_, value)| !value.is_empty()) {
        say(format_args!("{key:<widest$}  {}", printable(value)));
    }
}

/// Tells, after a page, how to get the next one.
pub(super) fn tell_more(page: &Value) {
    if let Some(cursor) = page["next_cursor"].as_str() {
        warn_more(&format!("--cursor {}", printable(cursor)));
    }
}

/// Tells that there are more, and what shows them.
pub(super) fn warn_more(how: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "there are more: {how}");
}

/// A field as a cell: text as it is, nothing for null, other values as JSON.
pub(super) fn cell(object: &Value, field: &str) -> String {
    shown(&object[field])
}

/// A value as a cell.
pub(super) fn shown(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// The entries of a list, none if it is not there.
pub(super) fn list<'a>(object: &'a Value, field: &str) -> &'a [Value] {
    object[field].as_array().map_or(&[], Vec::as_slice)
}

/// The present by this machine's clock.
pub(super) fn now() -> Timestamp {
    Timestamp::from_jiff(jiff::Timestamp::now())
}

/// What people's clocks show: the zone of this machine (`TZ`, else the system's) and the present.
#[derive(Debug)]
pub(super) struct Local {
    zone: TimeZone,
    now: Timestamp,
}

impl Local {
    pub(super) fn new() -> Self {
        Self { zone: TimeZone::system(), now: now() }
    }

    /// A heading for a column of times: which zone they are in.
    pub(super) fn heading(&self) -> String {
        match self.zone.iana_name() {
            Some(name) => format!("LOCAL ({name})"),
            None => format!("LOCAL ({})", self.now.to_jiff().to_zoned_datetime(self.zone.clone()).strftime("%:z")),
        }
    }

    /// An instant in this zone, with the date when it is not today, and milliseconds when there are any.
    pub(super) fn time(&self, at: Timestamp) -> String {
        let zoned = at.to_jiff().to_zoned_datetime(self.zone.clone());
        let today = zoned.date() == self.now.to_jiff().to_zoned_datetime(self.zone.clone()).date();
        let date = if today { "" } else { "%Y-%m-%d " };
        let ms = if at.as_millis() % 1000 == 0 { "" } else { "%.3f" };
        zoned.strftime(&format!("{date}%H:%M:%S{ms}")).to_string()
    }

    /// A value that is an instant, as a cell.
    pub(super) fn shown(&self, value: &Value) -> String {
        let text = shown(value);
        text.parse().map(|at| self.time(at)).unwrap_or(text)
    }

    /// A field that holds an instant, as a cell.
    pub(super) fn cell(&self, object: &Value, field: &str) -> String {
        self.shown(&object[field])
    }

    /// Like [`Self::cell`], with the instant in UTC, which options and logs have, behind it.
    pub(super) fn both(&self, object: &Value, field: &str) -> String {
        let text = cell(object, field);
        match text.parse() {
            Ok(at) => format!("{} ({text})", self.time(at)),
            Err(_) => text,
        }
    }

    /// How far an instant is from now.
    pub(super) fn distance(&self, at: Timestamp) -> String {
        distance(at, self.now)
    }
}

/// How far an instant is from `now`: `in 3h 12m`, `5s ago`.
fn distance(at: Timestamp, now: Timestamp) -> String {
    let ms = at.millis_since(now);
    if ms >= 0 { format!("in {}", span(ms)) } else { format!("{} ago", span(-ms)) }
}

/// A span of time in its two largest units.
pub(super) fn span(ms: i64) -> String {
    let units = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];
    let Some(first) = units.iter().position(|(_, size)| ms >= *size) else { return "0s".to_owned() };
    let (unit, size) = units[first];
    let mut text = format!("{}{unit}", ms / size);
    // Milliseconds matter only where there is nothing larger.
    if let Some((unit, smaller)) = units.get(first + 1).filter(|(unit, _)| *unit != "ms")
        && ms % size / smaller > 0
    {
        text.push_str(&format!(" {}{unit}", ms % size / smaller));
    }
    text
}

/// Reads a span of time such as `90s`, `1h30m`, `2d`, `500ms`: milliseconds.
pub(super) fn parse_span(text: &str) -> Result<u64, String> {
    let rule = || "must be whole numbers with ms, s, m, h or d, e.g. 90s or 1h30m".to_owned();
    let mut rest = text.trim();
    if rest.is_empty() {
        return Err(rule());
    }
    let mut total = 0u64;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let unit_end = rest[digits..].find(|c: char| c.is_ascii_digit()).map_or(rest.len(), |n| digits + n);
        let size = match rest[digits..unit_end].trim() {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return Err(rule()),
        };
        if digits == 0 {
            return Err(rule());
        }
        let ms = rest[..digits].parse::<u64>().ok().and_then(|n| n.checked_mul(size));
        total = ms.and_then(|ms| total.checked_add(ms)).ok_or_else(|| "is too long".to_owned())?;
        rest = &rest[unit_end..];
    }
    Ok(total)
}

/// Text from elsewhere without what would steer a terminal.
pub(super) fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        // Direction marks reorder what is shown after them.
        if c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}') {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

/// Columns that a text takes in a terminal: two for most of East Asia and emoji, none for combining marks.
fn width(text: &str) -> usize {
    let columns = |c: char| match c as u32 {
        0x300..=0x36f | 0x200b..=0x200f | 0xfe00..=0xfe0f => 0,
        0x1100..=0x115f
        | 0x2e80..=0x303e
        | 0x3041..=0xa4cf
        | 0xac00..=0xd7a3
        | 0xf900..=0xfaff
        | 0xfe30..=0xfe6f
        | 0xff00..=0xff60
        | 0xffe0..=0xffe6
        | 0x1f300..=0x1faff
        | 0x20000..=0x3fffd => 2,
        _ => 1,
    };
    text.chars().map(columns).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_also_with_wide_text_and_control_characters_are_shown() {
        let mut table = Table::new(&["ID", "NAME", "END"]);
        table.row(["a".to_owned(), "订单".to_owned(), "x".to_owned()]);
        table.row(["bb".to_owned(), "e\u{1b}[2J".to_owned(), "y".to_owned()]);
        let text = table.text();
        let ends: Vec<usize> =
            text.lines().map(|line| width(line.trim_end_matches(['x', 'y']).trim_end_matches("END"))).collect();
        assert_eq!(ends.len(), 3);
        assert!(ends.iter().all(|end| *end == ends[0]), "{text}");
        assert!(!text.contains('\u{1b}'), "{text:?}");
    }

    #[test]
    fn a_day_is_that_of_the_reader() {
        let zone = jiff::tz::TimeZoneDatabase::bundled().get("Asia/Shanghai").unwrap();
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        // In Shanghai the day has begun at 16:00 UTC.
        let local = Local { zone, now: at("2026-12-01T20:00:00Z") };
        assert_eq!(local.heading(), "LOCAL (Asia/Shanghai)");
        for (time, shown) in [
            ("2026-12-01T16:00:00Z", "00:00:00"),
            ("2026-12-02T15:59:59.999Z", "23:59:59.999"),
            ("2026-12-01T15:59:59Z", "2026-12-01 23:59:59"),
            ("2026-12-02T16:00:00Z", "2026-12-03 00:00:00"),
        ] {
            assert_eq!(local.time(at(time)), shown, "{time}");
        }
        let _ = (local.time(Timestamp::MAX), local.time(Timestamp::MIN));
        let run = serde_json::json!({"at": "2026-12-01T16:00:00.000Z", "none": null, "odd": "soon"});
        assert_eq!(local.both(&run, "at"), "00:00:00 (2026-12-01T16:00:00.000Z)");
        assert_eq!((local.cell(&run, "none"), local.both(&run, "odd")), (String::new(), "soon".to_owned()));
        let zone = TimeZone::fixed(jiff::tz::Offset::constant(5));
        assert_eq!(Local { zone, now: at("2026-12-01T20:00:00Z") }.heading(), "LOCAL (+05:00)");
    }

    #[test]
    fn spans_are_read_and_shown() {
        for (text, ms) in [
            ("90s", 90_000),
            ("1h30m", 5_400_000),
            ("2d", 172_800_000),
            ("500ms", 500),
            ("0s", 0),
            ("1h 5m", 3_900_000),
        ] {
            assert_eq!(parse_span(text), Ok(ms), "{text}");
        }
        for bad in ["", "5", "s", "5x", "-5s", "1.5s", "99999999999999999999s", "18446744073709551615d"] {
            assert!(parse_span(bad).is_err(), "{bad}");
        }
        for (ms, text) in
            [(0, "0s"), (500, "500ms"), (5_500, "5s"), (3_720_000, "1h 2m"), (86_400_000, "1d"), (3_605_000, "1h")]
        {
            assert_eq!(span(ms), text);
        }
    }
}
