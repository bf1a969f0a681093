//! What was received against what was owed. Pure.

use std::collections::{BTreeMap, HashSet};

use ax_shared::RunId;
use serde::Serialize;

use super::lateness::{Percentiles, Times};
use super::load::{Load, Owed, Window};
use super::record::Receipt;

/// How many faults are named; all are counted.
const NAMED: usize = 10;

/// The comparison of a stretch.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct Judgement {
    /// Instants that the schedules owe.
    pub(super) owed: u64,
    /// Of these, how many a worker received.
    pub(super) received: u64,
    /// Of these, how many no worker received.
    pub(super) missed: u64,
    /// Instants received as two runs, and runs received more than once as a first attempt.
    pub(super) doubled: u64,
    /// Instants received that no schedule owes.
    pub(super) unowed: u64,
    /// Receipts of second and later attempts: late redeliveries, no fault by themselves.
    pub(super) redelivered: u64,
    /// First receipt minus the instant, in milliseconds.
    pub(super) lateness_ms: Percentiles,
    /// The first few faults by name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) faults: Vec<String>,
}

impl Judgement {
    /// Whether nothing was missed, doubled or made up.
    pub(super) fn is_clean(&self) -> bool {
        self.missed == 0 && self.doubled == 0 && self.unowed == 0
    }
}

/// Compares the receipts of all workers with what `load` owes in `window`; receipts of other instants do not matter.
pub(super) fn judge(load: Load, window: Window, receipts: &[Receipt]) -> Judgement {
    let mut by_instant: BTreeMap<Owed, Vec<&Receipt>> = BTreeMap::new();
    for receipt in receipts.iter().filter(|receipt| window.contains(receipt.trigger_time)) {
        by_instant.entry(Owed { task: receipt.task, at: receipt.trigger_time }).or_default().push(receipt);
    }
    let mut judgement = Judgement::default();
    let mut times = Times::new();
    let name = |faults: &mut Vec<String>, what: &str, owed: &Owed| {
        if faults.len() < NAMED {
            faults.push(format!("{what}: {owed}"));
        }
    };
    for owed in load.owed(window) {
        judgement.owed += 1;
        let Some(receipts) = by_instant.remove(&owed) else {
            judgement.missed += 1;
            name(&mut judgement.faults, "missed", &owed);
            continue;
        };
        judgement.received += 1;
        let first = receipts.iter().map(|receipt| receipt.lateness_us()).min();
        first.into_iter().for_each(|us| times.add_us(us));
        judgement.redelivered += receipts.iter().filter(|receipt| receipt.attempt > 1).count() as u64;
        if is_doubled(&receipts) {
            judgement.doubled += 1;
            name(&mut judgement.faults, "doubled", &owed);
        }
    }
    // Nothing that is owed is left.
    judgement.unowed = by_instant.len() as u64;
    for owed in by_instant.keys() {
        name(&mut judgement.faults, "not owed", owed);
    }
    judgement.lateness_ms = times.percentiles();
    judgement
}

fn is_doubled(receipts: &[&Receipt]) -> bool {
    let runs: HashSet<RunId> = receipts.iter().map(|receipt| receipt.run_id).collect();
    runs.len() > 1 || receipts.iter().filter(|receipt| receipt.attempt <= 1).count() > 1
}

/// One run of the history, as the API lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Told {
    /// None for a run of a task that is not ours.
    pub(super) owed: Option<Owed>,
    pub(super) succeeded: bool,
    pub(super) attempt: u64,
}

/// What the history says about the same stretch.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct HistoryJudgement {
    /// Runs in it.
    pub(super) runs: u64,
    pub(super) succeeded: u64,
    /// Owed instants without a run.
    pub(super) missing: u64,
    /// Runs of instants that have another one, or that nothing owes.
    pub(super) superfluous: u64,
    /// Runs that took more than one attempt.
    pub(super) retried: u64,
    /// Publish confirmed minus the instant, in milliseconds.
    pub(super) published_ms: Percentiles,
    /// The first few faults by name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) faults: Vec<String>,
}

impl HistoryJudgement {
    /// Whether each owed instant has one run, and that succeeded.
    pub(super) fn is_clean(&self) -> bool {
        self.missing == 0 && self.superfluous == 0 && self.succeeded == self.runs
    }
}

/// Compares the runs of the history with what `load` owes in `window`.
pub(super) fn judge_history(load: Load, window: Window, runs: &[Told]) -> HistoryJudgement {
    let mut open: HashSet<Owed> = load.owed(window).collect();
    let mut judgement = HistoryJudgement { runs: runs.len() as u64, ..HistoryJudgement::default() };
    for run in runs {
        let wanted = run.owed.is_some_and(|owed| open.remove(&owed));
        judgement.superfluous += u64::from(!wanted);
        judgement.succeeded += u64::from(run.succeeded);
        judgement.retried += u64::from(run.attempt > 1);
        if (!wanted || !run.succeeded) && judgement.faults.len() < NAMED {
            let what = if wanted { "not succeeded" } else { "superfluous" };
            let name = run.owed.map_or_else(|| "a run of another task".to_owned(), |owed| owed.to_string());
            judgement.faults.push(format!("{what}: {name}"));
        }
    }
    judgement.missing = open.len() as u64;
    let mut missing: Vec<Owed> = open.into_iter().collect();
    missing.sort_unstable();
    let room = NAMED.saturating_sub(judgement.faults.len());
    judgement.faults.extend(missing.iter().take(room).map(|owed| format!("not in the history: {owed}")));
    judgement
}

