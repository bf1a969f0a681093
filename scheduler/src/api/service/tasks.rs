//! Definitions: put, apply, get, list, delete, pause, resume.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::PoisonError;

use ax_shared::definition::{Status, tasks_of_document};
use ax_shared::{FieldError, Group, TaskDefinition, TaskId, Timestamp};
use serde_json::{Value, json};

use super::candidate::{ApplyOptions, Candidate, Expected, check_expected, consumer_of};
use super::{Caller, Service, cursor, cursor_of, cut_page, delay_accepted_at, delayed_run_id, limit_of, no_such_task};
use crate::api::ApiError;
use crate::api::fields::Fields;
use crate::api::view::{ApplyReport, PutReport, Resumed, TaskPage, TaskView};
use crate::core::definitions::{
    AcceptContext, Accepted, AuditEntry, Change, DefinitionView, DefinitionWrite, TaskRow, accept, delete,
};
use crate::core::run::{Run, RunState, Stretch};
use crate::ports::{Hint, RunFilter, TaskFilter, TaskHistory};

/// The longest time for which rows are planned ahead, in milliseconds.
const MAX_HORIZON_MS: i64 = 60_000;
/// The reason of instants that passed while their task was paused.
const PAUSED: &str = "paused";
/// The most consumers of AX_TRIGGERS that definitions may need.
const MAX_CONSUMERS: usize = 1000;

/// Which tasks to list.
#[derive(Debug, Clone, Default)]
pub struct ListTasks {
    filter: TaskFilter,
}

impl ListTasks {
    /// Reads the filter of a request.
    ///
    /// # Errors
    /// Broken rules.
    pub fn read(mut fields: Fields) -> Result<Self, ApiError> {
        let filter = TaskFilter {
            group: fields.name("group", Group::new),
            status: fields.parsed("status", |word| match word {
                "enabled" | "1" => Ok(Status::Enabled),
                "paused" | "0" => Ok(Status::Paused),
                _ => Err("is neither enabled nor paused (1 and 0 are read as these)"),
            }),
            label: fields.text("label", 400),
            q: fields.text("q", 200).filter(|q| !q.is_empty()),
            after: cursor_of(&mut fields),
            limit: limit_of(&mut fields),
        };
        fields.finish()?;
        Ok(Self { filter })
    }
}

/// What a change came to, with the row as it is afterwards.
struct Changed {
    accepted: Accepted,
    row: TaskRow,
}

type Decide<'a> = Box<dyn FnOnce(&DefinitionView, Timestamp) -> Result<Vec<Changed>, ApiError> + Send + 'a>;

impl Service {
    /// Makes or changes a task.
    ///
    /// # Errors
    /// A broken rule, another version than expected, or a database that is away.
    pub async fn put_task(
        &self,
        caller: &Caller,
        id: &TaskId,
        mut body: Value,
        expected: Expected,
    ) -> Result<PutReport, ApiError> {
        if let Value::Object(object) = &mut body {
            match object.get("task_id") {
                None | Some(Value::Null) => {
                    object.insert("task_id".to_owned(), Value::String(id.to_string()));
                }
                Some(Value::String(given)) if given == id.as_str() => {}
                Some(_) => {
                    return Err(ApiError::field("task_id", "conflict", format!("must be {id:?} as in the address")));
                }
            }
        }
        let candidate = Candidate::read(&body, "", self.settings.strict).map_err(ApiError::of_fields)?;
        self.check_consumers(std::slice::from_ref(&candidate)).await?;
        let changed = self
            .change(
                caller,
                std::slice::from_ref(id),
                false,
                Box::new(move |view, now| {
                    let existing = view.tasks.get(id);
                    check_expected(id, existing, expected)?;
                    candidate.check_against(existing, now).map_err(|e| ApiError::Invalid(vec![e]))?;
                    Ok(vec![accepted(existing, candidate.definition, view, now)])
                }),
            )
            .await?;
        let Some(changed) = changed.into_iter().next() else { return Err(no_such_task(id)) };
        let created = changed.accepted.change == Change::Created;
        Ok(PutReport { created, task: self.view_of(&changed.row).await? })
    }

