//! What the system says about this process, read when somebody asks. What it does not say is left out.

use std::fmt::Write as _;
use std::sync::OnceLock;
use std::time::SystemTime;

use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use super::{CPU, Kind, MAX_FDS, Metric, OPEN_FDS, RESIDENT_MEMORY, START_TIME, VIRTUAL_MEMORY};

/// There is one process, so one instant at which it began.
static BEGAN: OnceLock<SystemTime> = OnceLock::new();

/// Notes the start.
pub(super) fn begin() {
    BEGAN.get_or_init(SystemTime::now);
}

/// Appends every value with its description.
pub(super) fn render(text: &mut String) {
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    add(text, &CPU, Some(cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9));
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    add(text, &RESIDENT_MEMORY, kib(&status, "VmRSS:").map(|kib| kib * 1024.0));
    add(text, &VIRTUAL_MEMORY, kib(&status, "VmSize:").map(|kib| kib * 1024.0));
    // The folder itself is open while it is read.
    let open = std::fs::read_dir("/proc/self/fd").map(|entries| entries.count().saturating_sub(1) as f64);
    add(text, &OPEN_FDS, open.ok());
    add(text, &MAX_FDS, getrlimit(Resource::Nofile).current.map(|most| most as f64));
    let began = BEGAN.get().and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
    add(text, &START_TIME, began.map(|at| at.as_secs_f64()));
}

fn add(text: &mut String, metric: &Metric, value: Option<f64>) {
    let Some(value) = value else { return };
    let kind = if metric.kind == Kind::Counter { "counter" } else { "gauge" };
    let _ = write!(text, "# HELP {0} {1}\n# TYPE {0} {kind}\n{0} {value}\n\n", metric.name, metric.help);
}

/// The number on the line of `/proc/self/status` that begins with `key`.
fn kib(status: &str, key: &str) -> Option<f64> {
    status.lines().find_map(|line| line.strip_prefix(key))?.split_whitespace().next()?.parse().ok()
}
