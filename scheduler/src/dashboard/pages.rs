//! The pages' contents as text, ready for the templates.

use askama::Template;
use ax_shared::Timestamp;
use ax_shared::definition::Status;

use super::Frame;
use crate::api::Problem;
use crate::api::view::{self, Fires, RunDetail, RunView, TaskView};

/// An instant, UTC, in whole seconds unless it has milliseconds.
pub(super) fn instant(at: Timestamp) -> String {
    let precise = at.as_millis() % 1000 != 0;
    at.to_jiff().strftime(if precise { "%Y-%m-%d %H:%M:%S%.3f" } else { "%Y-%m-%d %H:%M:%S" }).to_string()
}

fn instant_or_none(at: Option<Timestamp>) -> String {
    at.map_or_else(|| "none".to_owned(), instant)
}

/// An instant on the wall clock of a zone.
fn local(at: Timestamp, zone: &str) -> String {
    match at.to_jiff().in_tz(zone) {
        Ok(zoned) => zoned.strftime("%Y-%m-%d %H:%M:%S %Z").to_string(),
        Err(_) => String::new(),
    }
}

/// How long it is until an instant, for people.
pub(crate) fn wait(ms: i64) -> String {
    let s = ms.max(0) / 1000;
    match s {
        0..=119 => format!("in {s} s"),
        120..=7199 => format!("in {} min", s / 60),
        7200..=172_799 => format!("in {} h", s / 3600),
        _ => format!("in {} days", s / 86_400),
    }
}

fn pretty(value: &impl serde::Serialize) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default()
}

struct TaskRow {
    id: String,
    name: String,
    schedule: String,
    zone: String,
    group: String,
    paused: bool,
    next: String,
    wait: String,
    last: Option<RunRow>,
}

impl TaskRow {
    fn of(task: &TaskView, now: Timestamp) -> Self {
        let d = &task.definition;
        let schedule = match (&d.cron_expr, d.delay_seconds) {
            (Some(expr), _) => expr.clone(),
            (None, Some(seconds)) => format!("once, after {seconds} s"),
            (None, None) => "by hand".to_owned(),
        };
        Self {
            id: d.task_id.to_string(),
            name: d.name.clone(),
            schedule,
            zone: d.timezone.clone(),
            group: d.executor_group.to_string(),
            paused: d.status == Status::Paused,
            next: task.next_fire_at.map_or_else(|| "–".to_owned(), instant),
            wait: task.next_fire_at.map_or_else(String::new, |at| wait(at.millis_since(now))),
            last: task.last_run.as_ref().map(RunRow::of),
        }
    }
}

struct RunRow {
    id: String,
    task: String,
    at: String,
    state: &'static str,
    reason: String,
    kind: &'static str,
    attempt: String,
    late: String,
    worker: String,
}

impl RunRow {
    fn of(run: &RunView) -> Self {
        Self {
            id: run.run_id.to_string(),
            task: run.task_id.to_string(),
            at: instant(run.trigger_time),
            state: run.state.as_str(),
            reason: run.reason.clone().unwrap_or_default(),
            kind: run.kind.as_str(),
            attempt: if run.attempt == 0 { String::new() } else { format!("{} of {}", run.attempt, run.max_attempts) },
            late: run.lateness_ms.map_or_else(String::new, |ms| format!("{ms} ms")),
            worker: run.worker_id.clone().unwrap_or_default(),
        }
    }
}

#[derive(Template)]
#[template(path = "home.html")]
pub(super) struct HomePage {
    node: String,
    now: String,
    refresh: bool,
    signed_in: bool,
    tasks: Vec<TaskRow>,
    more: Option<String>,
    runs: Vec<RunRow>,
}

impl HomePage {
    pub(super) fn of(frame: &Frame, tasks: view::TaskPage, runs: &view::RunPage) -> Self {
        Self {
            node: frame.node.clone(),
            now: instant(frame.now),
            refresh: true,
            signed_in: frame.signed_in,
            tasks: tasks.tasks.iter().map(|task| TaskRow::of(task, frame.now)).collect(),
            more: tasks.next_cursor,
            runs: runs.runs.iter().map(RunRow::of).collect(),
        }
    }
}

#[derive(Template)]
#[template(path = "task.html")]
pub(super) struct TaskPage {
    node: String,
    now: String,
    refresh: bool,
    signed_in: bool,
    task: TaskRow,
    description: String,
    queue: String,
    handler: String,
    last_success: String,
    version: u64,
    updated: String,
    fires: Vec<(String, String)>,
    runs: Vec<RunRow>,
    definition: String,
}

impl TaskPage {
    pub(super) fn of(frame: &Frame, task: &TaskView, fires: &Fires, runs: &view::RunPage) -> Self {
        let d = &task.definition;
        Self {
            node: frame.node.clone(),
            now: instant(frame.now),
            refresh: true,
            signed_in: frame.signed_in,
            task: TaskRow::of(task, frame.now),
            description: d.description.clone(),
            queue: d.queue_label.to_string(),
            handler: d.handler.to_string(),
            last_success: instant_or_none(task.last_success_at),
            version: task.version,
            updated: instant(task.updated_at),
            fires: fires.fires.iter().map(|at| (instant(*at), local(*at, &d.timezone))).collect(),
            runs: runs.runs.iter().map(RunRow::of).collect(),
            definition: pretty(&**d),
        }
    }
}

struct TimelineRow {
    at: String,
    event: &'static str,
    attempt: String,
    worker: String,
    detail: String,
}

#[derive(Template)]
#[template(path = "run.html")]
pub(super) struct RunPage {
    node: String,
    now: String,
    refresh: bool,
    signed_in: bool,
    run: RunRow,
    stretch: String,
    timeline: Vec<TimelineRow>,
    payload: String,
    result: String,
}

impl RunPage {
    pub(super) fn of(frame: &Frame, detail: &RunDetail) -> Self {
        let stretch = detail.run.stretch;
        let row = |entry: &view::TimelineEntry| TimelineRow {
            at: instant(entry.at),
            event: entry.event,
            attempt: entry.attempt.map_or_else(String::new, |n| n.to_string()),
            worker: entry.worker_id.clone().unwrap_or_default(),
            detail: entry.detail.clone().unwrap_or_default(),
        };
        Self {
            node: frame.node.clone(),
            now: instant(frame.now),
            refresh: !detail.run.state.is_final(),
            signed_in: frame.signed_in,
            run: RunRow::of(&detail.run),
            stretch: stretch.map_or_else(String::new, |s| {
                format!("{} instants from {} to {}", s.count, instant(s.from), instant(s.to))
            }),
            timeline: detail.timeline.iter().map(row).collect(),
            payload: detail.payload.as_ref().map(pretty).unwrap_or_default(),
            result: detail.result.as_ref().map(pretty).unwrap_or_default(),
        }
    }
}

#[derive(Template)]
#[template(path = "problem.html")]
pub(super) struct ProblemPage {
    node: String,
    now: String,
    refresh: bool,
    signed_in: bool,
    title: String,
    detail: String,
}

impl ProblemPage {
    pub(super) fn of(frame: &Frame, problem: &Problem) -> Self {
        Self {
            node: frame.node.clone(),
            now: instant(frame.now),
            refresh: problem.status == 503,
            signed_in: frame.signed_in,
            title: problem.title.clone(),
            detail: problem.detail.clone(),
        }
    }
}
