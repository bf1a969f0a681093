//! Runs: trigger by hand, enqueue, list, get.

use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use ax_shared::definition::{MAX_DELAY_SECONDS, Status, check_payload};
use ax_shared::{Group, RunId, RunKind, TaskId, Timestamp};
use futures::stream::{self, StreamExt, TryStreamExt};
use serde_json::{Value, json};

use super::{Caller, Service, cursor, cursor_of, cut_page, limit_of, no_such_task};
use crate::api::ApiError;
use crate::api::fields::Fields;
use crate::api::view::{Enqueued, Requested, RunDetail, RunPage, RunView};
use crate::core::definitions::{AuditEntry, TaskRow};
use crate::core::run::{Run, RunState};
use crate::ports::{Hint, RunFilter};

/// The most runs of one enqueue request.
const MAX_ENQUEUED: usize = 10_000;
/// The longest delay of a run, in milliseconds: 100 years.
const MAX_DELAY_MS: u64 = MAX_DELAY_SECONDS * 1000;
/// Idempotency keys that are looked up at the same time.
const KEYS_AT_ONCE: usize = 64;

/// Which runs to list.
#[derive(Debug, Clone, Default)]
pub struct ListRuns {
    filter: RunFilter,
}

impl ListRuns {
    /// Reads the filter of a request.
    ///
    /// # Errors
    /// Broken rules.
    pub fn read(mut fields: Fields) -> Result<Self, ApiError> {
        let mut states = Vec::new();
        for word in fields.texts("state") {
            match RunState::parse(&word) {
                Some(state) => states.push(state),
                None => {
                    let known: Vec<_> = RunState::ALL.into_iter().map(RunState::as_str).collect();
                    fields.refuse("state", "format", format!("must be one of {}", known.join(", ")));
                    break;
                }
            }
        }
        let filter = RunFilter {
            task_id: fields.name("task_id", TaskId::new),
            group: fields.name("group", Group::new),
            states,
            from: fields.time("from"),
            to: fields.time("to"),
            after: cursor_of(&mut fields),
            limit: limit_of(&mut fields),
        };
        fields.finish()?;
        Ok(Self { filter })
    }

    /// The newest runs of all tasks whose trigger time is before `to`: what is delayed for long would hide the rest.
    #[must_use]
    pub fn newest(to: Timestamp, limit: u32) -> Self {
        Self { filter: RunFilter { to: Some(to), limit, ..RunFilter::default() } }
    }

    /// The newest runs of one task.
    #[must_use]
    pub fn of_task(id: TaskId, limit: u32) -> Self {
        Self { filter: RunFilter { task_id: Some(id), limit, ..RunFilter::default() } }
    }
}

/// What a run is asked for with.
struct Order {
    task_id: Option<TaskId>,
    payload: Option<Value>,
    delay_ms: u64,
    key: Option<String>,
    reason: Option<String>,
}

impl Order {
    fn read(fields: &mut Fields) -> Self {
        let payload = fields.json("payload");
        if let Some(payload) = &payload
            && let Err(e) = check_payload("payload", payload)
        {
            fields.refuse("payload", &e.rule, e.message);
        }
        let delay_ms = fields.integer("delay_ms", 0..=MAX_DELAY_MS).unwrap_or(0);
        let key = fields.text("idempotency_key", 512);
        if key.as_deref() == Some("") {
            fields.refuse("idempotency_key", "format", "must not be empty");
        }
        Self { task_id: None, payload, delay_ms, key, reason: None }
    }

    /// The run that is asked for, under `run_id`.
    fn run(&self, row: &TaskRow, run_id: RunId, kind: RunKind, now: Timestamp) -> Run {
        let due = now.plus_millis(i64::try_from(self.delay_ms).unwrap_or(i64::MAX));
        Run { payload: self.payload.clone(), reason: self.reason.clone(), ..row.new_run(run_id, kind, due, due, now) }
    }
}

