//! What users of other schedulers reported, each as a test named after what went wrong.

use std::time::{Duration, Instant};

use ax_scheduler::core::schedule::{MAX_EXPRESSION_BYTES, Schedule, ScheduleError, Stretch, tzdata_version};
use ax_shared::Timestamp;

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn schedule(expr: &str, zone: &str) -> Schedule {
    Schedule::parse(expr, zone).unwrap_or_else(|refusal| panic!("`{expr}` in {zone}: {refusal}"))
}

fn refusal(expr: &str, zone: &str) -> ScheduleError {
    match Schedule::parse(expr, zone) {
        Ok(_) => panic!("`{expr}` in `{zone}` was accepted"),
        Err(refusal) => refusal,
    }
}

/// The fires after `after`, as many as `expected` has, must be `expected`.
fn fires(expr: &str, zone: &str, after: &str, expected: &[&str]) {
    let (schedule, after) = (schedule(expr, zone), at(after));
    let found: Vec<Timestamp> =
        std::iter::successors(schedule.next_after(after, after), |at| schedule.next_after(*at, after))
            .take(expected.len())
            .collect();
    assert_eq!(found, expected.iter().map(|text| at(text)).collect::<Vec<_>>(), "`{expr}` in {zone}");
}

/// All instants in a span whose ends belong to it.
fn fires_within(expr: &str, zone: &str, from: &str, to: &str) -> Vec<Timestamp> {
    let schedule = schedule(expr, zone);
    let (before, to) = (at(from).plus_millis(-1), at(to));
    std::iter::successors(schedule.next_after(before, before), |at| schedule.next_after(*at, before))
        .take_while(|at| *at <= to)
        .collect()
}

/// The shortest of ten measurements, so that a busy machine does not decide.
fn cost<T>(mut work: impl FnMut() -> T) -> Duration {
    let measure = |_| {
        let start = Instant::now();
        std::hint::black_box(work());
        start.elapsed()
    };
    (0..10).map(measure).min().unwrap()
}

// Changes of the clock.

#[test]
fn a_daily_job_does_not_run_twice_on_the_night_the_clocks_go_back() {
    fires("0 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00Z", &["2026-10-25T00:00:00Z", "2026-10-26T01:00:00Z"]);
}

#[test]
fn a_daily_job_does_not_run_again_after_a_restart_in_the_repeated_hour() {
    fires("30 2 * * *", "Europe/Berlin", "2026-10-25T01:10:00Z", &["2026-10-26T01:30:00Z"]);
    assert!(!schedule("30 2 * * *", "Europe/Berlin").contains(at("2026-10-25T01:30:00Z"), Timestamp::default()));
}

#[test]
fn a_job_in_the_skipped_hour_is_not_lost() {
    fires("30 2 * * *", "America/New_York", "2027-03-13T12:00:00Z", &["2027-03-14T07:00:00Z", "2027-03-15T06:30:00Z"]);
    fires("15 2 * * *", "Australia/Lord_Howe", "2026-10-03T00:00:00Z", &["2026-10-03T15:30:00Z"]);
}

#[test]
fn a_half_hour_overlap_does_not_run_a_job_twice() {
    fires(
        "45 1 * * *",
        "Australia/Lord_Howe",
        "2026-04-04T00:00:00Z",
        &["2026-04-04T14:45:00Z", "2026-04-05T15:15:00Z"],
    );
}

#[test]
fn several_times_in_one_gap_make_one_fire_and_none_beside_one_that_is_due_anyway() {
    fires("*/30 2,3 * * *", "America/New_York", "2027-03-13T12:00:00Z", &["2027-03-14T07:00:00Z"]);
    fires(
        "0,10,20 2 * * *",
        "America/New_York",
        "2027-03-14T00:00:00Z",
        &["2027-03-14T07:00:00Z", "2027-03-15T06:00:00Z"],
    );
    let merged = fires_within("0 2,3 * * *", "America/New_York", "2027-03-14T05:00:00Z", "2027-03-14T12:00:00Z");
    assert_eq!(merged, [at("2027-03-14T07:00:00Z")]);
    // Three ordinary days of one or two fires, and the day of the gap with its single one.
    for (expr, count) in [("0 2 * * *", 4), ("0 3 * * *", 4), ("0 2,3 * * *", 7)] {
        let (from, until) = (at("2027-03-12T12:00:00Z"), at("2027-03-16T12:00:00Z"));
        let stretch = schedule(expr, "America/New_York").stretch(from, until, from).unwrap();
        assert_eq!(stretch.count, count, "{expr}");
    }
}

