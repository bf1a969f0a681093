//! The task definition: what a user writes, checked once into strong types.
//!
//! [`TaskDefinition::from_json`] reads a JSON object field by field so that every refusal names the field and the rule
//! that it breaks, and all of them at once. What the schedule itself must satisfy (dialect, zone, never firing) is the
//! scheduler's knowledge and is checked there.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::ids::{Group, Handler, Queue, TaskId};

/// The largest payload of a definition or a manual trigger, in bytes of JSON text.
pub const MAX_PAYLOAD_BYTES: usize = 512 * 1024;
/// The longest `delay_seconds`: 100 years of 365.25 days.
pub const MAX_DELAY_SECONDS: u64 = 3_155_760_000;
/// The longest time of one attempt, in milliseconds: 7 days.
pub const MAX_TIMEOUT_MS: u64 = 7 * 24 * 3600 * 1000;
/// The longest wait between attempts, in milliseconds: 30 days.
pub const MAX_BACKOFF_MS: u64 = 30 * 24 * 3600 * 1000;
/// The longest time for which an idempotency key is remembered, in seconds: 7 days.
pub const MAX_DEDUP_WINDOW_SECONDS: u64 = 7 * 24 * 3600;

/// One broken rule of one field; the element of `errors` in a problem document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FieldError {
    /// The field, as a path from the body's root, e.g. `tasks[3].retry_backoff.max_ms`.
    pub field: String,
    /// The rule, as one word for programs: `required`, `type`, `range`, `format`, `unknown_field`, `conflict`,
    /// `size`, `not_supported`, `schedule`, `exists`.
    pub rule: String,
    /// The rule and the offending value in words.
    pub message: String,
}

impl FieldError {
    /// Makes an error of `field` against `rule`.
    pub fn new(field: impl Into<String>, rule: &str, message: impl Into<String>) -> Self {
        Self { field: field.into(), rule: rule.to_owned(), message: message.into() }
    }

    /// The same error with `prefix` put before the field (`tasks[3]` and `payload` make `tasks[3].payload`).
    #[must_use]
    pub fn under(mut self, prefix: &str) -> Self {
        if !prefix.is_empty() {
            self.field = if self.field.is_empty() { prefix.to_owned() } else { format!("{prefix}.{}", self.field) };
        }
        self
    }
}

/// How long to wait before attempt n + 1: min(initial · multiplier^(n−1), max) + random(0…jitter), in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RetryBackoff {
    /// Wait before the second attempt, in milliseconds. Defaults to 5000.
    pub initial_ms: u64,
    /// Factor from one wait to the next, ≥ 1. Defaults to 5.
    pub multiplier: f64,
    /// Longest wait before jitter, in milliseconds. Defaults to 300000.
    pub max_ms: u64,
    /// Upper bound of the random part, in milliseconds. Defaults to 2000.
    pub jitter_ms: u64,
}

impl Default for RetryBackoff {
    fn default() -> Self {
        Self { initial_ms: 5000, multiplier: 5.0, max_ms: 300_000, jitter_ms: 2000 }
    }
}

impl RetryBackoff {
    /// The wait after failed attempt `n` (1 = the first), in milliseconds; `random` in 0.0..=1.0 chooses the jitter.
    /// Never overflows.
    #[must_use]
    pub fn delay_ms(&self, n: u32, random: f64) -> u64 {
        let exponent = i32::try_from(n.saturating_sub(1)).unwrap_or(i32::MAX);
        // initial · multiplier^k may be infinite; min() brings it back to max. 0 · ∞ is NaN, which min() drops too.
        let grown = if self.initial_ms == 0 { 0.0 } else { self.initial_ms as f64 * self.multiplier.powi(exponent) };
        let base = grown.min(self.max_ms as f64) as u64;
        base.saturating_add((self.jitter_ms as f64 * random.clamp(0.0, 1.0)) as u64)
    }
}

/// Whether fires of a task are executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Status {
    /// Fires are executed.
    #[default]
    Enabled,
    /// Fires are recorded as skipped.
    Paused,
}

/// What happens to instants that were missed by more than the grace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum MisfirePolicy {
    /// The newest missed instant is fired, the others become one row of the history.
    #[default]
    FireOnce,
    /// None of them is fired: they are one row of the history.
    Skip,
}