impl Service {
    /// Starts a run of a task by hand.
    ///
    /// # Errors
    /// There is no such task, it is paused, a broken rule, or something is away.
    pub async fn trigger(&self, caller: &Caller, id: &TaskId, body: Value) -> Result<Requested, ApiError> {
        let mut fields = Fields::of_body(body, "").map_err(|e| ApiError::of_fields(vec![e]))?;
        let mut order = Order::read(&mut fields);
        order.reason = fields.text("reason", 500).filter(|reason| !reason.is_empty());
        fields.unsupported("trigger_time");
        fields.unsupported("force");
        fields.finish()?;

        let row = self.store.task(id).await?.ok_or_else(|| no_such_task(id))?;
        if row.definition.status == Status::Paused {
            return Err(ApiError::conflict(format!("task {id:?} is paused: resume it first")));
        }
        let now = self.now();
        let run_id = self.claim(&row, order.key.as_deref(), self.fresh_run_id(now)).await?;
        let run = order.run(&row, run_id, RunKind::Manual, now);
        let audit = AuditEntry {
            at: now,
            actor: caller.actor.clone(),
            action: "run.triggered".to_owned(),
            subject: run_id.to_string(),
            detail: json!({"task_id": id, "reason": order.reason, "delay_ms": order.delay_ms}),
        };
        let inserted = self.store.insert_runs(&[run], &[audit]).await?;
        let created = inserted.first().copied().unwrap_or(false);
        if created {
            self.hint(Hint::Runs);
        }
        Ok(Requested { run_id, created })
    }

    /// Inserts many runs, all or none.
    ///
    /// # Errors
    /// Every broken rule of every run, paused tasks, or something is away.
    pub async fn enqueue(&self, caller: &Caller, body: Value) -> Result<Enqueued, ApiError> {
        let mut fields = Fields::of_body(body, "").map_err(|e| ApiError::of_fields(vec![e]))?;
        let entries = match fields.json("runs") {
            Some(Value::Array(entries)) => entries,
            Some(_) => {
                fields.refuse("runs", "type", "must be an array");
                Vec::new()
            }
            None => {
                fields.refuse("runs", "required", "is required");
                Vec::new()
            }
        };
        if entries.len() > MAX_ENQUEUED {
            fields.refuse("runs", "size", format!("at most {MAX_ENQUEUED} runs at once, not {}", entries.len()));
        }
        fields.finish()?;

        let mut errors = Vec::new();
        let mut orders = Vec::with_capacity(entries.len());
        for (i, entry) in entries.into_iter().enumerate() {
            let at = format!("runs[{i}]");
            let mut fields = match Fields::of_body(entry, &at) {
                Ok(fields) => fields,
                Err(e) => {
                    errors.push(e);
                    continue;
                }
            };
            let task_id = fields.name("task_id", TaskId::new);
            let mut order = Order::read(&mut fields);
            order.task_id = task_id;
            let mut broken = fields.into_errors();
            if order.task_id.is_none() && !broken.iter().any(|e| e.field.ends_with("task_id")) {
                broken.push(ax_shared::FieldError::new("task_id", "required", "is required").under(&at));
            }
            errors.extend(broken);
            orders.push(order);
        }
        if !errors.is_empty() {
            return Err(ApiError::of_fields(errors));
        }
        let orders: Vec<(TaskId, Order)> =
            orders.into_iter().filter_map(|o| o.task_id.clone().map(|id| (id, o))).collect();
        let rows = self.tasks_of(&orders).await?;

        let now = self.now();
        let proposed: Vec<RunId> = orders.iter().map(|_| self.fresh_run_id(now)).collect();
        let claims = orders
            .iter()
            .zip(&proposed)
            .map(|((id, order), proposed)| self.claim(&rows[id], order.key.as_deref(), *proposed));
        let claims: Vec<_> = claims.collect();
        let ids: Vec<RunId> = stream::iter(claims).buffered(KEYS_AT_ONCE).try_collect().await?;

        // One key twice in one request is one run, made by the first of them.
        let mut seen = HashSet::new();
        let firsts: Vec<bool> = ids.iter().map(|id| seen.insert(*id)).collect();
        let runs: Vec<Run> = orders
            .iter()
            .zip(&ids)
            .zip(&firsts)
            .filter(|(_, first)| **first)
            .map(|(((id, order), run_id), _)| order.run(&rows[id], *run_id, RunKind::Enqueue, now))
            .collect();
        let mut inserted = Vec::new();
        if !runs.is_empty() {
            let fresh: HashSet<RunId> = proposed.into_iter().collect();
            let audit = enqueued(caller, &runs, &fresh, now);
            inserted = self.store.insert_runs(&runs, &[audit]).await?;
            if inserted.contains(&true) {
                self.hint(Hint::Runs);
            }
        }
        let mut inserted = inserted.into_iter();
        let runs = ids
            .into_iter()
            .zip(firsts)
            .map(|(run_id, first)| Requested { run_id, created: first && inserted.next().unwrap_or(false) })
            .collect();
        Ok(Enqueued { runs })
    }

