//! On what was measured: versions and machine.

use serde::Serialize;

use super::usage::kib;

/// What took part.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Versions {
    pub(super) ax: String,
    /// `release` or `debug`; figures of a debug build mean nothing.
    pub(super) build: String,
    pub(super) rustc: String,
    pub(super) nats_server: String,
    /// Kind and version.
    pub(super) database: String,
    pub(super) kernel: String,
}

impl Versions {
    pub(super) fn new(nats_server: String, database: String) -> Self {
        let uname = rustix::system::uname();
        let word = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
        Self {
            ax: crate::VERSION.into(),
            build: if cfg!(debug_assertions) { "debug".into() } else { "release".into() },
            rustc: env!("AX_RUSTC_VERSION").into(),
            nats_server,
            database,
            kernel: format!("{} {}", word(uname.sysname()), word(uname.release())),
        }
    }
}

/// The machine that all parts shared.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Machine {
    pub(super) cpu: String,
    /// Cores that this program may use.
    pub(super) cores: usize,
    pub(super) memory_bytes: u64,
    /// Processes that ran or wanted to, averaged over the minute before.
    pub(super) load_before: f64,
}

impl Machine {
    pub(super) fn look() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let cpu = read("/proc/cpuinfo")
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(':').map(|(_, name)| name.trim().to_owned()));
        let load = read("/proc/loadavg").split(' ').next().and_then(|first| first.parse().ok());
        Self {
            cpu: cpu.unwrap_or_else(|| std::env::consts::ARCH.into()),
            cores: std::thread::available_parallelism().map_or(0, Into::into),
            memory_bytes: kib(&read("/proc/meminfo"), "MemTotal:").unwrap_or(0) * 1024,
            load_before: load.unwrap_or(0.0),
        }
    }
}
