//! Implementations of [`crate::ports::Store`].
//!
//! ```text
//!   postgres   several nodes share it; the fence is a lock on the shard's row
//!   sqlite     one node, one file, one writer connection
//!   memory     for simulations and tests
//!   columns    rows as both databases have them ↔ the types of the core
//!   queries    SQL that both databases read alike
//!   measured   any of them, timed
//! ```
//!
//! Invariant: every method with an epoch locks the shard's row, or holds the only writer connection, before it reads or
//! writes anything else, in one transaction with what it writes. No row of a run is ever deleted here.

mod columns;
mod measured;
pub mod memory;
mod migrate;
pub mod postgres;
mod queries;
pub mod sqlite;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use crate::core::command::Command;
use crate::core::definitions::AuditEntry;
use crate::core::run::{Attempt, Run};
use crate::ports::{Store, StoreError};

pub use memory::Memory;
pub use postgres::Postgres;
pub use sqlite::Sqlite;

/// Opens the database of a URL: `postgres://…`, `postgresql://…` or `sqlite://PATH`. Its schema may still be missing,
/// see [`Store::migrate`]. Every operation is timed as `ax_sql_seconds{op, db}`.
///
/// # Errors
/// [`StoreError::Refused`] for another scheme, a malformed URL, missing rights, a server that is too old, and a SQLite
/// file that another node has open; [`StoreError::Unavailable`] when nothing answers. A password is never in the text.
pub async fn open(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    match url.split_once(':').map(|(scheme, _)| scheme) {
        Some("postgres" | "postgresql") => Ok(measured::measured(Postgres::open(url).await?, "postgres")),
        Some("sqlite") => Ok(measured::measured(Sqlite::open(url).await?, "sqlite")),
        Some(other) if other.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c)) => {
            Err(StoreError::Refused(format!("the database URL has the unknown scheme {other:?}; {KNOWN}")))
        }
        _ => Err(StoreError::Refused(format!("the database URL has no scheme; {KNOWN}"))),
    }
}

/// Opens the database of a URL like [`open`], also while a node has the file of a SQLite database; answers whether one
/// has. Only what is no business of the node's may be changed then: its tokens. A SQLite file that is not there is made
/// only if `make`.
///
/// # Errors
/// See [`open`].
pub async fn open_beside(url: &str, make: bool) -> Result<(Arc<dyn Store>, bool), StoreError> {
    if url.split_once(':').is_some_and(|(scheme, _)| scheme == "sqlite") {
        let (store, beside) = Sqlite::open_beside(url, make).await?;
        return Ok((measured::measured(store, "sqlite"), beside));
    }
    Ok((open(url).await?, false))
}

const KNOWN: &str = "ax knows postgres://USER@HOST/DATABASE and sqlite://PATH";

/// The one shard of today.
const SHARD: i64 = 0;
/// Rows of one statement: more gain nothing and hold locks for longer.
const BATCH_ROWS: usize = 1000;
/// Bytes of JSON in one statement, so that a batch of large payloads does not become one huge message.
const BATCH_BYTES: usize = 8 * 1024 * 1024;

/// Cuts rows into slices for one statement each; `bytes` tells what a row weighs beyond its plain columns.
fn batches<T>(rows: &[T], bytes: impl Fn(&T) -> usize) -> impl Iterator<Item = &[T]> {
    let mut rest = rows;
    std::iter::from_fn(move || {
        let mut size = 0;
        let fits = rest
            .iter()
            .take(BATCH_ROWS)
            .take_while(|row| {
                size += bytes(row);
                size <= BATCH_BYTES
            })
            .count();
        // A row that is too large for a batch goes alone.
        let (batch, later) = rest.split_at(fits.max(1).min(rest.len()));
        rest = later;
        (!batch.is_empty()).then_some(batch)
    })
}

/// A command as it is stored: text that no database refuses.
fn command_body(command: &Command) -> Result<String, StoreError> {
    let command = Command {
        actor: columns::text(&command.actor).into_owned(),
        reason: command.reason.as_deref().map(|reason| columns::text(reason).into_owned()),
        ..command.clone()
    };
    serde_json::to_string(&command).map_err(|e| StoreError::Corrupt(format!("a command: {e}")))
}

/// A stored command.
fn command_of(body: &str) -> Result<Command, StoreError> {
    serde_json::from_str(body).map_err(|e| StoreError::Corrupt(format!("command {body}: {e}")))
}

/// The lines of an audit that hold: a line about a run of this call which had been there before is left out.
fn audit_of(runs: &[Run], written: &[bool], audit: &[AuditEntry]) -> Vec<AuditEntry> {
    let mut not_ours: HashSet<String> = HashSet::new();
    for (run, _) in runs.iter().zip(written).filter(|(_, written)| !**written) {
        not_ours.insert(run.run_id.to_string());
    }
    for (run, _) in runs.iter().zip(written).filter(|(_, written)| **written) {
        not_ours.remove(&run.run_id.to_string());
    }
    audit.iter().filter(|entry| !not_ours.contains(&entry.subject)).cloned().collect()
}

