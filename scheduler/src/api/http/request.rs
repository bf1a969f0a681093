//! Reading requests: parameters, bodies, what `If-Match` says; each refusal a problem document.

use axum::body::Body;
use axum::extract::{FromRequestParts, Query};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use futures::StreamExt as _;
use serde_json::Value;

use super::problem::HttpError;
use crate::api::ApiError;
use crate::api::fields::Fields;
use crate::api::operation::{Input, MAX_BODY_BYTES, read_if_match, read_json, too_large};
use crate::api::service::Expected;

/// How much of a body that is too large is read before the connection is given up.
const MAX_DISCARDED_BYTES: usize = 4 * MAX_BODY_BYTES;

/// The parameters of the query string.
pub(crate) struct Params(pub(crate) Fields);

impl<S: Send + Sync> FromRequestParts<S> for Params {
    type Rejection = HttpError;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, HttpError> {
        let raw = parts.uri.query().unwrap_or_default();
        if percent_encoding::percent_decode_str(raw).decode_utf8().is_err() {
            let detail = "the query string is not UTF-8, percent-encoded".to_owned();
            return Err(HttpError(ApiError::Malformed(detail)));
        }
        let Query(pairs) = Query::<Vec<(String, String)>>::from_request_parts(parts, state)
            .await
            .map_err(|e| ApiError::Malformed(format!("the query string cannot be read: {e}")))?;
        Ok(Self(Fields::of_query(pairs)))
    }
}

/// The body as JSON, as far as it is read at all; nothing is null.
pub(super) async fn body(input: Input, body: Body) -> Result<Value, HttpError> {
    Ok(match input {
        Input::Parameters => Value::Null,
        Input::OptionalBody => read_json(&bytes(body).await?, true)?,
        Input::Body | Input::Document => read_json(&bytes(body).await?, false)?,
    })
}

/// The whole body. One that is too large is read on for a while and thrown away: a client that is cut off in the
/// middle of sending would see a broken connection instead of the answer.
pub(super) async fn bytes(body: Body) -> Result<Vec<u8>, HttpError> {
    let mut chunks = body.into_data_stream();
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
    if seen > MAX_BODY_BYTES { Err(HttpError(too_large())) } else { Ok(bytes) }
}

/// What `If-Match` says.
pub(super) fn if_match(headers: &HeaderMap) -> Result<Expected, ApiError> {
    match headers.get(header::IF_MATCH) {
        Some(value) => read_if_match(value.to_str().unwrap_or_default()),
        None => Ok(Expected::Any),
    }
}
