//! Properties of every schedule, and two oracles: a clock walked minute by minute, and crate `cron`.

use std::collections::BTreeSet;
use std::str::FromStr;
use std::sync::LazyLock;

use ax_scheduler::core::schedule::{Schedule, Stretch};
use ax_shared::Timestamp;
use jiff::tz::{TimeZone, TimeZoneDatabase};
use proptest::prelude::*;
use proptest::sample::Index;

const MINUTE: i64 = 60_000;
const HOUR: i64 = 60 * MINUTE;

/// Zones of all kinds: whole and half hours, both hemispheres, changes at midnight, two in a month, none.
const ZONES: [&str; 24] = [
    "Africa/Cairo",
    "Africa/Casablanca",
    "America/Havana",
    "America/Los_Angeles",
    "America/New_York",
    "America/Nuuk",
    "America/Santiago",
    "America/St_Johns",
    "Antarctica/Troll",
    "Asia/Beirut",
    "Asia/Gaza",
    "Asia/Jerusalem",
    "Asia/Kathmandu",
    "Asia/Shanghai",
    "Atlantic/Azores",
    "Australia/Adelaide",
    "Australia/Lord_Howe",
    "Australia/Sydney",
    "Europe/Berlin",
    "Europe/Dublin",
    "Europe/London",
    "Pacific/Auckland",
    "Pacific/Chatham",
    "UTC",
];

/// Changes of offset outside of those years that are worth a visit.
const ODD: [(&str, &str); 7] = [
    ("Pacific/Apia", "2011-12-30T10:00:00Z"),
    ("America/Caracas", "2016-05-01T07:00:00Z"),
    ("Asia/Pyongyang", "2018-05-04T15:00:00Z"),
    ("Pacific/Kwajalein", "1993-08-21T12:00:00Z"),
    ("Antarctica/Casey", "2020-10-03T16:01:00Z"),
    ("America/New_York", "2107-03-13T07:00:00Z"),
    ("Europe/Berlin", "2512-10-30T01:00:00Z"),
];

fn zone_data(zone: &str) -> TimeZone {
    TimeZoneDatabase::bundled().get(zone).unwrap()
}

/// All changes of 2025–2028 in the zones above, an ordinary instant for those that have none, and the odd ones.
static CHANGES: LazyLock<Vec<(&str, i64)>> = LazyLock::new(|| {
    let start: jiff::Timestamp = "2025-01-01T00:00:00Z".parse().unwrap();
    let end: jiff::Timestamp = "2029-01-01T00:00:00Z".parse().unwrap();
    let mut changes: Vec<_> =
        ODD.iter().map(|(zone, at)| (*zone, at.parse::<Timestamp>().unwrap().as_millis())).collect();
    for zone in ZONES {
        let tz = zone_data(zone);
        let before = changes.len();
        let times = tz.following(start).map(|change| change.timestamp()).take_while(|at| *at < end);
        changes.extend(times.map(|at| (zone, at.as_millisecond())));
        if changes.len() == before {
            changes.push((zone, start.as_millisecond()));
        }
    }
    assert!(changes.len() > 150);
    changes
});

/// One item of a field: `*`, `n`, `a-b`, each with or without a step.
fn item(min: u32, max: u32, steps: u32) -> impl Strategy<Value = String> {
    let value = min..=max;
    prop_oneof![
        2 => Just("*".to_owned()),
        2 => (1..=steps).prop_map(|step| format!("*/{step}")),
        4 => value.clone().prop_map(|n| n.to_string()),
        2 => (value.clone(), value.clone()).prop_map(|(a, b)| format!("{}-{}", a.min(b), a.max(b))),
        1 => (value.clone(), value.clone(), 1..=steps).prop_map(|(a, b, s)| format!("{}-{}/{s}", a.min(b), a.max(b))),
        1 => (value, 1..=steps).prop_map(|(n, step)| format!("{n}/{step}")),
    ]
}

fn list(min: u32, max: u32, steps: u32) -> impl Strategy<Value = String> {
    prop_oneof![
        3 => item(min, max, steps),
        1 => prop::collection::vec(item(min, max, steps), 2..4).prop_map(|items| items.join(",")),
    ]
}

