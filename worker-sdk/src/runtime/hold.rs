//! Whose a delivered message still is.
//!
//! Once its ack deadline has passed, the server delivers a message to somebody else, and it takes an answer to the old
//! delivery for one to the new: a NAK would deliver it a third time beside the second. So a worker that was frozen, or
//! cut off, says nothing any more about a delivery that it may have lost.
//!
//! The deadline is counted from when the pull was sent, which is before the delivery: this worker gives the message up
//! before the server does.
//!
//! Nothing about a delivery is sent while there is no connection: the client would keep it and send it at some later
//! time, when the message may be somebody else's.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use async_nats::jetstream::AckKind;
use async_nats::{Request, Subject};

use super::{ANSWER_WITHIN, Shared};
use crate::clock::Boot;

/// Given up this much earlier than the server does.
const MARGIN: Duration = Duration::from_millis(200);

/// Pause after an extension, confirmed or not.
const EXTEND_AGAIN_AFTER: Duration = Duration::from_millis(250);

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
        let Some(ack) = self.ack().filter(|_| shared.is_connected()) else { return };
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

    /// Does `work`, meanwhile letting the ack deadline begin anew whenever a third of the time is spent.
    pub(super) async fn during<T>(&self, shared: &Shared, work: impl Future<Output = T>) -> T {
        tokio::select! {
            biased;
            done = work => done,
            never = self.keep(shared) => never,
        }
    }

    async fn keep<T>(&self, shared: &Shared) -> T {
        loop {
            tokio::time::sleep(self.fresh_for()).await;
            self.extend(shared).await;
            tokio::time::sleep(EXTEND_AGAIN_AFTER).await;
        }
    }

    /// Time until a third of the deadline is spent.
    fn fresh_for(&self) -> Duration {
        self.until().since(Boot::now()).saturating_sub(self.wait * 2 / 3)
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
        assert!(fresh.fresh_for() <= Duration::from_secs(1) && fresh.fresh_for() > Duration::from_millis(500));
        let late = Hold::new(ack, Boot::now(), MARGIN);
        assert!(!late.is_ours() && late.ack().is_none() && late.fresh_for().is_zero());
    }
}
