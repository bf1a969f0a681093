//! What holds for every request: where it may come from, who it is from, how long it may take, how it is counted.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use axum::extract::{ConnectInfo, MatchedPath, Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Method, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::Door;
use super::problem::HttpError;
use crate::api::ApiError;
use crate::api::operation::PATIENCE;
use crate::api::service::{Caller, Role};
use crate::dashboard;
use crate::metrics as names;

/// Where nobody has to say who he is: probes, and the page on which people say it.
const OPEN: [&str; 5] = ["/healthz", "/readyz", "/metrics", dashboard::SIGN_IN, dashboard::SIGN_OUT];
/// How often those who listen to a stream are looked at again.
const RECHECK: Duration = Duration::from_millis(500);
/// Headers that proxies add; so is whatever begins with `X-Forwarded-`.
const FORWARDED: [&str; 3] = ["forwarded", "x-real-ip", "via"];
/// The cookie that holds the token of a person who has signed in.
pub(crate) const COOKIE: &str = "ax_token";

/// Checks, bounds and counts a request, and says to those behind who asks.
pub(super) async fn guard(State(door): State<Door>, mut request: Request, next: Next) -> Response {
    let begun = Instant::now();
    let route = request.extensions().get::<MatchedPath>().map_or("none", MatchedPath::as_str).to_owned();
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let response = match admit(&door, &request) {
        Err(refused) => refuse(&door, &path, refused),
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            match tokio::time::timeout(PATIENCE, next.run(request)).await {
                Ok(response) => response,
                Err(_) => {
                    HttpError(ApiError::Unavailable { what: "the database or NATS", source: None }).into_response()
                }
            }
        }
    };
    let status = response.status().as_u16();
    metrics::counter!(names::HTTP_REQUESTS.name, "route" => route, "status" => status.to_string()).increment(1);
    tracing::debug!(%method, path, status, elapsed_ms = begun.elapsed().as_millis() as u64, "request");
    response
}

/// A person is asked to sign in, a program is told.
fn refuse(door: &Door, path: &str, refused: ApiError) -> Response {
    match refused {
        ApiError::Unauthorized { shown, .. } if !path.starts_with("/api/") => {
            dashboard::ask_to_sign_in(&door.service, path, shown)
        }
        refused => HttpError(refused).into_response(),
    }
}

/// Who asks. Without tokens everybody on this machine is an administrator, and nobody else is served.
fn admit(door: &Door, request: &Request) -> Result<Caller, ApiError> {
    let (uri, headers) = (request.uri(), request.headers());
    let open = !door.access.tokens.any();
    let only_local = open && door.access.loopback;
    check_origin(uri, headers, only_local)?;
    if only_local {
        check_not_forwarded(headers)?;
    }
    let local = || {
        let addr = request.extensions().get::<ConnectInfo<SocketAddr>>();
        addr.map_or_else(|| "unknown".to_owned(), |ConnectInfo(addr)| addr.ip().to_string())
    };
    if OPEN.contains(&uri.path()) {
        return Ok(Caller { actor: local(), role: Role::Viewer });
    }
    if only_local {
        return Ok(Caller { actor: local(), role: Role::Admin });
    }
    let missing = |detail: &str| ApiError::Unauthorized { detail: detail.to_owned(), shown: false };
    if open {
        return Err(missing(
            "there is no token any more, and only this machine may be served without: make one with `ax token create`",
        ));
    }
    if let Some(value) = headers.get(header::AUTHORIZATION) {
        return door.access.tokens.bearer(bearer(value.as_bytes())?);
    }
    let Some(secret) = cookie(headers) else {
        return Err(missing("a token is needed: send it as `Authorization: Bearer TOKEN`"));
    };
    // A browser adds a cookie to whatever it sends, so what changes something has to come from a page of ours.
    if !request.method().is_safe() && !headers.contains_key(header::ORIGIN) {
        return Err(ApiError::Forbidden(
            "a change by a person who has signed in must come from a page of ax".to_owned(),
        ));
    }
    door.access.tokens.bearer(secret)
}

