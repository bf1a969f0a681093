//! How an attempt fails.

use std::error::Error;
use std::time::Duration;

use ax_shared::wire::WireError;

/// Why an attempt failed, and whether another one may help.
///
/// Any error, `anyhow::Error` and text included, becomes a failure that is tried again, so `?` is all that a handler
/// needs:
///
/// ```
/// use std::time::Duration;
/// use ax_worker::{Failure, GiveUp};
///
/// fn amount(text: &str) -> Result<u32, Failure> {
///     let again: u32 = text.parse()?; // tried again, after the wait that the task asks for
///     let never: u32 = text.parse().give_up()?; // ends the run
///     if again > 100 {
///         return Err(Failure::retry_after("the bank is closed", Duration::from_secs(3600)));
///     }
///     if never == 0 {
///         Err("nothing to pay")?; // tried again
///     }
///     Ok(again)
/// }
/// assert_eq!(amount("7").unwrap(), 7);
/// assert_eq!(amount("x").unwrap_err().message(), "invalid digit found in string");
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Failure {
    pub(crate) error: WireError,
    pub(crate) retry: bool,
    pub(crate) retry_after: Option<Duration>,
}

impl Failure {
    /// A failure that is tried again, after the wait that the task's definition asks for.
    pub fn retry(message: impl Into<String>) -> Self {
        Self { error: WireError::Text(message.into()), retry: true, retry_after: None }
    }

    /// A failure that no further attempt can mend: the run ends as failed.
    pub fn give_up(message: impl Into<String>) -> Self {
        Self { retry: false, ..Self::retry(message) }
    }

    /// A failure that is tried again after `wait`, whatever the task's definition says.
    pub fn retry_after(message: impl Into<String>, wait: Duration) -> Self {
        Self { retry_after: Some(wait), ..Self::retry(message) }
    }

    /// Adds a word for programs, such as `not_found`. `timeout`, `panic`, `payload`, `unknown_handler` and `expired`
    /// are used by the SDK itself.
    #[must_use]
    pub fn of_kind(self, kind: &str) -> Self {
        let message = self.message().to_owned();
        Self { error: WireError::Kinded { kind: kind.to_owned(), message }, ..self }
    }

    /// What went wrong, in words.
    #[must_use]
    pub fn message(&self) -> &str {
        match &self.error {
            WireError::Text(message) | WireError::Kinded { message, .. } => message,
        }
    }

    /// The word for programs, if it has one.
    #[must_use]
    pub fn kind(&self) -> Option<&str> {
        match &self.error {
            WireError::Text(_) => None,
            WireError::Kinded { kind, .. } => Some(kind),
        }
    }

    /// Whether another attempt may help.
    #[must_use]
    pub fn is_retried(&self) -> bool {
        self.retry
    }
}

/// Tells the whole chain of causes.
impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for Failure {
    fn from(error: E) -> Self {
        let error = error.into();
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            text.push_str(": ");
            text.push_str(&cause.to_string());
            source = cause.source();
        }
        Self::retry(text)
    }
}

/// Turns an error into one that no further attempt can mend.
pub trait GiveUp<T> {
    /// The value, or a failure that ends the run.
    ///
    /// # Errors
    /// When `self` is one.
    fn give_up(self) -> Result<T, Failure>;
}

impl<T, E: Into<Failure>> GiveUp<T> for Result<T, E> {
    fn give_up(self) -> Result<T, Failure> {
        self.map_err(|error| Failure { retry: false, ..error.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_tells_its_whole_chain_and_is_tried_again() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot load the order")]
        struct Outer(#[source] std::num::ParseIntError);
        let error = "x".parse::<u32>().map_err(Outer).unwrap_err();
        let failure = Failure::from(error);
        assert_eq!(failure.message(), "cannot load the order: invalid digit found in string");
        assert!(failure.is_retried());
        let failure = "x".parse::<u32>().give_up().unwrap_err();
        assert!(!failure.is_retried());
        // A failure stays what it is, but for the retry.
        let failure = Err::<(), _>(Failure::retry("late").of_kind("timeout")).give_up().unwrap_err();
        assert_eq!((failure.kind(), failure.message(), failure.is_retried()), (Some("timeout"), "late", false));
    }

    #[test]
    fn errors_of_anyhow_and_texts_become_failures_too() {
        fn chain() -> Result<(), Failure> {
            use anyhow::Context as _;
            "x".parse::<u32>().context("read the amount")?;
            Ok(())
        }
        assert_eq!(chain().unwrap_err().message(), "read the amount: invalid digit found in string");
        fn text() -> Result<(), Failure> {
            Err("no such order")?;
            Ok(())
        }
        assert_eq!(text().unwrap_err(), Failure::retry("no such order"));
    }
}
