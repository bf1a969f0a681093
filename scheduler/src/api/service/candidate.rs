//! What a change of definitions starts from: the options of the request, and each definition read and checked by itself.

use ax_shared::{ConsumerName, FieldError, Profile, TaskDefinition, TaskId, Timestamp};
use serde_json::Value;

use crate::api::ApiError;
use crate::api::fields::Fields;
use crate::core::definitions::TaskRow;
use crate::core::schedule::Schedule;

/// What a caller expects of the version that it changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Expected {
    /// Nothing.
    #[default]
    Any,
    /// That the task exists.
    Existing,
    /// That the task is at this version.
    Version(u64),
}

/// How a document is to be applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ApplyOptions {
    /// Only tell what would be done.
    pub dry_run: bool,
    /// Refuse definitions that leave fields to a default which deserves a decision, also when the server would not.
    pub strict: bool,
}

impl ApplyOptions {
    /// Reads the options of a request.
    ///
    /// # Errors
    /// Broken rules.
    pub fn read(mut fields: Fields) -> Result<Self, ApiError> {
        let options = Self { dry_run: fields.flag("dry_run"), strict: fields.flag("strict") };
        fields.unsupported("prune");
        fields.finish()?;
        Ok(options)
    }
}

/// A definition that has been checked, with its place in the document.
pub(super) struct Candidate {
    pub(super) path: String,
    pub(super) definition: TaskDefinition,
    schedule: Option<Schedule>,
    pub(super) warnings: Vec<FieldError>,
}

impl Candidate {
    /// Reads a definition; the broken rules and warnings name fields under `path`.
    pub(super) fn read(value: &Value, path: &str, strict: bool) -> Result<Self, Vec<FieldError>> {
        let under =
            |errors: Vec<FieldError>| -> Vec<FieldError> { errors.into_iter().map(|e| e.under(path)).collect() };
        let checked = TaskDefinition::from_json(value).map_err(under)?;
        let mut definition = checked.definition;
        // A zone is checked even where no schedule uses it.
        let expr = definition.cron_expr.as_deref();
        let schedule = Schedule::parse(expr.unwrap_or("@daily"), &definition.timezone)
            .map_err(|e| under(vec![FieldError::new(e.field(), "schedule", e.to_string())]))?;
        schedule.canonical_zone().clone_into(&mut definition.timezone);
        let schedule = expr.is_some().then_some(schedule);
        if strict && !checked.defaulted.is_empty() {
            let message = "must be given: defaults are refused (strict)";
            let errors = checked.defaulted.iter().map(|field| FieldError::new(*field, "required", message));
            return Err(under(errors.collect()));
        }
        let mut warnings = Vec::new();
        for field in checked.defaulted {
            let value = match field {
                "timeout_ms" => definition.timeout_ms.to_string(),
                "max_retry" => definition.max_retry.to_string(),
                _ => definition.dedup_window_seconds.to_string(),
            };
            let message = format!("{} leaves it to the default, {value}", definition.task_id);
            warnings.push(FieldError::new(field, "defaulted", message).under(path));
        }
        Ok(Self { path: path.to_owned(), definition, schedule, warnings })
    }

    /// A schedule that is new must still have a fire to come; one that has come to its end may stay as it is.
    pub(super) fn check_against(&self, existing: Option<&TaskRow>, now: Timestamp) -> Result<(), FieldError> {
        let Some(schedule) = &self.schedule else { return Ok(()) };
        let known = existing.is_some_and(|row| {
            row.deleted_at.is_none()
                && row.definition.cron_expr == self.definition.cron_expr
                && row.definition.timezone == self.definition.timezone
        });
        if known {
            return Ok(());
        }
        schedule
            .ensure_fires_after(now)
            .map_err(|e| FieldError::new(e.field(), "schedule", e.to_string()).under(&self.path))
    }

    /// The name of the consumer that its runs go through.
    pub(super) fn consumer(&self) -> String {
        consumer_of(&self.definition)
    }
}

/// The name of the consumer that the runs of a definition go through.
pub(super) fn consumer_of(definition: &TaskDefinition) -> String {
    ConsumerName {
        group: definition.executor_group.clone(),
        queue: definition.queue_label.clone(),
        profile: Profile::of(definition.timeout_ms, definition.max_retry),
    }
    .to_string()
}

/// Refuses a change of another version than is expected.
pub(super) fn check_expected(id: &TaskId, existing: Option<&TaskRow>, expected: Expected) -> Result<(), ApiError> {
    let live = existing.filter(|row| row.deleted_at.is_none());
    match (expected, live) {
        (Expected::Any, _) | (Expected::Existing, Some(_)) => Ok(()),
        (Expected::Version(version), Some(row)) if row.version == version => Ok(()),
        (Expected::Version(version), Some(row)) => Err(ApiError::conflict(format!(
            "task {id:?} is at version {}, not {version} as If-Match says: read it again",
            row.version
        ))),
        (_, None) => Err(ApiError::conflict(format!("there is no task {id:?}, but If-Match expects one"))),
    }
}