/// Returns when those who sent these headers may no longer listen: a stream outlives the check at its start. What is let
/// in here is what [`admit`] lets in, so that streams end, too, when the database has been away for too long.
pub(super) async fn no_longer_let_in(door: Door, headers: HeaderMap) {
    let mut every = tokio::time::interval(RECHECK);
    loop {
        every.tick().await;
        let tokens = &door.access.tokens;
        let shown = headers.get(header::AUTHORIZATION).and_then(|value| bearer(value.as_bytes()).ok());
        let let_in = match shown.or_else(|| cookie(&headers)) {
            _ if !tokens.any() => {
                door.access.loopback
                    && check_origin(&Uri::default(), &headers, true).is_ok()
                    && check_not_forwarded(&headers).is_ok()
            }
            Some(secret) => tokens.bearer(secret).is_ok(),
            None => false,
        };
        if !let_in {
            return;
        }
    }
}

/// The token in an `Authorization` header.
fn bearer(value: &[u8]) -> Result<&str, ApiError> {
    let text = std::str::from_utf8(value).unwrap_or_default();
    let (scheme, token) = text.split_once(' ').unwrap_or((text, ""));
    if scheme.eq_ignore_ascii_case("bearer") {
        return Ok(token.trim());
    }
    let detail = "a token is needed: send it as `Authorization: Bearer TOKEN`".to_owned();
    Err(ApiError::Unauthorized { detail, shown: false })
}

/// The token of a person who has signed in.
pub(crate) fn cookie(headers: &HeaderMap) -> Option<&str> {
    let all = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let mut pairs = all.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(name, value)| *name == COOKIE && !value.is_empty()).map(|(_, value)| value)
}

/// Without tokens, whoever can make a browser on this machine send a request could change tasks. So requests have to
/// name this machine as their host then (a page that rebinds its name to 127.0.0.1 does not), and those that a page of
/// another origin sends are refused in any case.
fn check_origin(uri: &Uri, headers: &HeaderMap, only_local: bool) -> Result<(), ApiError> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let host = text(header::HOST).or(uri.authority().map(Authority::as_str));
    if let Some(host) = host
        && only_local
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

/// Without tokens whoever connects from this machine is an administrator. A proxy on this machine connects for others, so
/// what says that it comes through one is refused. Not every proxy says so: `docs/api.md` tells to make a token first.
fn check_not_forwarded(headers: &HeaderMap) -> Result<(), ApiError> {
    let told = |name: &str| FORWARDED.contains(&name) || name.starts_with("x-forwarded-");
    match headers.keys().find(|name| told(name.as_str())) {
        None => Ok(()),
        Some(name) => Err(ApiError::Forbidden(format!(
            "the header {name} says that this came through a proxy, and behind a proxy a token is needed: make one with \
             `ax token create`"
        ))),
    }
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
            check_origin(&Uri::from_static("/"), &headers, true).is_ok()
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

    #[test]
    fn what_a_proxy_passes_on_is_told_by_its_headers() {
        let check = |name: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, "localhost:8420".parse().unwrap());
            headers.insert(name, "192.0.2.1".parse().unwrap());
            check_not_forwarded(&headers).is_ok()
        };
        for name in ["forwarded", "via", "x-real-ip", "x-forwarded-for", "x-forwarded-host", "x-forwarded-port"] {
            assert!(!check(name), "{name}");
        }
        assert!(check("x-request-id"));
    }

    #[test]
    fn a_cookie_is_found_among_others() {
        let found = |lines: &[&str]| {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append(header::COOKIE, line.parse().unwrap());
            }
            cookie(&headers).map(ToOwned::to_owned)
        };
        assert_eq!(found(&["a=b; ax_token=ax_1; c=d"]), Some("ax_1".to_owned()));
        assert_eq!(found(&["a=b", "ax_token=ax_2"]), Some("ax_2".to_owned()));
        assert_eq!(found(&["xax_token=1; ax_token="]), None);
        assert_eq!(found(&[]), None);
    }
}
