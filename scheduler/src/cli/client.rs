//! Asking a server.

use std::time::Duration;

use clap::Args;
use reqwest::{Method, StatusCode};
use serde_json::Value;

use super::{Failure, REFUSED, UNREACHABLE, USAGE, say};
use crate::config::Layer;

/// How long an answer may take.
const TIMEOUT: Duration = Duration::from_secs(30);

/// How to reach the API, and how to print what it says.
#[derive(Debug, Clone, Args)]
pub(super) struct ClientArgs {
    /// Address of the API [default: http://127.0.0.1:8420]
    #[arg(long, env = "AX_API_URL", value_name = "URL")]
    api_url: Option<String>,
    /// Bearer token
    #[arg(long, env = "AX_TOKEN", value_name = "TOKEN", hide_env_values = true)]
    token: Option<String>,
    /// Print the answer's JSON as it is
    #[arg(long)]
    pub(super) json: bool,
}

/// A client of one server.
pub(super) struct Client {
    http: reqwest::Client,
    base: String,
    token: Option<String>,
}

impl Client {
    pub(super) fn new(args: &ClientArgs, file: &Layer) -> Result<Self, Failure> {
        let base = args.api_url.clone().or_else(|| file.api_url.clone());
        let base = base.unwrap_or_else(|| "http://127.0.0.1:8420".into());
        if !base.starts_with("http://") && !base.starts_with("https://") {
            return Err(Failure {
                code: USAGE,
                error: anyhow::anyhow!("api_url = {base:?}: must begin with http:// or https://"),
            });
        }
        let http = reqwest::Client::builder().timeout(TIMEOUT).build()?;
        let token = args.token.clone().or_else(|| file.token.clone());
        Ok(Self { http, base: base.trim_end_matches('/').to_owned(), token })
    }

    /// Sends a request to `/api/v1` + `path`; answers the body as text, or the refusal.
    pub(super) async fn ask(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, String)],
        body: Option<&Value>,
    ) -> Result<String, Failure> {
        let mut url = format!("{}/api/v1{path}", self.base);
        for (i, (key, value)) in query.iter().enumerate() {
            url.push(if i == 0 { '?' } else { '&' });
            url.push_str(&format!("{key}={}", percent(value)));
        }
        let mut request = self.http.request(method, &url);
        if let Some(token) = &self.token {
            request = request.bearer_auth(token);
        }
        if let Some(body) = body {
            request = request.json(body);
        }
        let unreachable = |e: reqwest::Error| Failure {
            code: if e.is_builder() { USAGE } else { UNREACHABLE },
            error: anyhow::Error::new(e).context(format!("no answer from {}", self.base)),
        };
        let answer = request.send().await.map_err(unreachable)?;
        let status = answer.status();
        let text = answer.text().await.map_err(unreachable)?;
        if status.is_success() { Ok(text) } else { Err(refusal(status, &text)) }
    }

    pub(super) async fn get(&self, path: &str, query: &[(&str, String)]) -> Result<String, Failure> {
        self.ask(Method::GET, path, query, None).await
    }

    pub(super) async fn post(&self, path: &str, body: &Value) -> Result<String, Failure> {
        self.ask(Method::POST, path, &[], Some(body)).await
    }
}

/// A problem document as lines for people.
fn refusal(status: StatusCode, text: &str) -> Failure {
    let code = if status == StatusCode::SERVICE_UNAVAILABLE { UNREACHABLE } else { REFUSED };
    let Ok(problem) = serde_json::from_str::<Value>(text) else {
        let first: String = text.chars().take(200).collect();
        return Failure { code, error: anyhow::anyhow!("{status}: {first}") };
    };
    let word = |field: &str| problem[field].as_str().unwrap_or_default().to_owned();
    let (title, detail) = (word("title"), word("detail"));
    let mut lines = match (title.is_empty(), detail.is_empty()) {
        (false, false) => format!("{title}: {detail}"),
        (true, true) => status.to_string(),
        _ => format!("{title}{detail}"),
    };
    for error in problem["errors"].as_array().into_iter().flatten() {
        let part = |field: &str| error[field].as_str().unwrap_or_default();
        let field = if part("field").is_empty() { "document" } else { part("field") };
        lines.push_str(&format!("\n  {field}: {}", part("message")));
    }
    Failure { code, error: anyhow::anyhow!("{lines}") }
}

/// Percent-encodes what is not unreserved (RFC 3986 §2.3).
pub(super) fn percent(text: &str) -> String {
    text.bytes()
        .map(|b| match b {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => char::from(b).to_string(),
            _ => format!("%{b:02X}"),
        })
        .collect()
}

/// Reads an answer's body.
pub(super) fn parse(text: &str) -> Result<Value, Failure> {
    Ok(serde_json::from_str(text)?)
}

/// Prints an answer as it is.
pub(super) fn raw(text: &str) {
    say(text.trim_end());
}

/// Reads JSON given as text, as `@FILE`, or as `-` for standard input.
pub(super) fn json_argument(name: &str, text: &str) -> Result<Value, Failure> {
    let usage = |error: anyhow::Error| Failure { code: USAGE, error };
    let content = match text.strip_prefix('@') {
        Some(path) => std::fs::read_to_string(path)
            .map_err(|e| usage(anyhow::Error::new(e).context(format!("--{name}: cannot read {path}"))))?,
        None => text.to_owned(),
    };
    serde_json::from_str(&content).map_err(|e| usage(anyhow::Error::new(e).context(format!("--{name} is not JSON"))))
}

/// Reads a delay such as `90s`, `5m`, `36h` or `30d`, in milliseconds.
pub(super) fn delay_ms(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let factor = match &text[digits..] {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => 0,
    };
    text[..digits]
        .parse::<u64>()
        .ok()
        .filter(|_| factor > 0)
        .and_then(|n| n.checked_mul(factor))
        .ok_or_else(|| "a whole number with ms, s, m, h or d, e.g. 90s".to_owned())
}
