//! What both dialects share of a field: its range, its names, its numbers, sets of its values as bits.

use super::error::{Part, ScheduleError, quote};

/// A field of a dialect.
pub(super) struct Field {
    pub(super) part: Part,
    pub(super) min: u32,
    pub(super) max: u32,
    /// Three-letter names of the values from `first_name` on.
    pub(super) names: &'static [&'static str],
    pub(super) first_name: u32,
    /// What may stand in it, for messages.
    pub(super) expected: &'static str,
}

pub(super) const MONTHS: [&str; 12] =
    ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"];
pub(super) const WEEKDAYS: [&str; 7] = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"];

impl Field {
    /// Makes a field of plain numbers.
    pub(super) const fn numbers(part: Part, min: u32, max: u32, expected: &'static str) -> Self {
        Self { part, min, max, names: &[], first_name: 0, expected }
    }

    /// How many values the field has.
    pub(super) const fn size(&self) -> u32 {
        self.max - self.min + 1
    }

    /// Reads one value, a number or a name in any case.
    pub(super) fn value(&self, text: &str, item: &str) -> Result<u32, ScheduleError> {
        if let Some(number) = number(text) {
            if (self.min..=self.max).contains(&number) {
                return Ok(number);
            }
            return Err(ScheduleError::OutOfRange {
                part: self.part,
                value: quote(text),
                min: self.min,
                max: self.max,
            });
        }
        match self.names.iter().position(|name| name.eq_ignore_ascii_case(text)) {
            Some(index) => Ok(self.first_name + index as u32),
            None => Err(self.not_understood(item)),
        }
    }

    /// Reads a step of 1 to `max`; a greater one is refused, or brought down to `max` if `clamp`.
    pub(super) fn step(&self, text: &str, item: &str, max: u32, clamp: bool) -> Result<u32, ScheduleError> {
        match number(text) {
            None => Err(self.not_understood(item)),
            Some(step) if step == 0 || (step > max && !clamp) => {
                Err(ScheduleError::StepOutOfRange { part: self.part, step: quote(text), max })
            }
            Some(step) => Ok(step.min(max)),
        }
    }

    pub(super) fn not_understood(&self, item: &str) -> ScheduleError {
        ScheduleError::NotUnderstood { part: self.part, item: quote(item), expected: self.expected }
    }

    /// Splits the field at its commas; an empty item is an error.
    pub(super) fn items<'a>(&self, list: &'a str) -> Result<impl Iterator<Item = &'a str>, ScheduleError> {
        if list.split(',').any(str::is_empty) {
            return Err(ScheduleError::EmptyItem { part: self.part, list: quote(list) });
        }
        Ok(list.split(','))
    }
}

/// Reads digits and nothing else (no sign, no hexadecimal); what overflows is `u32::MAX`.
pub(super) fn number(text: &str) -> Option<u32> {
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    Some(text.bytes().fold(0u32, |n, b| n.saturating_mul(10).saturating_add(u32::from(b - b'0'))))
}

/// Cuts `item` into what is before and after its first `/`.
pub(super) fn split_step(item: &str) -> (&str, Option<&str>) {
    match item.split_once('/') {
        Some((range, step)) => (range, Some(step)),
        None => (item, None),
    }
}

/// The least member of `bits` that is ≥ `from`.
pub(super) fn next_bit(bits: u64, from: u32) -> Option<u32> {
    let rest = bits.checked_shr(from).unwrap_or(0);
    (rest != 0).then(|| from + rest.trailing_zeros())
}

/// The greatest member of `bits` that is ≤ `from`.
pub(super) fn prev_bit(bits: u64, from: u32) -> Option<u32> {
    let rest = bits & (u64::MAX >> (63 - from.min(63)));
    (rest != 0).then(|| 63 - rest.leading_zeros())
}

/// How many members of `bits` are < `below` (0–63).
pub(super) fn count_below(bits: u64, below: u32) -> u64 {
    u64::from((bits & ((1 << below) - 1)).count_ones())
}