/// What happens to a fire while an earlier run of the task has not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum OverlapPolicy {
    /// The new run is skipped.
    #[default]
    Skip,
    /// Both run.
    Allow,
}

/// A checked task definition. Serialised, it is the canonical form: every field with its effective value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TaskDefinition {
    /// The task's id.
    pub task_id: TaskId,
    /// Text for people, ≤ 128 characters. Defaults to the id.
    #[cfg_attr(feature = "openapi", schema(max_length = 128))]
    pub name: String,
    /// Text for people, ≤ 2000 characters. Defaults to empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[cfg_attr(feature = "openapi", schema(max_length = 2000))]
    pub description: String,
    /// The schedule expression; none for tasks that run once or by hand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(max_length = 256))]
    pub cron_expr: Option<String>,
    /// One run, this many seconds after the definition was accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(maximum = 3_155_760_000_u64))]
    pub delay_seconds: Option<u64>,
    /// IANA zone of the schedule. Defaults to `UTC`.
    #[cfg_attr(feature = "openapi", schema(max_length = 64))]
    pub timezone: String,
    /// The workers that may execute the task.
    pub executor_group: Group,
    /// Lane in the group. Defaults to `default`.
    pub queue_label: Queue,
    /// What the worker registers. Defaults to the task id.
    pub handler: Handler,
    /// Handed to the worker as it is. Defaults to null.
    #[serde(default)]
    pub payload: Value,
    /// Time of one attempt, in milliseconds. Defaults to 60000.
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 604_800_000))]
    pub timeout_ms: u64,
    /// Attempts after the first, 0–100. Defaults to 0.
    #[cfg_attr(feature = "openapi", schema(maximum = 100))]
    pub max_retry: u32,
    /// Waits between attempts.
    pub retry_backoff: RetryBackoff,
    /// 1–10, larger is more urgent. Defaults to 5.
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 10))]
    pub priority: u8,
    /// Whether fires are executed. Defaults to enabled.
    pub status: Status,
    /// What happens to missed instants. Defaults to `fire_once`.
    pub misfire_policy: MisfirePolicy,
    /// A fire this late, in milliseconds, is merely late, later it is missed. Defaults to 60000.
    #[cfg_attr(feature = "openapi", schema(maximum = 31_622_400_000_u64))]
    pub misfire_grace_ms: u64,
    /// What happens to a fire while an earlier run has not ended. Defaults to `skip`.
    pub overlap_policy: OverlapPolicy,
    /// How long an idempotency key is remembered, in seconds; 0 = not at all. Defaults to 60.
    #[cfg_attr(feature = "openapi", schema(maximum = 604_800))]
    pub dedup_window_seconds: u64,
    /// Capacity units that a run takes in a worker, 0.1–100. Defaults to 1.
    #[cfg_attr(feature = "openapi", schema(minimum = 0.1, maximum = 100.0))]
    pub weight: f64,
    /// Text map of at most 16 entries.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Who owns the definition.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(max_length = 128))]
    pub source: Option<String>,
}

/// A checked definition and what a careful reader would be told about it.
#[derive(Debug, Clone, PartialEq)]
pub struct Checked {
    /// The definition.
    pub definition: TaskDefinition,
    /// Fields that were left to a default which deserves a decision: `timeout_ms`, `max_retry`,
    /// `dedup_window_seconds`.
    pub defaulted: Vec<&'static str>,
}

impl TaskDefinition {
    /// Number of attempts: 1 + `max_retry`.
    #[must_use]
    pub fn max_attempts(&self) -> u32 {
        1 + self.max_retry
    }

    /// Reads a definition from a JSON object.
    ///
    /// # Errors
    /// Every broken rule, in the order of the fields in the object, with missing fields last.
    pub fn from_json(value: &Value) -> Result<Checked, Vec<FieldError>> {
        let Value::Object(object) = value else {
            return Err(vec![FieldError::new("", "type", format!("a task is a JSON object, not {}", kind(value)))]);
        };
        Reader { object, errors: Vec::new() }.read()
    }
}

