//! `ax apply`: definitions out of files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ax_shared::FieldError;
use clap::{ArgGroup, Args};
use reqwest::Method;
use serde_json::value::RawValue;

use super::client::{Client, ClientArgs, Refusal, usage};
use super::input::{name_of, read_json};
use super::output::{Table, list, printable, shown};
use super::{Failure, REFUSED};
use crate::config::Layer;

/// `ax apply`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true), after_help = "Examples:
  ax apply -f report.json
  ax apply report.json
  ax apply -f tasks/ --dry-run
  generate-tasks | ax apply -f - --strict

A file holds one task, an array of tasks, or {\"tasks\": [...]}. Of a folder, all *.json are taken in the order of their
names as one document. It is applied whole or not at all.")]
pub(super) struct ApplyArgs {
    /// A file, a folder of *.json, or - for standard input
    #[arg(long, short = 'f', value_name = "FILE|DIR|-", group = "what")]
    file: Option<PathBuf>,
    /// The same without -f
    #[arg(value_name = "FILE|DIR|-", group = "what")]
    path: Option<PathBuf>,
    /// Only tell what would be done
    #[arg(long)]
    dry_run: bool,
    /// Refuse definitions that leave timeout, retries or dedup window to their defaults
    #[arg(long)]
    strict: bool,
    #[command(flatten)]
    client: ClientArgs,
}

/// A document, and where each of its tasks was written.
#[derive(Debug)]
struct Document {
    body: String,
    origin: Origin,
}

#[derive(Debug)]
enum Origin {
    /// One file, sent as it is.
    One(String),
    /// The i-th of `tasks` is this place of this file.
    Many(Vec<(String, String)>),
}

pub(super) async fn apply(args: ApplyArgs, file: Layer) -> Result<(), Failure> {
    let client = Client::new(&args.client, &file)?;
    let Some(path) = args.file.or(args.path) else { return Err(usage("nothing to apply: name a file with -f")) };
    let Document { body, origin } = read(&path).await?;
    let mut query = Vec::new();
    if args.dry_run {
        query.push(("dry_run", true.to_string()));
    }
    if args.strict {
        query.push(("strict", true.to_string()));
    }
    let answer = client.call(Method::POST, &["apply"], &query, Some(body)).await.map_err(|failure| {
        let code = failure.code;
        match failure.error.downcast::<Refusal>() {
            Ok(refusal) => Failure { code, error: origin.named(refusal).into() },
            Err(error) => Failure { code, error },
        }
    })?;
    answer.show(|report| {
        let mut table = Table::new(&[if args.dry_run { "WOULD BE" } else { "DONE" }, "TASK"]);
        for what in ["created", "updated", "unchanged", "deleted"] {
            for id in list(report, what) {
                table.row([what.to_owned(), shown(id)]);
            }
        }
        table.print("the document holds no task");
        for warning in list(report, "warnings") {
            if let Ok(warning) = serde_json::from_value::<FieldError>(warning.clone()) {
                let word = if warning.rule == "consumer_added" { "note" } else { "warning" };
                match origin.place(&warning.field).as_str() {
                    "" => warn(word, &warning.message),
                    place => warn(word, &format!("{place}: {}", warning.message)),
                }
            }
        }
    })
}

fn warn(word: &str, text: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "{word}: {}", printable(text));
}

impl Origin {
    /// A refusal that names files.
    fn named(&self, mut refusal: Refusal) -> Refusal {
        if refusal.errors.is_empty()
            && let Self::One(file) = self
        {
            refusal.errors.push(FieldError::new(file.clone(), "", "was not applied"));
            return refusal;
        }
        let first = refusal.errors.first().map(|error| (error.field.clone(), self.place(&error.field)));
        // The place in a merged document says nothing to those who wrote the files.
        if let Some((field, place)) = first
            && let Some(rest) = refusal.detail.strip_prefix(&field).filter(|rest| rest.starts_with(": "))
        {
            refusal.detail = format!("{place}{}", self.in_words(rest));
        }
        for error in &mut refusal.errors {
            error.field = self.place(&error.field);
            error.message = self.in_words(&error.message);
        }
        refusal
    }

    /// A sentence with the tasks that it names told where they were written.
    fn in_words(&self, text: &str) -> String {
        let Self::Many(_) = self else { return text.to_owned() };
        let mut pieces = text.split("tasks[");
        let mut words = pieces.next().unwrap_or_default().to_owned();
        for piece in pieces {
            match piece.split_once(']').filter(|(index, _)| index.parse::<usize>().is_ok()) {
                Some((index, rest)) => words.extend([&self.place(&format!("tasks[{index}]")), rest]),
                None => words.extend(["tasks[", piece]),
            }
        }
        words
    }

