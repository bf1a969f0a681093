//! The HTTP door: routes, problem documents, and nothing else.
//!
//! There are no tokens yet, so only loopback addresses may be bound, and requests that a page of another site made the
//! user's browser send are refused.

mod api;
mod guard;
mod problem;
mod request;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router, middleware};
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub(crate) use self::problem::{HttpError, log};
pub(crate) use self::request::Params;
use super::ApiError;
use super::service::Service;
use crate::dashboard;

/// The largest body of a request, in bytes.
pub const MAX_BODY_BYTES: usize = 16 * 1024 * 1024;
/// How long connections that are busy may go on after a shutdown began.
const DRAIN: Duration = Duration::from_secs(5);

/// What every handler can see.
#[derive(Clone)]
pub(crate) struct Door {
    pub(crate) service: Arc<Service>,
    metrics: Option<PrometheusHandle>,
    shutdown: CancellationToken,
}

/// Why the HTTP address cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Anybody who reaches the port could change tasks.
    #[error(
        "{0} is not a loopback address: without tokens, which this version does not have yet, only loopback may be \
         served; use 127.0.0.1 and, from elsewhere, a tunnel such as `ssh -L 8420:127.0.0.1:8420`"
    )]
    NotLoopback(SocketAddr),
    /// Taken, or not allowed.
    #[error("cannot listen on {addr} (AX_HTTP_ADDR names another address)")]
    Listen {
        /// The address.
        addr: SocketAddr,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
}

/// Opens the port.
///
/// # Errors
/// The address is not loopback, is taken, or is not allowed.
pub async fn bind(addr: SocketAddr) -> Result<TcpListener, BindError> {
    if !addr.ip().is_loopback() {
        return Err(BindError::NotLoopback(addr));
    }
    TcpListener::bind(addr).await.map_err(|source| BindError::Listen { addr, source })
}

/// All routes: the API under `/api/v1`, health and metrics, and the pages for people. Live streams end with `shutdown`.
pub fn router(service: Arc<Service>, metrics: Option<PrometheusHandle>, shutdown: CancellationToken) -> Router {
    Router::new()
        .nest("/api/v1", api::routes())
        .merge(dashboard::routes())
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics_text))
        .fallback(guard::no_such_address)
        .method_not_allowed_fallback(guard::method_not_allowed)
        .layer(middleware::from_fn(guard::guard))
        .with_state(Door { service, metrics, shutdown })
}

/// Serves until `shutdown`, then lets busy connections end for a few seconds.
///
/// # Errors
/// The listener failed.
pub async fn serve(listener: TcpListener, router: Router, shutdown: CancellationToken) -> std::io::Result<()> {
    let app = router.into_make_service_with_connect_info::<SocketAddr>();
    let server = axum::serve(listener, app).with_graceful_shutdown(shutdown.clone().cancelled_owned());
    tokio::select! {
        done = server => done,
        () = async { shutdown.cancelled().await; tokio::time::sleep(DRAIN).await } => Ok(()),
    }
}

/// The process lives; says nothing about what is behind it.
async fn healthz() -> &'static str {
    "ok\n"
}

/// Whether this node can do its work; followers can, too.
async fn readyz(State(door): State<Door>) -> Response {
    let readiness = door.service.readiness().await;
    if readiness.ready {
        return Json(readiness).into_response();
    }
    let what = if readiness.database == "ok" { "NATS" } else { "the database" };
    let told = [&readiness.database, &readiness.nats].into_iter().filter(|t| *t != "ok");
    let told: Vec<&str> = told.map(String::as_str).collect();
    HttpError(ApiError::Unavailable { what, source: Some(anyhow::anyhow!("{}", told.join("; "))) }).into_response()
}

/// Metrics in Prometheus' text format.
async fn metrics_text(State(door): State<Door>) -> Response {
    let text = door.metrics.map(|handle| handle.render()).unwrap_or_default();
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}