/// Of several attempts with one (run_id, attempt) the last, ordered by that key.
fn last_of_each(attempts: &[Attempt]) -> Vec<&Attempt> {
    let by_key: BTreeMap<_, _> = attempts.iter().map(|attempt| ((attempt.run_id, attempt.attempt), attempt)).collect();
    by_key.into_values().collect()
}

/// What an epoch is raised to before it is counted up.
fn epoch_floor(at_least: u64) -> Result<i64, StoreError> {
    // The lease's key may have been written by somebody else; a number next to the end would leave no epochs.
    i64::try_from(at_least)
        .ok()
        .filter(|epoch| *epoch < i64::MAX / 2)
        .ok_or_else(|| StoreError::Refused(format!("the lease names the impossible epoch {at_least}")))
}

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        use sqlx::Error;
        match &error {
            Error::Configuration(source) => {
                let said = source.to_string();
                let said = said.trim_start_matches("error with configuration: ");
                Self::Refused(format!("the database URL is malformed: {said}"))
            }
            Error::RowNotFound
            | Error::TypeNotFound { .. }
            | Error::ColumnIndexOutOfBounds { .. }
            | Error::ColumnNotFound(_)
            | Error::ColumnDecode { .. }
            | Error::Encode(_)
            | Error::Decode(_) => Self::Corrupt(error.to_string()),
            Error::Database(refusal) => {
                let code = refusal.code().unwrap_or_default();
                match judge(&code, refusal.as_ref().try_downcast_ref::<sqlx::sqlite::SqliteError>().is_some()) {
                    Verdict::Later => Self::Unavailable(error),
                    Verdict::Refused => Self::Refused(format!("the database refused ({code}): {}", refusal.message())),
                    Verdict::NoSchema => Self::Refused(format!(
                        "the database has not the schema of this version of ax: {}; run `ax migrate`",
                        refusal.message()
                    )),
                    Verdict::Corrupt => Self::Corrupt(format!("{} ({code})", refusal.message())),
                }
            }
            _ => Self::Unavailable(error),
        }
    }
}

enum Verdict {
    Later,
    Refused,
    NoSchema,
    Corrupt,
}

/// Says what an error code of a database means for the caller. Codes: PostgreSQL manual, appendix A; SQLite "Result and
/// Error Codes" (primary code = low byte).
fn judge(code: &str, sqlite: bool) -> Verdict {
    if sqlite {
        return match code.parse::<u32>().unwrap_or_default() & 0xff {
            // ERROR: the statement does not fit the schema.
            1 => Verdict::NoSchema,
            // PERM, READONLY, AUTH
            3 | 8 | 23 => Verdict::Refused,
            // CORRUPT, TOOBIG, CONSTRAINT, MISMATCH, NOTADB
            11 | 18 | 19 | 20 | 26 => Verdict::Corrupt,
            // ABORT, BUSY, LOCKED, NOMEM, INTERRUPT, IOERR, FULL, CANTOPEN, PROTOCOL …
            _ => Verdict::Later,
        };
    }
    match code {
        // undefined function, column, table, object
        "42883" | "42703" | "42P01" | "42704" => Verdict::NoSchema,
        _ if ["22", "23", "21"].iter().any(|class| code.starts_with(class)) => Verdict::Corrupt,
        // no such database, authorization, privileges, syntax
        _ if ["3D", "28", "42", "0A"].iter().any(|class| code.starts_with(class)) => Verdict::Refused,
        // connection, rollback, resources, not in this state, shutdown or cancel, system, read-only transaction …
        _ => Verdict::Later,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_cut_by_rows_and_by_bytes_and_lose_nothing() {
        let rows: Vec<usize> = vec![1; 2500];
        assert_eq!(batches(&rows, |_| 0).map(<[_]>::len).collect::<Vec<_>>(), [1000, 1000, 500]);
        let rows = [BATCH_BYTES - 1, 1, 1, BATCH_BYTES + 1, 5, 0];
        assert_eq!(batches(&rows, |bytes| *bytes).map(<[_]>::len).collect::<Vec<_>>(), [2, 1, 1, 2]);
        assert_eq!(batches(&[] as &[usize], |_| 0).count(), 0);
    }

    #[tokio::test]
    async fn a_wrong_url_is_refused_by_name_and_a_password_is_not_repeated() {
        for (url, part) in [
            ("", "no scheme"),
            ("ax.db", "no scheme"),
            ("mysql://root:secret@h/db", "unknown scheme \"mysql\""),
            ("sqlite:ax.db", "sqlite://PATH"),
            ("sqlite://", "path"),
            ("sqlite://:memory:", "memory"),
            ("sqlite::memory:", "memory"),
            ("sqlite://x.db?mode=memory", "option"),
            ("postgres://user:secret@host:notaport/db", "port"),
            ("postgres://user:secret@host/db?sslmode=perhaps", "ssl_mode"),
        ] {
            match open(url).await {
                Err(StoreError::Refused(text)) => {
                    assert!(text.contains(part), "{url}: {text}");
                    assert!(!text.contains("secret"), "{url}: {text}");
                }
                Err(other) => panic!("{url}: {other:?}"),
                Ok(_) => panic!("{url} was opened"),
            }
        }
    }
}
