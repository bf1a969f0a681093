//! Definitions written in code.

use std::time::Duration;

use ax_shared::{Group, Handler, Queue, TaskId, Timestamp};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::WorkerError;

/// How long an idempotency key is remembered unless the definition says otherwise, in seconds.
const DEDUP_WINDOW_SECONDS: u64 = 60;

/// A task's definition, applied when its worker begins. What one attempt may take and how often a failure is tried again
/// are decisions, so they have no default.
///
/// ```
/// use std::time::Duration;
/// use ax_worker::Task;
///
/// let nightly = Task::new("sync_orders", Duration::from_secs(60), 3)
///     .cron("0 2 * * *")
///     .timezone("Asia/Shanghai")
///     .payload(serde_json::json!({"db": "orders"}))
///     .priority(8);
/// ```
///
/// Everything that a definition can say has a name here or goes through [`field`](Self::field). The scheduler checks it
/// all, and a refusal names field and rule.
#[derive(Debug)]
pub struct Task {
    task_id: String,
    fields: Map<String, Value>,
    /// The payload could not be written.
    wrong: Option<serde_json::Error>,
}

impl Task {
    /// A task that runs when triggered by hand, until it is given a schedule. `timeout` is the time of one attempt (1 ms
    /// to 7 days), `max_retry` how many attempts may follow the first (0 to 100).
    #[must_use]
    pub fn new(task_id: &str, timeout: Duration, max_retry: u32) -> Self {
        let mut fields = Map::new();
        fields.insert("task_id".into(), task_id.into());
        fields.insert("timeout_ms".into(), millis(timeout));
        fields.insert("max_retry".into(), max_retry.into());
        fields.insert("dedup_window_seconds".into(), DEDUP_WINDOW_SECONDS.into());
        Self { task_id: task_id.to_owned(), fields, wrong: None }
    }

    /// Sets a field of the definition as its JSON has it, such as `misfire_policy`.
    #[must_use]
    pub fn field(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.fields.insert(name.to_owned(), value.into());
        self
    }

    /// A schedule: five fields as in cron, six or seven as in Quartz, a nickname such as `@daily`, or `EVERY 30s`.
    #[must_use]
    pub fn cron(self, expression: &str) -> Self {
        self.field("cron_expr", expression)
    }

    /// A run every `interval` (whole milliseconds), counted from when the definition is accepted.
    #[must_use]
    pub fn every(self, interval: Duration) -> Self {
        let ms = interval.as_millis();
        let expression =
            if ms.is_multiple_of(1000) { format!("EVERY {}s", ms / 1000) } else { format!("EVERY {ms}ms") };
        self.cron(&expression)
    }

    /// One run, this long (whole seconds) after the definition is accepted.
    #[must_use]
    pub fn delay(self, delay: Duration) -> Self {
        self.field("delay_seconds", delay.as_secs())
    }

    /// IANA name of the schedule's zone. Defaults to `UTC`.
    #[must_use]
    pub fn timezone(self, name: &str) -> Self {
        self.field("timezone", name)
    }

    /// The handler that executes it. Defaults to the task's id.
    #[must_use]
    pub fn handler(self, name: &str) -> Self {
        self.field("handler", name)
    }

    /// What the handler is given. Defaults to null.
    #[must_use]
    pub fn payload(mut self, payload: impl Serialize) -> Self {
        match serde_json::to_value(payload) {
            Ok(payload) => self.field("payload", payload),
            Err(error) => {
                self.wrong.get_or_insert(error);
                self
            }
        }
    }

    /// A name for people. Defaults to the id.
    #[must_use]
    pub fn name(self, text: &str) -> Self {
        self.field("name", text)
    }

    /// A text for people.
    #[must_use]
    pub fn description(self, text: &str) -> Self {
        self.field("description", text)
    }

    /// Lane in the group. Defaults to `default`.
    #[must_use]
    pub fn queue(self, label: &str) -> Self {
        self.field("queue_label", label)
    }

    /// 1–10, larger is more urgent. Defaults to 5.
    #[must_use]
    pub fn priority(self, priority: u8) -> Self {
        self.field("priority", priority)
    }

    /// Capacity units that a run takes in a worker, 0.1–100. Defaults to 1.
    #[must_use]
    pub fn weight(self, weight: f64) -> Self {
        self.field("weight", weight)
    }

    /// The wait before attempt n + 1: `initial` · `multiplier`^(n−1), at most `max`, and a random part up to `jitter`.
    /// Defaults to 5 s, 5, 300 s, 2 s.
    #[must_use]
    pub fn retry_backoff(self, initial: Duration, multiplier: f64, max: Duration, jitter: Duration) -> Self {
        let backoff = json!({
            "initial_ms": millis(initial), "multiplier": multiplier, "max_ms": millis(max), "jitter_ms": millis(jitter),
        });
        self.field("retry_backoff", backoff)
    }

