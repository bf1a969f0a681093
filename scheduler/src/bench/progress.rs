//! What people see while it runs, on standard error.

use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

/// Without a terminal to rewrite a line on, how often the time left is told.
const TOLD_EVERY: Duration = Duration::from_secs(15);

/// Tells phase and time left.
#[derive(Debug)]
pub(super) struct Progress {
    terminal: bool,
    told: Instant,
    line_open: bool,
}

impl Progress {
    pub(super) fn new() -> Self {
        Self { terminal: std::io::stderr().is_terminal(), told: Instant::now(), line_open: false }
    }

    /// Tells what begins.
    pub(super) fn phase(&mut self, text: &str) {
        self.end_line();
        let _ = writeln!(std::io::stderr(), "bench: {text}");
        self.told = Instant::now();
    }

    /// Tells how many seconds a wait goes on, now and then.
    pub(super) fn left(&mut self, text: &str, left: Duration) {
        let seconds = left.as_secs_f64().ceil();
        if self.terminal {
            let _ = write!(std::io::stderr(), "\r\x1b[Kbench: {text}, {seconds:.0} s left");
            self.line_open = true;
        } else if self.told.elapsed() >= TOLD_EVERY {
            let _ = writeln!(std::io::stderr(), "bench: {text}, {seconds:.0} s left");
            self.told = Instant::now();
        }
    }

    /// Leaves the line that was rewritten.
    pub(super) fn end_line(&mut self) {
        if std::mem::take(&mut self.line_open) {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.end_line();
    }
}
