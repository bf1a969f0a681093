//! Whose a delivered message still is.
//!
//! Once its ack deadline has passed, the server delivers a message to somebody else, and it takes an answer to the old
//! delivery for one to the new: a NAK would deliver it a third time beside the second. So a worker that was frozen, or
//! cut off, says nothing any more about a delivery that it may have lost.
//!
//! The deadline is counted from when the pull was sent, which is before the delivery: this worker gives the message up
//! before the server does.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use async_nats::jetstream::AckKind;
use async_nats::{Request, Subject};

use super::{ANSWER_WITHIN, Shared};
use crate::clock::Boot;

/// Given up this much earlier than the server does.
const MARGIN: Duration = Duration::from_millis(200);

/// One delivery, as long as it is this worker's.
pub(super) struct Hold {
    ack: Option<Subject>,
    wait: Duration,
    until: Mutex<Boot>,
}

impl Hold {
    /// A delivery that was asked for at `asked` from a consumer whose ack deadline is `wait`.
    pub(super) fn new(ack: Option<Subject>, asked: Boot, wait: Duration) -> Self {
        let wait = wait.saturating_sub(MARGIN);
        Self { ack, wait, until: Mutex::new(asked.plus(wait)) }
    }

    fn until(&self) -> std::sync::MutexGuard<'_, Boot> {
        self.until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether nobody else can have got the message yet.
    pub(super) fn is_ours(&self) -> bool {
        Boot::now() < *self.until()
    }

    /// Whether the deadline is further away than `span`.
    pub(super) fn lasts(&self, span: Duration) -> bool {
        Boot::now().plus(span) < *self.until()
    }

    /// Where the answer goes, while it is for this worker to answer.
    pub(super) fn ack(&self) -> Option<&Subject> {
        self.ack.as_ref().filter(|_| self.is_ours())
    }

    /// Lets the ack deadline begin anew, if the server confirms that it does. Otherwise it stays as it was.
    pub(super) async fn extend(&self, shared: &Shared) {
        let Some(ack) = self.ack() else { return };
        let sent = Boot::now();
        let request = Request::new().payload(AckKind::Progress.into()).timeout(Some(ANSWER_WITHIN));
        let answered = tokio::time::timeout(ANSWER_WITHIN, shared.client.send_request(ack.clone(), request)).await;
        if let Ok(Ok(answer)) = answered
            && answer.status.is_none()
        {
            let mut until = self.until();
            *until = (*until).max(sent.plus(self.wait));
        }
    }

    /// Does `work`, meanwhile letting the ack deadline begin anew again and again.
    pub(super) async fn during<T>(&self, shared: &Shared, work: impl Future<Output = T>) -> T {
        tokio::pin!(work);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return done,
                () = tokio::time::sleep(self.wait / 3) => self.extend(shared).await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delivery_is_given_up_before_its_deadline_and_not_answered_after_it() {
        let ack = Some(Subject::from("ack"));
        let fresh = Hold::new(ack.clone(), Boot::now(), Duration::from_secs(3));
        assert!(fresh.is_ours() && fresh.ack().is_some());
        assert!(fresh.lasts(Duration::from_secs(2)) && !fresh.lasts(Duration::from_millis(2900)));
        let late = Hold::new(ack, Boot::now(), MARGIN);
        assert!(!late.is_ours() && late.ack().is_none());
    }
}
