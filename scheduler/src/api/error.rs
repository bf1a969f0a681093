//! Why a request was not done, and the problem document that says so.

use ax_shared::FieldError;
use serde::{Deserialize, Serialize};

use crate::ports::{BusError, StoreError};

/// Why a request was not done; nothing was written unless it says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// It cannot be read at all.
    #[error("{0}")]
    Malformed(String),
    /// It shows no token, or one that does not count.
    #[error("{detail}")]
    Unauthorized {
        /// Why not.
        detail: String,
        /// Whether a token was shown.
        shown: bool,
    },
    /// The caller's role does not allow it, or it comes from a page of another site.
    #[error("{0}")]
    Forbidden(String),
    /// What it names does not exist.
    #[error("{0}")]
    NotFound(String),
    /// The resource exists and does not know this method.
    #[error("{0}")]
    MethodNotAllowed(String),
    /// It contradicts the present state.
    #[error("{detail}")]
    Conflict {
        /// What contradicts what.
        detail: String,
        /// The fields at fault, if it was fields.
        errors: Vec<FieldError>,
    },
    /// Something in it is larger than the limit.
    #[error("{detail}")]
    TooLarge {
        /// What is too large, and the limit.
        detail: String,
        /// The fields at fault, if it was fields.
        errors: Vec<FieldError>,
    },
    /// It breaks rules, each named.
    #[error("{}", told(.0))]
    Invalid(Vec<FieldError>),
    /// Something behind ax is away; the same request may succeed later.
    #[error("{what} cannot be reached at present; nothing was done: try again")]
    Unavailable {
        /// `the database` or `NATS`.
        what: &'static str,
        /// Why, for the log.
        #[source]
        source: Option<anyhow::Error>,
    },
    /// Too much is asked of this node at once; the same request may succeed later.
    #[error("too many requests are under way at this node; nothing was done: try again")]
    Busy,
    /// ax or its database is not as it should be.
    #[error("{0}")]
    Internal(String),
}

fn told(errors: &[FieldError]) -> String {
    match errors {
        [] => "the request is invalid".to_owned(),
        [one] if one.field.is_empty() => one.message.clone(),
        [one] => format!("{}: {}", one.field, one.message),
        [first, rest @ ..] => format!("{}: {} (and {} more)", first.field, first.message, rest.len()),
    }
}

impl ApiError {
    /// One broken rule of one field.
    #[must_use]
    pub fn field(field: impl Into<String>, rule: &str, message: impl Into<String>) -> Self {
        Self::of_fields(vec![FieldError::new(field, rule, message)])
    }

    /// Broken rules; too large a payload makes it "too large", anything else "invalid".
    #[must_use]
    pub fn of_fields(errors: Vec<FieldError>) -> Self {
        let is_payload = |e: &FieldError| e.rule == "size" && e.field.rsplit('.').next() == Some("payload");
        match errors.iter().find(|e| is_payload(e)) {
            Some(large) => Self::TooLarge { detail: format!("{}: {}", large.field, large.message), errors },
            None => Self::Invalid(errors),
        }
    }

    /// A contradiction with the present state that no field of the request is at fault for.
    #[must_use]
    pub fn conflict(detail: impl Into<String>) -> Self {
        Self::Conflict { detail: detail.into(), errors: Vec::new() }
    }

    /// The HTTP status of the problem.
    #[must_use]
    pub fn status(&self) -> u16 {
        match self {
            Self::Malformed(_) => 400,
            Self::Unauthorized { .. } => 401,
            Self::Forbidden(_) => 403,
            Self::NotFound(_) => 404,
            Self::MethodNotAllowed(_) => 405,
            Self::Conflict { .. } => 409,
            Self::TooLarge { .. } => 413,
            Self::Invalid(_) => 422,
            Self::Unavailable { .. } | Self::Busy => 503,
            Self::Internal(_) => 500,
        }
    }

    /// The problem document.
    #[must_use]
    pub fn problem(&self) -> Problem {
        let errors = match self {
            Self::Conflict { errors, .. } | Self::TooLarge { errors, .. } | Self::Invalid(errors) => errors.clone(),
            _ => Vec::new(),
        };
        let title = match self {
            Self::Malformed(_) => "malformed request",
            Self::Unauthorized { .. } => "unauthorized",
            Self::Forbidden(_) => "forbidden",
            Self::NotFound(_) => "not found",
            Self::MethodNotAllowed(_) => "method not allowed",
            Self::Conflict { .. } => "conflict",
            Self::TooLarge { .. } => "too large",
            Self::Invalid(_) => "invalid",
            Self::Unavailable { .. } | Self::Busy => "unavailable",
            Self::Internal(_) => "internal error",
        };
        Problem {
            kind: "about:blank".to_owned(),
            title: title.to_owned(),
            status: self.status(),
            detail: self.to_string(),
            errors,
        }
    }

    /// Logs what an operator must hear of: whatever is behind ax or inside of it, with its cause, which is not told.
    pub(crate) fn log(&self) {
        match self {
            Self::Unavailable { what, source } => {
                let cause = source.as_ref().map(|cause| format!("{cause:#}"));
                tracing::warn!(what, cause, "a request was answered 503");
            }
            Self::Internal(detail) => tracing::error!(detail, "a request was answered 500"),
            _ => {}
        }
    }

    /// After how many seconds the same request may succeed, where waiting may help.
    #[must_use]
    pub fn retry_after_s(&self) -> Option<u32> {
        matches!(self, Self::Unavailable { .. } | Self::Busy).then_some(2)
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Unavailable(_) | StoreError::Fenced { .. } => {
                Self::Unavailable { what: "the database", source: Some(error.into()) }
            }
            StoreError::Corrupt(_) | StoreError::Refused(_) => Self::Internal(error.to_string()),
        }
    }
}

impl From<BusError> for ApiError {
    fn from(error: BusError) -> Self {
        match error {
            BusError::Unavailable(_) => Self::Unavailable { what: "NATS", source: Some(error.into()) },
            BusError::Refused(_) | BusError::Incompatible(_) => Self::Internal(error.to_string()),
        }
    }
}

/// A problem document (RFC 9457).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Problem {
    /// `about:blank`: the status says what kind of problem it is, `errors` say which rules were broken.
    #[serde(rename = "type")]
    pub kind: String,
    /// The status in words.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// What happened, in words.
    pub detail: String,
    /// The fields at fault.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<FieldError>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_that_is_too_large_is_413_and_a_long_name_is_422() {
        assert_eq!(ApiError::field("tasks[0].payload", "size", "x").status(), 413);
        assert_eq!(ApiError::field("payload", "size", "x").status(), 413);
        assert_eq!(ApiError::field("name", "size", "x").status(), 422);
    }

    #[test]
    fn a_problem_names_every_field() {
        let error =
            ApiError::Invalid(vec![FieldError::new("a", "range", "1 is"), FieldError::new("b", "type", "2 is")]);
        let problem = error.problem();
        assert_eq!((problem.status, problem.errors.len()), (422, 2));
        assert_eq!(problem.detail, "a: 1 is (and 1 more)");
        assert_eq!(serde_json::to_value(&problem).unwrap()["type"], "about:blank");
    }
}
