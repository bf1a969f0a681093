//! One method per operation, on the ports alone.
//!
//! Any node serves any operation: it inserts rows and never writes an existing run, so nothing here needs to be the
//! leader. After a write the leader is told by a hint; that the hint may get lost costs at most a second, since the
//! leader looks by itself.

mod candidate;
mod cluster;
mod commands;
mod fires;
mod runs;
mod tasks;

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use ax_shared::{Prefix, RunId, Timestamp};
use serde::Serialize;
use uuid::{ContextV7, NoContext, Uuid};

pub use self::candidate::{ApplyOptions, Expected};
pub use self::fires::{PreviewRequest, UpcomingRequest};
pub use self::runs::ListRuns;
pub use self::tasks::ListTasks;
use super::ApiError;
use super::fields::Fields;
pub use crate::core::token::Role;
use crate::ports::{Bus, Clock, Hint, Store};

/// Entries of a page when the request does not say.
pub const DEFAULT_LIMIT: u64 = 50;
/// The most entries of a page.
pub const MAX_LIMIT: u64 = 500;

/// What the service is told about its node.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Configured name of this node.
    pub node_id: String,
    /// Prefix of subjects.
    pub prefix: Prefix,
    /// Whether definitions that leave fields to a default which deserves a decision are refused.
    pub strict: bool,
}

/// Who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// For the audit: the name of a token, or where the caller is.
    pub actor: String,
    /// What it may do.
    pub role: Role,
}

impl Caller {
    /// Checks that the caller may what takes this role.
    ///
    /// # Errors
    /// [`ApiError::Forbidden`], naming the role that is needed.
    pub fn must_be(&self, role: Role) -> Result<(), ApiError> {
        if self.role >= role {
            return Ok(());
        }
        Err(ApiError::Forbidden(format!(
            "this takes the role {}; {:?} has the role {}",
            role.as_str(),
            self.actor,
            self.role.as_str()
        )))
    }
}

/// Everything that users and programs can ask of ax.
pub struct Service {
    store: Arc<dyn Store>,
    bus: Arc<dyn Bus>,
    clock: Arc<dyn Clock>,
    settings: Settings,
    /// Orders the ids that are made within one millisecond.
    ids: Mutex<ContextV7>,
    /// Names of consumers that are known to exist.
    consumers: Mutex<HashSet<String>>,
}

impl Service {
    /// Makes a service on these ports.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, bus: Arc<dyn Bus>, clock: Arc<dyn Clock>, settings: Settings) -> Self {
        Self { store, bus, clock, settings, ids: Mutex::new(ContextV7::new()), consumers: Mutex::default() }
    }

    /// The present instant on the corrected clock.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// The name of this node.
    #[must_use]
    pub fn node_id(&self) -> &str {
        &self.settings.node_id
    }

    /// A new id; ids are ordered as they are made.
    fn fresh_run_id(&self, now: Timestamp) -> RunId {
        let (seconds, nanos) = unix(now);
        let ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
        RunId(Uuid::new_v7(uuid::Timestamp::from_unix(&*ids, seconds, nanos)))
    }

    /// Tells the leader that rows were inserted, without waiting for it.
    fn hint(&self, hint: Hint) {
        let bus = self.bus.clone();
        tokio::spawn(async move { bus.hint(hint).await });
    }
}

/// The id of the run that a delay accepted at `now` sets off. It holds exactly `now`, so that the due instant can be
/// told from the definition alone, see [`delay_accepted_at`].
fn delayed_run_id(now: Timestamp) -> RunId {
    let (seconds, nanos) = unix(now);
    RunId(Uuid::new_v7(uuid::Timestamp::from_unix(NoContext, seconds, nanos)))
}

/// When the delay that set off this run was accepted.
fn delay_accepted_at(id: RunId) -> Option<Timestamp> {
    let (seconds, nanos) = id.0.get_timestamp()?.to_unix();
    let ms = i64::try_from(seconds).ok()?.checked_mul(1000)? + i64::from(nanos / 1_000_000);
    Some(Timestamp::from_millis(ms))
}

fn unix(now: Timestamp) -> (u64, u32) {
    let ms = u64::try_from(now.as_millis()).unwrap_or(0);
    (ms / 1000, (ms % 1000) as u32 * 1_000_000)
}

/// Reads `limit`.
fn limit_of(fields: &mut Fields) -> u32 {
    fields.integer("limit", 1..=MAX_LIMIT).unwrap_or(DEFAULT_LIMIT) as u32
}

/// Writes the place after which a next page begins.
fn cursor(place: &impl Serialize) -> String {
    data_encoding::BASE64URL_NOPAD.encode(&serde_json::to_vec(place).unwrap_or_default())
}

/// Reads `cursor`.
fn cursor_of<T: serde::de::DeserializeOwned>(fields: &mut Fields) -> Option<T> {
    fields.parsed("cursor", |text| {
        let bytes = data_encoding::BASE64URL_NOPAD.decode(text.as_bytes()).ok();
        bytes
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .ok_or("is not a cursor of this list: take next_cursor of the page before as it is")
    })
}

/// Cuts a list that was asked for with one entry more than the page has; true when there is a next page.
fn cut_page<T>(entries: &mut Vec<T>, limit: u32) -> bool {
    let limit = limit as usize;
    let more = entries.len() > limit;
    entries.truncate(limit);
    more
}

fn no_such_task(id: &ax_shared::TaskId) -> ApiError {
    ApiError::NotFound(format!("there is no task {id:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_acceptance_of_a_delay_can_be_read_from_its_run() {
        for ms in [1_790_000_000_123, 1_790_000_000_999, 4_000_000_000_000] {
            let now = Timestamp::from_millis(ms);
            assert_eq!(delay_accepted_at(delayed_run_id(now)), Some(now));
        }
        let derived = RunId::scheduled(&ax_shared::TaskId::new("a").unwrap(), Timestamp::from_millis(0));
        assert_eq!(delay_accepted_at(derived), None);
    }
}
