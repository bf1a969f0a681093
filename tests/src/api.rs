//! A client of `/api/v1` for tests: returns what was answered, and adds nothing to it.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::{Deadline, eventually};

/// The states that a run does not leave by itself.
pub const FINAL: [&str; 7] = ["succeeded", "failed", "timed_out", "cancelled", "skipped", "expired", "blocked"];

/// A client of one node.
#[derive(Debug, Clone)]
pub struct Api {
    base: String,
    client: reqwest::Client,
}

/// One answer.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The status.
    pub status: StatusCode,
    /// The `Content-Type`, empty when there is none.
    pub content_type: String,
    /// The body as JSON; a JSON string when it is none.
    pub body: Value,
}

impl Answer {
    /// Returns the body of a successful answer.
    ///
    /// # Errors
    /// When the status is not 2xx; with the body.
    pub fn ok(self) -> Result<Value> {
        if self.status.is_success() {
            return Ok(self.body);
        }
        bail!("{}: {}", self.status, self.body)
    }

    /// Checks that this is a refusal with `status`, told as problem details, and returns its text.
    ///
    /// # Errors
    /// When the status is another one or the body is not RFC 9457.
    pub fn refused(self, status: u16) -> Result<String> {
        if self.status.as_u16() != status {
            bail!("expected {status}, got {}: {}", self.status, self.body);
        }
        if self.content_type != "application/problem+json" {
            bail!("problem details are application/problem+json, not {:?}: {}", self.content_type, self.body);
        }
        if self.body["status"] != status || !self.body["type"].is_string() || !self.body["title"].is_string() {
            bail!("not problem details: {}", self.body);
        }
        Ok(self.body.to_string())
    }
}

impl Api {
    /// Makes a client of the node at `url`, such as `http://127.0.0.1:8420`. Connects to nothing yet.
    #[must_use]
    pub fn new(url: &str) -> Self {
        Self { base: url.trim_end_matches('/').to_owned(), client: reqwest::Client::new() }
    }

