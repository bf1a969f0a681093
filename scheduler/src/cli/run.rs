//! `ax run`: what came of it.

use ax_shared::{RunId, TaskId, Timestamp};
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use super::client::{Client, ClientArgs, usage};
use super::output::{Local, Table, cell, list, print_pairs, span, tell_more, warn_more};
use super::{Failure, REFUSED, say};
use crate::config::Layer;
use crate::core::run::RunState;

/// Hex digits of a run id from which on a query may be the beginning of one: they fix the time to about five hours.
const MIN_PREFIX: usize = 6;
/// Pages of 500 runs that a search for a prefix reads.
const MAX_PAGES: usize = 40;
/// Milliseconds of time in a run id, in hex digits.
const TIME_DIGITS: usize = 12;

/// `ax run`.
#[derive(Debug, Args)]
pub(super) struct RunArgs {
    #[command(subcommand)]
    command: RunCommand,
    #[command(flatten)]
    client: ClientArgs,
}

#[derive(Debug, Subcommand)]
enum RunCommand {
    /// List runs, newest trigger time first
    #[command(
        visible_alias = "list",
        after_help = "Examples:
  ax run ls
  ax run ls --task report.daily --state failed --state timed_out
  ax run ls --from 2027-01-01T00:00:00Z --to 2027-01-02T00:00:00Z --limit 500 --json"
    )]
    Ls(ListArgs),
    /// Show a run: its attempts, its timeline, its result
    #[command(after_help = "Example:
  ax run get 0199aa6e-5b54-8c8e-9b0f-4c7d5a0e4a11
  ax run get 0199aa6e-5b54-8c8e")]
    Get(GetArgs),
    /// Find runs by whatever is at hand
    #[command(after_help = "Examples:
  ax run find 0199aa6e-5b54-8c8e-9b0f-4c7d5a0e4a11
  ax run find 0199aa6e5b54
  ax run find report.daily

A run id, its first six or more digits, or a trace id shows that run, several that begin alike as a list. The id of a
task lists its newest runs.")]
    Find(FindArgs),
    /// End a run as cancelled; nothing happens to one that has ended
    #[command(after_help = "Example:
  ax run cancel 0199aa6e-5b54-8c8e --reason \"wrong date\"")]
    Cancel(CancelArgs),
}

#[derive(Debug, Args)]
struct CancelArgs {
    #[command(flatten)]
    run: GetArgs,
    /// Why, for the run and the audit
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
}

#[derive(Debug, Args)]
struct ListArgs {
    /// Only of this task
    #[arg(long, value_name = "TASK", value_parser = TaskId::new)]
    task: Option<TaskId>,
    /// Only of this executor group
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,
    /// Only in this state; may be given several times
    #[arg(long, value_name = "STATE", value_delimiter = ',', value_parser = states())]
    state: Vec<String>,
    /// Trigger time from this instant on
    #[arg(long, value_name = "INSTANT")]
    from: Option<Timestamp>,
    /// Trigger time before this instant
    #[arg(long, value_name = "INSTANT")]
    to: Option<Timestamp>,
    /// At most so many [default: 50]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=500))]
    limit: Option<u64>,
    /// Where the page before ended
    #[arg(long, value_name = "CURSOR")]
    cursor: Option<String>,
}

fn states() -> impl clap::builder::TypedValueParser<Value = String> {
    PossibleValuesParser::new(RunState::ALL.map(RunState::as_str)).map(|word| word)
}

#[derive(Debug, Args)]
struct GetArgs {
    /// The run's id, or the beginning of it; without dashes it is the trace id
    #[arg(value_name = "RUN", value_parser = id_or_beginning)]
    run: String,
}

/// A run id, or digits enough to find the one that begins with them.
fn id_or_beginning(text: &str) -> Result<String, String> {
    match text.parse::<RunId>() {
        Ok(id) => Ok(id.to_string()),
        Err(_) if prefix_of(text).is_some() => Ok(text.to_owned()),
        Err(_) => Err(format!("must be a run id, or {MIN_PREFIX} or more of the hex digits that it begins with")),
    }
}

