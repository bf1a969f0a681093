//! The tokens as this node knows them: read again twice a second, so that one that was made or revoked counts within
//! about a second on every node.
//!
//! While the database is away, known tokens go on for [`TRUSTED`]; then nobody can be told from anybody, and requests
//! are refused as unavailable. A token that has expired still counts as one: it is refused, and so are requests without
//! any, until it is revoked.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::ApiError;
use super::service::Caller;
use crate::core::token::{Token, TokenHash, hash};
use crate::ports::{Clock, Store, StoreError};

/// How often tokens are read.
const EVERY: Duration = Duration::from_millis(500);
/// How long reading may take.
const READ_WITHIN: Duration = Duration::from_secs(5);
/// How long what was read counts while the database is away.
pub const TRUSTED: Duration = Duration::from_secs(300);

/// The tokens, shared by all requests of a node.
pub struct Tokens {
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    book: RwLock<Book>,
}

#[derive(Default)]
struct Book {
    tokens: HashMap<TokenHash, Token>,
    /// On the boot-time clock.
    read_at: Duration,
}

impl Tokens {
    /// Reads them for the first time.
    ///
    /// # Errors
    /// The database is away or has not the schema.
    pub async fn read(store: Arc<dyn Store>, clock: Arc<dyn Clock>) -> Result<Self, StoreError> {
        let tokens = Self { store, clock, book: RwLock::default() };
        tokens.refresh().await?;
        Ok(tokens)
    }

    /// Reads them again.
    ///
    /// # Errors
    /// The database is away; what was read before stays.
    pub async fn refresh(&self) -> Result<(), StoreError> {
        // What is read is true at some moment after this one.
        let read_at = self.clock.boot();
        let tokens = self.store.tokens().await?.into_iter().map(|token| (token.hash, token)).collect();
        *self.book.write().unwrap_or_else(PoisonError::into_inner) = Book { tokens, read_at };
        Ok(())
    }

    /// Reads them again and again until `stop`.
    pub async fn keep_up(self: Arc<Self>, stop: CancellationToken) {
        let mut away = false;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(EVERY) => {}
            }
            let failed = match tokio::time::timeout(READ_WITHIN, self.refresh()).await {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(format!("{:#}", anyhow::Error::from(error))),
                Err(_) => Some("no answer in time".to_owned()),
            };
            if let (Some(cause), false) = (&failed, away) {
                let seconds = TRUSTED.as_secs();
                tracing::warn!(cause, seconds, "tokens cannot be read; those known go on for a while");
            }
            away = failed.is_some();
        }
    }

    /// Whether there is any, expired ones included.
    #[must_use]
    pub fn any(&self) -> bool {
        !self.book.read().unwrap_or_else(PoisonError::into_inner).tokens.is_empty()
    }

    /// Who bears this token.
    ///
    /// # Errors
    /// [`ApiError::Unauthorized`] for an unknown or expired one, [`ApiError::Unavailable`] when the database has been
    /// away for too long to know.
    pub fn bearer(&self, secret: &str) -> Result<Caller, ApiError> {
        let book = self.book.read().unwrap_or_else(PoisonError::into_inner);
        if self.clock.boot().saturating_sub(book.read_at) > TRUSTED {
            return Err(ApiError::Unavailable { what: "the database", source: None });
        }
        let refused = |why: &str| Err(ApiError::Unauthorized { detail: why.to_owned(), shown: true });
        match book.tokens.get(&hash(secret)) {
            None => refused("the token is unknown or has been revoked"),
            Some(token) if token.expires_at.is_some_and(|at| at <= self.clock.now()) => {
                refused("the token has expired")
            }
            Some(token) => Ok(Caller { actor: token.name.clone(), role: token.role }),
        }
    }
}