/// A minute field; the full and the half hour are where clocks change.
fn minutes() -> impl Strategy<Value = String> {
    let full_hour = ["0", "30", "0,30", "0-59/15", "0-45"].map(str::to_owned).to_vec();
    prop_oneof![list(0, 59, 59), prop::sample::select(full_hour)]
}

/// An hour field; the small hours are where clocks change.
fn hours() -> impl Strategy<Value = String> {
    prop_oneof![list(0, 23, 23), Just("*".to_owned()), list(0, 3, 3)]
}

fn unix() -> impl Strategy<Value = String> {
    let date = (
        prop_oneof![2 => Just("*".to_owned()), 1 => list(1, 31, 31)],
        prop_oneof![3 => Just("*".to_owned()), 1 => list(1, 12, 12)],
        prop_oneof![2 => Just("*".to_owned()), 1 => list(0, 7, 7)],
    );
    (minutes(), hours(), date)
        .prop_map(|(minute, hour, (day, month, weekday))| format!("{minute} {hour} {day} {month} {weekday}"))
}

fn quartz() -> impl Strategy<Value = String> {
    let day = prop_oneof![
        list(1, 31, 31),
        (1..=31u32).prop_map(|day| format!("{day}W")),
        (0..=30u32).prop_map(|before| format!("L-{before}")),
        (0..=30u32).prop_map(|before| format!("L-{before}W")),
        prop::sample::select(vec!["L".to_owned(), "LW".to_owned()]),
    ];
    let weekday = prop_oneof![
        list(1, 7, 7),
        (1..=7u32).prop_map(|weekday| format!("{weekday}L")),
        (1..=7u32, 1..=5u32).prop_map(|(weekday, nth)| format!("{weekday}#{nth}")),
        prop::sample::select(vec!["L".to_owned(), "FRI-MON".to_owned(), "6-2/2".to_owned()]),
    ];
    let days = prop_oneof![
        day.prop_map(|day| (day, "?".to_owned())),
        weekday.prop_map(|weekday| ("?".to_owned(), weekday)),
        Just(("*".to_owned(), "?".to_owned())),
        Just(("*".to_owned(), "*".to_owned())),
    ];
    let hours = prop_oneof![4 => hours(), 1 => Just("22-2".to_owned())];
    let months = prop_oneof![3 => Just("*".to_owned()), 1 => list(1, 12, 12), 1 => Just("NOV-FEB".to_owned())];
    let years = prop_oneof![4 => Just(""), 1 => Just(" *"), 1 => Just(" 2025-2027"), 1 => Just(" 2024/3")];
    (list(0, 59, 59), minutes(), hours, days, months, years).prop_map(
        |(second, minute, hour, (day, weekday), month, year)| {
            format!("{second} {minute} {hour} {day} {month} {weekday}{year}")
        },
    )
}