    /// What happens to a fire while an earlier run has not ended: `skip` (the default), `allow` …
    #[must_use]
    pub fn overlap_policy(self, policy: &str) -> Self {
        self.field("overlap_policy", policy)
    }

    /// How long an idempotency key is remembered (whole seconds), zero for not at all. Defaults to 60 s.
    #[must_use]
    pub fn dedup_window(self, window: Duration) -> Self {
        self.field("dedup_window_seconds", window.as_secs())
    }

    /// Tasks that have to have run before this one, whose results it can read.
    #[must_use]
    pub fn upstream<I: IntoIterator<Item = T>, T: Into<String>>(self, tasks: I) -> Self {
        let tasks: Vec<String> = tasks.into_iter().map(Into::into).collect();
        self.field("upstream_task_ids", tasks)
    }

    /// Not before this instant.
    #[must_use]
    pub fn start_at(self, instant: Timestamp) -> Self {
        self.field("start_at", instant.to_string())
    }

    /// The definition of a task of `group`, with the names checked that others have to find.
    pub(crate) fn document(mut self, group: &Group) -> Result<Value, WorkerError> {
        let task_id = TaskId::new(&self.task_id)?;
        if let Some(error) = self.wrong {
            return Err(WorkerError::Payload(self.task_id, error));
        }
        let handler = self.fields.entry("handler").or_insert_with(|| Handler::of_task(&task_id).as_str().into());
        Handler::new(handler.as_str().unwrap_or_default())?;
        if let Some(queue) = self.fields.get("queue_label").and_then(Value::as_str) {
            Queue::new(queue)?;
        }
        self.fields.insert("executor_group".into(), group.as_str().into());
        Ok(Value::Object(self.fields))
    }
}

fn millis(span: Duration) -> Value {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX).into()
}

#[cfg(test)]
mod tests {
    use ax_shared::TaskDefinition;

    use super::*;

    #[test]
    fn a_definition_is_complete_and_leaves_no_decision_to_a_default() {
        let task = Task::new("sync.orders", Duration::from_millis(1500), 3)
            .every(Duration::from_secs(30))
            .name("orders")
            .description("copies them")
            .queue("slow")
            .priority(9)
            .weight(2.5)
            .payload(json!({"db": "orders"}))
            .retry_backoff(Duration::from_secs(1), 2.0, Duration::from_secs(60), Duration::ZERO)
            .overlap_policy("allow")
            .dedup_window(Duration::from_secs(600));
        let document = task.document(&Group::new("data-sync").unwrap()).unwrap();
        let checked = TaskDefinition::from_json(&document).unwrap();
        assert!(checked.defaulted.is_empty(), "{:?}", checked.defaulted);
        let task = checked.definition;
        assert_eq!((task.timeout_ms, task.max_retry, task.priority), (1500, 3, 9));
        assert_eq!((task.cron_expr.as_deref(), task.handler.as_str()), (Some("EVERY 30s"), "sync.orders"));
        assert_eq!((task.executor_group.as_str(), task.queue_label.as_str()), ("data-sync", "slow"));
        assert_eq!((task.retry_backoff.initial_ms, task.dedup_window_seconds), (1000, 600));
        assert_eq!(task.payload, json!({"db": "orders"}));
    }

    #[test]
    fn intervals_delays_and_foreign_fields_are_written_as_the_scheduler_reads_them() {
        let group = Group::new("g").unwrap();
        let new = |id: &str| Task::new(id, Duration::from_secs(1), 0);
        let document = new("a").every(Duration::from_millis(1500)).handler("h").document(&group).unwrap();
        assert_eq!((&document["cron_expr"], &document["handler"]), (&json!("EVERY 1500ms"), &json!("h")));
        let document = new("b").delay(Duration::from_secs(9)).upstream(["a"]).field("jitter_ms", 7).document(&group);
        let document = document.unwrap();
        assert_eq!(document["delay_seconds"], 9);
        assert_eq!((&document["upstream_task_ids"], &document["jitter_ms"]), (&json!(["a"]), &json!(7)));
        for wrong in [new("a b"), new("a").handler("a b"), new("a").queue("a-b")] {
            assert!(matches!(wrong.document(&group), Err(WorkerError::Name(_))));
        }
        let map = std::collections::HashMap::from([((1, 2), 3)]);
        assert!(matches!(new("a").payload(map).document(&group), Err(WorkerError::Payload(..))));
    }
}
