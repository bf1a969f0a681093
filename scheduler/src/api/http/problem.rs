//! Refusals as problem documents.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::api::ApiError;

/// A refusal on its way out. Whatever is behind ax or inside of it is logged with its cause, which is not told.
#[derive(Debug)]
pub(crate) struct HttpError(pub(crate) ApiError);

impl<E: Into<ApiError>> From<E> for HttpError {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        log(&self.0);
        let problem = self.0.problem();
        let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_vec(&problem).unwrap_or_default();
        let mut response = (status, [(header::CONTENT_TYPE, "application/problem+json")], body).into_response();
        if let Some(seconds) = self.0.retry_after_s() {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// Logs what an operator must hear of.
pub(crate) fn log(error: &ApiError) {
    match error {
        ApiError::Unavailable { what, source } => {
            let cause = source.as_ref().map(|cause| format!("{cause:#}"));
            tracing::warn!(what, cause, "a request was answered 503");
        }
        ApiError::Internal(detail) => tracing::error!(detail, "a request was answered 500"),
        _ => {}
    }
}
