//! `ax task`, `ax enqueue`: definitions, and runs asked for by hand.

use std::collections::BTreeMap;
use std::path::PathBuf;

use ax_shared::TaskId;
use clap::{Args, Subcommand};
use reqwest::Method;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::client::{Client, ClientArgs, usage};
use super::input::{self, name_of, read_json};
use super::output::{Local, Table, cell, list, parse_span, print_pairs, printable, tell_more};
use super::{Failure, say};
use crate::config::Layer;

/// `ax task`.
#[derive(Debug, Args)]
pub(super) struct TaskArgs {
    #[command(subcommand)]
    command: TaskCommand,
    #[command(flatten)]
    client: ClientArgs,
}

#[derive(Debug, Subcommand)]
enum TaskCommand {
    /// List tasks
    #[command(
        visible_alias = "list",
        after_help = "Examples:
  ax task ls
  ax task ls --group data-sync --status paused
  ax task ls --label team=data --search order --json"
    )]
    Ls(ListArgs),
    /// Show a task: its definition, its next fire, its last run
    #[command(after_help = "Examples:
  ax task get payment.check_timeout
  ax task get payment.check_timeout --json")]
    Get(One),
    /// Remove a task; what is queued is cancelled, its history stays
    #[command(
        visible_alias = "delete",
        after_help = "Example:
  ax task rm report.daily"
    )]
    Rm(One),
    /// Stop a task from firing
    #[command(after_help = "Example:
  ax task pause report.daily")]
    Pause(One),
    /// Let a paused task fire again; tells what it will start
    #[command(after_help = "Example:
  ax task resume report.daily")]
    Resume(One),
    /// Start a run now, or after a delay
    #[command(after_help = "Examples:
  ax task trigger report.daily
  ax task trigger report.daily --payload '{\"to\": \"me@example.com\"}' --reason \"asked for by finance\"
  ax task trigger order.close --payload @order.json --delay 30m --key order-4711")]
    Trigger(TriggerArgs),
}

#[derive(Debug, Args)]
struct ListArgs {
    /// Only of this executor group
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,
    /// Only enabled or only paused ones
    #[arg(long, value_name = "STATUS", value_parser = ["enabled", "paused"])]
    status: Option<String>,
    /// Only with this label: NAME or NAME=VALUE
    #[arg(long, value_name = "LABEL")]
    label: Option<String>,
    /// Only with this in id or name
    #[arg(long, short = 'q', value_name = "TEXT")]
    search: Option<String>,
    /// At most so many [default: 50]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=500))]
    limit: Option<u64>,
    /// Where the page before ended
    #[arg(long, value_name = "CURSOR")]
    cursor: Option<String>,
}

#[derive(Debug, Args)]
struct One {
    /// The task's id
    #[arg(value_name = "TASK", value_parser = TaskId::new)]
    task: TaskId,
}

#[derive(Debug, Args)]
struct TriggerArgs {
    /// The task's id
    #[arg(value_name = "TASK", value_parser = TaskId::new)]
    task: TaskId,
    #[command(flatten)]
    order: OrderArgs,
    /// Why, for the history
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
}

/// What a run is asked for with.
#[derive(Debug, Args)]
struct OrderArgs {
    /// Instead of the task's payload: JSON, or @FILE (@- = standard input)
    #[arg(long, value_name = "JSON|@FILE", allow_hyphen_values = true)]
    payload: Option<String>,
    /// Not before this time has passed, e.g. 90s, 1h30m, 2d
    #[arg(long, value_name = "DURATION", value_parser = parse_span)]
    delay: Option<u64>,
    /// Idempotency key: the same one within the task's window means the same run
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
}

/// `ax enqueue`.
#[derive(Debug, Args)]
#[command(
    override_usage = "ax enqueue [OPTIONS] <TASK>\n       ax enqueue [OPTIONS] -f <FILE|->",
    after_help = "Examples:
  ax enqueue order.close --payload '{\"order\": 4711}' --delay 30m --key order-4711
  ax enqueue -f runs.json
  generate-runs | ax enqueue -f -

