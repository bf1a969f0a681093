//! How the commands ask a server: where it is, one call, what its answers and refusals become.

use std::fmt;
use std::time::Duration;

use ax_shared::FieldError;
use clap::Args;
use reqwest::{Method, StatusCode, Url};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::output::printable;
use super::{Failure, REFUSED, UNREACHABLE, USAGE, say};
use crate::api::Problem;
use crate::api::http::MAX_BODY_BYTES;
use crate::config::{Layer, without_password};

/// The longest time for one request with its answer.
const TIMEOUT: Duration = Duration::from_secs(30);
const DEFAULT_URL: &str = "http://127.0.0.1:8420";

/// Options of every command that asks a server.
#[derive(Debug, Clone, Args)]
pub(super) struct ClientArgs {
    /// Where the API of a node is [default: http://127.0.0.1:8420]
    #[arg(long, env = "AX_API_URL", value_name = "URL", hide_env_values = true, global = true)]
    api_url: Option<String>,
    /// Bearer token; better in AX_TOKEN, since other users of this machine can see the arguments of a program
    #[arg(long, env = "AX_TOKEN", value_name = "TOKEN", hide_env_values = true, global = true)]
    token: Option<String>,
    /// Print what the server answered, as it is
    #[arg(long, global = true)]
    pub(super) json: bool,
}

/// A server that can be asked.
#[derive(Debug)]
pub(super) struct Client {
    http: reqwest::Client,
    base: Url,
    token: Option<String>,
    json: bool,
}

/// What was answered to a request that was done.
#[derive(Debug)]
pub(super) struct Answer {
    body: String,
    json: bool,
}

/// A refusal, as one line and one more for each field at fault.
#[derive(Debug)]
pub(super) struct Refusal {
    title: String,
    pub(super) detail: String,
    /// Where and what.
    pub(super) errors: Vec<FieldError>,
}

impl std::error::Error for Refusal {}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", printable(&self.title), printable(&self.detail))?;
        // The detail of a refusal for one reason is that reason.
        let told = |error: &&FieldError| self.errors.len() == 1 && self.detail == in_one_line(error);
        for error in self.errors.iter().filter(|error| !told(error)) {
            match error.field.as_str() {
                "" => write!(f, "\n  {}", printable(&error.message))?,
                field => write!(f, "\n  {}: {}", printable(field), printable(&error.message))?,
            }
        }
        Ok(())
    }
}

fn in_one_line(error: &FieldError) -> String {
    match error.field.as_str() {
        "" => error.message.clone(),
        field => format!("{field}: {}", error.message),
    }
}

impl From<Problem> for Refusal {
    fn from(problem: Problem) -> Self {
        Self { title: problem.title, detail: problem.detail, errors: problem.errors }
    }
}

/// A request that is wrong before anybody was asked.
pub(super) fn usage(text: impl fmt::Display) -> Failure {
    Failure { code: USAGE, error: anyhow::anyhow!("{text}") }
}

impl Client {
    /// Decides whom to ask: flags, variables, the file, the default.
    pub(super) fn new(args: &ClientArgs, file: &Layer) -> Result<Self, Failure> {
        let given = |flag: &Option<String>, file: &Option<String>| {
            flag.clone().filter(|text| !text.is_empty()).or_else(|| file.clone())
        };
        let text = given(&args.api_url, &file.api_url).unwrap_or_else(|| DEFAULT_URL.to_owned());
        let wrong = |rule: &str| usage(format_args!("api_url = {:?}: {rule}", without_password(&text)));
        let mut base = Url::parse(&text).map_err(|_| wrong("must be http://HOST:PORT"))?;
        match base.scheme() {
            "http" if base.has_host() => {}
            "https" => return Err(wrong("https is not supported by this version: use http, through a tunnel")),
            _ => return Err(wrong("must be http://HOST:PORT")),
        }
        base.set_query(None);
        base.set_fragment(None);
        // What the address names is asked itself, whatever proxies the environment has for other programs.
        let http = reqwest::Client::builder()
            .timeout(TIMEOUT)
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .user_agent(concat!("ax/", env!("CARGO_PKG_VERSION")))
            .build()?;
        Ok(Self { http, base, token: given(&args.token, &file.token), json: args.json })
    }

    pub(super) async fn get(&self, path: &[&str], query: &[(&str, String)]) -> Result<Answer, Failure> {
        self.call(Method::GET, path, query, None).await
    }

    pub(super) async fn post(&self, path: &[&str], body: String) -> Result<Answer, Failure> {
        self.call(Method::POST, path, &[], Some(body)).await
    }