/// Splits a document into its task objects with the path of each: one task, an array, or `{"tasks": […]}`.
///
/// # Errors
/// When the document is of none of these shapes.
pub fn tasks_of_document(document: &Value) -> Result<Vec<(String, &Value)>, FieldError> {
    let listed = |prefix: &str, items: &'_ [Value]| -> Vec<(String, usize)> {
        (0..items.len()).map(|i| (format!("{prefix}[{i}]"), i)).collect()
    };
    match document {
        Value::Array(items) => Ok(listed("", items).into_iter().map(|(path, i)| (path, &items[i])).collect()),
        Value::Object(object) => match object.get("tasks") {
            None => Ok(vec![(String::new(), document)]),
            Some(Value::Array(items)) => {
                if let Some(other) = object.keys().find(|k| *k != "tasks") {
                    return Err(FieldError::new(
                        other,
                        "unknown_field",
                        "a document with \"tasks\" holds nothing else beside it",
                    ));
                }
                Ok(listed("tasks", items).into_iter().map(|(path, i)| (path, &items[i])).collect())
            }
            Some(other) => Err(FieldError::new("tasks", "type", format!("must be an array, not {}", kind(other)))),
        },
        other => Err(FieldError::new(
            "",
            "type",
            format!("a document is a task, an array of tasks or {{\"tasks\": […]}}, not {}", kind(other)),
        )),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Shows a value of the user's in an error message without letting it grow.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() > 60 { text.chars().take(60).chain(['…']).collect() } else { text }
}

struct Reader<'a> {
    object: &'a Map<String, Value>,
    errors: Vec<FieldError>,
}

/// Every field of the contract, with those whose behaviour this version does not have yet.
const FIELDS: &[&str] = &[
    "task_id",
    "name",
    "description",
    "cron_expr",
    "delay_seconds",
    "timezone",
    "executor_group",
    "queue_label",
    "handler",
    "payload",
    "timeout_ms",
    "max_retry",
    "retry_backoff",
    "priority",
    "status",
    "misfire_policy",
    "misfire_grace_ms",
    "overlap_policy",
    "dedup_window_seconds",
    "weight",
    "labels",
    "source",
    "start_deadline_ms",
    "upstream_task_ids",
    "dependency_window",
    "failure_policy",
    "when",
    "breaker",
    "jitter_ms",
    "start_at",
    "end_at",
    "protected",
    "alert",
    "retention_days",
];

