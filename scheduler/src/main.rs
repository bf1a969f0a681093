//! The `ax` program: arguments → configuration → telemetry → run → exit code.

use std::process::ExitCode;

use ax_scheduler::cli;
use clap::Parser as _;
use tokio_util::sync::CancellationToken;

fn main() -> ExitCode {
    let _failpoints = ax_scheduler::failpoint::scenario();
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            let _ = e.print();
            return ExitCode::from(if e.use_stderr() { 2 } else { 0 });
        }
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(e) => {
            eprintln!("ax: cannot start: {e}");
            return ExitCode::from(1);
        }
    };
    let code = runtime.block_on(async {
        let stop = CancellationToken::new();
        tokio::spawn(stop_on_signal(stop.clone()));
        cli::run(cli, stop).await
    });
    // What still runs holds nothing that must be written.
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    code
}

/// Stops gently on the first SIGTERM or SIGINT, and at once on the second.
async fn stop_on_signal(stop: CancellationToken) {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut term), Ok(mut int)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) else {
        return;
    };
    for first in [true, false] {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        if !first {
            std::process::exit(130);
        }
        stop.cancel();
    }
}