#[derive(Debug, Args)]
struct FindArgs {
    /// A run id or its beginning, a trace id, or the id of a task
    #[arg(value_name = "QUERY")]
    query: String,
    /// At most so many runs of a task
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=500))]
    limit: u64,
}

pub(super) async fn run(args: RunArgs, file: Layer) -> Result<(), Failure> {
    let client = Client::new(&args.client, &file)?;
    match args.command {
        RunCommand::Ls(args) => {
            let mut query: Vec<(&str, String)> = Vec::new();
            query.extend(args.task.map(|task| ("task_id", task.to_string())));
            query.extend(args.group.map(|group| ("group", group)));
            query.extend(args.state.into_iter().map(|state| ("state", state)));
            query.extend(args.from.map(|at| ("from", at.to_string())));
            query.extend(args.to.map(|at| ("to", at.to_string())));
            query.extend(args.limit.map(|limit| ("limit", limit.to_string())));
            query.extend(args.cursor.map(|cursor| ("cursor", cursor)));
            client.get(&["runs"], &query).await?.show(|page| {
                print_runs(page);
                tell_more(page);
            })
        }
        RunCommand::Get(GetArgs { run }) => {
            client.get(&["runs", &whole_id(&client, run).await?], &[]).await?.show(print_run)
        }
        RunCommand::Cancel(CancelArgs { run: GetArgs { run }, reason }) => {
            let id = whole_id(&client, run).await?;
            let body = serde_json::json!({ "reason": reason.unwrap_or_default() }).to_string();
            client.post(&["runs", &id, "cancel"], body).await?.show(print_run)
        }
        RunCommand::Find(find_args) => find(&client, find_args, args.client.json).await,
    }
}

async fn find(client: &Client, args: FindArgs, json: bool) -> Result<(), Failure> {
    let query = args.query.trim();
    if let Ok(id) = query.parse::<RunId>()
        && let Some(run) = client.find(&["runs", &id.to_string()], &[]).await?
    {
        return run.show(print_run);
    }
    if let Some(digits) = prefix_of(query) {
        let mut found = with_prefix(client, &digits).await?;
        if let [one] = &found.runs[..] {
            let id = id_of(one);
            return client.get(&["runs", &id], &[]).await?.show(print_run);
        }
        if !found.runs.is_empty() {
            let all = found.runs.len();
            found.runs.truncate(args.limit as usize);
            let page = serde_json::to_string(&found)?;
            if json {
                say(&page);
            } else {
                print_runs(&serde_json::from_str(&page)?);
            }
            if all > found.runs.len() {
                warn_more("more digits, or a larger --limit");
            }
            return Ok(());
        }
    }
    let nothing = |query: &str| {
        let short = !query.is_empty() && query.len() < MIN_PREFIX && query.bytes().all(|b| b.is_ascii_hexdigit());
        let hint = if short { format!("; of a run id, give {MIN_PREFIX} digits or more") } else { String::new() };
        Failure { code: REFUSED, error: anyhow::anyhow!("not found: no run or task {query:?}{hint}") }
    };
    let task = match TaskId::new(query) {
        Ok(task) => task,
        Err(_) if query.parse::<RunId>().is_ok() => return Err(nothing(query)),
        Err(e) => return Err(usage(format_args!("{query:?} is neither part of a run id nor the id of a task: {e}"))),
    };
    let page = [("task_id", task.to_string()), ("limit", args.limit.to_string())];
    let runs = client.get(&["runs"], &page).await?;
    // A task that was removed has runs, one that never ran has none.
    if list(&runs.value()?, "runs").is_empty() && client.find(&["tasks", task.as_str()], &[]).await?.is_none() {
        return Err(nothing(query));
    }
    let more = !runs.value()?["next_cursor"].is_null();
    runs.show(print_runs)?;
    if more {
        warn_more(&format!("a larger --limit, or page through ax run ls --task {task}"));
    }
    Ok(())
}