impl<'a> Reader<'a> {
    fn read(mut self) -> Result<Checked, Vec<FieldError>> {
        for key in self.object.keys() {
            if !FIELDS.contains(&key.as_str()) {
                let known = match nearest(key) {
                    Some(near) => format!("unknown field; did you mean {near:?}?"),
                    None => "unknown field".to_owned(),
                };
                self.refuse(key, "unknown_field", known);
            }
        }
        self.refuse_unsupported();

        let task_id = self.name_of::<TaskId>("task_id", TaskId::new, true);
        let group = self.name_of::<Group>("executor_group", Group::new, true);
        let queue = self.name_of::<Queue>("queue_label", Queue::new, false).unwrap_or_else(Queue::default_lane);
        let handler = self.name_of::<Handler>("handler", Handler::new, false);
        let name = self.text("name", 128);
        let description = self.text("description", 2000).unwrap_or_default();
        let source = self.text("source", 128);
        let cron_expr = self.text("cron_expr", 256);
        let delay_seconds =
            self.integer("delay_seconds", 0, MAX_DELAY_SECONDS, "0 … 3155760000 (100 years in seconds)");
        if cron_expr.is_some() && delay_seconds.is_some() {
            self.refuse("delay_seconds", "conflict", "at most one of cron_expr and delay_seconds".into());
        }
        let timezone = self.text("timezone", 64);
        let timeout = self.integer("timeout_ms", 1, MAX_TIMEOUT_MS, "1 … 604800000 (7 days in milliseconds)");
        let max_retry = self.integer("max_retry", 0, 100, "0 … 100");
        let retry_backoff = self.backoff();
        let priority = self.integer("priority", 1, 10, "1 … 10").unwrap_or(5);
        let status = self.status();
        let misfire_policy = self.word(
            "misfire_policy",
            &[("fire_once", Some(MisfirePolicy::FireOnce)), ("skip", Some(MisfirePolicy::Skip)), ("catch_up", None)],
        );
        let grace =
            self.integer("misfire_grace_ms", 0, 366 * 24 * 3600 * 1000, "0 … 31622400000 (366 days in milliseconds)");
        let overlap_policy = self.word(
            "overlap_policy",
            &[
                ("skip", Some(OverlapPolicy::Skip)),
                ("allow", Some(OverlapPolicy::Allow)),
                ("queue", None),
                ("cancel_previous", None),
            ],
        );
        let dedup = self.integer(
            "dedup_window_seconds",
            0,
            MAX_DEDUP_WINDOW_SECONDS,
            "0 (not at all) … 604800 (7 days in seconds)",
        );
        let weight = self.number("weight", 0.1, 100.0);
        let payload = self.payload();
        let labels = self.labels();

        let mut defaulted = Vec::new();
        for field in ["timeout_ms", "max_retry", "dedup_window_seconds"] {
            if self.get(field).is_none() {
                defaulted.push(field);
            }
        }
        match (task_id, group) {
            (Some(task_id), Some(executor_group)) if self.errors.is_empty() => Ok(Checked {
                definition: TaskDefinition {
                    name: name.unwrap_or_else(|| task_id.to_string()),
                    description,
                    cron_expr,
                    delay_seconds,
                    timezone: timezone.unwrap_or_else(|| "UTC".to_owned()),
                    executor_group,
                    queue_label: queue,
                    handler: handler.unwrap_or_else(|| Handler::of_task(&task_id)),
                    payload,
                    timeout_ms: timeout.unwrap_or(60_000),
                    max_retry: max_retry.unwrap_or(0) as u32,
                    retry_backoff,
                    priority: priority as u8,
                    status,
                    misfire_policy,
                    misfire_grace_ms: grace.unwrap_or(60_000),
                    overlap_policy,
                    dedup_window_seconds: dedup.unwrap_or(60),
                    weight: weight.unwrap_or(1.0),
                    labels,
                    source,
                    task_id,
                },
                defaulted,
            }),
            _ => Err(self.errors),
        }
    }

    fn refuse(&mut self, field: &str, rule: &str, message: String) {
        self.errors.push(FieldError::new(field, rule, message));
    }

