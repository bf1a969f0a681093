//! How an attempt fails.

use std::time::Duration;

use ax_shared::wire::WireError;

/// Why an attempt failed, and whether another one may help.
///
/// Any error becomes a failure that is tried again, so `?` is all that a handler needs:
///
/// ```
/// use ax_worker::{Failure, GiveUp};
///
/// fn parse(text: &str) -> Result<u32, Failure> {
///     let again: u32 = text.parse()?; // tried again
///     let never: u32 = text.parse::<u32>().give_up()?; // ends the run
///     Ok(again + never)
/// }
/// assert!(!parse("7").is_err());
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

    /// Adds a word for programs, such as `timeout`.
    #[must_use]
    pub fn of_kind(self, kind: &str) -> Self {
        let message = self.error.text();
        Self { error: WireError::Kinded { kind: kind.to_owned(), message }, ..self }
    }
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
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
        assert_eq!(failure.error.text(), "cannot load the order: invalid digit found in string");
        assert!(failure.retry);
        assert!(!"x".parse::<u32>().give_up().unwrap_err().retry);
        assert_eq!(Failure::retry("late").of_kind("timeout").error.text(), "timeout: late");
    }
}