    /// A field of the document as `file: field` where it was written.
    fn place(&self, field: &str) -> String {
        let joined = |file: &str, field: &str| {
            if field.is_empty() { file.to_owned() } else { format!("{file}: {field}") }
        };
        match self {
            Self::One(file) => joined(file, field),
            Self::Many(places) => {
                let found = field.strip_prefix("tasks[").and_then(|rest| {
                    let (index, rest) = rest.split_once(']')?;
                    let (file, at) = places.get(index.parse::<usize>().ok()?)?;
                    let rest = if at.is_empty() { rest.trim_start_matches('.') } else { rest };
                    Some(joined(file, &format!("{at}{rest}")))
                });
                found.unwrap_or_else(|| field.to_owned())
            }
        }
    }
}

/// Reads a file, standard input, or every `*.json` of a folder.
async fn read(path: &Path) -> Result<Document, Failure> {
    if path == Path::new("-") || !path.is_dir() {
        let body = read_json(path).await?;
        return Ok(Document { body: body.get().to_owned(), origin: Origin::One(name_of(path)) });
    }
    let refused = |text: String| Failure { code: REFUSED, error: anyhow::anyhow!("{text}") };
    let files = files_of(path).map_err(|e| refused(format!("{}: cannot be read: {e}", name_of(path))))?;
    if files.is_empty() {
        return Err(refused(format!("{}: holds no *.json", name_of(path))));
    }
    let (mut tasks, mut places, mut broken) = (Vec::new(), Vec::new(), Vec::new());
    for file in files {
        match read_json(&file).await.and_then(|document| tasks_of(&file, &document)) {
            Ok(found) => {
                for (place, task) in found {
                    places.push((name_of(&file), place));
                    tasks.push(task);
                }
            }
            Err(failure) => broken.push(failure.error.to_string()),
        }
    }
    if !broken.is_empty() {
        return Err(refused(broken.join("\n  ")));
    }
    let body = serde_json::to_string(&BTreeMap::from([("tasks", tasks)]))?;
    Ok(Document { body, origin: Origin::Many(places) })
}

/// The `*.json` of a folder by name, hidden ones and folders left out.
fn files_of(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if !hidden && path.extension().is_some_and(|extension| extension == "json") && !path.is_dir() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The tasks of one file with their places in it. What a task may hold is the server's to say.
fn tasks_of(file: &Path, document: &RawValue) -> Result<Vec<(String, Box<RawValue>)>, Failure> {
    let refused = |text: &str| Failure { code: REFUSED, error: anyhow::anyhow!("{}: {text}", name_of(file)) };
    let listed = |at: &str, tasks: Vec<Box<RawValue>>| -> Vec<(String, Box<RawValue>)> {
        tasks.into_iter().enumerate().map(|(i, task)| (format!("{at}[{i}]"), task)).collect()
    };
    if let Ok(tasks) = serde_json::from_str::<Vec<Box<RawValue>>>(document.get()) {
        return Ok(listed("", tasks));
    }
    let Ok(mut object) = serde_json::from_str::<BTreeMap<String, Box<RawValue>>>(document.get()) else {
        return Err(refused("must be a task, an array of tasks or {\"tasks\": [...]}"));
    };
    let Some(tasks) = object.remove("tasks") else { return Ok(vec![(String::new(), document.to_owned())]) };
    if let Some(other) = object.keys().next() {
        return Err(refused(&format!("{other}: a document with \"tasks\" holds nothing else beside it")));
    }
    let tasks = serde_json::from_str(tasks.get()).map_err(|_| refused("tasks: must be an array"))?;
    Ok(listed("tasks", tasks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_told_where_it_was_written() {
        let places = [("a.json", ""), ("b.json", "[1]"), ("c.json", "tasks[0]")];
        let many = Origin::Many(places.map(|(file, at)| (file.to_owned(), at.to_owned())).to_vec());
        assert_eq!(many.place("tasks[0].timeout_ms"), "a.json: timeout_ms");
        assert_eq!(many.place("tasks[0]"), "a.json");
        assert_eq!(many.place("tasks[1].task_id"), "b.json: [1].task_id");
        assert_eq!(many.place("tasks[2].labels.x"), "c.json: tasks[0].labels.x");
        assert_eq!(many.place("tasks[9].x"), "tasks[9].x");
        assert_eq!(many.place(""), "");
        assert_eq!(many.in_words("x is at tasks[1] and tasks[x]"), "x is at b.json: [1] and tasks[x]");
        assert_eq!(Origin::One("d.json".into()).place("tasks[3]"), "d.json: tasks[3]");
    }
}
