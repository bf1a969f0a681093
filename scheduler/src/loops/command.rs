//! Carries out what operators ask of runs, which any node has stored: at once when hinted, within a second in any case.

use std::sync::Arc;

use super::{EndOfTerm, Term};
use crate::core::command::Command;
use crate::core::run::Run;
use crate::ports::StoreError;

/// Commands taken at once.
const BATCH: u32 = 500;

/// One pass. A command whose run is in SQL as open, but is just being taken up, is left to the next pass.
pub(super) async fn run_once(term: &Arc<Term>) -> Result<(), EndOfTerm> {
    let Some(commands) = term.done("commands", term.cx.store.commands(BATCH).await).await? else { return Ok(()) };
    for command in &commands {
        // Nobody else takes runs up meanwhile: what is neither here nor final in SQL is delayed into the future.
        let _taking_up = term.taking_up.lock().await;
        if let Err(e) = carry_out(term, command).await {
            term.done("command", Err::<(), _>(e)).await?;
            return Ok(());
        }
    }
    if !commands.is_empty() {
        term.wake.flush.notify_one();
    }
    Ok(())
}

async fn carry_out(term: &Arc<Term>, command: &Command) -> Result<(), StoreError> {
    if !term.shard().holds(command.run_id)
        && let Some((run, _)) = term.cx.store.run(command.run_id).await?
        && !run.state.is_final()
    {
        if run.adopted {
            return Ok(());
        }
        // It is not due for long. What is asked of it is written together with its being taken up.
        term.shard().hold_runs([Run { adopted: true, ..run }]);
    }
    term.shard().carry_out(command, term.cx.clock.now());
    tracing::info!(
        run_id = %command.run_id, command = command.kind.as_str(), actor = command.actor, reason = command.reason,
        "command carried out"
    );
    Ok(())
}