    /// Applies a document, whole or not at all.
    ///
    /// # Errors
    /// Every broken rule of every task, or a database that is away.
    pub async fn apply(
        &self,
        caller: &Caller,
        document: &Value,
        options: ApplyOptions,
    ) -> Result<ApplyReport, ApiError> {
        let strict = options.strict || self.settings.strict;
        let mut errors = Vec::new();
        let mut candidates: Vec<Candidate> = Vec::new();
        let mut places: HashMap<TaskId, String> = HashMap::new();
        for (path, value) in tasks_of_document(document).map_err(|e| ApiError::of_fields(vec![e]))? {
            match Candidate::read(value, &path, strict) {
                Ok(candidate) => {
                    if let Some(first) = places.insert(candidate.definition.task_id.clone(), path.clone()) {
                        let message = format!("{} is defined at {first} already", candidate.definition.task_id);
                        errors.push(FieldError::new("task_id", "conflict", message).under(&path));
                    }
                    candidates.push(candidate);
                }
                Err(more) => errors.extend(more),
            }
        }
        if !errors.is_empty() {
            return Err(ApiError::of_fields(errors));
        }
        let added = self.check_consumers(&candidates).await?;

        let ids: Vec<TaskId> = candidates.iter().map(|c| c.definition.task_id.clone()).collect();
        let mut warnings: Vec<FieldError> = Vec::new();
        warnings.extend(candidates.iter_mut().flat_map(|c| std::mem::take(&mut c.warnings)));
        let changed = if candidates.is_empty() {
            Vec::new()
        } else {
            self.change(
                caller,
                &ids,
                options.dry_run,
                Box::new(move |view, now| {
                    let existing = |c: &Candidate| view.tasks.get(&c.definition.task_id);
                    let errors: Vec<FieldError> =
                        candidates.iter().filter_map(|c| c.check_against(existing(c), now).err()).collect();
                    if !errors.is_empty() {
                        return Err(ApiError::Invalid(errors));
                    }
                    Ok(candidates.into_iter().map(|c| accepted(existing(&c), c.definition, view, now)).collect())
                }),
            )
            .await?
        };

        let mut report = ApplyReport::default();
        let mut needed = BTreeSet::new();
        for Changed { accepted, row } in changed {
            let id = row.definition.task_id.clone();
            match accepted.change {
                Change::Created => report.created.push(id),
                Change::Updated => report.updated.push(id),
                Change::Unchanged => report.unchanged.push(id),
                Change::Deleted => report.deleted.push(id),
            }
            if accepted.change != Change::Unchanged {
                needed.insert(consumer_of(&row.definition));
            }
        }
        for name in added.intersection(&needed) {
            warnings.push(FieldError::new("", "consumer_added", format!("adds the consumer {name}")));
        }
        report.warnings = warnings;
        Ok(report)
    }

    /// One task.
    ///
    /// # Errors
    /// There is none of that id, or the database is away.
    pub async fn task(&self, id: &TaskId) -> Result<TaskView, ApiError> {
        let row = self.store.task(id).await?.ok_or_else(|| no_such_task(id))?;
        self.view_of(&row).await
    }

    /// A page of tasks, by id.
    ///
    /// # Errors
    /// The database is away.
    pub async fn list_tasks(&self, request: ListTasks) -> Result<TaskPage, ApiError> {
        let limit = request.filter.limit;
        let filter = TaskFilter { limit: limit + 1, ..request.filter };
        let mut rows = self.store.list_tasks(&filter).await?;
        let more = cut_page(&mut rows, limit);
        let ids: Vec<TaskId> = rows.iter().map(|row| row.definition.task_id.clone()).collect();
        let now = self.now();
        let histories = if ids.is_empty() { BTreeMap::new() } else { self.store.histories(&ids, now).await? };
        let next_cursor = ids.last().filter(|_| more).map(cursor);
        let view = |row: &TaskRow| TaskView::of(row, next_fire(row, now), histories.get(&row.definition.task_id));
        Ok(TaskPage { tasks: rows.iter().map(view).collect(), next_cursor })
    }

    /// Deletes a task; its history stays.
    ///
    /// # Errors
    /// There is none of that id, or the database is away.
    pub async fn delete_task(&self, caller: &Caller, id: &TaskId, expected: Expected) -> Result<(), ApiError> {
        self.change(
            caller,
            std::slice::from_ref(id),
            false,
            Box::new(move |view, now| {
                let existing = view.tasks.get(id);
                let accepted = delete(existing, context(view, now)).ok_or_else(|| no_such_task(id))?;
                check_expected(id, existing, expected)?;
                let row = accepted.row.clone().ok_or_else(|| no_such_task(id))?;
                Ok(vec![Changed { accepted, row }])
            }),
        )
        .await?;
        Ok(())
    }

    /// Stops the fires of a task until it is resumed. Pausing a paused task changes nothing.
    ///
    /// # Errors
    /// There is none of that id, or the database is away.
    pub async fn pause_task(&self, caller: &Caller, id: &TaskId) -> Result<TaskView, ApiError> {
        let (_, changed) = self.set_status(caller, id, Status::Paused).await?;
        self.view_of(&changed.row).await
    }