#[cfg(test)]
mod tests {
    use super::super::load::run_id;
    use super::*;

    const WINDOW: Window = Window { from_s: 1_000, to_s: 1_020 };

    fn load() -> Load {
        Load::new(20, 10).unwrap()
    }

    fn clean() -> Vec<Receipt> {
        let receipt = |owed: Owed| Receipt {
            task: owed.task,
            trigger_time: owed.at,
            run_id: run_id(owed).unwrap(),
            attempt: 1,
            received_us: owed.at.as_millis() * 1000 + 2_000,
        };
        load().owed(WINDOW).map(receipt).collect()
    }

    fn counts(receipts: &[Receipt]) -> (u64, u64, u64, u64, u64) {
        let j = judge(load(), WINDOW, receipts);
        assert_eq!(j.is_clean(), j.missed + j.doubled + j.unowed == 0);
        assert_eq!(j.owed, 2 * (18 + 2 * 2));
        (j.received, j.missed, j.doubled, j.unowed, j.redelivered)
    }

    #[test]
    fn everything_once_is_clean() {
        assert_eq!(counts(&clean()), (44, 0, 0, 0, 0));
        let lateness = judge(load(), WINDOW, &clean()).lateness_ms;
        assert_eq!((lateness.count, lateness.min), (44, 2.0));
    }

    #[test]
    fn a_receipt_that_is_not_there_is_missed() {
        let mut receipts = clean();
        let gone = receipts.remove(7);
        assert_eq!(counts(&receipts), (43, 1, 0, 0, 0));
        let faults = judge(load(), WINDOW, &receipts).faults;
        assert_eq!(faults, [format!("missed: {}", Owed { task: gone.task, at: gone.trigger_time })]);
        assert_eq!(counts(&[]), (0, 44, 0, 0, 0));
    }

    #[test]
    fn one_instant_as_two_runs_is_doubled_whatever_their_attempts() {
        for attempt in [1, 2] {
            let mut receipts = clean();
            receipts.push(Receipt { run_id: RunId(uuid::Uuid::from_u128(9)), attempt, ..receipts[3] });
            assert_eq!(counts(&receipts), (44, 0, 1, 0, u64::from(attempt > 1)));
        }
    }

    #[test]
    fn a_first_attempt_that_comes_twice_is_doubled_and_a_second_attempt_is_not() {
        let mut receipts = clean();
        receipts.push(Receipt { received_us: receipts[3].received_us + 900, ..receipts[3] });
        assert_eq!(counts(&receipts), (44, 0, 1, 0, 0));
        let last = receipts.len() - 1;
        receipts[last].attempt = 2;
        assert_eq!(counts(&receipts), (44, 0, 0, 0, 1));
    }

    #[test]
    fn what_nothing_owes_is_told_and_what_lies_outside_does_not_matter() {
        let mut receipts = clean();
        let odd = receipts[0].trigger_time.plus_millis(500);
        receipts.push(Receipt { trigger_time: odd, ..receipts[0] });
        receipts.push(Receipt { task: 20, ..receipts[0] });
        receipts.push(Receipt { trigger_time: WINDOW.to(), ..receipts[0] });
        assert_eq!(counts(&receipts), (44, 0, 0, 2, 0));
    }

    #[test]
    fn the_earliest_receipt_counts() {
        let mut receipts = clean();
        for receipt in &mut receipts {
            receipt.received_us += 8_000;
        }
        let early = Receipt { received_us: receipts[0].received_us - 9_000, attempt: 2, ..receipts[0] };
        receipts.push(early);
        let lateness = judge(load(), WINDOW, &receipts).lateness_ms;
        assert_eq!((lateness.min, lateness.count, lateness.p50.round()), (1.0, 44, 10.0));
    }

    #[test]
    fn the_history_needs_one_success_for_each_instant() {
        let told = |owed| Told { owed: Some(owed), succeeded: true, attempt: 1 };
        let whole: Vec<Told> = load().owed(WINDOW).map(told).collect();
        let j = judge_history(load(), WINDOW, &whole);
        assert!(j.is_clean() && j.runs == 44 && j.succeeded == 44, "{j:?}");

        let mut failed = whole.clone();
        failed[0] = Told { succeeded: false, attempt: 4, ..failed[0].clone() };
        let j = judge_history(load(), WINDOW, &failed);
        assert!(!j.is_clean() && (j.succeeded, j.retried, j.missing) == (43, 1, 0), "{j:?}");

        let j = judge_history(load(), WINDOW, &whole[1..]);
        assert!(!j.is_clean() && (j.missing, j.superfluous) == (1, 0), "{j:?}");
        assert_eq!(j.faults.len(), 1);

        let mut twice = whole.clone();
        twice.push(whole[0].clone());
        twice.push(Told { owed: None, ..whole[0].clone() });
        let j = judge_history(load(), WINDOW, &twice);
        assert!(!j.is_clean() && (j.missing, j.superfluous) == (0, 2), "{j:?}");
    }
}
