//! When tasks fire: of one task, of an expression, of all.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use ax_shared::definition::Status;
use ax_shared::{FieldError, Group, TaskId, Timestamp};

use super::tasks::delay_due;
use super::{Service, limit_of, no_such_task};
use crate::api::ApiError;
use crate::api::fields::Fields;
use crate::api::view::{Fires, Upcoming, UpcomingFire};
use crate::core::definitions::TaskRow;
use crate::core::schedule::Schedule;
use crate::ports::TaskFilter;

/// How far ahead `upcoming` looks when the request does not say: one day, in milliseconds.
const DEFAULT_SPAN_MS: i64 = 24 * 3_600_000;
/// Instants of one task in an answer of `upcoming` when the request does not say.
const DEFAULT_PER_TASK: u64 = 10;
/// Tasks that are read at once while looking through all of them.
const BATCH: u32 = 2000;

/// An expression whose instants are asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct PreviewRequest {
    /// The expression in its zone.
    pub schedule: Schedule,
    /// Instants strictly after this, and the anchor of `EVERY`; none = now.
    pub after: Option<Timestamp>,
    /// How many.
    pub count: u32,
}

impl PreviewRequest {
    /// Reads a request.
    ///
    /// # Errors
    /// Broken rules.
    pub fn read(mut fields: Fields) -> Result<Self, ApiError> {
        let expr = fields.text("cron_expr", 256);
        if expr.is_none() {
            fields.refuse("cron_expr", "required", "is required");
        }
        let zone = fields.text("timezone", 64).unwrap_or_else(|| "UTC".to_owned());
        let after = fields.time("after");
        let count = count_of(&mut fields);
        fields.finish()?;
        let schedule = Schedule::parse(&expr.unwrap_or_default(), &zone)
            .map_err(|e| ApiError::field(e.field(), "schedule", e.to_string()))?;
        Ok(Self { schedule, after, count })
    }

    /// The instants, when it is `now`.
    #[must_use]
    pub fn fires(&self, now: Timestamp) -> Fires {
        let after = self.after.unwrap_or(now);
        Fires { fires: instants(&self.schedule, after, after).take(self.count as usize).collect() }
    }
}

/// Which instants of all tasks are asked for.
#[derive(Debug, Clone, Default)]
pub struct UpcomingRequest {
    from: Option<Timestamp>,
    to: Option<Timestamp>,
    group: Option<Group>,
    limit: u32,
    /// Of one task at most this many, so that a short interval does not fill the answer.
    per_task: u32,
}

impl UpcomingRequest {
    /// Reads a request.
    ///
    /// # Errors
    /// Broken rules.
    pub fn read(mut fields: Fields) -> Result<Self, ApiError> {
        let request = Self {
            from: fields.time("from"),
            to: fields.time("to"),
            group: fields.name("group", Group::new),
            limit: limit_of(&mut fields),
            per_task: fields.integer("per_task", 1..=super::MAX_LIMIT).unwrap_or(DEFAULT_PER_TASK) as u32,
        };
        fields.finish()?;
        Ok(request)
    }
}

/// Reads `count`: 10 when left out.
fn count_of(fields: &mut Fields) -> u32 {
    fields.integer("count", 1..=super::MAX_LIMIT).unwrap_or(10) as u32
}

/// Instants of a schedule strictly after `after`, in order.
fn instants(schedule: &Schedule, after: Timestamp, anchor: Timestamp) -> impl Iterator<Item = Timestamp> + '_ {
    std::iter::successors(schedule.next_after(after, anchor), move |at| schedule.next_after(*at, anchor))
}

/// The next instants at which a task fires by itself, at most `count`.
pub(super) fn fires_of(row: &TaskRow, now: Timestamp, count: usize) -> Vec<Timestamp> {
    if row.definition.status == Status::Paused {
        return Vec::new();
    }
    if let Some(expr) = &row.definition.cron_expr {
        let Ok(schedule) = Schedule::parse(expr, &row.definition.timezone) else { return Vec::new() };
        return instants(&schedule, now, row.anchor_at).take(count).collect();
    }
    delay_due(row).filter(|due| *due > now).into_iter().take(count).collect()
}

