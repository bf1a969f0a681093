//! What operators ask of runs, carried out in memory. The command ends in the same commit as what it did, and carrying one
//! out twice changes nothing, so it may be read again until then.

use ax_shared::{RunId, Timestamp};

use super::Shard;
use crate::core::command::{Command, CommandKind};

impl Shard {
    /// Whether the run is here: it has not ended, or its end is not written or its message not closed yet.
    #[must_use]
    pub fn holds(&self, id: RunId) -> bool {
        self.runs.contains_key(&id)
    }

    /// Carries a command out. Nothing is done to a run that has ended, or is not here and so has ended.
    pub fn carry_out(&mut self, command: &Command, now: Timestamp) {
        match command.kind {
            CommandKind::Cancel => {
                let reason = command.reason.clone().unwrap_or_else(|| format!("cancelled by {}", command.actor));
                self.withdraw(command.run_id, reason.into(), now);
            }
        }
        self.commands_done.push(command.id);
    }
}
