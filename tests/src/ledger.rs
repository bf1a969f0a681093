//! Whether each scheduled instant of a task is accounted for, and none twice.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use jiff::Timestamp;
use serde_json::Value;

/// The scheduled runs of tasks, by task and trigger time.
#[derive(Debug, Default)]
pub struct Ledger {
    tasks: BTreeMap<String, BTreeMap<i64, Vec<Value>>>,
    stretches: Vec<(String, i64, i64, i64)>,
}

/// Reads a time of the API, in milliseconds since 1970.
///
/// # Errors
/// When it is none.
pub fn millis(time: &Value) -> Result<i64> {
    let text = time.as_str().with_context(|| format!("not a time: {time}"))?;
    Ok(text.parse::<Timestamp>().with_context(|| format!("not a time: {text}"))?.as_millisecond())
}

/// Returns the time now, in milliseconds since 1970.
#[must_use]
pub fn now() -> i64 {
    Timestamp::now().as_millisecond()
}

/// Writes milliseconds since 1970 as the API takes times.
///
/// # Errors
/// When they are out of range.
pub fn rfc3339(millis: i64) -> Result<String> {
    Ok(format!("{:.3}", Timestamp::from_millisecond(millis)?))
}

impl Ledger {
    /// Sorts `runs`, as `GET /runs` lists them. Runs that no schedule set off are left out.
    ///
    /// # Errors
    /// When one lacks a field.
    pub fn of(runs: &[Value]) -> Result<Self> {
        let mut ledger = Self::default();
        for run in runs {
            let task = run["task_id"].as_str().with_context(|| format!("no task_id: {run}"))?;
            match run["kind"].as_str() {
                Some("every" | "cron") => {
                    let instants = ledger.tasks.entry(task.to_owned()).or_default();
                    instants.entry(millis(&run["trigger_time"])?).or_default().push(run.clone());
                }
                Some("missed" | "skipped") => {
                    let count = run["count"].as_i64().with_context(|| format!("no count: {run}"))?;
                    ledger.stretches.push((task.to_owned(), millis(&run["from"])?, millis(&run["to"])?, count));
                }
                _ => {}
            }
        }
        Ok(ledger)
    }

    /// Returns how many tasks have a scheduled run.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.tasks.len()
    }

    /// Returns how many instants one row stands for, over all rows that stand for a stretch.
    #[must_use]
    pub fn in_stretches(&self) -> i64 {
        self.stretches.iter().map(|(.., count)| count).sum()
    }

    /// Returns the trigger times of one task's runs, in milliseconds, ascending.
    #[must_use]
    pub fn instants(&self, task: &str) -> Vec<i64> {
        self.tasks.get(task).map(|instants| instants.keys().copied().collect()).unwrap_or_default()
    }

    /// Returns all runs.
    pub fn runs(&self) -> impl Iterator<Item = &Value> {
        self.tasks.values().flat_map(BTreeMap::values).flatten()
    }

    /// Checks that each task's instants from its first to `to` lie `interval_ms` apart without a hole, each with one run or
    /// in one stretch, and that the first lies before `from` + 2 intervals. Times in milliseconds.
    ///
    /// # Errors
    /// At the first task for which this does not hold, naming the instants.
    pub fn check_every(&self, interval_ms: i64, from: i64, to: i64) -> Result<()> {
        for (task, runs) in &self.tasks {
            let first = *runs.keys().next().context("no run")?;
            ensure!(first < from + 2 * interval_ms, "{task}: its first instant {} is late", rfc3339(first)?);
            let mut due = first;
            while due <= to {
                let covered =
                    self.stretches.iter().filter(|(of, a, b, _)| of == task && *a <= due && due <= *b).count();
                let count = runs.get(&due).map_or(0, Vec::len) + covered;
                ensure!(count == 1, "{task}: {count} rows for {}, not one", rfc3339(due)?);
                due += interval_ms;
            }
            if let Some(stray) = runs.keys().find(|instant| (**instant - first) % interval_ms != 0) {
                bail!("{task}: {} is off its phase", rfc3339(*stray)?);
            }
        }
        for (task, a, b, count) in &self.stretches {
            let instants = (b - a) / interval_ms + 1;
            ensure!(instants == *count, "{task}: a stretch of {instants} instants says {count}");
        }
        Ok(())
    }

    /// Checks that all runs are in `state`.
    ///
    /// # Errors
    /// When some are not, with up to five of them.
    pub fn check_state(&self, state: &str) -> Result<()> {
        let others: Vec<&Value> = self.runs().filter(|run| run["state"] != state).collect();
        let shown: Vec<String> = others.iter().take(5).map(ToString::to_string).collect();
        ensure!(others.is_empty(), "{} of {} are not {state}: {}", others.len(), self.runs().count(), shown.join("\n"));
        Ok(())
    }
}
