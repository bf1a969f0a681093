//! Days of the proleptic Gregorian calendar, counted from 1970-01-01 = day 0.
//!
//! The conversions are those of Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", with years that
//! begin in March so that the leap day comes last.

/// Days in 400 years; the calendar, weekdays included, repeats after them.
pub(super) const DAYS_IN_CYCLE: i64 = 146_097;
/// Seconds in a day of the wall clock.
pub(super) const DAY: i64 = 86_400;

/// The day number of a date; `month` 1–12, `day` 1–31.
pub(super) const fn day_number(year: i64, month: u32, day: u32) -> i64 {
    let y = if month <= 2 { year - 1 } else { year };
    let era = y.div_euclid(400);
    let year_of_era = y.rem_euclid(400);
    let month_from_march = ((month + 9) % 12) as i64;
    let day_of_year = (153 * month_from_march + 2) / 5 + day as i64 - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * DAYS_IN_CYCLE + day_of_era - 719_468
}

/// The date (year, month, day) of a day number.
pub(super) fn date(day_number: i64) -> (i64, u32, u32) {
    let z = day_number + 719_468;
    let era = z.div_euclid(DAYS_IN_CYCLE);
    let day_of_era = z.rem_euclid(DAYS_IN_CYCLE);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = (day_of_year - (153 * month_from_march + 2) / 5 + 1) as u32;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 } as u32;
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

/// Days in a month.
pub(super) fn month_length(year: i64, month: u32) -> u32 {
    match month {
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// The weekday of a day number, 0 = Sunday.
pub(super) fn weekday(day_number: i64) -> u32 {
    (day_number + 4).rem_euclid(7) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_day_of_a_cycle_agrees_with_jiff() {
        let mut expected = jiff::civil::date(1899, 12, 31);
        for number in day_number(1899, 12, 31)..day_number(2301, 1, 1) {
            let (year, month, day) = date(number);
            let found = (year, month, day, weekday(number), month_length(year, month));
            let of_jiff = (
                i64::from(expected.year()),
                expected.month() as u32,
                expected.day() as u32,
                expected.weekday().to_sunday_zero_offset() as u32,
                expected.days_in_month() as u32,
            );
            assert_eq!(found, of_jiff);
            assert_eq!(day_number(year, month, day), number);
            expected = expected.tomorrow().unwrap();
        }
        assert_eq!(date(day_number(-9999, 1, 1)), (-9999, 1, 1));
        assert_eq!(date(day_number(9999, 12, 31)), (9999, 12, 31));
    }
}