    /// One request; a refusal, and nobody answering, is a failure.
    pub(super) async fn call(
        &self,
        method: Method,
        path: &[&str],
        query: &[(&str, String)],
        body: Option<String>,
    ) -> Result<Answer, Failure> {
        let (status, body) = self.exchange(method, path, query, body).await?;
        if status.is_success() {
            return Ok(Answer { body, json: self.json });
        }
        Err(self.refused(status, &body))
    }

    /// Like [`Self::get`], with none for 404.
    pub(super) async fn find(&self, path: &[&str], query: &[(&str, String)]) -> Result<Option<Answer>, Failure> {
        let (status, body) = self.exchange(Method::GET, path, query, None).await?;
        match serde_json::from_str::<Problem>(&body) {
            Ok(_) if status == StatusCode::NOT_FOUND => Ok(None),
            _ if status.is_success() => Ok(Some(Answer { body, json: self.json })),
            _ => Err(self.refused(status, &body)),
        }
    }

    async fn exchange(
        &self,
        method: Method,
        path: &[&str],
        query: &[(&str, String)],
        body: Option<String>,
    ) -> Result<(StatusCode, String), Failure> {
        let mut url = self.base.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(["api", "v1"]).extend(path);
        }
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        let changes = method != Method::GET;
        let mut request = self.http.request(method, url);
        if let Some(token) = &self.token {
            request = request.bearer_auth(token);
        }
        if let Some(body) = body {
            // A server closes the connection on what is too large, often before its answer can be read.
            if body.len() > MAX_BODY_BYTES {
                let error = anyhow::anyhow!("too large: {} bytes, the limit is {MAX_BODY_BYTES} (16 MiB)", body.len());
                return Err(Failure { code: REFUSED, error });
            }
            request = request.header("Content-Type", "application/json").body(body);
        }
        let response = request.send().await.map_err(|e| self.away(&e, changes))?;
        let status = response.status();
        let body = response.bytes().await.map_err(|e| self.away(&e, changes))?;
        Ok((status, String::from_utf8_lossy(&body).into_owned()))
    }

    /// Where is asked, fit to be shown.
    fn shown(&self) -> String {
        without_password(self.base.as_str().trim_end_matches('/'))
    }

    fn away(&self, e: &reqwest::Error, changes: bool) -> Failure {
        let at = self.shown();
        if e.is_builder() {
            return usage(format_args!("the request to {at} cannot be made: is the token right? ({})", root(e)));
        }
        let unknown = if changes { "; whether it was done is not known" } else { "" };
        let error = if e.is_connect() {
            let hint = "is a server running? --api-url or AX_API_URL says where";
            anyhow::anyhow!("nobody answers at {at}: {} ({hint})", root(e))
        } else if e.is_timeout() {
            anyhow::anyhow!("no answer from {at} within {} s{unknown}", TIMEOUT.as_secs())
        } else {
            anyhow::anyhow!("the connection to {at} broke before the answer: {}{unknown}", root(e))
        };
        Failure { code: UNREACHABLE, error }
    }

    /// What somebody does who is not let in.
    fn remedy(&self) -> &'static str {
        match self.token {
            None => "for ax: AX_TOKEN or --token (`ax token create` makes one, where the database is)",
            Some(_) => "it came from --token, AX_TOKEN or ax.toml (`ax token create` makes another one)",
        }
    }

    fn refused(&self, status: StatusCode, body: &str) -> Failure {
        let code = match status {
            StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => UNREACHABLE,
            _ => REFUSED,
        };
        match serde_json::from_str::<Problem>(body) {
            Ok(problem) => {
                if self.json {
                    say(body);
                }
                let mut refusal = Refusal::from(problem);
                if status == StatusCode::UNAUTHORIZED {
                    refusal.detail = format!("{}; {}", refusal.detail, self.remedy());
                }
                Failure { code, error: refusal.into() }
            }
            Err(_) => Failure { code, error: anyhow::anyhow!("{} answered {status}, not as ax does", self.shown()) },
        }
    }
}

/// The innermost cause.
fn root(e: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = e;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

impl Answer {
    /// Prints it as it is when JSON was asked for, else lets `show` print it for people.
    pub(super) fn show(&self, show: impl FnOnce(&Value)) -> Result<(), Failure> {
        if self.json {
            if !self.body.is_empty() {
                say(&self.body);
            }
            return Ok(());
        }
        show(&self.value()?);
        Ok(())
    }

    /// The answer read; nothing at all is null.
    pub(super) fn value(&self) -> Result<Value, Failure> {
        if self.body.is_empty() { Ok(Value::Null) } else { self.read() }
    }

    /// The answer read as what it is known to be.
    pub(super) fn read<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        let read = serde_json::from_str(&self.body);
        read.map_err(|e| Failure { code: REFUSED, error: anyhow::anyhow!("the answer is not what ax answers: {e}") })
    }
}
