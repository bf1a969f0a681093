//! What is told in the end: one JSON object, or a table for people.

use std::fmt::Write as _;

use serde::Serialize;

use super::Options;
use super::floor::FloorReport;
use super::judge::Judgement;
use super::machine::{Machine, Versions};
use super::parts::Parts;
use super::steady::AxReport;
use super::usage::ProcessUsage;

const MIB: f64 = 1024.0 * 1024.0;

/// One measurement.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Report {
    pub(super) workload: &'static str,
    pub(super) versions: Versions,
    pub(super) machine: Machine,
    pub(super) settings: Shown,
    pub(super) floor_before: FloorReport,
    pub(super) ax: AxReport,
    pub(super) floor_after: FloorReport,
    pub(super) ratios: Ratios,
}

/// The settings as they were used.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Shown {
    pub(super) tasks: u32,
    /// Due once in a period.
    pub(super) slow_tasks: u32,
    pub(super) slow_period_seconds: u64,
    /// Due twice in it.
    pub(super) fast_tasks: u32,
    pub(super) fast_period_seconds: f64,
    /// Expressions of one task of each kind, whose phase is the first number.
    pub(super) expressions: [String; 2],
    pub(super) work_ms: [u32; 2],
    pub(super) for_seconds: u64,
    pub(super) warm_up_seconds: f64,
    pub(super) floor_seconds: u64,
    pub(super) nodes: u32,
    pub(super) workers: u32,
    pub(super) concurrency: u32,
    /// Where NATS and the database are.
    pub(super) nats: &'static str,
    pub(super) database: &'static str,
    pub(super) log: String,
}

/// ax beside the floor: the mean of the two floors.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Ratios {
    pub(super) floor_p50_ms: f64,
    pub(super) floor_p99_ms: f64,
    /// ax's p50 minus the floor's, in milliseconds.
    pub(super) p50_over_floor_ms: f64,
    /// ax's p99 by the floor's.
    pub(super) p99_by_floor: f64,
}

impl Shown {
    pub(super) fn new(options: &Options, parts: &Parts) -> anyhow::Result<Self> {
        let load = options.load;
        let fast_tasks = load.fast_tasks();
        Ok(Self {
            tasks: load.tasks(),
            slow_tasks: load.tasks() - fast_tasks,
            slow_period_seconds: load.period().as_secs(),
            fast_tasks,
            fast_period_seconds: load.period().as_secs_f64() / 2.0,
            expressions: [load.expression(fast_tasks), load.expression(0)],
            work_ms: [0, 50],
            for_seconds: options.length.as_secs(),
            warm_up_seconds: options.warm_up.as_secs_f64(),
            floor_seconds: options.floor_length.as_secs(),
            nodes: options.nodes,
            workers: options.workers,
            concurrency: options.concurrency,
            nats: if options.wanted.nats.is_some() { "a NATS from outside" } else { "a private nats-server" },
            database: parts.database()?.place(),
            log: options.log.clone(),
        })
    }
}

impl Ratios {
    pub(super) fn new(before: &FloorReport, ax: &AxReport, after: &FloorReport) -> Self {
        let (before, ax, after) = (before.judgement.lateness_ms, ax.judgement.lateness_ms, after.judgement.lateness_ms);
        let rounded = |value: f64| (value * 1000.0).round() / 1000.0;
        let (p50, p99) = (f64::midpoint(before.p50, after.p50), f64::midpoint(before.p99, after.p99));
        Self {
            floor_p50_ms: rounded(p50),
            floor_p99_ms: rounded(p99),
            p50_over_floor_ms: rounded(ax.p50 - p50),
            p99_by_floor: if p99 > 0.0 { rounded(ax.p99 / p99) } else { 0.0 },
        }
    }
}

