//! `ax run …`, `ax upcoming`, `ax nodes`.

use clap::{Args, Subcommand};
use serde_json::Value;

use super::client::{Client, ClientArgs, parse, raw};
use super::output::{local, more, table, text};
use super::{Failure, REFUSED, say};
use crate::config::Layer;

/// `ax run …`.
#[derive(Debug, Subcommand)]
pub(super) enum RunCommand {
    /// List runs, newest trigger time first
    Ls {
        /// Of this task
        #[arg(long, value_name = "TASK")]
        task: Option<String>,
        /// Of this executor group
        #[arg(long)]
        group: Option<String>,
        /// In this state; may be repeated
        #[arg(long)]
        state: Vec<String>,
        /// Trigger time at or after, RFC 3339
        #[arg(long, value_name = "TIME")]
        from: Option<String>,
        /// Trigger time before, RFC 3339
        #[arg(long, value_name = "TIME")]
        to: Option<String>,
        /// At most this many, up to 500
        #[arg(long, default_value_t = 50)]
        limit: u32,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Show a run with its attempts, timeline and result
    Get {
        /// Run id or trace id
        run_id: String,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Find runs by run id, trace id, the beginning of either (among the newest 500 runs), or task id
    Find {
        /// What to look for
        query: String,
        #[command(flatten)]
        client: ClientArgs,
    },
}

pub(super) async fn run(command: RunCommand, file: &Layer) -> Result<(), Failure> {
    match command {
        RunCommand::Ls { task, group, state, from, to, limit, client } => {
            let mut query = vec![("limit", limit.to_string())];
            query.extend(state.into_iter().map(|s| ("state", s)));
            for (key, value) in [("task_id", task), ("group", group), ("from", from), ("to", to)] {
                query.extend(value.map(|v| (key, v)));
            }
            let answer = Client::new(&client, file)?.get("/runs", &query).await?;
            list(&answer, client.json)
        }
        RunCommand::Get { run_id, client } => {
            let answer = Client::new(&client, file)?.get(&path(&run_id), &[]).await?;
            one(&answer, client.json)
        }
        RunCommand::Find { query, client } => {
            let asked = Client::new(&client, file)?;
            let hex = query.replace('-', "");
            let is_hex = !hex.is_empty() && hex.len() <= 32 && hex.bytes().all(|b| b.is_ascii_hexdigit());
            if is_hex && hex.len() == 32 {
                match asked.get(&path(&query), &[]).await {
                    Ok(answer) => return one(&answer, client.json),
                    Err(e) if e.code != REFUSED => return Err(e),
                    Err(_) => {}
                }
            }
            let newest = |limit: &str| vec![("limit", limit.to_owned())];
            if is_hex && hex.len() >= 4 {
                let answer = asked.get("/runs", &newest("500")).await?;
                let mut answer = parse(&answer)?;
                if let Some(runs) = answer["runs"].as_array_mut() {
                    runs.retain(|r| text(r, "trace_id").starts_with(&hex.to_lowercase()));
                    if !runs.is_empty() {
                        answer.as_object_mut().map(|o| o.remove("next_cursor"));
                        return list(&answer.to_string(), client.json);
                    }
                }
            }
            let mut by_task = newest("50");
            by_task.push(("task_id", query.clone()));
            let answer = asked.get("/runs", &by_task).await?;
            if parse(&answer)?["runs"].as_array().is_none_or(Vec::is_empty) {
                return Err(Failure { code: REFUSED, error: anyhow::anyhow!("no run is found by {query:?}") });
            }
            list(&answer, client.json)
        }
    }
}

fn path(run_id: &str) -> String {
    format!("/runs/{}", super::client::percent(run_id))
}

fn list(answer: &str, json: bool) -> Result<(), Failure> {
    if json {
        raw(answer);
        return Ok(());
    }
    let answer = parse(answer)?;
    let rows: Vec<_> = answer["runs"].as_array().into_iter().flatten().map(row).collect();
    table(&["RUN", "TASK", "KIND", "TRIGGER TIME", "STATE", "ATTEMPT", "LATE", "REASON"], &rows);
    more(&answer);
    Ok(())
}

fn row(run: &Value) -> Vec<String> {
    let attempt = match run["attempt"].as_u64() {
        Some(n) if n > 0 => format!("{n}/{}", run["max_attempts"]),
        _ => String::new(),
    };
    let mut reason = text(run, "reason");
    if let Some(count) = run["count"].as_u64() {
        reason = format!("{count} instants to {}: {reason}", local(&run["to"]));
    }
    vec![
        text(run, "run_id"),
        text(run, "task_id"),
        text(run, "kind"),
        local(&run["trigger_time"]),
        text(run, "state"),
        attempt,
        run["lateness_ms"].as_i64().map(|ms| format!("{ms} ms")).unwrap_or_default(),
        reason.chars().take(60).collect(),
    ]
}

fn one(answer: &str, json: bool) -> Result<(), Failure> {
    if json {
        raw(answer);
        return Ok(());
    }
    let run = parse(answer)?;
    let mut plain = run.clone();
    if let Some(object) = plain.as_object_mut() {
        object.remove("attempts");
        object.remove("timeline");
    }
    super::tasks::show(&plain.to_string(), false)?;
    for attempt in run["attempts"].as_array().into_iter().flatten() {
        say(format_args!(
            "attempt {:<3} {:<10} {} → {}  {} {}",
            text(attempt, "attempt"),
            if attempt["outcome"].is_null() { "running".into() } else { text(attempt, "outcome") },
            local(&attempt["started_at"]),
            local(&attempt["finished_at"]),
            text(attempt, "worker_id"),
            text(attempt, "error"),
        ));
    }
    for entry in run["timeline"].as_array().into_iter().flatten() {
        say(format_args!("{}  {}", text(entry, "at"), text(entry, "event")));
    }
    Ok(())
}

/// `ax upcoming`.
#[derive(Debug, Args)]
pub(super) struct UpcomingArgs {
    /// From this instant on, RFC 3339 [default: now]
    #[arg(long, value_name = "TIME")]
    from: Option<String>,
    /// Up to this instant, RFC 3339 [default: 24 h later]
    #[arg(long, value_name = "TIME")]
    to: Option<String>,
    /// Of this executor group
    #[arg(long)]
    group: Option<String>,
    /// At most this many, up to 500
    #[arg(long, default_value_t = 50)]
    limit: u32,
    #[command(flatten)]
    client: ClientArgs,
}

pub(super) async fn upcoming(args: UpcomingArgs, file: &Layer) -> Result<(), Failure> {
    let mut query = vec![("limit", args.limit.to_string())];
    for (key, value) in [("from", args.from), ("to", args.to), ("group", args.group)] {
        query.extend(value.map(|v| (key, v)));
    }
    let answer = Client::new(&args.client, file)?.get("/upcoming", &query).await?;
    if args.client.json {
        raw(&answer);
        return Ok(());
    }
    let answer = parse(&answer)?;
    let fires = answer["fires"].as_array().into_iter().flatten();
    let rows: Vec<_> = fires.map(|f| vec![local(&f["at"]), text(f, "at"), text(f, "task_id")]).collect();
    table(&["LOCAL TIME", "UTC", "TASK"], &rows);
    Ok(())
}

/// `ax nodes`.
#[derive(Debug, Args)]
pub(super) struct NodesArgs {
    #[command(flatten)]
    client: ClientArgs,
}

pub(super) async fn nodes(args: NodesArgs, file: &Layer) -> Result<(), Failure> {
    let answer = Client::new(&args.client, file)?.get("/nodes", &[]).await?;
    if args.client.json {
        raw(&answer);
        return Ok(());
    }
    let nodes = parse(&answer)?;
    let rows: Vec<_> = nodes["nodes"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|n| {
            vec![
                text(n, "node_id"),
                if n["leader"] == true { "leader".into() } else { String::new() },
                text(n, "epoch"),
                format!("{:.1} ms", n["clock_offset_ms"].as_f64().unwrap_or_default()),
                text(n, "http_addr"),
                format!("{} on {}", text(n, "pid"), text(n, "host")),
                local(&n["started_at"]),
                text(n, "version"),
            ]
        })
        .collect();
    table(&["NODE", "ROLE", "EPOCH", "CLOCK OFFSET", "API", "PROCESS", "STARTED", "VERSION"], &rows);
    Ok(())
}
