//! The conformance corpus: 282 cases drawn from Debian cron's own parser and loop, cronsim and Quartz 2.3.

use std::str::FromStr;

use ax_scheduler::core::schedule::Schedule;
use ax_shared::Timestamp;
use serde::Deserialize;

const CORPUS: &str = include_str!("data/cron.jsonl");

#[derive(Deserialize)]
struct Case {
    id: String,
    expr: String,
    tz: String,
    after: Option<Timestamp>,
    #[serde(default)]
    next: Vec<Timestamp>,
    #[serde(default)]
    error: bool,
    why: String,
}

fn cases() -> Vec<Case> {
    CORPUS.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// What is wrong with the answers to a case, if anything.
fn fault(case: &Case) -> Option<String> {
    let schedule = match Schedule::parse(&case.expr, &case.tz) {
        Ok(_) if case.error => return Some("accepted".to_owned()),
        Err(_) if case.error => return None,
        Err(refusal) => return Some(format!("refused: {refusal}")),
        Ok(schedule) => schedule,
    };
    let after = case.after.expect("a valid expression is asked from an instant");
    let mut at = after;
    for expected in &case.next {
        match schedule.next_after(at, after) {
            Some(found) if found == *expected => at = found,
            found => return Some(format!("after {at} expected {expected}, found {found:?}")),
        }
    }
    let nothing_left = case.next.is_empty() && schedule.next_after(after, after).is_some();
    nothing_left.then(|| "expected no fire".to_owned())
}

#[test]
fn all_cases_hold() {
    let cases = cases();
    assert_eq!(cases.len(), 282);
    let faults: Vec<String> = cases
        .iter()
        .filter_map(|case| {
            fault(case).map(|fault| format!("{} `{}` {}: {fault} ({})", case.id, case.expr, case.tz, case.why))
        })
        .collect();
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn every_refusal_has_a_field_and_words() {
    for case in cases().iter().filter(|case| case.error) {
        let refusal = Schedule::parse(&case.expr, &case.tz).unwrap_err();
        let field =
            if refusal.to_string().contains("time zone `") || case.tz.is_empty() { "timezone" } else { "cron_expr" };
        assert_eq!(refusal.field(), field, "{}: {refusal}", case.id);
        assert!(refusal.to_string().len() > 15, "{}: {refusal}", case.id);
    }
}

/// Asks crate `cron` alone the same questions; it may have the field of seconds for five fields.
fn crate_cron_passes(case: &Case, with_seconds: bool) -> bool {
    let five = case.expr.split_ascii_whitespace().count() == 5;
    let expr = if five && with_seconds { format!("0 {}", case.expr) } else { case.expr.clone() };
    let Ok(schedule) = cron::Schedule::from_str(&expr) else { return case.error };
    let Ok(zone) = case.tz.parse::<chrono_tz::Tz>() else { return case.error };
    if case.error {
        return false;
    }
    let after = chrono::DateTime::from_timestamp_millis(case.after.unwrap().as_millis()).unwrap().with_timezone(&zone);
    let found: Vec<i64> = schedule.after(&after).take(case.next.len().max(1)).map(|at| at.timestamp_millis()).collect();
    found == case.next.iter().map(|at| at.as_millis()).collect::<Vec<_>>()
}

/// The figures of the decision record on the schedule walk. Run with `--nocapture` to see them.
#[test]
fn crate_cron_alone_fails_too_many_cases_to_be_used() {
    let cases = cases();
    let passed = |with_seconds| cases.iter().filter(|case| crate_cron_passes(case, with_seconds)).count();
    let (alone, with_seconds) = (passed(false), passed(true));
    eprintln!("crate cron: {alone} of {} alone, {with_seconds} with a field of seconds put first", cases.len());
    assert!(alone * 2 < cases.len() && with_seconds * 4 < cases.len() * 3, "{alone} {with_seconds}");
}
