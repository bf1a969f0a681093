//! What operators ask of a run that exists already. Any node stores such a command; the leader alone carries it out, and
//! what it does to the run is written together with the end of the command, so that it happens once.

use ax_shared::{RunId, Timestamp};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// What is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CommandKind {
    /// End the run as cancelled.
    Cancel,
}

impl CommandKind {
    /// The word of this kind in SQL.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cancel => "cancel",
        }
    }
}

/// A command; the row `command` in SQL, which is removed when it has been carried out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    /// Identity.
    pub id: Uuid,
    /// What is asked.
    pub kind: CommandKind,
    /// Of which run.
    pub run_id: RunId,
    /// Who asks.
    pub actor: String,
    /// Why, if that was said.
    pub reason: Option<String>,
    /// When.
    pub at: Timestamp,
}
