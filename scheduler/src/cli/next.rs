//! `ax next`: the next fires of an expression, without a server, or of a task.

use ax_shared::Timestamp;
use clap::Args;
use serde_json::json;

use super::client::{Client, ClientArgs, parse, percent, raw};
use super::{Failure, REFUSED, say};
use crate::config::Layer;
use crate::core::schedule::Schedule;

/// `ax next`.
#[derive(Debug, Args)]
#[command(
    after_help = "An expression is computed here; an id is asked of a server. Examples:\n  ax next '0 2 * * *' --tz \
Asia/Shanghai\n  ax next '0 */5 * * * ?' --count 3\n  ax next 'EVERY 90s'\n  ax next report.daily"
)]
pub(super) struct NextArgs {
    /// A schedule expression or a task id
    #[arg(value_name = "EXPR|TASK")]
    what: String,
    /// Zone of the expression, an IANA name
    #[arg(long, value_name = "ZONE", default_value = "UTC")]
    tz: String,
    /// Fires after this instant, RFC 3339; the anchor of EVERY [default: now]
    #[arg(long, value_name = "TIME")]
    after: Option<Timestamp>,
    /// How many
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=500))]
    count: u32,
    #[command(flatten)]
    client: ClientArgs,
}

pub(super) async fn next(args: NextArgs, file: &Layer) -> Result<(), Failure> {
    if !is_expression(&args.what) {
        let path = format!("/tasks/{}/next", percent(&args.what));
        let answer = Client::new(&args.client, file)?.get(&path, &[("count", args.count.to_string())]).await?;
        if args.client.json {
            raw(&answer);
            return Ok(());
        }
        for fire in parse(&answer)?["fires"].as_array().into_iter().flatten() {
            say(format_args!("{}", fire.as_str().unwrap_or_default()));
        }
        return Ok(());
    }
    let refuse = |e: crate::core::schedule::ScheduleError| Failure {
        code: REFUSED,
        error: anyhow::anyhow!("{}: {e}", e.field()),
    };
    let schedule = Schedule::parse(&args.what, &args.tz).map_err(refuse)?;
    let after = args.after.unwrap_or_else(|| Timestamp::from_jiff(jiff::Timestamp::now()));
    schedule.ensure_fires_after(after).map_err(refuse)?;
    let mut fires = Vec::new();
    let mut from = after;
    while fires.len() < args.count as usize {
        let Some(at) = schedule.next_after(from, after) else { break };
        fires.push(at);
        from = at;
    }
    if args.client.json {
        say(json!({ "fires": fires }));
        return Ok(());
    }
    let zone = jiff::tz::TimeZone::get(schedule.canonical_zone()).unwrap_or(jiff::tz::TimeZone::UTC);
    for at in fires {
        let there = zone.to_datetime(at.to_jiff()).strftime("%a %Y-%m-%d %H:%M:%S%.f").to_string();
        say(format_args!("{there:<26} {}   {at}", schedule.canonical_zone()));
    }
    Ok(())
}

/// Task ids have no spaces and do not begin like an interval; what looks like an expression is one.
fn is_expression(what: &str) -> bool {
    what.contains(char::is_whitespace)
        || what.starts_with('@')
        || what.contains('*')
        || (what.len() > 2
            && what[..2].eq_ignore_ascii_case("PT")
            && what[2..].starts_with(|c: char| c.is_ascii_digit()))
}