    /// The value of a field; an explicit null counts as left out.
    fn get(&self, field: &str) -> Option<&'a Value> {
        self.object.get(field).filter(|v| !v.is_null())
    }

    fn refuse_type(&mut self, field: &str, wanted: &str, value: &Value) {
        self.refuse(field, "type", format!("must be {wanted}, not {}", kind(value)));
    }

    fn name_of<T>(
        &mut self,
        field: &str,
        make: fn(&str) -> Result<T, crate::ids::InvalidName>,
        required: bool,
    ) -> Option<T> {
        match self.get(field) {
            None => {
                if required {
                    self.refuse(field, "required", "is required".into());
                }
                None
            }
            Some(Value::String(text)) => match make(text) {
                Ok(name) => Some(name),
                Err(e) => {
                    self.refuse(field, "format", e.to_string());
                    None
                }
            },
            Some(other) => {
                self.refuse_type(field, "a string", other);
                None
            }
        }
    }

    fn text(&mut self, field: &str, max_chars: usize) -> Option<String> {
        match self.get(field)? {
            Value::String(text) => {
                let chars = text.chars().count();
                if chars > max_chars {
                    self.refuse(field, "size", format!("at most {max_chars} characters, not {chars}"));
                }
                if text.contains('\0') {
                    self.refuse(field, "format", "must not contain the NUL character".into());
                }
                Some(text.clone())
            }
            other => {
                self.refuse_type(field, "a string", other);
                None
            }
        }
    }

    fn integer(&mut self, field: &str, min: u64, max: u64, range: &str) -> Option<u64> {
        let value = self.get(field)?;
        match integer_of(value) {
            Some(n) if (i128::from(min)..=i128::from(max)).contains(&n) => u64::try_from(n).ok(),
            Some(n) => {
                self.refuse(field, "range", format!("{n} is out of range {range}"));
                None
            }
            None => {
                self.refuse(field, "type", format!("must be a whole number ({range}), not {}", shown(value)));
                None
            }
        }
    }

    fn number(&mut self, field: &str, min: f64, max: f64) -> Option<f64> {
        let value = self.get(field)?;
        match value.as_f64() {
            Some(n) if n >= min && n <= max => Some(n),
            Some(n) => {
                self.refuse(field, "range", format!("{n} is out of range {min} … {max}"));
                None
            }
            None => {
                self.refuse_type(field, "a number", value);
                None
            }
        }
    }

    /// Reads a word out of a closed set; a word without a value is known but not supported by this version.
    fn word<T: Default + Copy>(&mut self, field: &str, words: &[(&str, Option<T>)]) -> T {
        let Some(value) = self.get(field) else { return T::default() };
        let Value::String(text) = value else {
            self.refuse_type(field, "a string", value);
            return T::default();
        };
        match words.iter().find(|(word, _)| word == text) {
            Some((_, Some(meaning))) => *meaning,
            Some((word, None)) => {
                self.refuse(field, "not_supported", format!("{word:?} is not supported by this version of ax"));
                T::default()
            }
            None => {
                let known: Vec<_> = words.iter().filter(|(_, meaning)| meaning.is_some()).map(|(w, _)| *w).collect();
                self.refuse(field, "format", format!("{} is none of {}", shown(value), known.join(", ")));
                T::default()
            }
        }
    }

    fn status(&mut self) -> Status {
        match self.get("status") {
            None => Status::default(),
            Some(Value::String(s)) if s == "enabled" => Status::Enabled,
            Some(Value::String(s)) if s == "paused" => Status::Paused,
            Some(value) => match integer_of(value) {
                Some(1) => Status::Enabled,
                Some(0) => Status::Paused,
                _ => {
                    let told = format!("{} is neither enabled nor paused (1 and 0 are read as these)", shown(value));
                    self.refuse("status", "format", told);
                    Status::default()
                }
            },
        }
    }

    fn backoff(&mut self) -> RetryBackoff {
        let default = RetryBackoff::default();
        let object = match self.get("retry_backoff") {
            None => return default,
            Some(Value::Object(object)) => object,
            Some(other) => {
                self.refuse_type("retry_backoff", "an object", other);
                return default;
            }
        };
        let mut inner = Reader { object, errors: Vec::new() };
        for key in object.keys() {
            if !["initial_ms", "multiplier", "max_ms", "jitter_ms"].contains(&key.as_str()) {
                inner.refuse(key, "unknown_field", "unknown field".into());
            }
        }
        let range = "0 … 2592000000 (30 days in milliseconds)";
        let backoff = RetryBackoff {
            initial_ms: inner.integer("initial_ms", 0, MAX_BACKOFF_MS, range).unwrap_or(default.initial_ms),
            multiplier: inner.number("multiplier", 1.0, 1000.0).unwrap_or(default.multiplier),
            max_ms: inner.integer("max_ms", 0, MAX_BACKOFF_MS, range).unwrap_or(default.max_ms),
            jitter_ms: inner.integer("jitter_ms", 0, MAX_BACKOFF_MS, range).unwrap_or(default.jitter_ms),
        };
        self.errors.extend(inner.errors.into_iter().map(|e| e.under("retry_backoff")));
        backoff
    }

    fn payload(&mut self) -> Value {
        let payload = self.object.get("payload").cloned().unwrap_or(Value::Null);
        if let Err(e) = check_payload("payload", &payload) {
            self.errors.push(e);
        }
        payload
    }

    fn labels(&mut self) -> BTreeMap<String, String> {
        let object = match self.get("labels") {
            None => return BTreeMap::new(),
            Some(Value::Object(object)) => object,
            Some(other) => {
                self.refuse_type("labels", "an object of texts", other);
                return BTreeMap::new();
            }
        };
        if object.len() > 16 {
            self.refuse("labels", "size", format!("at most 16 entries, not {}", object.len()));
        }
        let mut labels = BTreeMap::new();
        for (key, value) in object {
            let field = format!("labels.{key}");
            if key.is_empty() || key.chars().count() > 64 || key.contains('\0') {
                self.refuse(&field, "format", "a label's name has 1 to 64 characters and no NUL".into());
            }
            match value {
                Value::String(text) if text.chars().count() <= 256 && !text.contains('\0') => {
                    labels.insert(key.clone(), text.clone());
                }
                Value::String(_) => {
                    self.refuse(&field, "size", "a label's value has at most 256 characters and no NUL".into());
                }
                other => self.refuse_type(&field, "a string", other),
            }
        }
        labels
    }

    /// Fields of the contract whose behaviour does not exist yet: their default is accepted, anything else is refused
    /// by name, so that nobody relies on what would be silently ignored.
    fn refuse_unsupported(&mut self) {
        let defaults: [(&str, Value); 12] = [
            ("start_deadline_ms", Value::Null),
            ("upstream_task_ids", Value::Array(Vec::new())),
            ("dependency_window", Value::Null),
            ("failure_policy", "stop".into()),
            ("when", Value::Null),
            ("breaker", Value::Null),
            ("jitter_ms", 0.into()),
            ("start_at", Value::Null),
            ("end_at", Value::Null),
            ("protected", false.into()),
            ("alert", Value::Null),
            ("retention_days", Value::Null),
        ];
        for (field, default) in defaults {
            if let Some(value) = self.get(field)
                && *value != default
            {
                self.refuse(field, "not_supported", "is not supported by this version of ax; leave it out".into());
            }
        }
    }
}

