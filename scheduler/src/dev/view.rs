//! The live view of `ax dev`: one line for everything that happens to a run.

use std::io::{IsTerminal, Write as _};
use std::net::SocketAddr;
use std::sync::Arc;

use ax_shared::{Prefix, Timestamp};
use futures::StreamExt;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::ports::Bus;

/// The view, following notices.
pub(super) struct View {
    following: JoinHandle<()>,
    colour: bool,
}

impl View {
    /// Begins to follow.
    pub(super) async fn start(bus: &Arc<dyn Bus>, prefix: &Prefix, stop: CancellationToken) -> anyhow::Result<Self> {
        let colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        let mut notices = bus.hear(&prefix.all_notices()).await?;
        let following = tokio::spawn(async move {
            loop {
                let next = tokio::select! {
                    () = stop.cancelled() => return,
                    next = notices.next() => next,
                };
                let Some((_, body)) = next else { return };
                if let Ok(notice) = serde_json::from_slice::<serde_json::Value>(&body) {
                    say(&line(&notice, colour));
                }
            }
        });
        Ok(Self { following, colour })
    }

    /// Says where everything is.
    pub(super) fn welcome(&mut self, nats_url: &str, http: SocketAddr, demo: bool, prefix: &Prefix) {
        let bold = |text: &str| if self.colour { format!("\x1b[1m{text}\x1b[0m") } else { text.to_owned() };
        let triggers = prefix.triggers_stream();
        let ax = prefix.as_str();
        say(&format!(
            "\n  {}   http://{http}/          API: http://{http}/api/v1\n  {}   {nats_url}\n\n  \
             Look at it with the nats program:\n    \
             nats -s {nats_url} stream ls\n    \
             nats -s {nats_url} consumer ls {triggers}\n    \
             nats -s {nats_url} sub '{ax}.notice.>'\n    \
             nats -s {nats_url} kv get {ax}_leader scheduler --raw\n\n  \
             and with ax:\n    \
             export AX_API_URL=http://{http}\n    \
             ax task ls\n    \
             ax run ls\n",
            bold("page"),
            bold("nats"),
        ));
        if demo {
            say("  The example tasks and a worker for them are loaded. What happens:\n");
        } else {
            say(
                "  No tasks come with it: `ax apply -f FILE` adds yours, `ax dev --demo` adds examples. What happens:\n",
            );
        }
    }

    /// Stops following.
    pub(super) async fn end(self) {
        let _ = self.following.await;
    }
}

pub(super) fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{text}");
    let _ = out.flush();
}

/// One line of the view: local time, state, task, and what there is to say about it.
fn line(notice: &serde_json::Value, colour: bool) -> String {
    let text = |field: &str| notice[field].as_str().unwrap_or_default();
    let state = text("state");
    let (sign, code) = match state {
        "triggered" if notice["attempt"].as_u64().unwrap_or(0) > 0 => ("↻", "33"),
        "triggered" => ("→", "36"),
        "running" => ("▶", "34"),
        "succeeded" => ("✔", "32"),
        "failed" | "timed_out" => ("✘", "31"),
        _ => ("·", "90"),
    };
    let mut about = Vec::new();
    let attempt = notice["attempt"].as_u64().unwrap_or(0);
    let last = notice["max_attempts"].as_u64().unwrap_or(1);
    if attempt > 1 || (attempt == 1 && last > 1 && state != "succeeded") {
        about.push(format!("attempt {attempt} of {last}"));
    }
    if state == "running"
        && let Some(late) = notice["lateness_ms"].as_i64()
    {
        about.push(format!("{late} ms after its instant"));
    }
    let instant = |field: &str| text(field).parse::<Timestamp>().ok();
    if state == "succeeded"
        && let (Some(started), Some(finished)) = (instant("started_at"), instant("finished_at"))
    {
        about.push(format!("in {} ms", finished.millis_since(started)));
    }
    if state == "running" && !text("worker_id").is_empty() {
        about.push(format!("by {}", text("worker_id")));
    }
    if !text("reason").is_empty() {
        about.push(text("reason").to_owned());
    }
    let now = jiff::tz::TimeZone::system().to_datetime(jiff::Timestamp::now()).strftime("%H:%M:%S.%3f").to_string();
    let head = format!("{sign} {state:<10}");
    let head = if colour { format!("\x1b[{code}m{head}\x1b[0m") } else { head };
    // Enough for `ax run get`: the millisecond, and what tells runs of the same one apart.
    let id: String = text("run_id").chars().take(18).collect();
    format!("{now}  {head} {:<28} {id}  {}", text("task_id"), about.join(", ")).trim_end().to_owned()
}
