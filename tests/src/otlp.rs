//! A real OTLP receiver: a gRPC server that keeps the spans it is sent.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue, any_value};
use opentelemetry_proto::tonic::trace::v1::{Span, span::SpanKind};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

use crate::{Deadline, eventually};

/// A span as it arrived.
#[derive(Debug, Clone)]
pub struct Got {
    /// The span.
    pub span: Span,
    /// Attributes of the process that sent it.
    pub resource: Vec<KeyValue>,
}

impl Got {
    /// Returns the trace id, 32 hex digits.
    #[must_use]
    pub fn trace_id(&self) -> String {
        hex(&self.span.trace_id)
    }

    /// Returns the span id, 16 hex digits.
    #[must_use]
    pub fn span_id(&self) -> String {
        hex(&self.span.span_id)
    }

    /// Returns the id of the parent span, empty for a root.
    #[must_use]
    pub fn parent_id(&self) -> String {
        hex(&self.span.parent_span_id)
    }

    /// Returns an attribute as text.
    #[must_use]
    pub fn attribute(&self, key: &str) -> Option<String> {
        value(&self.span.attributes, key)
    }

    /// Returns an attribute of the sender as text.
    #[must_use]
    pub fn resource(&self, key: &str) -> Option<String> {
        value(&self.resource, key)
    }

    /// Returns start and end, milliseconds of Unix time.
    #[must_use]
    pub fn times(&self) -> (i64, i64) {
        let millis = |nanos: u64| i64::try_from(nanos / 1_000_000).unwrap_or(i64::MAX);
        (millis(self.span.start_time_unix_nano), millis(self.span.end_time_unix_nano))
    }

    /// Whether the span says that something failed, and what.
    #[must_use]
    pub fn error(&self) -> Option<String> {
        self.span.status.as_ref().filter(|status| status.code == 2).map(|status| status.message.clone())
    }
}

fn value(attributes: &[KeyValue], key: &str) -> Option<String> {
    let found = attributes.iter().find(|attribute| attribute.key == key)?;
    Some(match &found.value {
        Some(AnyValue { value: Some(any_value::Value::StringValue(text)) }) => text.clone(),
        Some(AnyValue { value: Some(any_value::Value::IntValue(number)) }) => number.to_string(),
        other => format!("{other:?}"),
    })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[derive(Debug, Clone, Default)]
struct Store {
    spans: Arc<Mutex<Vec<Got>>>,
    headers: Arc<Mutex<Vec<String>>>,
}

#[tonic::async_trait]
impl TraceService for Store {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let tenant = request.metadata().get("x-tenant").and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned();
        self.headers.lock().unwrap_or_else(PoisonError::into_inner).push(tenant);
        let mut spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        for sender in request.into_inner().resource_spans {
            let resource = sender.resource.map(|resource| resource.attributes).unwrap_or_default();
            for span in sender.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                spans.push(Got { span, resource: resource.clone() });
            }
        }
        Ok(Response::new(ExportTraceServiceResponse { partial_success: None }))
    }
}

/// A receiver. Dropping it closes its port.
#[derive(Debug)]
pub struct Receiver {
    store: Store,
    addr: SocketAddr,
    server: JoinHandle<()>,
}

impl Receiver {
    /// Starts on a free port of the loopback.
    ///
    /// # Errors
    /// When there is none.
    pub async fn start() -> Result<Self> {
        Self::start_on(0).await
    }

    /// Starts on a port.
    ///
    /// # Errors
    /// When it is taken.
    pub async fn start_on(port: u16) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.context("bind the receiver")?;
        let addr = listener.local_addr()?;
        let store = Store::default();
        let service = TraceServiceServer::new(store.clone());
        let server = tokio::spawn(async move {
            Server::builder().add_service(service).serve_with_incoming(TcpIncoming::from(listener)).await.ok();
        });
        Ok(Self { store, addr, server })
    }

    /// Returns what `OTEL_EXPORTER_OTLP_ENDPOINT` has to be.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Returns the values of the header `x-tenant`, one for each request.
    #[must_use]
    pub fn tenants(&self) -> Vec<String> {
        self.store.headers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns all spans so far.
    #[must_use]
    pub fn spans(&self) -> Vec<Got> {
        self.store.spans.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the spans of one trace so far.
    #[must_use]
    pub fn trace(&self, trace_id: &str) -> Vec<Got> {
        self.spans().into_iter().filter(|got| got.trace_id() == trace_id).collect()
    }

    /// Waits until a run's trace has its root, which is sent last, and returns its spans. `run_id` may have dashes.
    ///
    /// # Errors
    /// When it has not by the deadline; with the spans as seen last.
    pub async fn run(&self, run_id: &str, deadline: Deadline) -> Result<Trace> {
        let trace_id = run_id.replace('-', "");
        eventually(deadline, &format!("the trace of run {run_id}"), || async {
            let spans = self.trace(&trace_id);
            let has = |name: &str| spans.iter().any(|got| got.span.name == name);
            anyhow::ensure!(has("run"), "{:?}", spans.iter().map(|got| got.span.name.clone()).collect::<Vec<_>>());
            Ok(Some(()))
        })
        .await?;
        Ok(Trace { spans: self.trace(&trace_id) })
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// The spans of one run.
#[derive(Debug, Clone)]
pub struct Trace {
    /// In the order in which they came.
    pub spans: Vec<Got>,
}

impl Trace {
    /// Returns all spans of a name, earliest first.
    #[must_use]
    pub fn all(&self, name: &str) -> Vec<&Got> {
        let mut found: Vec<&Got> = self.spans.iter().filter(|got| got.span.name == name).collect();
        found.sort_by_key(|got| (got.span.start_time_unix_nano, got.span.end_time_unix_nano));
        found
    }

    /// Returns the one span of a name.
    ///
    /// # Errors
    /// When there is none, or more.
    pub fn one(&self, name: &str) -> Result<&Got> {
        match self.all(name).as_slice() {
            [only] => Ok(only),
            other => anyhow::bail!("{} spans are called {name}: {:?}", other.len(), self.names()),
        }
    }

    /// Returns the names of all spans, sorted.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.spans.iter().map(|got| got.span.name.as_str()).collect();
        names.sort_unstable();
        names
    }

    /// Checks what holds for every run: one root without a parent, everything else below it, ids used once, kinds as
    /// documented, nothing outside of the root's time.
    ///
    /// # Errors
    /// When it does not.
    pub fn check(&self) -> Result<()> {
        let root = self.one("run")?;
        anyhow::ensure!(root.parent_id().is_empty(), "the root has a parent");
        let (start, end) = root.times();
        let mut ids = std::collections::HashSet::new();
        for got in &self.spans {
            let name = &got.span.name;
            anyhow::ensure!(ids.insert(got.span_id()), "two spans have the id of {name}: {:?}", self.names());
            let kind = if name == "publish" { SpanKind::Producer } else { SpanKind::Internal };
            anyhow::ensure!(got.span.kind() == kind, "{name} is of kind {:?}", got.span.kind());
            if name != "run" {
                anyhow::ensure!(got.parent_id() == root.span_id(), "{name} is not below the root");
                let (from, to) = got.times();
                anyhow::ensure!(start <= from && from <= to && to <= end, "{name} {from}–{to} in {start}–{end}");
            }
        }
        Ok(())
    }
}