/// Checks the size of a payload and that it can be stored.
///
/// # Errors
/// The rule that it breaks, as an error of `field`.
pub fn check_payload(field: &str, payload: &Value) -> Result<(), FieldError> {
    let bytes = serde_json::to_string(payload).map_or(usize::MAX, |text| text.len());
    if bytes > MAX_PAYLOAD_BYTES {
        return Err(FieldError::new(
            field,
            "size",
            format!("{bytes} bytes are more than the limit of {MAX_PAYLOAD_BYTES} (512 KiB)"),
        ));
    }
    Ok(())
}

/// A whole number, also when it is written as `5.0`.
fn integer_of(value: &Value) -> Option<i128> {
    let Value::Number(n) = value else { return None };
    if let Some(n) = n.as_i64() {
        return Some(n.into());
    }
    if let Some(n) = n.as_u64() {
        return Some(n.into());
    }
    n.as_f64().filter(|f| f.fract() == 0.0 && f.abs() < 1e30).map(|f| f as i128)
}

/// What other schedulers, and habit, call a field.
const ALIASES: &[(&str, &str)] = &[
    ("cron", "cron_expr"),
    ("schedule", "cron_expr"),
    ("expression", "cron_expr"),
    ("interval", "cron_expr"),
    ("every", "cron_expr"),
    ("id", "task_id"),
    ("task", "task_id"),
    ("tz", "timezone"),
    ("time_zone", "timezone"),
    ("zone", "timezone"),
    ("group", "executor_group"),
    ("executor", "executor_group"),
    ("queue", "queue_label"),
    ("lane", "queue_label"),
    ("delay", "delay_seconds"),
    ("delay_ms", "delay_seconds"),
    ("args", "payload"),
    ("params", "payload"),
    ("data", "payload"),
    ("input", "payload"),
    ("timeout", "timeout_ms"),
    ("timeout_seconds", "timeout_ms"),
    ("retry", "max_retry"),
    ("retries", "max_retry"),
    ("max_retries", "max_retry"),
    ("max_attempts", "max_retry"),
    ("backoff", "retry_backoff"),
    ("enabled", "status"),
    ("paused", "status"),
    ("misfire", "misfire_policy"),
    ("overlap", "overlap_policy"),
    ("concurrency", "overlap_policy"),
    ("depends_on", "upstream_task_ids"),
    ("upstream", "upstream_task_ids"),
    ("upstreams", "upstream_task_ids"),
    ("tags", "labels"),
    ("owner", "source"),
];

/// The known field that was probably meant: by another name for it, else the one that is closest, if any is close.
fn nearest(key: &str) -> Option<&'static str> {
    let lower = key.to_ascii_lowercase();
    if let Some((_, field)) = ALIASES.iter().find(|(alias, _)| *alias == lower) {
        return Some(field);
    }
    FIELDS
        .iter()
        .map(|f| (edit_distance(&lower, f), *f))
        .filter(|(d, f)| *d <= 2.max(f.len() / 4))
        .min()
        .map(|(_, f)| f)
}

