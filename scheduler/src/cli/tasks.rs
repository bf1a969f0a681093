//! `ax apply`, `ax task …`, `ax enqueue`.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use reqwest::Method;
use serde_json::{Value, json};

use super::client::{Client, ClientArgs, delay_ms, json_argument, parse, raw};
use super::output::{local, more, table, text};
use super::{Failure, USAGE, say};
use crate::config::Layer;

/// `ax apply`.
#[derive(Debug, Args)]
#[command(
    after_help = "A document is one task, an array of tasks or {\"tasks\": […]}. It is applied whole or not at all; \
the .json files of a folder are one document.\n\nExamples:\n  ax apply -f tasks/\n  ax apply -f report.json --dry-run\n  \
jq … | ax apply -f -"
)]
pub(super) struct ApplyArgs {
    /// A file, a folder of .json files, or - for standard input
    #[arg(short, long, value_name = "FILE|DIR|-")]
    file: PathBuf,
    /// Only tell what would change
    #[arg(long)]
    dry_run: bool,
    /// Refuse definitions that leave timeout, retries or dedup window to their defaults
    #[arg(long)]
    strict: bool,
    #[command(flatten)]
    client: ClientArgs,
}

pub(super) async fn apply(args: ApplyArgs, file: &Layer) -> Result<(), Failure> {
    let (document, sources) = read_document(&args.file)?;
    let client = Client::new(&args.client, file)?;
    let mut query = Vec::new();
    if args.dry_run {
        query.push(("dry_run", "true".to_owned()));
    }
    if args.strict {
        query.push(("strict", "true".to_owned()));
    }
    let answer =
        client.ask(Method::POST, "/apply", &query, Some(&document)).await.map_err(|e| name_files(e, &sources))?;
    if args.client.json {
        raw(&answer);
        return Ok(());
    }
    let answer = parse(&answer)?;
    for (field, word) in [("created", "created"), ("updated", "updated"), ("deleted", "deleted")] {
        for id in answer[field].as_array().into_iter().flatten() {
            say(format_args!("{word:<10} {}", id.as_str().unwrap_or_default()));
        }
    }
    let unchanged = answer["unchanged"].as_array().map_or(0, Vec::len);
    if unchanged > 0 {
        say(format_args!("unchanged  {unchanged}"));
    }
    for warning in answer["warnings"].as_array().into_iter().flatten() {
        let field = text(warning, "field");
        say(format_args!(
            "warning    {}{}{}",
            field,
            if field.is_empty() { "" } else { ": " },
            text(warning, "message")
        ));
    }
    if args.dry_run {
        say("(dry run: nothing was changed)");
    }
    Ok(())
}

/// Says which file `tasks[7]` is in.
fn name_files(failure: Failure, sources: &[(usize, PathBuf)]) -> Failure {
    if sources.len() < 2 {
        return failure;
    }
    let told: Vec<String> = failure
        .error
        .to_string()
        .lines()
        .map(|line| {
            let index =
                line.trim_start().strip_prefix("tasks[").and_then(|r| r.split(']').next()?.parse::<usize>().ok());
            match index.and_then(|i| sources.iter().rev().find(|(first, _)| *first <= i)) {
                Some((_, path)) => format!("{line} ({})", path.display()),
                None => line.to_owned(),
            }
        })
        .collect();
    Failure { code: failure.code, error: anyhow::anyhow!("{}", told.join("\n")) }
}

/// The document, and at which task each file begins.
fn read_document(path: &Path) -> Result<(Value, Vec<(usize, PathBuf)>), Failure> {
    let broken = |error: anyhow::Error| Failure { code: super::REFUSED, error };
    let parse = |path: &Path, content: &str| -> Result<Value, Failure> {
        serde_json::from_str(content)
            .with_context(|| format!("{} is not a JSON document", path.display()))
            .map_err(broken)
    };
    if path == Path::new("-") {
        let mut content = String::new();
        std::io::stdin().read_to_string(&mut content).context("read standard input").map_err(broken)?;
        return Ok((parse(Path::new("standard input"), &content)?, Vec::new()));
    }
    let read = |path: &Path| {
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display())).map_err(broken)
    };
    if !path.is_dir() {
        return Ok((parse(path, &read(path)?)?, vec![(0, path.to_owned())]));
    }
    let entries = std::fs::read_dir(path).with_context(|| format!("cannot read {}", path.display())).map_err(broken)?;
    let mut files: Vec<PathBuf> = entries
        .flatten()
        .map(|e| e.path())
        .filter(|p| p.extension().is_some_and(|e| e == "json") && p.is_file())
        .collect();
    files.sort();
    if files.is_empty() {
        return Err(broken(anyhow::anyhow!("{} has no .json files", path.display())));
    }
    let (mut tasks, mut sources) = (Vec::new(), Vec::new());
    for file in files {
        let document = parse(&file, &read(&file)?)?;
        let found = ax_shared::definition::tasks_of_document(&document)
            .map_err(|e| broken(anyhow::anyhow!("{}: {}", file.display(), e.message)))?;
        sources.push((tasks.len(), file));
        tasks.extend(found.into_iter().map(|(_, task)| task.clone()));
    }
    Ok((json!({ "tasks": tasks }), sources))
}

