//! How long a holder may trust its lease.

use std::time::Duration;

use uuid::Uuid;

/// A lease as its holder sees it, on the holder's own boot-time clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trust {
    ttl: Duration,
    /// When the last good renewal was *sent*: the server's own clock for the key began later.
    sent_at: Duration,
}

impl Trust {
    /// A lease of `ttl` whose last good write was sent at `sent_at` since boot.
    #[must_use]
    pub fn new(ttl: Duration, sent_at: Duration) -> Self {
        Self { ttl, sent_at }
    }

    /// A renewal that was sent at `sent_at` succeeded.
    pub fn renewed(&mut self, sent_at: Duration) {
        self.sent_at = self.sent_at.max(sent_at);
    }

    /// Until when (since boot) the holder may act: two thirds of the TTL after the last good renewal was sent.
    #[must_use]
    pub fn until(&self) -> Duration {
        self.sent_at + self.ttl * 2 / 3
    }

    /// Whether the holder may act now.
    #[must_use]
    pub fn holds(&self, now: Duration) -> bool {
        now < self.until()
    }

    /// How often to renew: a fifth of the TTL.
    #[must_use]
    pub fn renew_every(&self) -> Duration {
        self.ttl / 5
    }
}

/// What a follower has heard from `ax.internal.leader`, to decide on an early takeover.
#[derive(Debug, Clone, Default)]
pub struct Silence {
    /// Whom it is about: what was heard of one holder says nothing about the next.
    holder: Option<Uuid>,
    no_responders: u32,
    wait_until: Option<Duration>,
}

/// Asks in a row that nobody was there to answer, before a follower takes over early.
const ASKS: u32 = 2;
/// Own connection must have been up this long: after a reconnect the leader may not have subscribed again.
const CONNECTED: Duration = Duration::from_secs(1);
/// After a takeover that proved wrong the TTL alone decides for this long.
const DISTRUST: Duration = Duration::from_secs(60);

impl Silence {
    /// A leader answered, or somebody may be there but was slow (frozen): not the silence of a dead process.
    pub fn answered(&mut self) {
        self.no_responders = 0;
    }

    /// Nobody listens, while the key names `holder`.
    pub fn no_responders(&mut self, holder: Uuid) {
        if self.holder != Some(holder) {
            self.holder = Some(holder);
            self.no_responders = 0;
        }
        self.no_responders = self.no_responders.saturating_add(1);
    }

    /// An early takeover hit a leader that was alive.
    pub fn proved_wrong(&mut self, now: Duration) {
        self.no_responders = 0;
        self.wait_until = Some(now + DISTRUST);
    }

    /// Whether the holder of the lease may be taken for dead before its lease has expired.
    #[must_use]
    pub fn means_dead(&self, now: Duration, connected_for: Duration) -> bool {
        self.no_responders >= ASKS && connected_for >= CONNECTED && self.wait_until.is_none_or(|t| now >= t)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOLDER: Uuid = Uuid::from_u128(1);
    const S: Duration = Duration::from_secs(1);

    #[test]
    fn a_holder_stops_at_two_thirds_counted_from_sending() {
        let mut trust = Trust::new(6 * S, 10 * S);
        assert!(trust.holds(14 * S - Duration::from_millis(1)));
        assert!(!trust.holds(14 * S));
        trust.renewed(12 * S);
        trust.renewed(11 * S);
        assert_eq!(trust.until(), 16 * S);
    }

    #[test]
    fn only_a_row_of_no_responders_on_a_settled_connection_means_dead() {
        let mut silence = Silence::default();
        silence.no_responders(HOLDER);
        assert!(!silence.means_dead(S, 5 * S));
        silence.no_responders(HOLDER);
        assert!(silence.means_dead(S, 5 * S));
        assert!(!silence.means_dead(S, S / 2), "own connection just came back");
        silence.answered();
        assert!(!silence.means_dead(S, 5 * S), "a slow answer is no silence");
        silence.proved_wrong(S);
        silence.no_responders(HOLDER);
        silence.no_responders(HOLDER);
        assert!(!silence.means_dead(60 * S, 50 * S));
        assert!(silence.means_dead(61 * S, 50 * S));
        silence.no_responders(Uuid::from_u128(2));
        assert!(!silence.means_dead(61 * S, 50 * S), "a new holder has not been silent yet");
    }
}
