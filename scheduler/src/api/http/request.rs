//! Reading requests: ids out of paths, parameters, bodies, who asks; each refusal a problem document.

use std::net::SocketAddr;

use ax_shared::{RunId, TaskId};
use axum::extract::{ConnectInfo, FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use futures::StreamExt as _;
use serde_json::Value;

use super::MAX_BODY_BYTES;
use super::problem::HttpError;
use crate::api::ApiError;
use crate::api::fields::Fields;
use crate::api::service::{Caller, Expected};

/// How much of a body that is too large is read before the connection is given up.
const MAX_DISCARDED_BYTES: usize = 4 * MAX_BODY_BYTES;

/// The id of a task out of the path.
pub(crate) struct TaskPath(pub(crate) TaskId);
/// The id of a run out of the path.
pub(crate) struct RunPath(pub(crate) RunId);
/// The parameters of the query string.
pub(crate) struct Params(pub(crate) Fields);
/// A body of JSON; nothing at all is null.
pub(crate) struct Body(pub(crate) Value);
/// A body of JSON, where there has to be one.
pub(crate) struct RequiredBody(pub(crate) Value);
/// Who asks.
pub(crate) struct Actor(pub(crate) Caller);
/// What `If-Match` says.
pub(crate) struct IfMatch(pub(crate) Expected);

async fn id_of<S: Send + Sync>(parts: &mut Parts, state: &S) -> Result<String, HttpError> {
    let Path(id) = Path::<String>::from_request_parts(parts, state)
        .await
        .map_err(|_| ApiError::Malformed("the address is not UTF-8, percent-encoded".to_owned()))?;
    Ok(id)
}

impl<S: Send + Sync> FromRequestParts<S> for TaskPath {
    type Rejection = HttpError;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, HttpError> {
        let id = id_of(parts, state).await?;
        Ok(Self(TaskId::new(&id).map_err(|e| ApiError::field("task_id", "format", e.to_string()))?))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for RunPath {
    type Rejection = HttpError;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, HttpError> {
        let id = id_of(parts, state).await?;
        let id = id.parse().map_err(|_| ApiError::field("run_id", "format", "a run id is a UUID"))?;
        Ok(Self(id))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Params {
    type Rejection = HttpError;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, HttpError> {
        let Query(pairs) = Query::<Vec<(String, String)>>::from_request_parts(parts, state)
            .await
            .map_err(|e| ApiError::Malformed(format!("the query string cannot be read: {e}")))?;
        Ok(Self(Fields::of_query(pairs)))
    }
}

impl Body {
    /// The whole body. One that is too large is read on for a while and thrown away: a client that is cut off in the
    /// middle of sending would see a broken connection instead of the answer.
    async fn bytes(request: Request) -> Result<Vec<u8>, HttpError> {
        let mut chunks = request.into_body().into_data_stream();
        let (mut bytes, mut seen) = (Vec::new(), 0usize);
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|_| ApiError::Malformed("the body ended early".to_owned()))?;
            seen = seen.saturating_add(chunk.len());
            if seen <= MAX_BODY_BYTES {
                bytes.extend_from_slice(&chunk);
            } else {
                bytes = Vec::new();
            }
            if seen > MAX_DISCARDED_BYTES {
                break;
            }
        }
        if seen > MAX_BODY_BYTES {
            let detail = format!("the body is larger than the limit of {MAX_BODY_BYTES} bytes (16 MiB)");
            return Err(HttpError(ApiError::TooLarge { detail, errors: Vec::new() }));
        }
        Ok(bytes)
    }
}

impl<S: Send + Sync> FromRequest<S> for Body {
    type Rejection = HttpError;
    async fn from_request(request: Request, _: &S) -> Result<Self, HttpError> {
        let bytes = Body::bytes(request).await?;
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return Ok(Self(Value::Null));
        }
        Ok(Self(json(&bytes)?))
    }
}

impl<S: Send + Sync> FromRequest<S> for RequiredBody {
    type Rejection = HttpError;
    async fn from_request(request: Request, _: &S) -> Result<Self, HttpError> {
        let bytes = Body::bytes(request).await?;
        Ok(Self(json(&bytes)?))
    }
}

fn json(bytes: &[u8]) -> Result<Value, HttpError> {
    Ok(serde_json::from_slice(bytes).map_err(|e| ApiError::Malformed(format!("the body is not JSON in UTF-8: {e}")))?)
}

impl<S: Send + Sync> FromRequestParts<S> for Actor {
    type Rejection = HttpError;
    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, HttpError> {
        let actor = match parts.extensions.get::<ConnectInfo<SocketAddr>>() {
            Some(ConnectInfo(addr)) => addr.ip().to_string(),
            None => "unknown".to_owned(),
        };
        Ok(Self(Caller { actor }))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for IfMatch {
    type Rejection = HttpError;
    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, HttpError> {
        Ok(Self(if_match(&parts.headers)?))
    }
}

fn if_match(headers: &HeaderMap) -> Result<Expected, ApiError> {
    let Some(value) = headers.get(header::IF_MATCH) else { return Ok(Expected::Any) };
    let text = value.to_str().unwrap_or_default().trim();
    if text == "*" {
        return Ok(Expected::Existing);
    }
    let bare = text.strip_prefix("W/").unwrap_or(text).trim_matches('"');
    let version = bare.parse().map_err(|_| ApiError::field("If-Match", "format", "is a version, a whole number"))?;
    Ok(Expected::Version(version))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_bare_and_as_an_etag() {
        let read = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::IF_MATCH, text.parse().unwrap());
            if_match(&headers).ok()
        };
        assert_eq!(read("3"), Some(Expected::Version(3)));
        assert_eq!(read("\"3\""), Some(Expected::Version(3)));
        assert_eq!(read("W/\"3\""), Some(Expected::Version(3)));
        assert_eq!(read("*"), Some(Expected::Existing));
        assert_eq!(read("x"), None);
    }
}