fn interval() -> impl Strategy<Value = String> {
    (100..10_000_000i64).prop_map(|ms| format!("EVERY {ms}ms"))
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// A zone and an instant near one of its changes.
fn near_change(change: Index, off: i64) -> (&'static str, Timestamp) {
    let (zone, at) = CHANGES[change.index(CHANGES.len())];
    (zone, Timestamp::from_millis(at + off))
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn the_next_fire_is_later_and_they_strictly_increase_around_every_change(
        expr in prop_oneof![unix(), quartz()],
        offs in prop::collection::vec(-3 * HOUR..=3 * HOUR, 8),
    ) {
        for (n, (zone, change)) in CHANGES.iter().enumerate() {
            // An expression without any date is refused; that is another test's business.
            let Ok(schedule) = Schedule::parse(&expr, zone) else { return Ok(()) };
            let mut at = Timestamp::from_millis(change + offs[n % offs.len()]);
            for _ in 0..50 {
                let Some(next) = schedule.next_after(at, at) else { break };
                prop_assert!(next > at, "{expr} {zone}: {next} after {at}");
                at = next;
            }
        }
    }

    #[test]
    fn no_input_makes_it_panic(expr in "\\PC{0,40}", zone in "\\PC{0,20}", after in any::<i64>()) {
        let _ = Schedule::parse(&expr, &zone);
        if let Ok(schedule) = Schedule::parse(&expr, "Europe/Berlin") {
            let after = Timestamp::from_millis(after);
            prop_assert!(schedule.next_after(after, after).is_none_or(|next| next > after));
        }
    }

    #[test]
    fn no_near_miss_makes_it_panic(
        expr in "(([0-9*?LW#,/-]|MON|FEB|EVERY|PT|[0-9]{1,3}[smhdSMH]){1,6}[ \t]){1,7}",
        zone in prop::sample::select(ZONES.as_slice()),
        after in any::<i64>(),
        until in any::<i64>(),
    ) {
        if let Ok(schedule) = Schedule::parse(&expr, zone) {
            let (after, until) = (Timestamp::from_millis(after), Timestamp::from_millis(until));
            let next = schedule.next_after(after, until);
            prop_assert!(next.is_none_or(|next| next > after));
            let last = schedule.last_in(after, until, after);
            prop_assert!(last.is_none_or(|last| last > after && last <= until));
            schedule.ensure_fires_after(after).ok();
        }
    }

    #[test]
    fn every_question_gets_the_answer_of_the_walk(
        expr in prop_oneof![3 => unix(), 3 => quartz(), 1 => interval()],
        change in any::<Index>(),
        off in -30 * HOUR..=30 * HOUR,
        span in prop_oneof![0..6 * HOUR, 0..72 * HOUR, 0..9_000 * HOUR],
        ago in 0..100 * HOUR,
    ) {
        let (zone, after) = near_change(change, off);
        let Ok(schedule) = Schedule::parse(&expr, zone) else { return Ok(()) };
        let anchor = after.plus_millis(-ago);
        let until = after.plus_millis(span);
        let walk: Vec<Timestamp> = std::iter::successors(schedule.next_after(after, anchor), |at| schedule.next_after(*at, anchor))
            .take_while(|at| *at <= until)
            .take(20_000)
            .collect();
        prop_assume!(walk.len() < 20_000);
        let stretch = walk.first().map(|first| Stretch { first: *first, last: walk[walk.len() - 1], count: walk.len() as u64 });
        prop_assert_eq!(schedule.stretch(after, until, anchor), stretch, "{} {}", expr, zone);
        prop_assert_eq!(schedule.last_in(after, until, anchor), walk.last().copied());
        let all: BTreeSet<Timestamp> = walk.iter().copied().collect();
        for at in walk.iter().take(100) {
            prop_assert!(schedule.contains(*at, anchor));
            for off in [-HOUR, -MINUTE, -1_000, -1, 1, 1_000, MINUTE, HOUR] {
                let other = at.plus_millis(off);
                if other > after && other <= until {
                    prop_assert_eq!(schedule.contains(other, anchor), all.contains(&other), "{} {} {}", expr, zone, other);
                }
            }
        }
    }
}

/// The values of a plain field, read the slow way.
fn values(field: &str, min: u32, max: u32) -> BTreeSet<u32> {
    let read = |item: &str| -> Vec<u32> {
        let (range, step) = item.split_once('/').unwrap_or((item, ""));
        let (from, to) = match range.split_once('-') {
            Some((from, to)) => (from.parse().unwrap(), to.parse().unwrap()),
            None if range == "*" => (min, max),
            None if step.is_empty() => (range.parse().unwrap(), range.parse().unwrap()),
            None => (range.parse().unwrap(), max),
        };
        let step = step.parse().unwrap_or(1);
        (from..=to).filter(|n| (n - from) % step == 0).collect()
    };
    field.split(',').flat_map(read).collect()
}

/// A unix expression applied to one minute at a time.
struct Minutes {
    fields: Vec<BTreeSet<u32>>,
    both_days: bool,
    interval: bool,
}

impl Minutes {
    fn of(expr: &str) -> Self {
        let fields: Vec<&str> = expr.split(' ').collect();
        let star = |n: usize| fields[n].starts_with('*');
        let ranges = [(0, 59), (0, 23), (1, 31), (1, 12), (0, 7)];
        Self {
            fields: fields.iter().zip(ranges).map(|(field, (min, max))| values(field, min, max)).collect(),
            both_days: star(2) || star(4),
            interval: star(0) || star(1),
        }
    }

    fn matches(&self, wall: jiff::civil::DateTime) -> bool {
        let has = |n: usize, value: i8| self.fields[n].contains(&(value as u32));
        let weekday = wall.weekday();
        let dow = has(4, weekday.to_sunday_zero_offset())
            || has(4, weekday.to_monday_one_offset()) && weekday == jiff::civil::Weekday::Sunday;
        let (dom, clock) = (has(2, wall.day()), has(0, wall.minute()) && has(1, wall.hour()) && has(3, wall.month()));
        clock && if self.both_days { dom && dow } else { dom || dow }
    }

    /// Watches a wall clock from `start` on, minute by minute, as a person would apply the rule.
    fn fires(&self, tz: &TimeZone, start: Timestamp, minutes: i64) -> Vec<Timestamp> {
        let wall_at = |at: Timestamp| tz.to_datetime(at.to_jiff());
        let one = jiff::Span::new().minutes(1);
        let mut fires = Vec::new();
        let mut shown = wall_at(start.plus_millis(-MINUTE));
        let mut latest = shown;
        for n in 0..minutes {
            let at = start.plus_millis(n * MINUTE);
            let wall = wall_at(at);
            let mut fire = self.matches(wall) && (self.interval || wall > latest);
            let jump = wall.duration_since(shown).as_mins();
            if !self.interval && jump > 1 && jump - 1 <= 180 {
                let skipped = std::iter::successors(Some(shown + one), |wall| Some(*wall + one));
                let missed: Vec<_> =
                    skipped.take_while(|skipped| *skipped < wall).filter(|wall| *wall > latest).collect();
                fire = fire || missed.into_iter().any(|wall| self.matches(wall));
            }
            if fire {
                fires.push(at);
            }
            (shown, latest) = (wall, latest.max(wall));
        }
        fires
    }
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn a_clock_watched_minute_by_minute_agrees(expr in unix(), change in any::<Index>(), off in -30..=30i64) {
        let (zone, at) = near_change(change, off * HOUR);
        let Ok(schedule) = Schedule::parse(&expr, zone) else { return Ok(()) };
        // Two days before, so that the watcher has seen what went before.
        let start = Timestamp::from_millis((at.as_millis() - 48 * HOUR).div_euclid(MINUTE) * MINUTE);
        let watched = Minutes::of(&expr).fires(&zone_data(zone), start, 96 * 60);
        let from = start.plus_millis(30 * HOUR);
        let watched: Vec<Timestamp> = watched.into_iter().filter(|at| *at > from).collect();
        let until = start.plus_millis(96 * HOUR - 1);
        let found: Vec<Timestamp> = std::iter::successors(schedule.next_after(from, from), |at| schedule.next_after(*at, from))
            .take_while(|at| *at <= until)
            .collect();
        prop_assert_eq!(found, watched, "{} {}", expr, zone);
    }

    /// What both understand: numeric fields, UTC, up to the year 2100, and day fields that need no or-rule.
    #[test]
    fn crate_cron_agrees_on_numeric_fields_in_utc(
        second in list(0, 59, 59),
        minute in list(0, 59, 59),
        hour in list(0, 23, 23),
        day in prop_oneof![Just("*".to_owned()), list(1, 31, 31)],
        month in list(1, 12, 12),
        weekday in list(1, 7, 7),
        by_weekday in any::<bool>(),
        seven in any::<bool>(),
        after in 0..4_070_908_800_000i64,
    ) {
        let (day, weekday) = if by_weekday { ("*", weekday.as_str()) } else { (day.as_str(), "*") };
        let expr = format!("{second} {minute} {hour} {day} {month} {weekday}{}", if seven { " *" } else { "" });
        let Ok(schedule) = Schedule::parse(&expr, "UTC") else { return Ok(()) };
        let oracle = cron::Schedule::from_str(&expr).unwrap();
        let after = Timestamp::from_millis(after);
        let end = "2101-01-01T00:00:00Z".parse::<Timestamp>().unwrap();
        let found: Vec<i64> = std::iter::successors(schedule.next_after(after, after), |at| schedule.next_after(*at, after))
            .take_while(|at| *at < end)
            .take(20)
            .map(Timestamp::as_millis)
            .collect();
        let utc = chrono::DateTime::from_timestamp_millis(after.as_millis()).unwrap();
        let expected: Vec<i64> = oracle.after(&utc).map(|at| at.timestamp_millis()).take(20).collect();
        prop_assert_eq!(found, expected, "{}", expr);
    }
}
