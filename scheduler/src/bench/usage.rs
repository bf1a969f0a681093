//! CPU time and memory of processes, as the kernel counts them under `/proc`.
//!
//! Source: proc_pid_stat(5), proc_pid_status(5); proc_pid_clear_refs(5): writing 5 lets the peak begin anew.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::Serialize;

/// Ticks of a second in `/proc/PID/stat`: the same on every Linux that people use.
const TICKS: f64 = 100.0;

/// A process that is watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Watched {
    /// What it is, for people.
    pub(super) name: String,
    pub(super) pid: u32,
    /// Whether its children belong to it, as the sessions of Postgres do.
    pub(super) family: bool,
}

/// Counters of one process since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Counters {
    user_s: f64,
    system_s: f64,
    peak_bytes: u64,
}

/// What a process took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(super) struct Usage {
    pub(super) cpu_user_seconds: f64,
    pub(super) cpu_system_seconds: f64,
    pub(super) cpu_seconds: f64,
    /// Largest resident memory. Of Postgres, the sum over its processes: what they share is counted in each.
    pub(super) peak_memory_bytes: u64,
}

/// What one process took in a phase, and in the measured stretch of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct ProcessUsage {
    pub(super) name: String,
    /// From the phase's beginning, or the process's own, to the phase's end.
    pub(super) phase: Usage,
    /// From the first to the last measured instant.
    pub(super) stretch: Usage,
    /// CPU seconds of the stretch by its length.
    pub(super) stretch_cores: f64,
}

/// Watches processes over one phase: begin, stretch, end.
#[derive(Debug)]
pub(super) struct Meter {
    processes: Vec<Watched>,
    began: BTreeMap<u32, Counters>,
    peak_before: BTreeMap<u32, u64>,
    stretch: Option<Stretch>,
}

#[derive(Debug)]
struct Stretch {
    began: BTreeMap<u32, Counters>,
    at: Instant,
    ended: Option<(BTreeMap<u32, Counters>, f64)>,
}

impl Meter {
    /// Begins with the processes that run already; their counters are those of earlier phases too.
    pub(super) fn begin(running: &[Watched]) -> Self {
        let began = look(running);
        forget_peaks(running);
        Self { processes: running.to_vec(), began, peak_before: BTreeMap::new(), stretch: None }
    }

    /// Adds a process of this phase.
    pub(super) fn add(&mut self, process: Watched) {
        self.processes.push(process);
    }

    pub(super) fn stretch_begins(&mut self) {
        let began = look(&self.processes);
        self.peak_before = began.iter().map(|(pid, counters)| (*pid, counters.peak_bytes)).collect();
        forget_peaks(&self.processes);
        self.stretch = Some(Stretch { began, at: Instant::now(), ended: None });
    }

    pub(super) fn stretch_ends(&mut self) {
        let now = look(&self.processes);
        if let Some(stretch) = &mut self.stretch {
            stretch.ended = Some((now, stretch.at.elapsed().as_secs_f64()));
        }
    }

    /// What each took, asked while they still run.
    pub(super) fn end(self) -> Vec<ProcessUsage> {
        let now = look(&self.processes);
        let nothing = Counters::default();
        let of = |map: &BTreeMap<u32, Counters>, pid: u32| map.get(&pid).copied().unwrap_or(nothing);
        self.processes
            .iter()
            .map(|process| {
                let pid = process.pid;
                let before = self.peak_before.get(&pid).copied().unwrap_or(0);
                let mut phase = of(&now, pid).since(of(&self.began, pid));
                phase.peak_memory_bytes = phase.peak_memory_bytes.max(before);
                let (stretch, seconds) = match &self.stretch {
                    Some(Stretch { began, ended: Some((ended, seconds)), .. }) => {
                        (of(ended, pid).since(of(began, pid)), *seconds)
                    }
                    _ => (Usage::default(), 0.0),
                };
                let stretch_cores = if seconds > 0.0 { rounded(stretch.cpu_seconds / seconds) } else { 0.0 };
                ProcessUsage { name: process.name.clone(), phase, stretch, stretch_cores }
            })
            .collect()
    }
}

impl Counters {
    fn since(self, earlier: Self) -> Usage {
        let user = (self.user_s - earlier.user_s).max(0.0);
        let system = (self.system_s - earlier.system_s).max(0.0);
        Usage {
            cpu_user_seconds: rounded(user),
            cpu_system_seconds: rounded(system),
            cpu_seconds: rounded(user + system),
            peak_memory_bytes: self.peak_bytes,
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            user_s: self.user_s + other.user_s,
            system_s: self.system_s + other.system_s,
            peak_bytes: self.peak_bytes + other.peak_bytes,
        }
    }
}

fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

fn look(processes: &[Watched]) -> BTreeMap<u32, Counters> {
    processes.iter().map(|process| (process.pid, counters(process))).collect()
}

fn counters(process: &Watched) -> Counters {
    let own = Stat::of(process.pid).map(|stat| stat.counters(process.family)).unwrap_or_default();
    let own = Counters { peak_bytes: peak_bytes(process.pid), ..own };
    if !process.family {
        return own;
    }
    children(process.pid)
        .into_iter()
        .fold(own, |sum, (pid, stat)| sum.plus(Counters { peak_bytes: peak_bytes(pid), ..stat.counters(true) }))
}

/// Lets the peaks begin anew. Without the right to, a stretch's peak is that of the whole life.
fn forget_peaks(processes: &[Watched]) {
    for process in processes {
        let mut family = vec![process.pid];
        if process.family {
            family.extend(children(process.pid).into_iter().map(|(pid, _)| pid));
        }
        for pid in family {
            let _ = std::fs::write(format!("/proc/{pid}/clear_refs"), "5");
        }
    }
}

/// The part of `/proc/PID/stat` that matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stat {
    parent: u32,
    user: u64,
    system: u64,
    /// Of children that have ended.
    children_user: u64,
    children_system: u64,
}

impl Stat {
    fn of(pid: u32) -> Option<Self> {
        Self::parse(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    /// The second field is the program's name in parentheses, which may hold anything.
    fn parse(text: &str) -> Option<Self> {
        let (_, rest) = text.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        let number = |index: usize| fields.get(index)?.parse().ok();
        Some(Self {
            parent: u32::try_from(number(1)?).ok()?,
            user: number(11)?,
            system: number(12)?,
            children_user: number(13)?,
            children_system: number(14)?,
        })
    }

    fn counters(self, with_ended_children: bool) -> Counters {
        let (mut user, mut system) = (self.user, self.system);
        if with_ended_children {
            user += self.children_user;
            system += self.children_system;
        }
        Counters { user_s: user as f64 / TICKS, system_s: system as f64 / TICKS, peak_bytes: 0 }
    }
}

fn children(parent: u32) -> Vec<(u32, Stat)> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid| Some((pid, Stat::of(pid)?)))
        .filter(|(_, stat)| stat.parent == parent)
        .collect()
}

fn peak_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    kib(&status, "VmHWM:").unwrap_or(0) * 1024
}

/// The number of a line `KEY   123 kB`.
pub(super) fn kib(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_kernel_is_read_whatever_the_program_is_called() {
        let text = "42 (a) b (c)) S 7 42 42 0 -1 4194304 100 200 0 0 11 22 33 44 20 0 1 0 5 6 7";
        let stat = Stat::parse(text).unwrap();
        assert_eq!(stat, Stat { parent: 7, user: 11, system: 22, children_user: 33, children_system: 44 });
        assert_eq!(stat.counters(true).user_s, 0.44);
        assert_eq!(kib("VmPeak:\t 5 kB\nVmHWM:\t  1234 kB\n", "VmHWM:"), Some(1234));
    }

    #[test]
    fn a_stretch_counts_only_what_was_done_in_it() {
        let me = Watched { name: "me".into(), pid: std::process::id(), family: true };
        let mut meter = Meter::begin(std::slice::from_ref(&me));
        burn(0.15);
        meter.stretch_begins();
        burn(0.15);
        meter.stretch_ends();
        let usage = &meter.end()[0];
        // Other tests of this process may burn beside it.
        assert!(usage.stretch.cpu_seconds >= 0.1, "{usage:?}");
        assert!(usage.phase.cpu_seconds >= usage.stretch.cpu_seconds + 0.1, "{usage:?}");
        assert!(usage.phase.peak_memory_bytes > 1_000_000 && usage.stretch_cores > 0.0, "{usage:?}");
    }

    fn burn(cpu_seconds: f64) {
        let before = Stat::of(std::process::id()).unwrap().counters(false);
        let mut n = 0_u64;
        loop {
            for _ in 0..100_000 {
                n = std::hint::black_box(n.wrapping_mul(31).wrapping_add(7));
            }
            let now = Stat::of(std::process::id()).unwrap().counters(false);
            if now.user_s + now.system_s - before.user_s - before.system_s >= cpu_seconds {
                return;
            }
        }
    }
}