#[test]
fn a_gap_of_a_whole_day_is_not_made_up() {
    // Samoa had no 30 December 2011.
    fires("0 12 30 12 *", "Pacific/Apia", "2011-06-01T00:00:00Z", &["2012-12-29T22:00:00Z"]);
}

#[test]
fn a_sub_hour_schedule_does_not_go_silent_in_the_repeated_hour() {
    let found = fires_within("*/30 * * * *", "Australia/Melbourne", "2024-04-06T15:00:00Z", "2024-04-06T17:00:00Z");
    let expected = ["15:00", "15:30", "16:00", "16:30", "17:00"].map(|time| at(&format!("2024-04-06T{time}:00Z")));
    assert_eq!(found, expected);
    let found = fires_within("* * * * * *", "Europe/Vienna", "2025-10-26T00:59:50Z", "2025-10-26T01:00:40Z");
    assert_eq!(found.len(), 51);
    assert!(found.windows(2).all(|pair| pair[1].millis_since(pair[0]) == 1_000));
}

#[test]
fn the_second_pass_of_an_overlap_is_not_overlooked_when_the_next_date_is_a_year_away() {
    // New York goes back on 1 November 2026; the wall clock shows 01:00–01:59 at 05Z and again at 06Z.
    let (expr, zone) = ("30 * 1 1 11 ?", "America/New_York");
    fires(expr, zone, "2026-11-01T05:59:30Z", &["2026-11-01T06:00:30Z", "2026-11-01T06:01:30Z"]);
    let (schedule, from, until) = (schedule(expr, zone), at("2026-10-01T00:00:00Z"), at("2026-11-01T06:00:10Z"));
    let stretch = Stretch { first: at("2026-11-01T05:00:30Z"), last: at("2026-11-01T05:59:30Z"), count: 60 };
    assert_eq!(schedule.stretch(from, until, from), Some(stretch));
}

#[test]
fn asking_just_before_the_gap_does_not_panic() {
    fires("0 2 * * *", "America/New_York", "2025-03-09T06:30:00Z", &["2025-03-09T07:00:00Z"]);
}

#[test]
fn the_next_fire_advances_in_a_zone_behind_utc() {
    fires(
        "15 14 * * *",
        "America/Los_Angeles",
        "2026-05-01T21:15:00Z",
        &["2026-05-02T21:15:00Z", "2026-05-03T21:15:00Z"],
    );
}

#[test]
fn daylight_saving_does_not_end_in_2038() {
    fires(
        "0 30 2 * * ?",
        "America/New_York",
        "2040-03-10T12:00:00Z",
        &["2040-03-11T07:00:00Z", "2040-03-12T06:30:00Z"],
    );
}

#[test]
fn daylight_saving_holds_a_hundred_years_ahead_and_longer() {
    fires(
        "0 30 2 * * ?",
        "America/New_York",
        "2126-03-09T12:00:00Z",
        &["2126-03-10T07:00:00Z", "2126-03-11T06:30:00Z"],
    );
    // The calendar repeats after 400 years, and so does the rule: 2027 + 800.
    fires("30 2 * * *", "America/New_York", "2827-03-13T12:00:00Z", &["2827-03-14T07:00:00Z", "2827-03-15T06:30:00Z"]);
}

#[test]
fn a_schedule_ends_where_time_ends() {
    let daily = schedule("0 0 * * *", "Pacific/Apia");
    assert_eq!(daily.next_after(Timestamp::MAX, Timestamp::MAX), None);
    assert_eq!(schedule("EVERY 1h", "UTC").next_after(Timestamp::MAX, Timestamp::MIN), None);
    assert!(daily.next_after(Timestamp::MIN, Timestamp::MIN).is_some());
    let all = daily.stretch(Timestamp::MIN, Timestamp::MAX, Timestamp::MIN).unwrap();
    assert!(all.count > 19_000 * 365, "{all:?}");
}

// Dates.