/// The id of the one run that begins like this.
async fn whole_id(client: &Client, text: String) -> Result<String, Failure> {
    let Some(digits) = prefix_of(&text) else { return Ok(text) };
    let refused = |why: String| Failure { code: REFUSED, error: anyhow::anyhow!("{why}") };
    let found = with_prefix(client, &digits).await?.runs;
    match &found[..] {
        [] => Err(refused(format!("not found: no run begins with {text:?}"))),
        [one] => Ok(id_of(one)),
        many => {
            let shown: Vec<String> = many.iter().take(10).map(|run| format!("\n  {}", id_of(run))).collect();
            let more = if many.len() > shown.len() { "\n  …" } else { "" };
            Err(refused(format!("{} runs begin with {text:?}:{}{more}", many.len(), shown.concat())))
        }
    }
}

/// A page of runs, each as it was answered.
#[derive(Debug, Default, Deserialize, Serialize)]
struct Page {
    runs: Vec<Box<RawValue>>,
    #[serde(skip_serializing)]
    next_cursor: Option<String>,
}

/// The id of a run that was answered, nothing if it has none.
fn id_of(run: &RawValue) -> String {
    #[derive(Deserialize)]
    struct Run {
        run_id: String,
    }
    serde_json::from_str::<Run>(run.get()).map(|run| run.run_id).unwrap_or_default()
}

/// The digits of what may be the beginning of a run id.
fn prefix_of(query: &str) -> Option<String> {
    let digits: String = query.chars().filter(|c| *c != '-').map(|c| c.to_ascii_lowercase()).collect();
    let fits = (MIN_PREFIX..32).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit());
    fits.then_some(digits)
}

/// The first and last millisecond that an id which begins with these digits can hold.
fn span_of(digits: &str) -> Option<(i64, i64)> {
    let known = &digits[..digits.len().min(TIME_DIGITS)];
    let bits = 4 * (TIME_DIGITS - known.len());
    let first = i64::from_str_radix(known, 16).ok()? << bits;
    let last = first + (1 << bits) - 1;
    (last <= Timestamp::MAX.as_millis()).then_some((first, last))
}

/// Runs whose id begins with these digits.
///
/// An id begins with the time for which it was made: the trigger time, or the time of the request, before which no
/// delayed run is due. So the first search is in the span that the digits leave open, the second behind it.
async fn with_prefix(client: &Client, digits: &str) -> Result<Page, Failure> {
    let Some((first, last)) = span_of(digits) else { return Ok(Page::default()) };
    let at = |ms: i64| Timestamp::from_millis(ms).to_string();
    let within = vec![("from", at(first)), ("to", at(last + 1))];
    let found = search(client, digits, within).await?;
    if !found.runs.is_empty() {
        return Ok(found);
    }
    search(client, digits, vec![("from", at(last + 1))]).await
}

/// Reads runs page by page and keeps those whose id begins with these digits.
async fn search(client: &Client, digits: &str, filter: Vec<(&str, String)>) -> Result<Page, Failure> {
    let mut found = Page::default();
    let mut cursor: Option<String> = None;
    for _ in 0..MAX_PAGES {
        let mut query = filter.clone();
        query.push(("limit", "500".to_owned()));
        query.extend(cursor.take().map(|cursor| ("cursor", cursor)));
        let page: Page = client.get(&["runs"], &query).await?.read()?;
        found.runs.extend(page.runs.into_iter().filter(|run| id_of(run).replace('-', "").starts_with(digits)));
        cursor = page.next_cursor;
        if cursor.is_none() {
            return Ok(found);
        }
    }
    if found.runs.is_empty() {
        let error = anyhow::anyhow!("not found among the newest {} runs: give more digits", MAX_PAGES * 500);
        return Err(Failure { code: REFUSED, error });
    }
    Ok(found)
}