fn edit_distance(a: &str, b: &str) -> usize {
    if a.len() > 40 {
        return usize::MAX;
    }
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let cost = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = cost.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn with(field: &str, value: Value) -> Value {
        let mut object = json!({"task_id": "a", "executor_group": "g"});
        object[field] = value;
        object
    }

    fn refusal(field: &str, value: Value) -> FieldError {
        let errors = TaskDefinition::from_json(&with(field, value.clone())).expect_err(&format!("{field} = {value}"));
        assert_eq!(errors.len(), 1, "{field} = {value}: {errors:?}");
        errors.into_iter().next().unwrap()
    }

    #[test]
    fn the_smallest_definition_gets_the_documented_defaults() {
        let checked = TaskDefinition::from_json(&json!({"task_id": "a.b", "executor_group": "g"})).unwrap();
        let d = checked.definition;
        assert_eq!((d.name.as_str(), d.handler.as_str(), d.queue_label.as_str()), ("a.b", "a.b", "default"));
        assert_eq!((d.timeout_ms, d.max_retry, d.priority, d.dedup_window_seconds), (60_000, 0, 5, 60));
        assert_eq!((d.timezone.as_str(), d.weight, d.misfire_grace_ms), ("UTC", 1.0, 60_000));
        assert_eq!(
            d.retry_backoff,
            RetryBackoff { initial_ms: 5000, multiplier: 5.0, max_ms: 300_000, jitter_ms: 2000 }
        );
        assert_eq!(checked.defaulted, ["timeout_ms", "max_retry", "dedup_window_seconds"]);
    }

    #[test]
    fn the_canonical_form_reads_back_as_itself() {
        let text = json!({"task_id": "a", "executor_group": "g", "cron_expr": "0 2 * * *", "payload": {"db": "orders"},
            "name": "订单数据同步到数仓", "labels": {"team": "data"}, "status": 0, "weight": 0.5, "timeout_ms": 5.0});
        let d = TaskDefinition::from_json(&text).unwrap().definition;
        let canonical = serde_json::to_value(&d).unwrap();
        assert_eq!(TaskDefinition::from_json(&canonical).unwrap().definition, d);
        assert_eq!(canonical["status"], "paused");
    }

    #[test]
    fn every_refusal_names_its_field_and_rule() {
        for (field, value, rule) in [
            ("task_id", json!("a b"), "format"),
            ("task_id", json!(1), "type"),
            ("executor_group", json!("a.b"), "format"),
            ("queue_label", json!("a-b"), "format"),
            ("handler", json!("a*"), "format"),
            ("name", json!("x".repeat(129)), "size"),
            ("description", json!("x".repeat(2001)), "size"),
            ("timeout_ms", json!(0), "range"),
            ("timeout_ms", json!(604_800_001u64), "range"),
            ("timeout_ms", json!("60s"), "type"),
            ("timeout_ms", json!(1.5), "type"),
            ("max_retry", json!(101), "range"),
            ("max_retry", json!(-1), "range"),
            ("priority", json!(11), "range"),
            ("delay_seconds", json!(-1), "range"),
            ("delay_seconds", json!(1e300), "type"),
            ("delay_seconds", json!(3_155_760_001u64), "range"),
            ("status", json!("on"), "format"),
            ("status", json!(2), "format"),
            ("weight", json!(0.05), "range"),
            ("dedup_window_seconds", json!(604_801), "range"),
            ("labels", json!([]), "type"),
            ("retry_backoff", json!(5), "type"),
            ("payload", json!("x".repeat(512 * 1024)), "size"),
            ("misfire_policy", json!("catch_up"), "not_supported"),
            ("misfire_policy", json!("never"), "format"),
            ("overlap_policy", json!("queue"), "not_supported"),
            ("overlap_policy", json!("cancel_previous"), "not_supported"),
            ("start_deadline_ms", json!(1000), "not_supported"),
            ("upstream_task_ids", json!(["b"]), "not_supported"),
            ("dependency_window", json!("1h"), "not_supported"),
            ("failure_policy", json!("wait"), "not_supported"),
            ("when", json!("true"), "not_supported"),
            ("breaker", json!({"failures": 5}), "not_supported"),
            ("jitter_ms", json!(5), "not_supported"),
            ("start_at", json!("2026-01-01T00:00:00Z"), "not_supported"),
            ("end_at", json!("2026-01-01T00:00:00Z"), "not_supported"),
            ("protected", json!(true), "not_supported"),
            ("alert", json!({"on": ["failed"]}), "not_supported"),
            ("retention_days", json!(3), "not_supported"),
            ("colour", json!(3), "unknown_field"),
        ] {
            let e = refusal(field, value);
            assert_eq!((e.field.as_str(), e.rule.as_str()), (field, rule), "{e:?}");
        }
        assert_eq!(refusal("retry_backoff", json!({"max_ms": 2_592_000_001u64})).field, "retry_backoff.max_ms");
        for (near, field) in [
            ("cron_exp", "cron_expr"),
            ("cron", "cron_expr"),
            ("schedule", "cron_expr"),
            ("group", "executor_group"),
            ("retries", "max_retry"),
            ("timeout", "timeout_ms"),
            ("Timeout_MS", "timeout_ms"),
            ("payloads", "payload"),
        ] {
            let told = refusal(near, json!("x")).message;
            assert!(told.contains(&format!("did you mean {field:?}")), "{near}: {told}");
        }
        assert_eq!(refusal("colour", json!("x")).message, "unknown field");
        let told = refusal("status", json!("on")).message;
        assert!(told.starts_with("\"on\" is neither enabled nor paused"), "{told}");
    }

    #[test]
    fn defaults_of_fields_to_come_are_accepted() {
        let text = json!({"task_id": "a", "executor_group": "g", "misfire_policy": "fire_once", "upstream_task_ids": [],
            "jitter_ms": 0, "protected": false, "failure_policy": "stop", "when": null, "overlap_policy": "skip"});
        assert!(TaskDefinition::from_json(&text).is_ok());
    }

    #[test]
    fn all_broken_rules_are_told_at_once() {
        let errors = TaskDefinition::from_json(&json!({"priority": 0, "max_retry": 1000})).unwrap_err();
        let fields: Vec<_> = errors.iter().map(|e| e.field.as_str()).collect();
        assert_eq!(fields, ["task_id", "executor_group", "max_retry", "priority"]);
    }

    #[test]
    fn documents_hold_one_task_an_array_or_tasks() {
        let paths = |v: Value| tasks_of_document(&v).map(|t| t.into_iter().map(|(p, _)| p).collect::<Vec<_>>());
        assert_eq!(paths(json!({"task_id": "a"})).unwrap(), [""]);
        assert_eq!(paths(json!([{}, {}])).unwrap(), ["[0]", "[1]"]);
        assert_eq!(paths(json!({"tasks": [{}]})).unwrap(), ["tasks[0]"]);
        assert!(paths(json!({"tasks": {}})).is_err());
        assert!(paths(json!({"tasks": [], "more": 1})).is_err());
        assert!(paths(json!("x")).is_err());
    }

    #[test]
    fn a_backoff_grows_to_its_maximum_and_never_overflows() {
        let b = RetryBackoff::default();
        assert_eq!([1, 2, 3, 4, 5].map(|n| b.delay_ms(n, 0.0)), [5000, 25_000, 125_000, 300_000, 300_000]);
        assert_eq!(b.delay_ms(1, 1.0), 7000);
        assert_eq!(b.delay_ms(u32::MAX, 0.0), 300_000);
        let wild =
            RetryBackoff { initial_ms: MAX_BACKOFF_MS, multiplier: 1000.0, max_ms: MAX_BACKOFF_MS, jitter_ms: 0 };
        assert_eq!(wild.delay_ms(101, 0.0), MAX_BACKOFF_MS);
        let zero = RetryBackoff { initial_ms: 0, multiplier: 1000.0, max_ms: 10, jitter_ms: 0 };
        assert_eq!(zero.delay_ms(u32::MAX, 0.0), 0);
    }
}