    /// Lets a task fire again and tells what it will start.
    ///
    /// # Errors
    /// There is none of that id, or the database is away.
    pub async fn resume_task(&self, caller: &Caller, id: &TaskId) -> Result<Resumed, ApiError> {
        let (before, changed) = self.set_status(caller, id, Status::Enabled).await?;
        let now = self.now();
        let starts = super::fires::fires_of(&changed.row, now, 5);
        let mut skipped = changed.accepted.stretch();
        if before.definition.status == Status::Paused {
            skipped = joined(self.skipped_one_by_one(&before, now).await?, skipped);
        }
        Ok(Resumed { task: self.view_of(&changed.row).await?, starts, skipped })
    }

    /// The instants that had been planned when the task was paused: they have a row each and are in no stretch.
    async fn skipped_one_by_one(&self, paused: &TaskRow, now: Timestamp) -> Result<Option<Stretch>, ApiError> {
        // Rows exist up to `effective_at`. A change in the meantime hides the moment of the pause, which lies at most
        // the longest planning horizon earlier.
        let until = paused.effective_at.min(now);
        let since = match paused.updated_at {
            at if at < paused.effective_at => at,
            _ => paused.effective_at.plus_millis(-MAX_HORIZON_MS),
        };
        let filter = RunFilter {
            task_id: Some(paused.definition.task_id.clone()),
            states: vec![RunState::Skipped],
            from: Some(since.plus_millis(1)),
            to: Some(until.plus_millis(1)),
            limit: super::MAX_LIMIT as u32,
            ..RunFilter::default()
        };
        let runs = self.store.list_runs(&filter).await?;
        let paused = |run: &&Run| run.stretch.is_none() && run.reason.as_deref() == Some(PAUSED);
        let instants = runs.iter().filter(paused).map(|run| run.trigger_at);
        let each = instants.map(|at| Stretch { from: at, to: at, count: 1 });
        Ok(each.fold(None, |all, one| joined(Some(one), all)))
    }

    /// The row as it was, and what came of the change.
    async fn set_status(&self, caller: &Caller, id: &TaskId, status: Status) -> Result<(TaskRow, Changed), ApiError> {
        let mut before = None;
        let seen = &mut before;
        let changed = self
            .change(
                caller,
                std::slice::from_ref(id),
                false,
                Box::new(move |view, now| {
                    let live = view.tasks.get(id).filter(|row| row.deleted_at.is_none());
                    let row = live.ok_or_else(|| no_such_task(id))?;
                    *seen = Some(row.clone());
                    let definition = TaskDefinition { status, ..(*row.definition).clone() };
                    Ok(vec![accepted(Some(row), definition, view, now)])
                }),
            )
            .await?;
        before.zip(changed.into_iter().next()).ok_or_else(|| no_such_task(id))
    }

    /// Decides under the lock that orders changes of definitions, writes what was decided (unless `dry_run`) and tells
    /// the leader.
    async fn change(
        &self,
        caller: &Caller,
        ids: &[TaskId],
        dry_run: bool,
        decide: Decide<'_>,
    ) -> Result<Vec<Changed>, ApiError> {
        let mut outcome: Option<Result<Vec<Changed>, ApiError>> = None;
        let slot = &mut outcome;
        let clock = &self.clock;
        self.store
            .change_definitions(
                ids,
                Box::new(move |view| {
                    // The moment of acceptance lies under the lock, so that of two changes the later one is later.
                    let now = clock.now();
                    let decided = decide(&view, now);
                    let write = match &decided {
                        Ok(changed) if !dry_run => write_of(caller, &view, changed, now),
                        _ => None,
                    };
                    *slot = Some(decided);
                    write
                }),
            )
            .await?;
        let changed = outcome.ok_or_else(|| ApiError::Internal("the database did not ask for a decision".into()))??;
        if !dry_run {
            if changed.iter().any(|c| c.accepted.row.is_some()) {
                self.hint(Hint::Definitions);
            }
            if changed.iter().flat_map(|c| &c.accepted.runs).any(|run| run.state == RunState::Pending) {
                self.hint(Hint::Runs);
            }
        }
        Ok(changed)
    }

    /// Refuses definitions that would bring the number of consumers above [`MAX_CONSUMERS`]; answers the names that are
    /// not known yet. Without NATS nobody can tell which ones there are: then nothing is refused.
    async fn check_consumers(&self, candidates: &[Candidate]) -> Result<BTreeSet<String>, ApiError> {
        let needed: BTreeSet<String> = candidates.iter().map(Candidate::consumer).collect();
        let known = |names: &BTreeSet<String>| {
            let known = self.consumers.lock().unwrap_or_else(PoisonError::into_inner);
            names.iter().all(|name| known.contains(name))
        };
        if known(&needed) || self.bus.connected_for().is_zero() {
            return Ok(BTreeSet::new());
        }
        let Ok(groups) = self.bus.groups().await else { return Ok(BTreeSet::new()) };
        let there: BTreeSet<String> =
            groups.into_values().flat_map(|group| group.consumers).map(|consumer| consumer.name).collect();
        let added: BTreeSet<String> = needed.difference(&there).cloned().collect();
        if !added.is_empty() && there.len() + added.len() > MAX_CONSUMERS {
            let first = candidates.iter().find(|c| added.contains(&c.consumer()));
            let field = FieldError::new(
                "executor_group",
                "size",
                format!(
                    "the tasks would need {} consumers, one for each group, lane and profile (timeout, retries); at \
                     most {MAX_CONSUMERS} are possible: let tasks share groups, lanes, timeouts and retries",
                    there.len() + added.len()
                ),
            );
            return Err(ApiError::Invalid(vec![field.under(first.map_or("", |c| c.path.as_str()))]));
        }
        *self.consumers.lock().unwrap_or_else(PoisonError::into_inner) = there.into_iter().collect();
        Ok(added)
    }

