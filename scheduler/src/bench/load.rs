//! The load: which tasks there are, which instants they owe, how long a run works. Pure.
//!
//! Invariant: what is owed follows from period and phase alone. No expression is read and nothing of the scheduler is
//! asked, so that a fault of the scheduler cannot hide itself here.

use std::fmt;
use std::time::Duration;

use ax_shared::{RunId, TaskDefinition, TaskId, Timestamp};
use serde_json::{Value, json};

/// The executor group of every task.
pub(super) const GROUP: &str = "bench";
/// The handler of every task.
pub(super) const HANDLER: &str = "bench.work";
/// The longest work of a handler, in microseconds.
const WORK_AT_MOST_US: u64 = 50_000;

/// Nine tasks of ten are due once in a period, the tenth twice, their phases spread evenly over its seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Load {
    tasks: u32,
    period_s: u32,
}

/// Whole seconds since 1970, the last one not included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Window {
    pub(super) from_s: i64,
    pub(super) to_s: i64,
}

/// A load that cannot be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum InvalidLoad {
    /// Nothing to do, or too many for the form of their names.
    #[error("there must be 10 to 1000000 tasks")]
    Tasks,
    /// The second half of a period would not begin at a second, or a minute would not hold whole periods.
    #[error("the period must be 2, 4, 6, 10, 12, 20, 30 or 60 seconds")]
    Period,
}

/// When one task is due: at each second `s` with `s mod period = phase`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rhythm {
    period_s: u32,
    phase_s: u32,
}

impl Load {
    pub(super) fn new(tasks: u32, period_s: u32) -> Result<Self, InvalidLoad> {
        if !(10..=1_000_000).contains(&tasks) {
            return Err(InvalidLoad::Tasks);
        }
        if period_s == 0 || !period_s.is_multiple_of(2) || !60_u32.is_multiple_of(period_s) {
            return Err(InvalidLoad::Period);
        }
        Ok(Self { tasks, period_s })
    }

    pub(super) fn tasks(self) -> u32 {
        self.tasks
    }

    /// Tasks that are due twice in a period: the first of them all.
    pub(super) fn fast_tasks(self) -> u32 {
        self.tasks / 10
    }

    pub(super) fn period(self) -> Duration {
        Duration::from_secs(self.period_s.into())
    }

    fn rhythm(self, task: u32) -> Rhythm {
        let fast = self.fast_tasks();
        match task.checked_sub(fast) {
            None => Rhythm { period_s: self.period_s / 2, phase_s: task % (self.period_s / 2) },
            Some(slow) => Rhythm { period_s: self.period_s, phase_s: slow % self.period_s },
        }
    }

    /// The expression of a task, in the form with seconds first.
    pub(super) fn expression(self, task: u32) -> String {
        let Rhythm { period_s, phase_s } = self.rhythm(task);
        match period_s {
            60 => format!("{phase_s} * * * * ?"),
            _ => format!("{phase_s}/{period_s} * * * * ?"),
        }
    }

    /// The tasks that owe a run at this second.
    pub(super) fn due(self, second: i64) -> impl Iterator<Item = u32> {
        (0..self.tasks).filter(move |task| self.rhythm(*task).is_due(second))
    }

    /// Every instant that is owed, in order of time.
    pub(super) fn owed(self, window: Window) -> impl Iterator<Item = Owed> {
        (window.from_s..window.to_s)
            .flat_map(move |second| self.due(second).map(move |task| Owed { task, at: instant(second) }))
    }

    /// The definition of a task.
    pub(super) fn definition(self, task: u32) -> Value {
        json!({
            "task_id": task_name(task),
            "cron_expr": self.expression(task),
            "executor_group": GROUP,
            "handler": HANDLER,
            "payload": {"task": task, "db": "orders", "table": "order_items"},
            "timeout_ms": 60_000,
            "max_retry": 3,
            "dedup_window_seconds": 60,
        })
    }

    /// The same, read as the scheduler reads it.
    pub(super) fn parsed(self, task: u32) -> Result<TaskDefinition, String> {
        TaskDefinition::from_json(&self.definition(task))
            .map(|checked| checked.definition)
            .map_err(|errors| errors.into_iter().map(|e| e.message).collect::<Vec<_>>().join("; "))
    }
}

impl Rhythm {
    fn is_due(self, second: i64) -> bool {
        second.rem_euclid(self.period_s.into()) == i64::from(self.phase_s)
    }
}

impl Window {
    /// From a second on, for whole seconds.
    pub(super) fn of(from_s: i64, length: Duration) -> Self {
        Self { from_s, to_s: from_s.saturating_add(i64::try_from(length.as_secs()).unwrap_or(i64::MAX)) }
    }

