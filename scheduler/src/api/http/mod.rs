//! The HTTP door: routes, problem documents, and nothing else.
//!
//! Without tokens only loopback addresses may be served. Requests that a page of another site made the user's browser
//! send are refused in any case.

mod api;
pub(crate) mod guard;
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

pub(crate) use self::problem::{HttpError, challenge};
pub(crate) use self::request::Params;
use super::ApiError;
pub use super::operation::MAX_BODY_BYTES;
use super::operation::{SPECIALS, Special};
use super::service::Service;
use super::tokens::Tokens;
use crate::dashboard;

/// How long connections that are busy may go on after a shutdown began.
const DRAIN: Duration = Duration::from_secs(5);

/// What every handler can see.
#[derive(Clone)]
pub(crate) struct Door {
    pub(crate) service: Arc<Service>,
    pub(crate) access: Access,
    metrics: Option<PrometheusHandle>,
    shutdown: CancellationToken,
}

/// Who is served.
#[derive(Clone)]
pub struct Access {
    /// Those who show one of these.
    pub tokens: Arc<Tokens>,
    /// Whether only this machine can connect: then, while there are no tokens, whoever does.
    pub loopback: bool,
}

/// Why the HTTP address cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Anybody who reaches the port could change tasks.
    #[error(
        "{0} is not a loopback address, and without tokens only loopback may be served: make a token first, with \
         `ax token create NAME --role admin` on the same AX_DATABASE_URL, or use 127.0.0.1"
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
/// The address is taken or is not allowed.
pub async fn bind(addr: SocketAddr) -> Result<TcpListener, BindError> {
    TcpListener::bind(addr).await.map_err(|source| BindError::Listen { addr, source })
}

/// Decides whether an address may be served.
///
/// # Errors
/// It is not loopback, and there are no tokens.
pub fn admit(addr: SocketAddr, tokens: Arc<Tokens>) -> Result<Access, BindError> {
    let loopback = addr.ip().is_loopback();
    if loopback || tokens.any() { Ok(Access { tokens, loopback }) } else { Err(BindError::NotLoopback(addr)) }
}

/// All routes: the API under `/api/v1`, health and metrics, and the pages for people. Live streams end with `shutdown`.
pub fn router(
    service: Arc<Service>,
    access: Access,
    metrics: Option<PrometheusHandle>,
    shutdown: CancellationToken,
) -> Router {
    let door = Door { service, access, metrics, shutdown };
    let mut router = Router::new().nest("/api/v1", api::routes()).merge(dashboard::routes());
    for special in SPECIALS {
        let answer = match special.special {
            Special::Events => get(api::events),
            Special::OpenApi => get(api::openapi),
            Special::Healthz => get(healthz),
            Special::Readyz => get(readyz),
            Special::Metrics => get(metrics_text),
        };
        router = router.route(special.path, answer);
    }
    router
        .fallback(guard::no_such_address)
        .method_not_allowed_fallback(guard::method_not_allowed)
        .layer(middleware::from_fn_with_state(door.clone(), guard::guard))
        .with_state(door)
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
    let text = door.metrics.as_ref().map(crate::metrics::render).unwrap_or_default();
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}
