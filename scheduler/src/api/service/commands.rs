//! What is asked of a run that exists: stored for the leader, which alone writes runs.

use std::time::Duration;

use ax_shared::RunId;
use serde_json::json;
use uuid::Uuid;

use super::{Caller, Service};
use crate::api::ApiError;
use crate::api::fields::Fields;
use crate::api::view::RunDetail;
use crate::core::command::{Command, CommandKind};
use crate::core::definitions::AuditEntry;
use crate::ports::Hint;

/// How long a call waits until the leader has done as asked; then it answers with the run as it is.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often it looks.
const LOOK: Duration = Duration::from_millis(50);

impl Service {
    /// Ends a run as cancelled, and answers it once it has ended, or as it is after 5 s. Nothing happens to a run that
    /// has ended.
    ///
    /// # Errors
    /// There is no such run, a broken rule, or the database is away.
    pub async fn cancel_run(&self, caller: &Caller, id: RunId, mut body: Fields) -> Result<RunDetail, ApiError> {
        let reason = body.text("reason", 500).filter(|reason| !reason.is_empty());
        body.finish()?;
        let run = self.run(id).await?;
        if run.run.state.is_final() {
            return Ok(run);
        }
        let at = self.now();
        let command = Command {
            id: Uuid::now_v7(),
            kind: CommandKind::Cancel,
            run_id: id,
            actor: caller.actor.clone(),
            reason: reason.clone(),
            at,
        };
        let audit = AuditEntry {
            at,
            actor: caller.actor.clone(),
            action: "run.cancelled".to_owned(),
            subject: id.to_string(),
            detail: json!({"task_id": run.run.task_id, "state": run.run.state, "reason": reason}),
        };
        self.store.insert_command(&command, &audit).await?;
        self.hint(Hint::Commands);
        let until = tokio::time::Instant::now() + PATIENCE;
        loop {
            let run = self.run(id).await?;
            if run.run.state.is_final() || tokio::time::Instant::now() >= until {
                return Ok(run);
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}