    pub(super) fn seconds(self) -> i64 {
        self.to_s - self.from_s
    }

    pub(super) fn from(self) -> Timestamp {
        instant(self.from_s)
    }

    pub(super) fn to(self) -> Timestamp {
        instant(self.to_s)
    }

    pub(super) fn contains(self, at: Timestamp) -> bool {
        (self.from()..self.to()).contains(&at)
    }
}

/// An instant that a task owes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Owed {
    pub(super) task: u32,
    pub(super) at: Timestamp,
}

impl fmt::Display for Owed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", task_name(self.task), self.at)
    }
}

fn instant(second: i64) -> Timestamp {
    Timestamp::from_millis(second.saturating_mul(1000))
}

pub(super) fn task_name(task: u32) -> String {
    format!("bench.t{task:06}")
}

pub(super) fn task_number(id: &str) -> Option<u32> {
    id.strip_prefix("bench.t").filter(|digits| digits.len() == 6)?.parse().ok()
}

/// The id that the run of an owed instant has.
pub(super) fn run_id(owed: Owed) -> Option<RunId> {
    Some(RunId::scheduled(&TaskId::new(&task_name(owed.task)).ok()?, owed.at))
}

/// How long the handler of a run works: 0 to 50 ms, spread evenly over the runs, the same at each repetition.
pub(super) fn work(run_id: RunId) -> Duration {
    let (_, low) = run_id.0.as_u64_pair();
    Duration::from_micros(low % (WORK_AT_MOST_US + 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::schedule::Schedule;

    #[test]
    fn ten_thousand_tasks_owe_the_same_at_each_second() {
        let load = Load::new(10_000, 60).unwrap();
        assert_eq!(load.fast_tasks(), 1000);
        let due: Vec<usize> = (0..60).map(|second| load.due(second).count()).collect();
        assert_eq!(due.iter().sum::<usize>(), 9_000 + 2 * 1_000);
        assert!(due.iter().all(|count| (183..=184).contains(count)), "{due:?}");
        assert_eq!(load.owed(Window { from_s: 7, to_s: 187 }).count(), 3 * 11_000);
    }

    #[test]
    fn the_expressions_mean_what_is_owed() {
        for period_s in [2, 10, 30, 60] {
            let load = Load::new(200, period_s).unwrap();
            for task in [0, 1, 19, 20, 21, 57, 199] {
                let schedule = Schedule::parse(&load.expression(task), "UTC").unwrap();
                let from = Timestamp::from_millis(1_796_000_000_000);
                let mut at = from;
                let until = from.plus_millis(180_000);
                let mut fires = Vec::new();
                while let Some(next) = schedule.next_after(at, from).filter(|next| *next < until) {
                    fires.push(next);
                    at = next;
                }
                let second = from.as_millis() / 1000;
                let window = Window { from_s: second, to_s: second + 180 };
                let owed: Vec<_> =
                    load.owed(window).filter(|owed| owed.task == task && owed.at > from).map(|owed| owed.at).collect();
                assert_eq!(fires, owed, "{}", load.expression(task));
            }
        }
    }

    #[test]
    fn loads_that_cannot_be_kept_are_refused() {
        assert_eq!(Load::new(9, 60), Err(InvalidLoad::Tasks));
        for period_s in [0, 1, 3, 7, 8, 15, 45, 120] {
            assert_eq!(Load::new(100, period_s), Err(InvalidLoad::Period), "{period_s}");
        }
    }

    #[test]
    fn work_is_spread_over_its_range_and_repeats() {
        let load = Load::new(1000, 10).unwrap();
        let work_of = |owed| work(run_id(owed).unwrap()).as_micros() as u64;
        let all: Vec<u64> = load.owed(Window { from_s: 0, to_s: 10 }).map(work_of).collect();
        let mean = all.iter().sum::<u64>() / all.len() as u64;
        assert!((23_000..27_000).contains(&mean), "{mean}");
        assert!(all.iter().all(|us| *us <= WORK_AT_MOST_US));
        assert_eq!(all, load.owed(Window { from_s: 0, to_s: 10 }).map(work_of).collect::<Vec<_>>());
    }

    #[test]
    fn names_are_read_back_and_definitions_are_accepted() {
        for task in [0, 42, 999_999] {
            assert_eq!(task_number(&task_name(task)), Some(task));
        }
        assert_eq!(task_number("bench.t1"), None);
        assert_eq!(Load::new(10, 10).unwrap().parsed(3).unwrap().max_attempts(), 4);
    }
}