#[test]
fn an_expression_that_can_never_match_is_refused_at_once() {
    for expr in [
        "0 0 30 2 *",
        "0 0 31 2 *",
        "0 0 31 4 *",
        "0 0 31 2,4,6 *",
        "0 0 0 29 2 ? 2027",
        "0 0 0 31W 2,4 ?",
        "0 0 0 L-30 2 ?",
        "0 0 0 ? 2 2#5 2027",
        "0 0 0 29 2 ? 2100-2103",
    ] {
        assert_eq!(refusal(expr, "UTC"), ScheduleError::NeverFires, "{expr}");
        let cost = cost(|| Schedule::parse(expr, "UTC"));
        assert!(cost < Duration::from_millis(10), "{expr}: {cost:?}");
    }
    let words = "this schedule never fires: no date matches its day, month and year fields";
    assert_eq!(refusal("0 0 30 2 *", "UTC").to_string(), words);
    fires("0 0 30 2 1", "UTC", "2026-01-01T00:00:00Z", &["2026-02-02T00:00:00Z"]);
    fires("0 0 29 2 *", "UTC", "2026-01-01T00:00:00Z", &["2028-02-29T00:00:00Z"]);
    fires("0 0 29 2 *", "UTC", "2097-01-01T00:00:00Z", &["2104-02-29T00:00:00Z"]);
}

#[test]
fn a_schedule_whose_fires_are_all_past_is_refused_at_registration_only() {
    let past = schedule("0 0 0 1 1 ? 2019", "UTC");
    let refused = past.ensure_fires_after(at("2026-01-01T00:00:00Z")).unwrap_err();
    assert_eq!((refused.field(), refused.to_string().as_str()), ("cron_expr", "this schedule has no fire after now"));
    assert_eq!(past.ensure_fires_after(at("2018-01-01T00:00:00Z")), Ok(()));
    assert_eq!(schedule("EVERY 1h", "UTC").ensure_fires_after(at("2026-01-01T00:00:00Z")), Ok(()));
    // A date that its zone skipped, and times that an interval expression does not make up.
    for (expr, zone) in [("0 0 12 30 12 ? 2011", "Pacific/Apia"), ("0 */5 2 14 3 ? 2027", "America/New_York")] {
        let nothing = schedule(expr, zone).ensure_fires_after(at("2000-01-01T00:00:00Z"));
        assert_eq!(nothing, Err(ScheduleError::NoFireAfterNow), "{expr}");
    }
}

#[test]
fn day_and_weekday_are_ored_in_unix_cron_and_sunday_is_0_and_7() {
    let days = |expr: &str| -> Vec<String> {
        fires_within(expr, "UTC", "2026-10-01T00:00:00Z", "2026-10-31T23:59:59Z")
            .iter()
            .map(|at| at.to_string()[8..10].to_owned())
            .collect()
    };
    assert_eq!(days("0 9 1 * 1"), ["01", "05", "12", "19", "26"]);
    for sunday in ["0 9 * * 7", "0 9 * * 0", "0 9 * * SUN", "0 0 9 ? * 1", "0 0 9 * * sun", "0 9 * * 7-7"] {
        assert_eq!(days(sunday), ["04", "11", "18", "25"], "{sunday}");
    }
    assert_eq!(days("0 9 * * 1-7").len(), 31);
    assert_eq!(days("0 9 */2 * MON"), ["05", "19"]);
    assert_eq!(days("0 9 1-31/2 * MON").len(), 18);
    assert_eq!(days("0 9 * * SAT-SUN"), ["03", "04", "10", "11", "17", "18", "24", "25", "31"]);
    assert_eq!(days("0 9 * * 5-0"), days("0 9 * * FRI,SAT,SUN"));
}

#[test]
fn the_last_day_and_the_nearest_weekday_respect_short_months_and_weekends() {
    fires(
        "0 37 15 L * ?",
        "UTC",
        "2025-08-31T15:38:00Z",
        &["2025-09-30T15:37:00Z", "2025-10-31T15:37:00Z", "2025-11-30T15:37:00Z"],
    );
    fires("0 0 9 15W * ?", "UTC", "2026-08-01T00:00:00Z", &["2026-08-14T09:00:00Z"]);
    fires("0 0 9 1W * ?", "UTC", "2026-08-01T00:00:00Z", &["2026-08-03T09:00:00Z"]);
    fires("0 0 9 LW * ?", "UTC", "2026-05-01T00:00:00Z", &["2026-05-29T09:00:00Z"]);
    fires("0 0 9 L-2W * ?", "UTC", "2026-05-01T00:00:00Z", &["2026-05-29T09:00:00Z", "2026-06-29T09:00:00Z"]);
    fires("0 0 9 ? * L", "UTC", "2026-05-01T00:00:00Z", &["2026-05-02T09:00:00Z", "2026-05-09T09:00:00Z"]);
    fires("0 0 9 ? * fril", "UTC", "2026-05-01T00:00:00Z", &["2026-05-29T09:00:00Z"]);
    fires("0 0 9 L-30 * ?", "UTC", "2026-02-01T00:00:00Z", &["2026-03-01T09:00:00Z", "2026-05-01T09:00:00Z"]);
}