impl Report {
    /// What was wrong, in words.
    pub(super) fn fault_text(&self) -> Option<String> {
        let mut wrong = Vec::new();
        let phases = [
            ("floor before", &self.floor_before.judgement),
            ("ax", &self.ax.judgement),
            ("floor after", &self.floor_after.judgement),
        ];
        for (name, judgement) in phases {
            if !judgement.is_clean() {
                let Judgement { missed, doubled, unowed, faults, .. } = judgement;
                wrong.push(format!(
                    "{name}: {missed} missed, {doubled} doubled, {unowed} not owed ({})",
                    faults.join("; ")
                ));
            }
        }
        let history = &self.ax.history;
        if !history.is_clean() {
            wrong.push(format!(
                "history: {} of {} runs succeeded, {} missing, {} superfluous ({})",
                history.succeeded,
                history.runs,
                history.missing,
                history.superfluous,
                history.faults.join("; ")
            ));
        }
        (!wrong.is_empty()).then(|| wrong.join("\n"))
    }

    /// Several lines for people.
    pub(super) fn text(&self) -> String {
        let Self { versions: v, machine: m, settings: s, .. } = self;
        let mut text = String::new();
        let mut line = |words: std::fmt::Arguments<'_>| {
            let _ = writeln!(text, "{words}");
        };
        line(format_args!(
            "ax {} ({} build, {}), nats-server {}, {}, {}",
            v.ax, v.build, v.rustc, v.nats_server, v.database, v.kernel
        ));
        line(format_args!(
            "{} cores ({}), {:.1} GiB, load {:.2} before",
            m.cores,
            m.cpu,
            m.memory_bytes as f64 / MIB / 1024.0,
            m.load_before
        ));
        line(format_args!(
            "{} tasks: {} each {} s, {} each {} s; work 0–50 ms; {} node(s), {} worker(s) of {}; {}, {}",
            s.tasks,
            s.slow_tasks,
            s.slow_period_seconds,
            s.fast_tasks,
            s.fast_period_seconds,
            s.nodes,
            s.workers,
            s.concurrency,
            s.nats,
            s.database
        ));
        line(format_args!(""));
        line(format_args!(
            "{:<13} {:>8} {:>8} {:>8} {:>8}   {:>8} {:>6} {:>7}",
            "lateness, ms", "p50", "p95", "p99", "max", "received", "missed", "doubled"
        ));
        for (name, j) in [
            ("floor before", &self.floor_before.judgement),
            ("ax", &self.ax.judgement),
            ("floor after", &self.floor_after.judgement),
        ] {
            let p = j.lateness_ms;
            line(format_args!(
                "{name:<13} {:>8.2} {:>8.2} {:>8.2} {:>8.2}   {:>8} {:>6} {:>7}",
                p.p50, p.p95, p.p99, p.max, j.received, j.missed, j.doubled
            ));
        }
        let r = self.ratios;
        line(format_args!("ax beside the floor: p50 {:+.2} ms, p99 {:.2} ×", r.p50_over_floor_ms, r.p99_by_floor));
        let h = &self.ax.history;
        line(format_args!(
            "history: {} runs, {} succeeded, {} missing; published p50 {:.1} p99 {:.1} ms",
            h.runs, h.succeeded, h.missing, h.published_ms.p50, h.published_ms.p99
        ));
        if let Some(nats) = &self.ax.nats {
            let (messages, bytes) = (nats.messages_per_run, nats.bytes_per_run);
            line(format_args!("NATS: {messages:.1} messages and {bytes:.0} bytes a run, in and out"));
        }
        if let Some(sql) = &self.ax.sql {
            line(format_args!("SQL: {:.2} operations a run", sql.operations_per_run));
        }
        line(format_args!(""));
        line(format_args!("{:<24} {:>12} {:>8} {:>12}", "while measured", "CPU seconds", "cores", "peak MiB"));
        for (phase, processes) in [("ax", &self.ax.processes), ("floor", &self.floor_before.processes)] {
            for process in processes {
                line(format_args!("{}", usage_line(phase, process)));
            }
        }
        text.trim_end().to_owned()
    }
}

fn usage_line(phase: &str, process: &ProcessUsage) -> String {
    let name = format!("{phase}: {}", process.name);
    let peak = process.stretch.peak_memory_bytes as f64 / MIB;
    format!("{name:<24} {:>12.2} {:>8.3} {peak:>12.1}", process.stretch.cpu_seconds, process.stretch_cores)
}