    /// The rows of the tasks that are named; all must exist and none be paused.
    async fn tasks_of(
        &self,
        orders: &[(TaskId, Order)],
    ) -> Result<std::collections::HashMap<TaskId, TaskRow>, ApiError> {
        let ids: Vec<TaskId> = orders.iter().map(|(id, _)| id.clone()).collect::<HashSet<_>>().into_iter().collect();
        let mut rows = std::collections::HashMap::new();
        for chunk in ids.chunks(1000) {
            for row in self.store.tasks(chunk).await? {
                rows.insert(row.definition.task_id.clone(), row);
            }
        }
        let errors_of = |rule: &str, test: &dyn Fn(&TaskId) -> Option<String>| -> Vec<ax_shared::FieldError> {
            let place = |i: usize| format!("runs[{i}].task_id");
            let told = orders.iter().enumerate().filter_map(|(i, (id, _))| test(id).map(|text| (place(i), text)));
            told.map(|(field, text)| ax_shared::FieldError::new(field, rule, text)).take(100).collect()
        };
        let unknown = errors_of("exists", &|id| (!rows.contains_key(id)).then(|| format!("there is no task {id:?}")));
        if !unknown.is_empty() {
            return Err(ApiError::Invalid(unknown));
        }
        let paused = errors_of("conflict", &|id| {
            (rows[id].definition.status == Status::Paused).then(|| format!("task {id:?} is paused: resume it first"))
        });
        if let Some(first) = paused.first() {
            return Err(ApiError::Conflict { detail: first.message.clone(), errors: paused });
        }
        Ok(rows)
    }

    /// The run that a key means: `proposed` when there is no key or none is remembered.
    async fn claim(&self, row: &TaskRow, key: Option<&str>, proposed: RunId) -> Result<RunId, ApiError> {
        let window = Duration::from_secs(row.definition.dedup_window_seconds);
        match key {
            Some(key) if !window.is_zero() => {
                Ok(self.bus.claim_key(&row.definition.task_id, key, proposed, window).await?)
            }
            _ => Ok(proposed),
        }
    }

    /// A page of runs, newest trigger time first.
    ///
    /// # Errors
    /// The database is away.
    pub async fn list_runs(&self, request: ListRuns) -> Result<RunPage, ApiError> {
        let limit = request.filter.limit;
        let filter = RunFilter { limit: limit + 1, ..request.filter };
        let mut runs = self.store.list_runs(&filter).await?;
        let more = cut_page(&mut runs, limit);
        let next_cursor = runs.last().filter(|_| more).map(|run| cursor(&(run.trigger_at, run.run_id)));
        Ok(RunPage { runs: runs.iter().map(RunView::of).collect(), next_cursor })
    }

    /// One run with its attempts, its timeline and its result.
    ///
    /// # Errors
    /// There is none of that id, or the database is away.
    pub async fn run(&self, id: RunId) -> Result<RunDetail, ApiError> {
        let found = self.store.run(id).await?;
        let (run, attempts) = found.ok_or_else(|| ApiError::NotFound(format!("there is no run {id}")))?;
        Ok(RunDetail::of(run, attempts, self.now()))
    }
}

/// The line of the audit about runs that were enqueued together: about those whose id is `fresh`, or all when none is, which
/// counts when whoever claimed their keys did not come to insert them.
///
/// The store leaves a line out when the run that it is about was there before. This one is about the first of those that it
/// counts, so that a request whose keys are all known leaves no line, and any other leaves one.
fn enqueued(caller: &Caller, runs: &[Run], fresh: &HashSet<RunId>, at: Timestamp) -> AuditEntry {
    let mut told: Vec<&Run> = runs.iter().filter(|run| fresh.contains(&run.run_id)).collect();
    if told.is_empty() {
        told = runs.iter().collect();
    }
    let tasks: BTreeSet<&TaskId> = told.iter().map(|run| &run.task_id).collect();
    AuditEntry {
        at,
        actor: caller.actor.clone(),
        action: "runs.enqueued".to_owned(),
        subject: told.first().map_or_else(String::new, |run| run.run_id.to_string()),
        detail: json!({"count": told.len(), "tasks": tasks}),
    }
}