fn print_runs(page: &Value) {
    let local = Local::new();
    let mut table =
        Table::new(&["RUN", "TASK", "TRIGGER TIME", "STATE", "KIND", "ATTEMPT", "LATE", "TOOK", "WORKER", "REASON"]);
    for run in list(page, "runs") {
        let count = run["count"].as_u64().filter(|count| *count > 1).map(|count| format!(" ×{count}"));
        table.row([
            cell(run, "run_id"),
            cell(run, "task_id"),
            local.cell(run, "trigger_time"),
            cell(run, "state") + &count.unwrap_or_default(),
            cell(run, "kind"),
            attempt_of(run),
            run["lateness_ms"].as_i64().map(|ms| format!("{ms}ms")).unwrap_or_default(),
            took(run),
            cell(run, "worker_id"),
            cell(run, "reason"),
        ]);
    }
    table.print("no runs");
}

fn attempt_of(run: &Value) -> String {
    match run["attempt"].as_u64() {
        None | Some(0) => String::new(),
        Some(attempt) => format!("{attempt}/{}", cell(run, "max_attempts")),
    }
}

/// How long something took from its start to its end.
fn took(of: &Value) -> String {
    let at = |field: &str| of[field].as_str()?.parse::<Timestamp>().ok();
    match (at("started_at"), at("finished_at")) {
        (Some(started), Some(finished)) => span(finished.millis_since(started).max(0)),
        _ => String::new(),
    }
}

fn print_run(run: &Value) {
    let local = Local::new();
    let mut pairs: Vec<(&str, String)> =
        ["run_id", "trace_id", "task_id", "state", "reason", "kind"].map(|field| (field, cell(run, field))).to_vec();
    pairs.extend(["trigger_time", "from", "to"].map(|field| (field, local.both(run, field))));
    pairs.push(("count", cell(run, "count")));
    pairs.push(("attempt", attempt_of(run)));
    let late = run["lateness_ms"].as_i64().map(|ms| format!("{ms}ms")).unwrap_or_default();
    pairs.extend([("late", late), ("took", took(run))]);
    let rest = ["group", "queue", "handler", "priority", "worker_id", "flow_id"];
    pairs.extend(rest.map(|field| (field, cell(run, field))));
    pairs.extend(["published_at", "started_at", "finished_at"].map(|field| (field, local.both(run, field))));
    pairs.extend(["payload", "result"].map(|field| (field, json_cell(&run[field]))));
    print_pairs(&pairs);

    let mut attempts = Table::new(&["ATTEMPT", "OUTCOME", "WORKER", "STARTED", "TOOK", "ERROR"]);
    for attempt in list(run, "attempts") {
        attempts.row([
            cell(attempt, "attempt"),
            cell(attempt, "outcome"),
            cell(attempt, "worker_id"),
            local.cell(attempt, "started_at"),
            took(attempt),
            cell(attempt, "error"),
        ]);
    }
    let mut timeline = Table::new(&["AT", "EVENT", "ATTEMPT", "WORKER", "DETAIL"]);
    for entry in list(run, "timeline") {
        let mut row = vec![local.cell(entry, "at")];
        row.extend(["event", "attempt", "worker_id", "detail"].map(|field| cell(entry, field)));
        timeline.row(row);
    }
    for table in [attempts, timeline].iter().filter(|table| !table.is_empty()) {
        say(format_args!("\n{}", table.text()));
    }
}

/// A value as JSON, so that the text `"1"` differs from the number; nothing for null.
fn json_cell(value: &Value) -> String {
    if value.is_null() { String::new() } else { value.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digits_of_an_id_tell_its_time() {
        let id: RunId = RunId::scheduled(&TaskId::new("a").unwrap(), Timestamp::from_millis(1_800_000_000_123));
        for digits in [6, 8, 11, 12, 20] {
            let digits = prefix_of(&id.trace_id()[..digits]).unwrap();
            let (first, last) = span_of(&digits).unwrap();
            assert!((first..=last).contains(&1_800_000_000_123), "{digits}");
        }
        assert_eq!(span_of("000000000001"), Some((1, 1)));
        assert_eq!(span_of("ffffff"), None);
    }

    #[test]
    fn what_cannot_begin_an_id_is_no_prefix() {
        for query in ["abc", "report.daily", "01999", "0199aa6g", ""] {
            assert_eq!(prefix_of(query), None, "{query}");
        }
        assert_eq!(prefix_of("0199AA6E-5b").as_deref(), Some("0199aa6e5b"));
    }
}
