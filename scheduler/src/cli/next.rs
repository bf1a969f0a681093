//! `ax next`, `ax upcoming`: when tasks fire.

use ax_shared::{TaskId, Timestamp};
use clap::Args;
use jiff::tz::{TimeZone, TimeZoneDatabase};
use serde_json::{Value, json};

use super::client::{Client, ClientArgs, Refusal, usage};
use super::output::{Local, Table, cell, list, now, warn_more};
use super::{Failure, REFUSED, say};
use crate::api::ApiError;
use crate::api::fields::Fields;
use crate::api::service::PreviewRequest;
use crate::config::Layer;
use crate::core::schedule::Schedule;

/// `ax next`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ax next \"0 2 * * *\" --tz Asia/Shanghai
  ax next \"0 */5 * * * ?\" --count 3
  ax next \"EVERY 90s\" --after 2027-01-01T00:00:00Z
  ax next payment.check_timeout

Five fields are unix cron, six or seven are Quartz. What has a blank in it or begins with @, PT or EVERY is an
expression and needs no server; anything else is the id of a task.")]
pub(super) struct NextArgs {
    /// A schedule, or the id of a task
    #[arg(value_name = "EXPR|TASK")]
    what: String,
    /// Time zone of the expression, an IANA name [default: UTC]
    #[arg(long, visible_alias = "timezone", value_name = "ZONE")]
    tz: Option<String>,
    /// Instants after this one, which is also what EVERY counts from [default: now]
    #[arg(long, value_name = "INSTANT")]
    after: Option<Timestamp>,
    /// How many
    #[arg(long, short = 'n', value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=500))]
    count: u64,
    #[command(flatten)]
    client: ClientArgs,
}

/// `ax upcoming`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ax upcoming
  ax upcoming --group data-sync --to 2027-01-01T00:00:00Z --limit 200")]
pub(super) struct UpcomingArgs {
    /// From when on [default: now]
    #[arg(long, value_name = "INSTANT")]
    from: Option<Timestamp>,
    /// Until when [default: 24 hours later]
    #[arg(long, value_name = "INSTANT")]
    to: Option<Timestamp>,
    /// Only tasks of this executor group
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,
    /// At most so many [default: 50]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=500))]
    limit: Option<u64>,
    /// Of one task at most so many [default: 10]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=500))]
    per_task: Option<u64>,
    #[command(flatten)]
    client: ClientArgs,
}

/// Whether what is asked about is an expression rather than a task; ids may begin like one (`every_day`).
fn is_expression(what: &str) -> bool {
    what.contains(char::is_whitespace)
        || what.starts_with(['@', '*'])
        || what.starts_with("PT")
        || what.starts_with("EVERY")
        || Schedule::parse(what, "UTC").is_ok()
}

pub(super) async fn next(args: NextArgs, file: Layer) -> Result<(), Failure> {
    if is_expression(&args.what) {
        return offline(&args);
    }
    let id = TaskId::new(&args.what)
        .map_err(|e| usage(format_args!("{:?} is neither a schedule nor the id of a task: {e}", args.what)))?;
    if args.tz.is_some() || args.after.is_some() {
        return Err(usage("--tz and --after go with an expression; a task has its own zone, and counts from now"));
    }
    let client = Client::new(&args.client, &file)?;
    let answer = client.get(&["tasks", id.as_str(), "next"], &[("count", args.count.to_string())]).await?;
    if args.client.json {
        return answer.show(|_| ());
    }
    let task = client.get(&["tasks", id.as_str()], &[]).await?.value()?;
    let nothing = match (task["status"].as_str(), task["cron_expr"].is_null() && task["delay_seconds"].is_null()) {
        (Some("paused"), _) => "none: the task is paused",
        (_, true) => "none: the task has no schedule",
        _ => "none any more",
    };
    answer.show(|fires| print_fires(fires, task["timezone"].as_str().unwrap_or("UTC"), nothing))
}

/// Answers as `POST /preview` does, without a server.
fn offline(args: &NextArgs) -> Result<(), Failure> {
    let refused = |e: ApiError| Failure { code: REFUSED, error: Refusal::from(e.problem()).into() };
    let body = json!({"cron_expr": args.what, "timezone": args.tz, "after": args.after, "count": args.count});
    let fields = Fields::of_body(body, "").map_err(|e| refused(ApiError::of_fields(vec![e])))?;
    let request = PreviewRequest::read(fields).map_err(|e| {
        if args.client.json
            && let Ok(problem) = serde_json::to_string(&e.problem())
        {
            say(problem);
        }
        refused(e)
    })?;
    let fires = serde_json::to_value(request.fires(now()))?;
    if args.client.json {
        say(fires);
    } else {
        print_fires(&fires, request.schedule.canonical_zone(), "none any more");
    }
    Ok(())
}

/// Prints instants in their zone, in UTC and from now.
fn print_fires(fires: &Value, zone: &str, nothing: &str) {
    let tz = TimeZoneDatabase::bundled().get(zone).unwrap_or(TimeZone::UTC);
    let here = Local::new();
    let mut table = Table::new(&[&format!("LOCAL ({zone})"), "UTC", ""]);
    for fire in list(fires, "fires") {
        let Some(at) = fire.as_str().and_then(|text| text.parse::<Timestamp>().ok()) else { continue };
        let zoned = at.to_jiff().to_zoned_datetime(tz.clone());
        let ms = if at.as_millis() % 1000 == 0 { "" } else { "%.3f" };
        let local = zoned.strftime(&format!("%a %Y-%m-%d %H:%M:%S{ms} %:z")).to_string();
        table.row([local, at.to_string(), here.distance(at)]);
    }
    table.print(nothing);
}

pub(super) async fn upcoming(args: UpcomingArgs, file: Layer) -> Result<(), Failure> {
    let mut query: Vec<(&str, String)> = Vec::new();
    query.extend(args.from.map(|at| ("from", at.to_string())));
    query.extend(args.to.map(|at| ("to", at.to_string())));
    query.extend(args.group.map(|group| ("group", group)));
    query.extend(args.limit.map(|limit| ("limit", limit.to_string())));
    query.extend(args.per_task.map(|most| ("per_task", most.to_string())));
    let answer = Client::new(&args.client, &file)?.get(&["upcoming"], &query).await?;
    answer.show(|page| {
        let local = Local::new();
        let mut table = Table::new(&[&local.heading(), "UTC", "TASK", ""]);
        for fire in list(page, "fires") {
            let at = cell(fire, "at");
            let far = at.parse().map(|at| local.distance(at)).unwrap_or_default();
            table.row([local.cell(fire, "at"), at, cell(fire, "task_id"), far]);
        }
        table.print("nothing fires in that time");
        if page["more"] == true {
            warn_more("--limit N, and --per-task N for a task that fires often");
        }
    })
}

#[cfg(test)]
mod tests {
    use super::is_expression;

    #[test]
    fn a_task_may_be_named_like_an_interval() {
        for expression in ["0 2 * * *", "@daily", "@dayly", "PT30S", "pt30s", "PT5X", "EVERY 30s", "every 30s", "EVERY"]
        {
            assert!(is_expression(expression), "{expression}");
        }
        for task in ["every_day", "pt_sync", "payment.check_timeout", "5", "P", "report-1"] {
            assert!(!is_expression(task), "{task}");
        }
    }
}