impl Service {
    /// The next instants of a task: none while it is paused.
    ///
    /// # Errors
    /// There is none of that id, broken rules, or the database is away.
    pub async fn next(&self, id: &TaskId, mut fields: Fields) -> Result<Fires, ApiError> {
        let count = count_of(&mut fields);
        fields.finish()?;
        let row = self.store.task(id).await?.ok_or_else(|| no_such_task(id))?;
        Ok(Fires { fires: fires_of(&row, self.now(), count as usize) })
    }

    /// The instants of an expression.
    #[must_use]
    pub fn preview(&self, request: &PreviewRequest) -> Fires {
        request.fires(self.now())
    }

    /// What fires next, over all tasks, earliest first.
    ///
    /// # Errors
    /// The database is away.
    pub async fn upcoming(&self, request: UpcomingRequest) -> Result<Upcoming, ApiError> {
        let now = self.now();
        // `from` is part of the span, what lies in the past is not.
        let after = request.from.map_or(now, |from| now.max(from.plus_millis(-1)));
        let until = request.to.unwrap_or_else(|| after.plus_millis(DEFAULT_SPAN_MS));
        if request.to.is_some_and(|to| request.from.is_some_and(|from| to < from)) {
            return Err(ApiError::Invalid(vec![FieldError::new("to", "range", "is before from")]));
        }

        // The earliest fires of as many tasks as there are entries can make the answer; the heap holds no more.
        let limit = request.limit as usize;
        let mut more = false;
        let mut next: BinaryHeap<(Timestamp, TaskId, Source)> = BinaryHeap::new();
        let mut filter =
            TaskFilter { group: request.group, status: Some(Status::Enabled), limit: BATCH, ..TaskFilter::default() };
        loop {
            let rows = self.store.list_tasks(&filter).await?;
            let full = rows.len() >= BATCH as usize;
            filter.after = rows.last().map(|row| row.definition.task_id.clone());
            for row in rows {
                let Some((source, first)) = Source::of(&row, after).filter(|(_, first)| *first <= until) else {
                    continue;
                };
                next.push((first, row.definition.task_id.clone(), source));
                if next.len() > limit {
                    next.pop();
                    more = true;
                }
            }
            if !full {
                break;
            }
        }

        // The number is that of the task's fires up to this one.
        let mut next: BinaryHeap<_> = next.into_iter().map(|(at, id, source)| Reverse((at, id, source, 1))).collect();
        let mut fires = Vec::new();
        while fires.len() < limit
            && let Some(Reverse((at, task_id, source, number))) = next.pop()
        {
            if let Some(later) = source.next_after(at).filter(|later| *later <= until) {
                if number < request.per_task {
                    next.push(Reverse((later, task_id.clone(), source, number + 1)));
                } else {
                    more = true;
                }
            }
            fires.push(UpcomingFire { task_id, at });
        }
        Ok(Upcoming { fires, more: more || !next.is_empty() })
    }
}

/// Where the instants of a task come from.
#[derive(Debug)]
enum Source {
    Schedule { schedule: Schedule, anchor: Timestamp },
    Once,
}

impl Source {
    /// The source of a task and its first instant after `after`.
    fn of(row: &TaskRow, after: Timestamp) -> Option<(Self, Timestamp)> {
        match &row.definition.cron_expr {
            Some(expr) => {
                let schedule = Schedule::parse(expr, &row.definition.timezone).ok()?;
                let source = Self::Schedule { schedule, anchor: row.anchor_at };
                let first = source.next_after(after)?;
                Some((source, first))
            }
            None => Some((Self::Once, delay_due(row).filter(|due| *due > after)?)),
        }
    }

    fn next_after(&self, at: Timestamp) -> Option<Timestamp> {
        match self {
            Self::Schedule { schedule, anchor } => schedule.next_after(at, *anchor),
            Self::Once => None,
        }
    }
}

/// The order of fires is that of instants and ids; a task has one source.
impl PartialEq for Source {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}
impl Eq for Source {}
impl PartialOrd for Source {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Source {
    fn cmp(&self, _: &Self) -> std::cmp::Ordering {
        std::cmp::Ordering::Equal
    }
}
