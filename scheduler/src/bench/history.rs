//! What the API says about the same stretch.

use std::time::Duration;

use anyhow::{Context as _, bail};
use ax_shared::Timestamp;
use serde_json::{Value, json};

use super::judge::{HistoryJudgement, Told, judge_history};
use super::lateness::Times;
use super::load::{GROUP, Load, Owed, Window, task_number};

/// One request; applying thousands of tasks takes a debug build a while.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
const LEADER_WITHIN: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Tasks of one document: well below the size that a body may have.
const TASKS_AT_ONCE: u32 = 5_000;
const PAGE: &str = "500";
/// States of a run that has not ended.
const OPEN: [&str; 4] = ["waiting", "pending", "triggered", "running"];

/// A client of one node.
#[derive(Debug)]
pub(super) struct Api {
    http: reqwest::Client,
    url: String,
}

impl Api {
    pub(super) fn new(url: &str) -> anyhow::Result<Self> {
        let http = reqwest::Client::builder().timeout(ANSWER_WITHIN).no_proxy().build()?;
        Ok(Self { http, url: format!("{url}/api/v1") })
    }

    async fn answer(&self, request: reqwest::RequestBuilder) -> anyhow::Result<Value> {
        let answer = request.send().await.context("ask the API")?;
        let status = answer.status();
        let text = answer.text().await.context("read the API's answer")?;
        if !status.is_success() {
            bail!("the API answered {status}: {text}");
        }
        serde_json::from_str(&text).context("read the API's answer")
    }

    async fn runs(&self, window: Window, query: &[(&str, &str)]) -> anyhow::Result<Value> {
        let (from, to) = (window.from().to_string(), window.to().to_string());
        let window = [("group", GROUP), ("from", &from), ("to", &to)];
        let mut url = reqwest::Url::parse(&format!("{}/runs", self.url))?;
        url.query_pairs_mut().extend_pairs(window.iter().chain(query));
        self.answer(self.http.get(url)).await
    }

    /// Waits until a node leads.
    pub(super) async fn has_leader(&self) -> anyhow::Result<()> {
        let deadline = tokio::time::Instant::now() + LEADER_WITHIN;
        while tokio::time::Instant::now() < deadline {
            let answer = self.answer(self.http.get(format!("{}/nodes", self.url))).await?;
            let leads = |node: &Value| node["leader"] == json!(true);
            if answer["nodes"].as_array().is_some_and(|nodes| nodes.iter().any(leads)) {
                return Ok(());
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        bail!("no node leads after {} s", LEADER_WITHIN.as_secs())
    }

    /// Puts the tasks into force, in as few documents as may be.
    pub(super) async fn apply(&self, load: Load) -> anyhow::Result<()> {
        let mut from = 0;
        while from < load.tasks() {
            let to = load.tasks().min(from + TASKS_AT_ONCE);
            let tasks: Vec<Value> = (from..to).map(|task| load.definition(task)).collect();
            let request = self.http.post(format!("{}/apply", self.url)).json(&json!({ "tasks": tasks }));
            let report = self.answer(request).await.context("apply the tasks")?;
            let created = report["created"].as_array().map_or(0, Vec::len);
            if created != (to - from) as usize {
                bail!("of {} tasks {created} were created: {report}", to - from);
            }
            from = to;
        }
        Ok(())
    }

    /// Waits until every run of the stretch has ended; whether that came within the time.
    pub(super) async fn settled(&self, window: Window, within: Duration) -> anyhow::Result<bool> {
        let open: Vec<(&str, &str)> = OPEN.map(|state| ("state", state)).into_iter().chain([("limit", "1")]).collect();
        let deadline = tokio::time::Instant::now() + within;
        loop {
            if self.runs(window, &open).await?["runs"].as_array().is_some_and(Vec::is_empty) {
                return Ok(true);
            }
            if tokio::time::Instant::now() > deadline {
                return Ok(false);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Reads the whole stretch and compares it with what was owed.
    pub(super) async fn judge(&self, load: Load, window: Window) -> anyhow::Result<HistoryJudgement> {
        let mut told = Vec::new();
        let mut published = Times::new();
        let mut cursor: Option<String> = None;
        loop {
            let mut query = vec![("limit", PAGE)];
            query.extend(cursor.as_deref().map(|cursor| ("cursor", cursor)));
            let page = self.runs(window, &query).await?;
            for run in page["runs"].as_array().context("no runs in the answer")? {
                let at = instant(&run["trigger_time"]).with_context(|| format!("no trigger time: {run}"))?;
                let task = run["task_id"].as_str().and_then(task_number);
                told.push(Told {
                    owed: task.map(|task| Owed { task, at }),
                    succeeded: run["state"] == "succeeded",
                    attempt: run["attempt"].as_u64().unwrap_or(0),
                });
                if let Some(published_at) = instant(&run["published_at"]) {
                    published.add_us(published_at.millis_since(at) * 1000);
                }
            }
            cursor = page["next_cursor"].as_str().map(ToOwned::to_owned);
            if cursor.is_none() {
                break;
            }
        }
        Ok(HistoryJudgement { published_ms: published.percentiles(), ..judge_history(load, window, &told) })
    }
}

fn instant(value: &Value) -> Option<Timestamp> {
    value.as_str()?.parse().ok()
}