    async fn view_of(&self, row: &TaskRow) -> Result<TaskView, ApiError> {
        let id = &row.definition.task_id;
        let now = self.now();
        let histories = self.store.histories(std::slice::from_ref(id), now).await?;
        let history: Option<&TaskHistory> = histories.get(id);
        Ok(TaskView::of(row, next_fire(row, now), history))
    }
}

/// Two stretches as one.
fn joined(a: Option<Stretch>, b: Option<Stretch>) -> Option<Stretch> {
    match (a, b) {
        (Some(a), Some(b)) => Some(Stretch { from: a.from.min(b.from), to: a.to.max(b.to), count: a.count + b.count }),
        (one, other) => one.or(other),
    }
}

fn context(view: &DefinitionView, now: Timestamp) -> AcceptContext {
    let DefinitionView { planned_until, planned_rev, .. } = *view;
    AcceptContext { now, planned_until, planned_rev, fresh_run_id: delayed_run_id(now) }
}

fn accepted(existing: Option<&TaskRow>, definition: TaskDefinition, view: &DefinitionView, now: Timestamp) -> Changed {
    let cx = context(view, now);
    let accepted = accept(existing, definition, cx);
    let row = accepted.row.clone().or_else(|| existing.cloned());
    Changed { row: row.expect("what is unchanged exists"), accepted }
}

fn write_of(caller: &Caller, view: &DefinitionView, changed: &[Changed], now: Timestamp) -> Option<DefinitionWrite> {
    let mut write = DefinitionWrite::default();
    for Changed { accepted, .. } in changed {
        let Some(row) = &accepted.row else { continue };
        let before = view.tasks.get(&row.definition.task_id);
        write.audit.push(AuditEntry {
            at: now,
            actor: caller.actor.clone(),
            action: action_of(accepted.change, before, row).to_owned(),
            subject: row.definition.task_id.to_string(),
            detail: detail_of(accepted.change, before, row),
        });
        write.tasks.push(row.clone());
        write.runs.extend(accepted.runs.iter().cloned());
    }
    (!write.tasks.is_empty()).then_some(write)
}

fn action_of(change: Change, before: Option<&TaskRow>, row: &TaskRow) -> &'static str {
    match change {
        Change::Created => "task.created",
        Change::Deleted => "task.deleted",
        Change::Updated | Change::Unchanged => {
            let Some(before) = before else { return "task.updated" };
            let only_status =
                TaskDefinition { status: before.definition.status, ..(*row.definition).clone() } == *before.definition;
            match (only_status, row.definition.status) {
                (true, Status::Paused) => "task.paused",
                (true, Status::Enabled) => "task.resumed",
                (false, _) => "task.updated",
            }
        }
    }
}

/// The version, and of a change the fields that changed with both values.
fn detail_of(change: Change, before: Option<&TaskRow>, row: &TaskRow) -> Value {
    let mut detail = json!({"version": row.version});
    if let (Change::Updated, Some(before)) = (change, before)
        && let (Ok(Value::Object(old)), Ok(Value::Object(new))) =
            (serde_json::to_value(&*before.definition), serde_json::to_value(&*row.definition))
    {
        let names: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
        let differing = names.into_iter().filter(|name| old.get(*name) != new.get(*name));
        detail["changed"] = differing
            .map(|name| (name.clone(), json!({"from": old.get(name), "to": new.get(name)})))
            .collect::<serde_json::Map<_, _>>()
            .into();
    }
    detail
}

/// The next instant at which a task fires by itself.
pub(super) fn next_fire(row: &TaskRow, now: Timestamp) -> Option<Timestamp> {
    super::fires::fires_of(row, now, 1).first().copied()
}

/// When the delay of a task is over.
pub(super) fn delay_due(row: &TaskRow) -> Option<Timestamp> {
    let ms = i64::try_from(row.definition.delay_seconds?).ok()?.checked_mul(1000)?;
    Some(delay_accepted_at(row.delay_run_id?)?.plus_millis(ms))
}
