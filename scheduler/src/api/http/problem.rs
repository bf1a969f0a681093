//! Refusals as problem documents.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::api::ApiError;

/// A refusal on its way out.
#[derive(Debug)]
pub(crate) struct HttpError(pub(crate) ApiError);

impl<E: Into<ApiError>> From<E> for HttpError {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        self.0.log();
        let problem = self.0.problem();
        let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_vec(&problem).unwrap_or_default();
        let mut response = (status, [(header::CONTENT_TYPE, "application/problem+json")], body).into_response();
        if let ApiError::Unauthorized { shown, .. } = &self.0 {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge(*shown));
        }
        if let Some(seconds) = self.0.retry_after_s() {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// What a 401 asks for (RFC 6750, section 3): without a token that was shown there is no error to name.
pub(crate) fn challenge(shown: bool) -> HeaderValue {
    HeaderValue::from_static(if shown { "Bearer realm=\"ax\", error=\"invalid_token\"" } else { "Bearer realm=\"ax\"" })
}
