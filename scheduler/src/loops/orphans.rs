//! Messages that belong to no run any more.
//!
//! A leader that was frozen with a publish on its way lets it go when it thaws, also when its successor has ended that
//! run meanwhile: no row owns the message, and nobody pulls its consumer once no task needs it. Such messages are deleted.
//! One of a run that is not in the database at all is left alone: that database may be an older copy.

use std::sync::Arc;
use std::time::Duration;

use ax_shared::{RunId, Timestamp};

use super::Term;
use crate::metrics as names;
use crate::ports::{BusError, StreamMessage};

/// A message may be younger than the news of it.
const LEAVE_ALONE: Duration = Duration::from_secs(30);
/// Messages that one sweep looks at; the next one goes on from there.
const AT_ONCE: usize = 1000;

/// Looks through AX_TRIGGERS if it holds more messages than runs own. `place` is the sequence that an earlier sweep got
/// to.
pub(super) async fn sweep(term: &Arc<Term>, place: &mut u64) -> Result<(), BusError> {
    let triggers = term.cx.bus.triggers().await?;
    if triggers.messages <= term.shard().owned_messages() as u64 {
        *place = 0;
        return Ok(());
    }
    for _ in 0..AT_ONCE {
        if !term.may_act() {
            return Ok(());
        }
        let Some(message) = term.cx.bus.next_trigger(*place + 1).await? else {
            *place = 0;
            return Ok(());
        };
        *place = message.seq;
        if is_orphan(term, &message).await {
            let Some(publisher) = term.publisher() else { return Ok(()) };
            if publisher.delete(message.seq).await.is_err() {
                // The next sweep meets it again.
                *place = 0;
                return Ok(());
            }
            metrics::counter!(names::ORPHANS_DELETED.name).increment(1);
            tracing::warn!(
                seq = message.seq,
                subject = message.subject,
                "a message of a run that had ended before it was published was deleted"
            );
        }
    }
    Ok(())
}

async fn is_orphan(term: &Term, message: &StreamMessage) -> bool {
    let id = message.subject.rsplit('.').next().and_then(|token| token.parse::<RunId>().ok());
    let Some(id) = id else { return false };
    if !is_old(message.at, term.cx.clock.now()) || term.shard().run(id).is_some() {
        return false;
    }
    // A run that is not in memory has ended, is not adopted yet, or is in no database.
    matches!(term.cx.store.run(id).await, Ok(Some((run, _))) if run.state.is_final())
}

fn is_old(at: Timestamp, now: Timestamp) -> bool {
    let age = now.millis_since(at);
    // What was stored after now was stored before the clock stepped back.
    age < 0 || age > LEAVE_ALONE.as_millis() as i64
}