    /// Calls `path` below `/api/v1` with a JSON body, or without one.
    ///
    /// # Errors
    /// When nobody answers. A refusal is an [`Answer`].
    pub async fn call(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Answer> {
        self.send(method, &format!("/api/v1{path}"), body.map(|body| body.to_string().into_bytes())).await
    }

    /// Calls a whole path with the bytes of `body`, which need not be JSON.
    ///
    /// # Errors
    /// When nobody answers. A refusal is an [`Answer`].
    pub async fn send(&self, method: Method, path: &str, body: Option<Vec<u8>>) -> Result<Answer> {
        let mut request = self.client.request(method, format!("{}{path}", self.base)).timeout(Duration::from_secs(30));
        if let Some(body) = body {
            request = request.header("Content-Type", "application/json").body(body);
        }
        let response = request.send().await.with_context(|| format!("call {path}"))?;
        let status = response.status();
        let content_type = response.headers().get("Content-Type").and_then(|value| value.to_str().ok());
        let content_type = content_type.unwrap_or_default().to_owned();
        let text = response.text().await.with_context(|| format!("read the answer of {path}"))?;
        let body = serde_json::from_str(&text).unwrap_or(Value::String(text));
        Ok(Answer { status, content_type, body })
    }

    /// Calls GET.
    ///
    /// # Errors
    /// When nobody answers.
    pub async fn get(&self, path: &str) -> Result<Answer> {
        self.call(Method::GET, path, None).await
    }

    /// Calls POST.
    ///
    /// # Errors
    /// When nobody answers.
    pub async fn post(&self, path: &str, body: &Value) -> Result<Answer> {
        self.call(Method::POST, path, Some(body)).await
    }

    /// Applies a document.
    ///
    /// # Errors
    /// When it is refused.
    pub async fn apply(&self, document: &Value) -> Result<Value> {
        self.post("/apply", document).await?.ok()
    }

    /// Puts one definition.
    ///
    /// # Errors
    /// When nobody answers.
    pub async fn put_task(&self, id: &str, definition: &Value) -> Result<Answer> {
        self.call(Method::PUT, &format!("/tasks/{}", encode(id)), Some(definition)).await
    }

    /// Gets one definition with what is known about it.
    ///
    /// # Errors
    /// When nobody answers.
    pub async fn task(&self, id: &str) -> Result<Answer> {
        self.get(&format!("/tasks/{}", encode(id))).await
    }

    /// Deletes a definition.
    ///
    /// # Errors
    /// When nobody answers.
    pub async fn delete_task(&self, id: &str) -> Result<Answer> {
        self.call(Method::DELETE, &format!("/tasks/{}", encode(id)), None).await
    }

    /// Triggers a task by hand.
    ///
    /// # Errors
    /// When nobody answers.
    pub async fn trigger(&self, id: &str, body: &Value) -> Result<Answer> {
        self.post(&format!("/tasks/{}/trigger", encode(id)), body).await
    }

    /// Enqueues runs; `runs` is the array.
    ///
    /// # Errors
    /// When it is refused.
    pub async fn enqueue(&self, runs: &Value) -> Result<Value> {
        self.post("/enqueue", &json!({ "runs": runs })).await?.ok()
    }

    /// Gets one run with attempts, timeline and result.
    ///
    /// # Errors
    /// When there is none.
    pub async fn run(&self, run_id: &str) -> Result<Value> {
        self.get(&format!("/runs/{}", encode(run_id))).await?.ok()
    }

    /// Gets all runs that match `query`, such as `task_id=a&state=failed`: every page.
    ///
    /// # Errors
    /// When a page is refused.
    pub async fn runs(&self, query: &str) -> Result<Vec<Value>> {
        self.all("/runs", "runs", query).await
    }

    /// Gets all of a paged list: every page, with 500 entries each.
    ///
    /// # Errors
    /// When a page is refused or lacks the list.
    pub async fn all(&self, path: &str, list: &str, query: &str) -> Result<Vec<Value>> {
        let mut all = Vec::new();
        let mut cursor = None::<String>;
        loop {
            let mut page = format!("{path}?limit=500&{query}");
            if let Some(cursor) = &cursor {
                page.push_str(&format!("&cursor={}", encode(cursor)));
            }
            let mut body = self.get(&page).await?.ok()?;
            cursor = body["next_cursor"].as_str().map(str::to_owned);
            match body[list].take() {
                Value::Array(items) => all.extend(items),
                other => bail!("{path} has no list {list}: {other}"),
            }
            if cursor.is_none() {
                return Ok(all);
            }
        }
    }

    /// Waits until a run is in one of `states`, and returns it.
    ///
    /// # Errors
    /// When it is not by the deadline; with the run as seen last.
    pub async fn run_reaches(&self, run_id: &str, states: &[&str], deadline: Deadline) -> Result<Value> {
        let what = format!("run {run_id} is {}", states.join(" or "));
        eventually(deadline, &what, || async {
            let run = self.run(run_id).await?;
            if states.contains(&run["state"].as_str().unwrap_or_default()) {
                return Ok(Some(run));
            }
            bail!("{run}")
        })
        .await
    }

    /// Waits until `task_id` has at least `count` runs in `state`, and returns them.
    ///
    /// # Errors
    /// When it has not by the deadline; with all runs as seen last.
    pub async fn runs_reach(&self, task_id: &str, state: &str, count: usize, deadline: Deadline) -> Result<Vec<Value>> {
        let what = format!("{task_id} has {count} runs that are {state}");
        eventually(deadline, &what, || async {
            let all = self.runs(&format!("task_id={}", encode(task_id))).await?;
            let states: Vec<String> = all.iter().map(|run| format!("{} {}", run["state"], run["reason"])).collect();
            let found: Vec<Value> = all.into_iter().filter(|run| run["state"] == state).collect();
            if found.len() >= count {
                return Ok(Some(found));
            }
            bail!("{states:?}")
        })
        .await
    }

    /// Returns the nodes that this node knows.
    ///
    /// # Errors
    /// When it does not say.
    pub async fn nodes(&self) -> Result<Vec<Value>> {
        let body = self.get("/nodes").await?.ok()?;
        Ok(body["nodes"].as_array().context("no nodes")?.clone())
    }

    /// Returns the node id of the leader, if this node knows one.
    ///
    /// # Errors
    /// When it does not say.
    pub async fn leader(&self) -> Result<Option<String>> {
        let nodes = self.nodes().await?;
        let leader = nodes.iter().find(|node| node["leader"] == true);
        Ok(leader.and_then(|node| node["node_id"].as_str()).map(str::to_owned))
    }

    /// Waits until there is a leader, and returns its node id.
    ///
    /// # Errors
    /// When there is none by the deadline.
    pub async fn has_leader(&self, deadline: Deadline) -> Result<String> {
        eventually(deadline, "there is a leader", || self.leader()).await
    }

    /// Returns the text of `/metrics`.
    ///
    /// # Errors
    /// When nobody answers.
    pub async fn metrics(&self) -> Result<String> {
        Ok(self.send(Method::GET, "/metrics", None).await?.ok()?.as_str().unwrap_or_default().to_owned())
    }
}

/// Percent-encodes everything but unreserved characters, for one path segment or query value.
#[must_use]
pub fn encode(text: &str) -> String {
    text.bytes().fold(String::new(), |mut out, byte| {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(char::from(byte)),
            _ => write!(out, "%{byte:02X}").unwrap_or_default(),
        }
        out
    })
}