#[test]
fn a_step_beyond_the_range_leaves_the_first_value_in_unix_cron_and_is_refused_in_quartz() {
    fires("*/90 * * * *", "UTC", "2026-01-01T00:00:00Z", &["2026-01-01T01:00:00Z", "2026-01-01T02:00:00Z"]);
    fires("5/4294967296 0 * * *", "UTC", "2026-01-01T00:00:00Z", &["2026-01-01T00:05:00Z", "2026-01-02T00:05:00Z"]);
    assert_eq!(refusal("0 0/60 * * * ?", "UTC").to_string(), "minute step 60 is out of range 1–59");
    assert_eq!(refusal("0 0 0/24 * * ?", "UTC").to_string(), "hour step 24 is out of range 1–23");
}

// Refusals.

#[test]
fn a_refusal_names_field_and_value() {
    for (expr, words) in [
        ("60 * * * *", "minute 60 is out of range 0–59"),
        ("0 0 60 * * ?", "hour 60 is out of range 0–23"),
        ("* 0-24 * * *", "hour 24 is out of range 0–23"),
        ("0 0 * 13 *", "month 13 is out of range 1–12"),
        ("0 0 * * 8", "weekday 8 is out of range 0–7"),
        ("0 0 0 ? * 0", "weekday 0 is out of range 1–7"),
        ("0 0 0 1 1 ? 1969", "year 1969 is out of range 1970–2199"),
        ("*/0 * * * *", "minute step 0 is out of range 1–60"),
        ("5-1 * * * *", "minute range `5-1` runs backward"),
        ("0 0 * * 5-1", "weekday range `5-1` runs backward"),
        ("0 0 0 1 1 ? 2030-2028", "year range `2030-2028` runs backward"),
        ("1,,2 * * * *", "minute `1,,2` has an empty item"),
        ("0 0 0 1 * MON", "day `1` and weekday `MON` are both restricted: put `?` in one"),
        ("0 0 0 ? * ?", "`?` stands for both day and weekday: put it in one and `*` or values in the other"),
        ("? 0 0 * * ?", "`?` may stand for day or weekday only, not for second: write `*`"),
        ("0 0 0 L,15 * ?", "day `L` must stand alone, not in the list `L,15`"),
        ("0 0 0 ? * MON,6#3", "weekday `6#3` must stand alone, not in the list `MON,6#3`"),
        ("0 0 0 ? * 6#6", "week 6 in weekday `6#6` is out of range 1–5"),
        ("0 0 0 L-31 * ?", "day offset 31 in `L-31` is out of range 0–30"),
        ("0 0 0 32W * ?", "day 32 is out of range 1–31"),
        ("@reboot", "`@reboot` is not supported: a schedule belongs to no machine's start"),
        ("@every 30s", "`@every` is written `EVERY`, for example `EVERY 30s`"),
        ("EVERY 2 days", "interval `2 days` is in days or longer: use PT24H or a cron expression"),
        ("P1D", "interval `P1D` is in days or longer: use PT24H or a cron expression"),
        ("EVERY 99ms", "interval `99ms` is below the minimum of 100 ms"),
    ] {
        let refused = refusal(expr, "UTC");
        assert_eq!((refused.field(), refused.to_string().as_str()), ("cron_expr", words), "{expr}");
    }
}

#[test]
fn the_number_of_fields_decides_and_a_wrong_one_names_the_expected_fields() {
    for expr in ["*", "* * * *", "* * * * * * * *"] {
        let words = refusal(expr, "UTC").to_string();
        assert!(words.contains("5 fields (minute hour day month weekday)"), "{words}");
        assert!(words.contains("6–7 (second minute hour day month weekday [year])"), "{words}");
    }
    assert!(matches!(refusal(" \t ", "UTC"), ScheduleError::Empty));
    let long = format!("0 0 * * {}", "1,".repeat(MAX_EXPRESSION_BYTES));
    assert!(matches!(refusal(&long, "UTC"), ScheduleError::TooLong { .. }));
}