A file holds an array of {\"task_id\", \"payload\"?, \"delay_ms\"?, \"idempotency_key\"?}, or {\"runs\": [...]}; up to 10,000, all
or none. Enqueued runs are not bound by the task's overlap policy."
)]
pub(super) struct EnqueueArgs {
    /// The task's id
    #[arg(value_name = "TASK", value_parser = TaskId::new, required_unless_present = "file", conflicts_with = "file")]
    task: Option<TaskId>,
    #[command(flatten)]
    order: OrderArgs,
    /// Many runs out of a file, or - for standard input
    #[arg(long, short = 'f', value_name = "FILE|-", conflicts_with_all = ["payload", "delay", "key"])]
    file: Option<PathBuf>,
    #[command(flatten)]
    client: ClientArgs,
}

/// One run, as the API takes it.
#[derive(Debug, Serialize)]
struct Order {
    #[serde(skip_serializing_if = "Option::is_none")]
    task_id: Option<TaskId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delay_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    idempotency_key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

impl OrderArgs {
    async fn read(self, task_id: Option<TaskId>, reason: Option<String>) -> Result<Order, Failure> {
        let payload = input::payload(self.payload.as_deref()).await?;
        Ok(Order { task_id, payload, delay_ms: self.delay, idempotency_key: self.key, reason })
    }
}

pub(super) async fn task(args: TaskArgs, file: Layer) -> Result<(), Failure> {
    let client = Client::new(&args.client, &file)?;
    match args.command {
        TaskCommand::Ls(args) => ls(&client, args).await,
        TaskCommand::Get(One { task }) => client.get(&["tasks", task.as_str()], &[]).await?.show(print_task),
        TaskCommand::Rm(One { task }) => {
            let answer = client.call(Method::DELETE, &["tasks", task.as_str()], &[], None).await?;
            answer.show(|_| say(format_args!("removed {task}")))
        }
        TaskCommand::Pause(One { task }) => {
            let answer = client.post(&["tasks", task.as_str(), "pause"], String::new()).await?;
            answer.show(|_| say(format_args!("paused {task}")))
        }
        TaskCommand::Resume(One { task }) => {
            let answer = client.post(&["tasks", task.as_str(), "resume"], String::new()).await?;
            answer.show(print_resumed)
        }
        TaskCommand::Trigger(args) => {
            let order = args.order.read(None, args.reason).await?;
            let body = serde_json::to_string(&order)?;
            let answer = client.post(&["tasks", args.task.as_str(), "trigger"], body).await?;
            answer.show(print_requested)
        }
    }
}

async fn ls(client: &Client, args: ListArgs) -> Result<(), Failure> {
    let mut query: Vec<(&str, String)> = Vec::new();
    query.extend(args.group.map(|group| ("group", group)));
    query.extend(args.status.map(|status| ("status", status)));
    query.extend(args.label.map(|label| ("label", label)));
    query.extend(args.search.map(|text| ("q", text)));
    query.extend(args.limit.map(|limit| ("limit", limit.to_string())));
    query.extend(args.cursor.map(|cursor| ("cursor", cursor)));
    client.get(&["tasks"], &query).await?.show(|page| {
        let local = Local::new();
        let mut table = Table::new(&["TASK", "NAME", "STATUS", "GROUP", "SCHEDULE", "ZONE", "NEXT FIRE", "LAST RUN"]);
        for task in list(page, "tasks") {
            let name = cell(task, "name");
            table.row([
                cell(task, "task_id"),
                if name == cell(task, "task_id") { String::new() } else { name },
                cell(task, "status"),
                cell(task, "executor_group"),
                schedule_of(task),
                cell(task, "timezone"),
                local.cell(task, "next_fire_at"),
                cell(&task["last_run"], "state"),
            ]);
        }
        table.print("no tasks");
        tell_more(page);
    })
}

/// When a task fires, in a word.
fn schedule_of(task: &Value) -> String {
    match (&task["cron_expr"], &task["delay_seconds"]) {
        (Value::String(expr), _) => expr.clone(),
        (_, Value::Number(seconds)) => format!("once after {seconds}s"),
        _ => "by hand".to_owned(),
    }
}

/// What people look for first; the rest follows by name.
const FIRST: [&str; 15] = [
    "task_id",
    "name",
    "description",
    "status",
    "cron_expr",
    "delay_seconds",
    "timezone",
    "next_fire_at",
    "executor_group",
    "queue_label",
    "handler",
    "payload",
    "timeout_ms",
    "max_retry",
    "retry_backoff",
];

fn print_task(task: &Value) {
    let local = Local::new();
    let told = |field: &str| match field {
        "next_fire_at" => match cell(task, field).parse() {
            Ok(at) => format!("{}, {}", local.both(task, field), local.distance(at)),
            Err(_) => cell(task, field),
        },
        // Every instant is named like one.
        field if field.ends_with("_at") => local.both(task, field),
        field => cell(task, field),
    };
    let mut pairs: Vec<(&str, String)> = FIRST.iter().map(|field| (*field, told(field))).collect();
    let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty) || *value == serde_json::json!({});
    for (field, value) in task.as_object().into_iter().flatten() {
        if field != "last_run" && !FIRST.contains(&field.as_str()) && !empty(value) {
            pairs.push((field, told(field)));
        }
    }
    let last = &task["last_run"];
    if last.is_object() {
        let at = local.both(last, "trigger_time");
        let told = [cell(last, "run_id"), cell(last, "state"), at, cell(last, "reason")];
        pairs.push(("last_run", told.join(" ").trim_end().to_owned()));
    }
    print_pairs(&pairs);
}

