//! The routes under `/api/v1`: those of the table, and what only HTTP has.

use std::convert::Infallible;
use std::time::Duration;

use axum::Router;
use axum::extract::{Extension, FromRequestParts as _, Path, Request as HttpRequest, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, on};
use futures::{Stream, StreamExt};

use super::problem::HttpError;
use super::request::{self, Params};
use super::{Door, guard};
use crate::api::operation::{Method, ROUTES, Reply, Request, Route, Subject};
use crate::api::service::{Caller, Role};
use crate::api::{ApiError, openapi};

type Answer<T> = Result<T, HttpError>;

pub(super) fn routes() -> Router<Door> {
    let mut router = Router::new();
    for route in ROUTES {
        let method = match route.method {
            Method::Get => MethodFilter::GET,
            Method::Put => MethodFilter::PUT,
            Method::Post => MethodFilter::POST,
            Method::Delete => MethodFilter::DELETE,
        };
        let answer = move |State(door): State<Door>, Extension(caller): Extension<Caller>, request: HttpRequest| async move {
            answer(route, &door, &caller, request).await
        };
        router = router.route(route.path, on(method, answer));
    }
    router
}

/// The document of the API.
pub(super) async fn openapi(Extension(caller): Extension<Caller>, Params(fields): Params) -> Answer<Response> {
    caller.must_be(Role::Viewer)?;
    fields.finish()?;
    Ok(([(header::CONTENT_TYPE, "application/json")], openapi::TEXT.as_str()).into_response())
}

async fn answer(route: &Route, door: &Door, caller: &Caller, request: HttpRequest) -> Answer<Response> {
    // Before anything is read: who may not ask need not send.
    caller.must_be(route.role)?;
    let request = read(route, request).await?;
    let reply = route.answer(&door.service, caller, request).await?;
    Ok(respond(reply))
}

async fn read(route: &Route, request: HttpRequest) -> Answer<Request> {
    let (mut parts, body) = request.into_parts();
    let id = match route.about {
        Subject::None => None,
        Subject::Task | Subject::Run => {
            let id = Path::<String>::from_request_parts(&mut parts, &()).await;
            Some(id.map_err(|_| ApiError::Malformed("the address is not UTF-8, percent-encoded".to_owned()))?.0)
        }
    };
    let Params(params) = Params::from_request_parts(&mut parts, &()).await?;
    let expected = request::if_match(&parts.headers)?;
    let body = request::body(route.input, body).await?;
    Ok(Request { id, params, body, expected })
}

fn respond(reply: Reply) -> Response {
    let status = StatusCode::from_u16(reply.status).unwrap_or(StatusCode::OK);
    if reply.body.is_empty() {
        return status.into_response();
    }
    let mut response = (status, [(header::CONTENT_TYPE, "application/json")], reply.body).into_response();
    // The version of a task as an entity tag, which `If-Match` takes.
    let etag = reply.version.and_then(|version| HeaderValue::from_str(&format!("\"{version}\"")).ok());
    if let Some(etag) = etag {
        response.headers_mut().insert(header::ETAG, etag);
    }
    response
}

/// State changes of runs as server-sent events: event = the state, data = the notice. Ends with the connection to NATS,
/// with the node, or with the token that was shown; a browser connects again by itself.
pub(super) async fn events(
    State(door): State<Door>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    Params(fields): Params,
) -> Answer<Sse<impl Stream<Item = Result<Event, Infallible>>>> {
    caller.must_be(Role::Viewer)?;
    fields.finish()?;
    let notices = door.service.notices().await?;
    let events = notices
        .take_until(door.shutdown.clone().cancelled_owned())
        .take_until(Box::pin(guard::no_longer_let_in(door, headers)))
        .map(|(state, body)| Ok(Event::default().event(state).data(String::from_utf8_lossy(&body))));
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(Duration::from_secs(15))))
}
