//! Every subject, stream, bucket and consumer name, built in one place.

use crate::ids::{Group, Handler, Queue, RunId, TaskId};
use crate::profile::Profile;

/// The prefix that goes before every subject (`ax`), stream (`AX_`), bucket (`ax_`) and service of one installation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefix {
    lower: String,
    upper: String,
}

impl Default for Prefix {
    fn default() -> Self {
        Self { lower: "ax".into(), upper: "AX".into() }
    }
}

/// A prefix that is not `[a-z][a-z0-9]{0,15}`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a valid prefix: a lower-case letter, then up to 15 lower-case letters or digits")]
pub struct InvalidPrefix(String);

/// A run's place in the subjects: who may execute it and which run it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RunAddress {
    /// The executor group.
    pub group: Group,
    /// The task.
    pub task_id: TaskId,
    /// The run.
    pub run_id: RunId,
}

impl Prefix {
    /// Checks a prefix: a lower-case letter, then up to 15 lower-case letters or digits.
    ///
    /// # Errors
    /// [`InvalidPrefix`] for anything else.
    pub fn new(value: &str) -> Result<Self, InvalidPrefix> {
        let ok = value.len() <= 16
            && value.starts_with(|c: char| c.is_ascii_lowercase())
            && value.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        if ok {
            Ok(Self { lower: value.to_owned(), upper: value.to_ascii_uppercase() })
        } else {
            Err(InvalidPrefix(value.chars().take(40).collect()))
        }
    }

    /// The prefix itself, `ax` by default.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.lower
    }

    /// Work queue of trigger messages.
    #[must_use]
    pub fn triggers_stream(&self) -> String {
        format!("{}_TRIGGERS", self.upper)
    }

    /// What workers and the server tell about runs, in one order.
    #[must_use]
    pub fn events_stream(&self) -> String {
        format!("{}_EVENTS", self.upper)
    }

    /// Log lines of runs.
    #[must_use]
    pub fn logs_stream(&self) -> String {
        format!("{}_LOGS", self.upper)
    }

    /// Copies of messages whose deliveries are used up.
    #[must_use]
    pub fn dead_stream(&self) -> String {
        format!("{}_DEAD", self.upper)
    }

    /// KV bucket `ax_<name>` (leader, dedup, dag, groups, workers) or object bucket (results).
    #[must_use]
    pub fn bucket(&self, name: &str) -> String {
        format!("{}_{name}", self.lower)
    }

    /// Subject of a run's trigger.
    #[must_use]
    pub fn trigger(&self, run: &RunAddress, queue: &Queue, profile: Profile) -> String {
        format!("{}.trigger.{}.{queue}.{profile}.{}.{}", self.lower, run.group, run.task_id, run.run_id)
    }

    /// All triggers.
    #[must_use]
    pub fn all_triggers(&self) -> String {
        format!("{}.trigger.>", self.lower)
    }

    /// Triggers that one consumer delivers.
    #[must_use]
    pub fn triggers_of(&self, group: &Group, queue: &Queue, profile: Profile) -> String {
        format!("{}.trigger.{group}.{queue}.{profile}.>", self.lower)
    }

    /// Subject of a worker's event of `kind` (`started`, `succeeded` …).
    #[must_use]
    pub fn event(&self, kind: &str, run: &RunAddress) -> String {
        format!("{}.event.{kind}.{}.{}.{}", self.lower, run.group, run.task_id, run.run_id)
    }

    /// All workers' events.
    #[must_use]
    pub fn all_events(&self) -> String {
        format!("{}.event.>", self.lower)
    }

    /// Subject of a run's log lines.
    #[must_use]
    pub fn log(&self, group: &Group, run_id: RunId) -> String {
        format!("{}.log.{group}.{run_id}", self.lower)
    }

    /// All log lines.
    #[must_use]
    pub fn all_logs(&self) -> String {
        format!("{}.log.>", self.lower)
    }

    /// Subject of the dead copy of a run.
    #[must_use]
    pub fn dead(&self, run: &RunAddress) -> String {
        format!("{}.dead.{}.{}.{}", self.lower, run.group, run.task_id, run.run_id)
    }

    /// All dead copies.
    #[must_use]
    pub fn all_dead(&self) -> String {
        format!("{}.dead.>", self.lower)
    }

    /// Live, unstored notice of a run's new state.
    #[must_use]
    pub fn notice(&self, state: &str, run: &RunAddress) -> String {
        format!("{}.notice.{state}.{}.{}.{}", self.lower, run.group, run.task_id, run.run_id)
    }

    /// Every notice.
    #[must_use]
    pub fn all_notices(&self) -> String {
        format!("{}.notice.>", self.lower)
    }

    /// Where the leader answers followers that ask whether it lives.
    #[must_use]
    pub fn leader_ask(&self) -> String {
        format!("{}.internal.leader", self.lower)
    }

    /// Where a node answers those that ask for its id.
    #[must_use]
    pub fn node_ask(&self, node_id: &str) -> String {
        format!("{}.internal.node.{node_id}", self.lower)
    }

    /// Where every node answers.
    #[must_use]
    pub fn nodes_ask(&self) -> String {
        format!("{}.internal.nodes", self.lower)
    }

    /// Where nodes tell the leader that rows of a kind were inserted.
    #[must_use]
    pub fn hint(&self) -> String {
        format!("{}.internal.hint", self.lower)
    }

    /// Subject of an operation of the API, e.g. `apply` or `task.get`.
    #[must_use]
    pub fn api(&self, operation: &str) -> String {
        format!("{}.api.v1.{operation}", self.lower)
    }

    /// Subject of an event that a person should hear of, e.g. `rejected`.
    #[must_use]
    pub fn alert(&self, kind: &str) -> String {
        format!("{}.alert.{kind}", self.lower)
    }

    /// Subject that asks workers to stop a run.
    #[must_use]
    pub fn cancel(&self, group: &Group, run_id: RunId) -> String {
        format!("{}.control.cancel.{group}.{run_id}", self.lower)
    }

    /// Server-made subjects that AX_EVENTS stores beside the workers' events: ack metrics and advisories of AX_TRIGGERS.
    #[must_use]
    pub fn server_events(&self) -> [String; 4] {
        let stream = self.triggers_stream();
        [
            format!("$JS.EVENT.METRIC.CONSUMER.ACK.{stream}.>"),
            format!("$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{stream}.>"),
            format!("$JS.EVENT.ADVISORY.CONSUMER.MSG_NAKED.{stream}.>"),
            format!("$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.{stream}.>"),
        ]
    }
}