#[test]
fn syntax_of_the_other_dialect_is_refused_with_a_hint() {
    for expr in ["0 0 ? * *", "0 0 L * *", "0 0 15W * *", "0 0 * * 5#2", "0 0 * * FRIL", "0 0 L-3 * *"] {
        assert!(refusal(expr, "UTC").to_string().contains("Quartz"), "{expr}");
    }
    for expr in ["H * * * *", "H/15 * * * *", "~ * * * *", "0~30 * * * *"] {
        assert!(refusal(expr, "UTC").to_string().contains("choose the minutes"), "{expr}");
    }
    for expr in ["@Daily", "@DAILY", "@daily x", "@dayly", "@"] {
        assert!(matches!(refusal(expr, "UTC"), ScheduleError::UnknownNickname { .. }), "{expr}");
    }
}

// Zones.

#[test]
fn an_unknown_zone_is_refused_and_never_taken_for_utc() {
    for zone in [
        "+05:30",
        "-03:00",
        "PST",
        "Europe/Budapesst",
        "",
        " UTC",
        "UTC ",
        "Factory",
        "localtime",
        "Etc/Unknown",
        "Z",
        "europe berlin",
        "\u{130}stanbul",
    ] {
        for expr in ["0 0 * * *", "EVERY 1h"] {
            let refused = refusal(expr, zone);
            assert_eq!(refused.field(), "timezone", "{refused}");
            assert!(refused.to_string().contains(zone), "{refused}");
        }
    }
    for expr in ["CRON_TZ=Asia/Tokyo 0 0 * * *", "TZ=UTC 0 0 * * * *", "cron_tz=UTC 0 0 * * *"] {
        assert!(matches!(refusal(expr, "UTC"), ScheduleError::ZonePrefix { .. }), "{expr}");
    }
}

#[test]
fn an_alias_works_in_any_case_and_its_present_name_is_shown() {
    for (zone, name) in [
        ("us/eastern", "America/New_York"),
        ("Asia/Calcutta", "Asia/Kolkata"),
        ("Europe/Kiev", "Europe/Kyiv"),
        ("Europe/Kyiv", "Europe/Kyiv"),
        ("EUROPE/BERLIN", "Europe/Berlin"),
        ("Europe/Amsterdam", "Europe/Amsterdam"),
        ("PRC", "Asia/Shanghai"),
        ("utc", "UTC"),
        ("Etc/UTC", "UTC"),
    ] {
        assert_eq!(schedule("0 0 * * *", zone).canonical_zone(), name);
    }
    assert_eq!(schedule("0 0 * * *", "Europe/Kiev"), schedule("0 0 * * *", "Europe/Kyiv"));
    assert_ne!(schedule("0 0 * * *", "Europe/Kiev"), schedule("0 0 * * *", "Europe/Sofia"));
}

