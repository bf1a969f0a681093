//! What holds for every request: where it may come from, how long it may take, how it is counted.

use std::net::SocketAddr;
use std::time::Instant;

use axum::extract::{ConnectInfo, MatchedPath, Request};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Method, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::problem::HttpError;
use crate::api::ApiError;
use crate::api::operation::PATIENCE;
use crate::api::service::{Caller, Role};
use crate::metrics as names;

/// Checks, bounds and counts a request.
pub(super) async fn guard(mut request: Request, next: Next) -> Response {
    let begun = Instant::now();
    let route = request.extensions().get::<MatchedPath>().map_or("none", MatchedPath::as_str).to_owned();
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let actor = match request.extensions().get::<ConnectInfo<SocketAddr>>() {
        Some(ConnectInfo(addr)) => addr.ip().to_string(),
        None => "unknown".to_owned(),
    };
    request.extensions_mut().insert(Caller { actor, role: Role::Admin });
    let response = match check_origin(request.uri(), request.headers()) {
        Err(refused) => HttpError(refused).into_response(),
        Ok(()) => match tokio::time::timeout(PATIENCE, next.run(request)).await {
            Ok(response) => response,
            Err(_) => HttpError(ApiError::Unavailable { what: "the database or NATS", source: None }).into_response(),
        },
    };
    let status = response.status().as_u16();
    metrics::counter!(names::HTTP_REQUESTS.name, "route" => route, "status" => status.to_string()).increment(1);
    tracing::debug!(%method, path, status, elapsed_ms = begun.elapsed().as_millis() as u64, "request");
    response
}

/// Without tokens, whoever can make a browser on this machine send a request could change tasks. So requests have to
/// name this machine as their host (a page that rebinds its name to 127.0.0.1 does not), and those that a page of
/// another origin sends are refused.
fn check_origin(uri: &Uri, headers: &HeaderMap) -> Result<(), ApiError> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let host = text(header::HOST).or(uri.authority().map(Authority::as_str));
    if let Some(host) = host
        && !is_local(host)
    {
        let shown: String = host.chars().take(60).collect();
        return Err(ApiError::Forbidden(format!(
            "{shown:?} is not a name of this machine: without tokens only localhost, 127.0.0.1 and [::1] are served"
        )));
    }
    if let Some(origin) = text(header::ORIGIN)
        && origin.split_once("://").map(|(_, rest)| rest) != host
    {
        return Err(ApiError::Forbidden("requests from pages of other origins are refused".to_owned()));
    }
    Ok(())
}

/// Whether a `Host` names this machine.
fn is_local(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name.eq_ignore_ascii_case("localhost")
        || name.to_ascii_lowercase().ends_with(".localhost")
        || name.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// There is nothing at this address.
pub(super) async fn no_such_address(uri: Uri) -> HttpError {
    let path: String = uri.path().chars().take(200).collect();
    HttpError(ApiError::NotFound(format!("there is nothing at {path}")))
}

/// The address exists, the method does not.
pub(super) async fn method_not_allowed(method: Method, uri: Uri) -> HttpError {
    let path: String = uri.path().chars().take(200).collect();
    HttpError(ApiError::MethodNotAllowed(format!("{method} is not a method of {path}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_other_sites_cannot_use_the_browser_of_a_local_user() {
        let check = |host: &str, origin: Option<&str>| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, host.parse().unwrap());
            if let Some(origin) = origin {
                headers.insert(header::ORIGIN, origin.parse().unwrap());
            }
            check_origin(&Uri::from_static("/"), &headers).is_ok()
        };
        for host in ["localhost:8420", "127.0.0.1:8420", "127.0.0.2", "[::1]:8420", "LOCALHOST", "ax.localhost:1"] {
            assert!(check(host, None), "{host}");
        }
        assert!(check("localhost:8420", Some("http://localhost:8420")));
        for host in ["evil.example", "evil.example:8420", "10.0.0.1:8420", "localhost.evil.example", "[::2]:1"] {
            assert!(!check(host, None), "{host}");
        }
        assert!(!check("localhost:8420", Some("http://evil.example")));
        assert!(!check("localhost:8420", Some("null")));
    }
}
