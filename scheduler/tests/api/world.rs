//! A node's API, alone: no leader runs, so what it inserts stays as it was inserted.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use anyhow::{Context, Result};
use ax_scheduler::api::http;
use ax_scheduler::api::service::{Caller, Role, Service, Settings};
use ax_scheduler::api::tokens::Tokens;
use ax_scheduler::bus::nats::{NatsBus, NatsConfig};
use ax_scheduler::ports::{Bus, Clock, Store};
use ax_scheduler::store::memory::Memory;
use ax_shared::{Prefix, Timestamp};
use ax_tests::nats::Nats;
use metrics_exporter_prometheus::PrometheusHandle;
use reqwest::{Method, StatusCode, header};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_util::sync::{CancellationToken, DropGuard};
use uuid::Uuid;

/// 2026-11-30T22:00:00Z, a Monday.
pub(crate) const NOW: Timestamp = Timestamp::from_millis(1_796_076_000_000);

/// The recorder of this process.
static METRICS: LazyLock<Option<PrometheusHandle>> = LazyLock::new(|| ax_scheduler::metrics::install().ok());

/// A clock that goes when it is told to.
pub(crate) struct TestClock(AtomicI64);

impl TestClock {
    pub(crate) fn advance(&self, ms: i64) {
        self.0.fetch_add(ms, Ordering::SeqCst);
    }
}

impl Clock for TestClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(self.0.load(Ordering::SeqCst))
    }
    fn boot(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::SeqCst).unsigned_abs())
    }
}

pub(crate) struct World {
    pub(crate) nats: Nats,
    pub(crate) bus: Arc<NatsBus>,
    pub(crate) store: Arc<Memory>,
    pub(crate) clock: Arc<TestClock>,
    pub(crate) tokens: Arc<Tokens>,
    pub(crate) addr: std::net::SocketAddr,
    client: reqwest::Client,
    _stop: DropGuard,
}

/// What was answered.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: header::HeaderMap,
    pub(crate) body: Value,
}

impl Answer {
    /// The (field, rule) pairs of a problem document.
    pub(crate) fn rules(&self) -> Vec<(&str, &str)> {
        let errors = self.body["errors"].as_array().map(Vec::as_slice).unwrap_or_default();
        errors.iter().map(|e| (e["field"].as_str().unwrap(), e["rule"].as_str().unwrap())).collect()
    }

    pub(crate) fn header(&self, name: header::HeaderName) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// Checks that this is a problem document of `status`.
    #[track_caller]
    pub(crate) fn refused(self, status: u16) -> Self {
        assert_eq!(self.status.as_u16(), status, "{}", self.body);
        assert_eq!(self.header(header::CONTENT_TYPE), "application/problem+json");
        assert_eq!(self.body["status"], status);
        assert!(self.body["type"].is_string() && self.body["title"].is_string(), "{}", self.body);
        self
    }

    #[track_caller]
    pub(crate) fn is(self, status: u16) -> Value {
        assert_eq!(self.status.as_u16(), status, "{}", self.body);
        self.body
    }
}

pub(crate) fn service(store: Arc<dyn Store>, bus: Arc<dyn Bus>, clock: Arc<dyn Clock>, strict: bool) -> Service {
    Service::new(store, bus, clock, Settings { node_id: "n1".into(), prefix: Prefix::default(), strict })
}

pub(crate) fn caller() -> Caller {
    Caller { actor: "test".into(), role: Role::Admin }
}

impl World {
    pub(crate) async fn start() -> Result<Self> {
        Self::with(false, true).await
    }