fn print_resumed(answer: &Value) {
    let local = Local::new();
    say(format_args!("resumed {}", printable(&cell(answer, "task_id"))));
    let skipped = &answer["skipped"];
    if skipped.is_object() {
        let [from, to] = ["from", "to"].map(|field| printable(&local.cell(skipped, field)));
        say(format_args!("not made up: {} from {from} to {to}", printable(&cell(skipped, "count"))));
    }
    let starts: Vec<String> = list(answer, "starts").iter().map(|at| printable(&local.shown(at))).collect();
    if !starts.is_empty() {
        say(format_args!("will start: {}", starts.join(", ")));
    }
}

fn print_requested(run: &Value) {
    let known = if run["created"] == false { " (this key was known: no new run)" } else { "" };
    say(format_args!("run {}{known}", printable(&cell(run, "run_id"))));
}

pub(super) async fn enqueue(args: EnqueueArgs, file: Layer) -> Result<(), Failure> {
    let client = Client::new(&args.client, &file)?;
    let body = match args.file {
        Some(path) => {
            let document = read_json(&path).await?;
            match document.get().as_bytes().first() {
                Some(b'[') => format!("{{\"runs\":{}}}", document.get()),
                Some(b'{') if is_one(&document) => format!("{{\"runs\":[{}]}}", document.get()),
                Some(b'{') => document.get().to_owned(),
                _ => {
                    let name = name_of(&path);
                    return Err(usage(format_args!("{name}: must be an array of runs or {{\"runs\": [...]}}")));
                }
            }
        }
        None => {
            let order = args.order.read(args.task, None).await?;
            serde_json::to_string(&BTreeMap::from([("runs", [order])]))?
        }
    };
    client.post(&["enqueue"], body).await?.show(|answer| list(answer, "runs").iter().for_each(print_requested))
}

/// Whether an object is one run rather than a list of them.
fn is_one(document: &RawValue) -> bool {
    serde_json::from_str::<BTreeMap<String, Box<RawValue>>>(document.get())
        .is_ok_and(|object| object.contains_key("task_id") && !object.contains_key("runs"))
}