#[test]
fn a_process_that_sees_no_zone_database_knows_all_zones() {
    const MARK: &str = "AX_TEST_WITHOUT_ZONES";
    let version = tzdata_version();
    assert!(version.len() >= 5 && version.starts_with("20"), "{version}");
    daylight_saving_does_not_end_in_2038();
    an_alias_works_in_any_case_and_its_present_name_is_shown();
    if std::env::var_os(MARK).is_none() {
        let nowhere = tempfile::tempdir().unwrap();
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_process_that_sees_no_zone_database_knows_all_zones"])
            .envs([("TZDIR", nowhere.path().as_os_str()), ("TZ", "Nowhere/Atall".as_ref()), (MARK, "1".as_ref())])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}

// Intervals.

#[test]
fn an_interval_is_read_in_all_its_spellings() {
    for (expr, ms) in [
        ("EVERY 30s", 30_000),
        ("every 30s", 30_000),
        ("EVERY 1h30m", 5_400_000),
        ("EVERY 1h 30m", 5_400_000),
        ("EVERY 2 hours", 7_200_000),
        ("EVERY 1 hour 30 minutes", 5_400_000),
        ("EVERY 500ms", 500),
        ("EVERY 100ms", 100),
        ("EVERY 24h", 86_400_000),
        ("PT30S", 30_000),
        ("pt1h30m", 5_400_000),
        ("PT0.5S", 500),
        ("PT1.250S", 1_250),
        ("PT24H", 86_400_000),
        ("EVERY PT30S", 30_000),
        (" EVERY  90\tsec ", 90_000),
    ] {
        assert_eq!(schedule(expr, "UTC").interval_ms(), Some(ms), "{expr}");
        assert!(schedule(expr, "UTC").is_every());
    }
    assert_eq!(schedule("0 0 * * *", "UTC").interval_ms(), None);
    for expr in [
        "EVERY",
        "EVERY 30",
        "EVERY s",
        "EVERY -5s",
        "EVERY 1.5h",
        "EVERY 5M",
        "EVERY 1m1h",
        "EVERY 1s1s",
        "EVERY 5x",
        "PT",
        "P",
        "PT5",
        "PT-5S",
        "PT1.0005S",
        "PT1.5H",
        "PT1M1H",
        "PT.5S",
        "EVERY 0s",
        "EVERY 99ms",
        "EVERY 1 week",
        "P1W",
        "P1DT1H",
        "P1M",
        "EVERY 876601h",
        "EVERY 99999999999999999999h",
        "EVERY 9223372036854775807h",
        "EVERY1h",
    ] {
        assert_eq!(refusal(expr, "UTC").field(), "cron_expr", "{expr}");
    }
}

#[test]
fn the_phase_of_an_interval_follows_from_its_anchor_alone() {
    let daily = schedule("EVERY 24h", "UTC");
    let anchor = at("2026-01-01T10:00:00.250Z");
    let day = |n: i64| anchor.plus_millis(n * 86_400_000);
    // Asked every six hours, as a scheduler that is restarted so often would.
    let asked = (0..12).map(|n| daily.next_after(anchor.plus_millis(n * 21_600_000), anchor).unwrap());
    assert_eq!(asked.collect::<Vec<_>>(), [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3].map(day));
    assert_eq!(daily.next_after(at("2020-01-01T00:00:00Z"), anchor), Some(day(1)));
    assert!(!daily.contains(anchor, anchor) && daily.contains(day(1), anchor) && !daily.contains(day(-1), anchor));
    assert_eq!(daily.last_in(day(-3), day(0), anchor), None);
    assert_eq!(daily.stretch(day(-3), day(3), anchor), Some(Stretch { first: day(1), last: day(3), count: 3 }));
}

// Cost.

#[test]
fn one_call_costs_little_however_rare_the_fire() {
    for (expr, zone) in [
        ("* * * * * *", "America/New_York"),
        ("*/5 * * * *", "Europe/Berlin"),
        ("0 2 * * *", "Asia/Shanghai"),
        ("0 0 0 29 2 ?", "Australia/Lord_Howe"),
        ("0 0 9 ? 2 6#5", "Europe/Berlin"),
        ("0 0 0 1 1 ? 2199", "America/New_York"),
        ("0 */5 2 14 3 ? 2027", "America/New_York"),
        ("0 */5 2 14 3 ?", "America/New_York"),
    ] {
        let schedule = schedule(expr, zone);
        let after = at("2026-06-01T00:00:00Z");
        let cost = cost(|| (0..100).filter_map(|n| schedule.next_after(after.plus_millis(n * 977), after)).max()) / 100;
        eprintln!("{expr} {zone}: {} ns", cost.as_nanos());
        assert!(cost < Duration::from_millis(1), "{expr}: {cost:?}");
    }
}

#[test]
fn a_long_stretch_is_counted_and_not_walked() {
    let from = at("2026-02-10T10:10:10Z");
    for (expr, days, count) in [
        ("* * * * * *", 40, 40 * 86_400),
        ("EVERY 100ms", 40, 40 * 864_000),
        ("*/5 * * * *", 365, 365 * 288),
        ("* * * * * *", 36_500, 36_500 * 86_400),
    ] {
        let schedule = schedule(expr, "America/New_York");
        let until = from.plus_millis(days * 86_400_000);
        let stretch = schedule.stretch(from, until, from).unwrap();
        assert_eq!(stretch.count, count, "{expr}");
        let cost = cost(|| schedule.stretch(from, until, from));
        eprintln!("{expr} over {days} days: {cost:?}");
        assert!(cost < Duration::from_millis(50), "{expr}: {cost:?}");
    }
}