    pub(crate) async fn with(strict: bool, loopback: bool) -> Result<Self> {
        let nats = Nats::start().await?;
        let bus = NatsBus::connect(NatsConfig::new(nats.url())).await?;
        bus.prepare(Uuid::now_v7()).await?;
        let store = Arc::new(Memory::new());
        let clock = Arc::new(TestClock(AtomicI64::new(NOW.as_millis())));
        store.acquire(0, NOW).await?;

        let service = Arc::new(service(store.clone(), bus.clone(), clock.clone(), strict));
        let stop = CancellationToken::new();
        let listener = http::bind("127.0.0.1:0".parse()?).await?;
        let addr = listener.local_addr()?;
        let tokens = Arc::new(Tokens::read(store.clone(), clock.clone()).await?);
        let access = http::Access { tokens: tokens.clone(), loopback };
        let router = http::router(service, access, METRICS.clone(), stop.clone());
        tokio::spawn(http::serve(listener, router, stop.clone()));
        let client = reqwest::Client::builder().no_proxy().build()?;
        Ok(Self { nats, bus, store, clock, tokens, addr, client, _stop: stop.drop_guard() })
    }

    /// A request under `/api/v1`.
    pub(crate) async fn call(&self, method: Method, path: &str, body: Option<Value>) -> Result<Answer> {
        self.send(method, path, body.map(|body| body.to_string().into_bytes()), &[]).await
    }

    pub(crate) async fn get(&self, path: &str) -> Result<Answer> {
        self.call(Method::GET, path, None).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Result<Answer> {
        self.call(Method::POST, path, Some(body)).await
    }

    pub(crate) async fn put(&self, id: &str, body: Value) -> Result<Answer> {
        self.call(Method::PUT, &format!("/tasks/{id}"), Some(body)).await
    }

    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
        headers: &[(&str, &str)],
    ) -> Result<Answer> {
        let mut request = self.client.request(method, format!("http://{}/api/v1{path}", self.addr));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if let Some(body) = body {
            request = request.body(body);
        }
        let response = request.send().await?;
        let (status, headers) = (response.status(), response.headers().clone());
        let text = response.text().await?;
        let body =
            if text.is_empty() { Value::Null } else { serde_json::from_str(&text).unwrap_or(Value::String(text)) };
        Ok(Answer { status, headers, body })
    }

    /// The text of a page.
    pub(crate) async fn page(&self, path: &str) -> Result<(StatusCode, String)> {
        let response = self.client.get(format!("http://{}{path}", self.addr)).send().await?;
        Ok((response.status(), response.text().await?))
    }

    /// The text of a page that is asked for with headers.
    pub(crate) async fn page_with(&self, path: &str, headers: &[(&str, &str)]) -> Result<(StatusCode, String)> {
        let mut request = self.client.get(format!("http://{}{path}", self.addr));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = request.send().await?;
        Ok((response.status(), response.text().await?))
    }

    /// Submits a form as a browser does, without following where it leads.
    pub(crate) async fn submit(&self, path: &str, form: String, headers: &[(&str, &str)]) -> Result<Answer> {
        let client = reqwest::Client::builder().no_proxy().redirect(reqwest::redirect::Policy::none()).build()?;
        let mut request = client.post(format!("http://{}{path}", self.addr)).body(form);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = request.header("Content-Type", "application/x-www-form-urlencoded").send().await?;
        let (status, headers) = (response.status(), response.headers().clone());
        Ok(Answer { status, headers, body: Value::String(response.text().await?) })
    }

    /// Sends bytes as they are and answers what comes back: status and everything after the head.
    pub(crate) async fn raw(&self, request: &[u8]) -> Result<(u16, String)> {
        let mut stream = tokio::net::TcpStream::connect(self.addr).await?;
        stream.write_all(request).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let status = answer.split(' ').nth(1).and_then(|code| code.parse().ok()).context("no status line")?;
        Ok((status, answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default()))
    }

    /// A GET of a path exactly as given.
    pub(crate) async fn raw_get(&self, path: &str) -> Result<(u16, String)> {
        self.raw(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").as_bytes()).await
    }
}

/// A complete definition that leaves nothing to a default which is warned about.
pub(crate) fn task(id: &str, more: Value) -> Value {
    let mut task = serde_json::json!({"task_id": id, "executor_group": "g", "timeout_ms": 60000, "max_retry": 0,
        "dedup_window_seconds": 60});
    for (field, value) in more.as_object().into_iter().flatten() {
        task[field] = value.clone();
    }
    task
}