/// The durable consumer of one group, lane and profile: `<group>-<queue>-<profile>`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConsumerName {
    /// The executor group.
    pub group: Group,
    /// The lane.
    pub queue: Queue,
    /// The (timeout, retries) class.
    pub profile: Profile,
}

impl std::fmt::Display for ConsumerName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}-{}", self.group, self.queue, self.profile)
    }
}

impl ConsumerName {
    /// Reads a consumer's name from the right: neither queue nor profile has a `-`.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let (rest, profile) = name.rsplit_once('-')?;
        let (group, queue) = rest.rsplit_once('-')?;
        Some(Self { group: Group::new(group).ok()?, queue: Queue::new(queue).ok()?, profile: Profile::parse(profile)? })
    }
}

/// Reads `<group>.<task_id>.<run_id>` from the right end of a subject whose kind token has been cut off: the task id
/// may hold dots, the others do not.
#[must_use]
pub fn parse_address(rest: &str) -> Option<RunAddress> {
    let (group, rest) = rest.split_once('.')?;
    let (task, run) = rest.rsplit_once('.')?;
    Some(RunAddress { group: Group::new(group).ok()?, task_id: TaskId::new(task).ok()?, run_id: run.parse().ok()? })
}

/// The header names of ax's messages.
pub mod header {
    /// Version of the wire format, `1`.
    pub const VERSION: &str = "Ax-Version";
    /// The run.
    pub const RUN_ID: &str = "Ax-Run-Id";
    /// The task.
    pub const TASK_ID: &str = "Ax-Task-Id";
    /// What the worker executes.
    pub const HANDLER: &str = "Ax-Handler";
    /// The executor group.
    pub const GROUP: &str = "Ax-Group";
    /// The instant for which the run is scheduled, RFC 3339.
    pub const TRIGGER_TIME: &str = "Ax-Trigger-Time";
    /// The instant at which the run is to be handed over: trigger time plus delay or spread, RFC 3339.
    pub const PUBLISH_AT: &str = "Ax-Publish-At";
    /// Time of one attempt in milliseconds.
    pub const TIMEOUT_MS: &str = "Ax-Timeout-Ms";
    /// The number of the run's last attempt.
    pub const MAX_ATTEMPTS: &str = "Ax-Max-Attempts";
    /// Attempts used up before this message; attempt = base + delivery count.
    pub const ATTEMPT_BASE: &str = "Ax-Attempt-Base";
    /// initial,multiplier,max,jitter in milliseconds.
    pub const RETRY_BACKOFF: &str = "Ax-Retry-Backoff";
    /// 1–10.
    pub const PRIORITY: &str = "Ax-Priority";
    /// Capacity units.
    pub const WEIGHT: &str = "Ax-Weight";
    /// Fencing number of the leader that published.
    pub const EPOCH: &str = "Ax-Epoch";
    /// The flow.
    pub const FLOW_ID: &str = "Ax-Flow-Id";
    /// Present and `true` on a message that takes the place of an earlier one.
    pub const REPUBLISHED: &str = "Ax-Republished";
    /// The attempt is not to begin after this instant, RFC 3339. Optional.
    pub const START_DEADLINE: &str = "Ax-Start-Deadline";
    /// W3C trace context.
    pub const TRACEPARENT: &str = "traceparent";
    /// Who sends a request to the API, as it says of itself.
    pub const ACTOR: &str = "Ax-Actor";
    /// Deduplication id of JetStream.
    pub const MSG_ID: &str = "Nats-Msg-Id";
}

/// The handler named by a trigger's headers, when it is a valid one.
#[must_use]
pub fn handler_of(value: &str) -> Option<Handler> {
    Handler::new(value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_consumer_name_is_read_from_the_right() {
        for text in ["data-sync-default-t60r3", "g-q-t1r0", "-a--long_lane-t604800r100"] {
            assert_eq!(ConsumerName::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(ConsumerName::parse("data-sync-default-t60r3").unwrap().group.as_str(), "data-sync");
        for bad in ["g-t60r3", "g-q-t61r3", "g-q-t60", "g-q-t60r101", "", "g--t60r3"] {
            assert!(ConsumerName::parse(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn a_run_address_survives_dots_in_the_task_id() {
        let run = RunId(uuid::Uuid::from_u128(7));
        let address =
            RunAddress { group: Group::new("g").unwrap(), task_id: TaskId::new("a.b.c").unwrap(), run_id: run };
        let subject = Prefix::default().event("started", &address);
        assert_eq!(parse_address(subject.strip_prefix("ax.event.started.").unwrap()), Some(address));
    }

    #[test]
    fn prefixes_are_short_and_lower_case() {
        assert_eq!(Prefix::new("prod2").unwrap().triggers_stream(), "PROD2_TRIGGERS");
        for bad in ["", "Ax", "a.b", "a b", "1a", "abcdefghijklmnopq", "a*"] {
            assert!(Prefix::new(bad).is_err(), "{bad}");
        }
    }
}