/// `ax task …`.
#[derive(Debug, Subcommand)]
pub(super) enum TaskCommand {
    /// List tasks
    Ls {
        /// Of this executor group
        #[arg(long)]
        group: Option<String>,
        /// enabled or paused
        #[arg(long)]
        status: Option<String>,
        /// Having this label: NAME or NAME=VALUE
        #[arg(long)]
        label: Option<String>,
        /// Text in id or name
        #[arg(long, value_name = "TEXT")]
        q: Option<String>,
        /// At most this many, up to 500
        #[arg(long, default_value_t = 50)]
        limit: u32,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Show a task: its definition, next fire, last run
    Get(TaskArgs),
    /// Delete a task; what is queued is cancelled, the history stays
    Rm(TaskArgs),
    /// Stop executing its fires; they are recorded as skipped
    Pause(TaskArgs),
    /// Go on
    Resume(TaskArgs),
    /// Run it by hand
    #[command(after_help = "Examples:\n  ax task trigger report.daily\n  ax task trigger report.daily --payload \
'{\"day\": \"2026-11-30\"}' --delay 5m\n  ax task trigger report.daily --payload @day.json --key 2026-11-30")]
    Trigger {
        /// The task
        task_id: String,
        /// Payload instead of the task's: JSON, or @FILE
        #[arg(long, value_name = "JSON|@FILE")]
        payload: Option<String>,
        /// Run it that much later, e.g. 90s, 5m, 36h, 30d
        #[arg(long, value_parser = delay_ms, value_name = "DURATION")]
        delay: Option<u64>,
        /// Idempotency key: within the task's dedup window the same key means the same run
        #[arg(long)]
        key: Option<String>,
        /// Why, for the history
        #[arg(long)]
        reason: Option<String>,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// A command on one task.
#[derive(Debug, Args)]
pub(super) struct TaskArgs {
    /// The task
    task_id: String,
    #[command(flatten)]
    client: ClientArgs,
}

pub(super) async fn task(command: TaskCommand, file: &Layer) -> Result<(), Failure> {
    match command {
        TaskCommand::Ls { group, status, label, q, limit, client } => {
            let mut query = vec![("limit", limit.to_string())];
            for (key, value) in [("group", group), ("status", status), ("label", label), ("q", q)] {
                query.extend(value.map(|v| (key, v)));
            }
            let answer = Client::new(&client, file)?.get("/tasks", &query).await?;
            if client.json {
                raw(&answer);
                return Ok(());
            }
            let answer = parse(&answer)?;
            let rows: Vec<_> = answer["tasks"].as_array().into_iter().flatten().map(task_row).collect();
            table(&["TASK", "SCHEDULE", "GROUP", "STATUS", "NEXT FIRE", "LAST RUN"], &rows);
            more(&answer);
            Ok(())
        }
        TaskCommand::Get(args) => {
            let answer = Client::new(&args.client, file)?.get(&path(&args.task_id, ""), &[]).await?;
            show(&answer, args.client.json)
        }
        TaskCommand::Rm(args) => {
            let client = Client::new(&args.client, file)?;
            client.ask(Method::DELETE, &path(&args.task_id, ""), &[], None).await?;
            if !args.client.json {
                say(format_args!("deleted {}", args.task_id));
            }
            Ok(())
        }
        TaskCommand::Pause(args) => {
            let answer = Client::new(&args.client, file)?.post(&path(&args.task_id, "/pause"), &json!({})).await?;
            told(&answer, args.client.json, &format!("paused {}", args.task_id));
            Ok(())
        }
        TaskCommand::Resume(args) => {
            let answer = Client::new(&args.client, file)?.post(&path(&args.task_id, "/resume"), &json!({})).await?;
            told(&answer, args.client.json, &format!("resumed {}", args.task_id));
            if !args.client.json {
                let answer = parse(&answer)?;
                if let Some(count) = answer["skipped"]["count"].as_u64() {
                    say(format_args!("  {count} instants passed meanwhile and are not made up"));
                }
                if let Some(next) = answer["starts"].as_array().and_then(|s| s.first()) {
                    say(format_args!("  next fire {}", local(next)));
                }
            }
            Ok(())
        }
        TaskCommand::Trigger { task_id, payload, delay, key, reason, client } => {
            let mut body = json!({});
            if let Some(payload) = payload {
                body["payload"] = json_argument("payload", &payload)?;
            }
            for (field, value) in [("idempotency_key", key), ("reason", reason)] {
                if let Some(value) = value {
                    body[field] = value.into();
                }
            }
            if let Some(delay) = delay {
                body["delay_ms"] = delay.into();
            }
            let answer = Client::new(&client, file)?.post(&path(&task_id, "/trigger"), &body).await?;
            if client.json {
                raw(&answer);
                return Ok(());
            }
            let answer = parse(&answer)?;
            let known = if answer["created"] == false { " (known key: no new run)" } else { "" };
            say(format_args!("{}{known}", text(&answer, "run_id")));
            Ok(())
        }
    }
}

fn path(task_id: &str, rest: &str) -> String {
    format!("/tasks/{}{rest}", super::client::percent(task_id))
}

fn told(answer: &str, json: bool, line: &str) {
    if json {
        raw(answer);
    } else {
        say(line);
    }
}

/// Prints an object, one field a line; what is nested as JSON.
pub(super) fn show(answer: &str, json: bool) -> Result<(), Failure> {
    if json {
        raw(answer);
        return Ok(());
    }
    if let Value::Object(fields) = parse(answer)? {
        for (key, value) in fields {
            let shown = match &value {
                Value::String(s) if key.ends_with("_at") || key.ends_with("_time") => {
                    format!("{s} ({})", local(&value))
                }
                Value::String(s) => s.clone(),
                Value::Null => continue,
                other => other.to_string(),
            };
            say(format_args!("{key:<22} {shown}"));
        }
    }
    Ok(())
}

fn task_row(task: &Value) -> Vec<String> {
    let schedule = match (&task["cron_expr"], &task["delay_seconds"]) {
        (Value::String(expr), _) if expr.contains(' ') && !expr.starts_with("EVERY") => {
            format!("{expr} {}", text(task, "timezone"))
        }
        (Value::String(expr), _) => expr.clone(),
        (_, Value::Number(n)) => format!("once after {n} s"),
        _ => "by hand".into(),
    };
    let last = &task["last_run"];
    let last = if last.is_null() {
        String::new()
    } else {
        format!("{} {}", text(last, "state"), local(&last["trigger_time"]))
    };
    vec![
        text(task, "task_id"),
        schedule,
        text(task, "executor_group"),
        text(task, "status"),
        local(&task["next_fire_at"]),
        last,
    ]
}

/// `ax enqueue`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  ax enqueue mail.send --payload '{\"to\": \"a@example.com\"}'\n  ax enqueue -f runs.json   \
(an array of {\"task_id\", \"payload\"?, \"delay_ms\"?, \"idempotency_key\"?}, all or none)"
)]
pub(super) struct EnqueueArgs {
    /// The task of one run
    #[arg(required_unless_present = "file", conflicts_with = "file")]
    task_id: Option<String>,
    /// Payload instead of the task's: JSON, or @FILE
    #[arg(long, value_name = "JSON|@FILE", conflicts_with = "file")]
    payload: Option<String>,
    /// Run it that much later, e.g. 90s, 5m, 36h, 30d
    #[arg(long, value_parser = delay_ms, value_name = "DURATION", conflicts_with = "file")]
    delay: Option<u64>,
    /// Idempotency key
    #[arg(long, conflicts_with = "file")]
    key: Option<String>,
    /// Many runs: a file with an array or {"runs": […]}, - for standard input
    #[arg(short, long, value_name = "FILE|-")]
    file: Option<PathBuf>,
    #[command(flatten)]
    client: ClientArgs,
}

pub(super) async fn enqueue(args: EnqueueArgs, file: &Layer) -> Result<(), Failure> {
    let body = match (&args.file, &args.task_id) {
        (Some(path), _) => match read_document(path)?.0 {
            Value::Array(runs) => json!({ "runs": runs }),
            other => other,
        },
        (None, Some(task_id)) => {
            let mut run = json!({ "task_id": task_id });
            if let Some(payload) = &args.payload {
                run["payload"] = json_argument("payload", payload)?;
            }
            if let Some(delay) = args.delay {
                run["delay_ms"] = delay.into();
            }
            if let Some(key) = &args.key {
                run["idempotency_key"] = key.clone().into();
            }
            json!({ "runs": [run] })
        }
        (None, None) => {
            return Err(Failure { code: USAGE, error: anyhow::anyhow!("name a task or a file") });
        }
    };
    let answer = Client::new(&args.client, file)?.post("/enqueue", &body).await?;
    if args.client.json {
        raw(&answer);
        return Ok(());
    }
    for run in parse(&answer)?["runs"].as_array().into_iter().flatten() {
        let known = if run["created"] == false { " (known key: no new run)" } else { "" };
        say(format_args!("{}{known}", text(run, "run_id")));
    }
    Ok(())
}
