//! Every operation of the API in one table: its address at each door, the role that it needs, what it reads. And the one
//! way from a request to its answer, which both doors take.
//!
//! Invariant: a door adds nothing to an operation. It takes a [`Request`] out of its protocol and puts a [`Reply`] or an
//! [`ApiError`] into it, so that the same question has the same answer at every door.

use std::fmt;
use std::time::Duration;

use ax_shared::{RunId, TaskId};
use serde::Serialize;
use serde_json::Value;

use super::ApiError;
use super::fields::Fields;
use super::service::{
    ApplyOptions, Caller, Expected, ListRuns, ListTasks, PreviewRequest, Role, Service, UpcomingRequest,
};
use super::strict::Strict;
use super::view::TaskView;

/// The largest body of a request, in bytes.
pub const MAX_BODY_BYTES: usize = 16 * 1024 * 1024;
/// How long a request may take before it is given up; nothing here waits for a worker.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// What can be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the table says what each does")]
pub enum Operation {
    ListTasks,
    GetTask,
    PutTask,
    DeleteTask,
    PauseTask,
    ResumeTask,
    TriggerTask,
    BackfillTask,
    NextFires,
    Apply,
    Preview,
    Upcoming,
    Enqueue,
    ListRuns,
    GetRun,
    CancelRun,
    Nodes,
}

/// A method of HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "they are those of HTTP")]
pub enum Method {
    Get,
    Put,
    Post,
    Delete,
}

/// What an operation is about, as its id stands in an address or a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// Nothing single.
    None,
    /// A task, `task_id`.
    Task,
    /// A run, `run_id`.
    Run,
}

impl Subject {
    /// The field of a body that names it.
    #[must_use]
    pub fn field(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Task => Some("task_id"),
            Self::Run => Some("run_id"),
        }
    }
}

/// What an operation reads besides its subject.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// Parameters alone: over HTTP in the query string, over NATS the fields of the body.
    Parameters,
    /// A JSON object that may be left out.
    OptionalBody,
    /// A JSON object.
    Body,
    /// A document of definitions, with parameters: over NATS beside it, in an envelope.
    Document,
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Route {
    /// Which operation.
    pub operation: Operation,
    /// The method of HTTP.
    pub method: Method,
    /// The path under `/api/v1`.
    pub path: &'static str,
    /// The end of the subject, after `<prefix>.api.v1.`.
    pub subject: &'static str,
    /// What it is about.
    pub about: Subject,
    /// What else it reads.
    pub input: Input,
    /// The least role that may.
    pub role: Role,
    /// What it does, for people.
    pub summary: &'static str,
}

macro_rules! table {
    ($($operation:ident = $method:ident $path:literal $subject:literal $about:ident $input:ident $role:ident $summary:literal;)*) => {
        /// Every operation.
        pub const ROUTES: &[Route] = &[$(Route {
            operation: Operation::$operation,
            method: Method::$method,
            path: $path,
            subject: $subject,
            about: Subject::$about,
            input: Input::$input,
            role: Role::$role,
            summary: $summary,
        }),*];
    };
}

table! {
    ListTasks = Get "/tasks" "task.list" None Parameters Viewer "List tasks by id";
    GetTask = Get "/tasks/{id}" "task.get" Task Parameters Viewer "Show a task with its definition and what is known of its runs";
    PutTask = Put "/tasks/{id}" "task.put" Task Body Admin "Make or change a task; an equal definition changes nothing";
    DeleteTask = Delete "/tasks/{id}" "task.delete" Task Parameters Admin "Delete a task; its history stays";
    PauseTask = Post "/tasks/{id}/pause" "task.pause" Task OptionalBody Operator "Stop the fires of a task until it is resumed";
    ResumeTask = Post "/tasks/{id}/resume" "task.resume" Task OptionalBody Operator "Let a task fire again, and tell what it will start";
    TriggerTask = Post "/tasks/{id}/trigger" "task.trigger" Task OptionalBody Operator "Start a run of a task by hand";
    BackfillTask = Post "/tasks/{id}/backfill" "task.backfill" Task OptionalBody Operator "Run past instants of a task: not supported by this version";
    NextFires = Get "/tasks/{id}/next" "task.next" Task Parameters Viewer "Show when a task fires next";
    Apply = Post "/apply" "apply" None Document Admin "Put a document of definitions into force, whole or not at all";
    Preview = Post "/preview" "preview" None Body Viewer "Show when an expression would fire";
    Upcoming = Get "/upcoming" "upcoming" None Parameters Viewer "Show what fires next, over all enabled tasks";
    Enqueue = Post "/enqueue" "enqueue" None Body Operator "Add runs beside the schedule, all or none";
    ListRuns = Get "/runs" "run.list" None Parameters Viewer "List runs, newest trigger time first";
    GetRun = Get "/runs/{id}" "run.get" Run Parameters Viewer "Show a run with its attempts, timeline and result";
    CancelRun = Post "/runs/{id}/cancel" "run.cancel" Run OptionalBody Operator "End a run as cancelled; nothing happens to one that has ended";
    Nodes = Get "/nodes" "nodes" None Parameters Viewer "Show the scheduler nodes that answer";
}

/// What only HTTP has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the table says what each does")]
pub enum Special {
    Events,
    OpenApi,
    Healthz,
    Readyz,
    Metrics,
}

/// One row of the table of what only HTTP has; all are GET.
#[derive(Debug, Clone, Copy)]
pub struct SpecialRoute {
    /// Which.
    pub special: Special,
    /// The whole path.
    pub path: &'static str,
    /// The least role that may; none = whoever asks.
    pub role: Option<Role>,
    /// What it does, for people.
    pub summary: &'static str,
}

/// What only HTTP has.
pub const SPECIALS: &[SpecialRoute] = &[
    SpecialRoute {
        special: Special::Events,
        path: "/api/v1/events",
        role: Some(Role::Viewer),
        summary: "Tell state changes of runs as they happen, as server-sent events",
    },
    SpecialRoute {
        special: Special::OpenApi,
        path: "/api/v1/openapi.json",
        role: Some(Role::Viewer),
        summary: "This document",
    },
    SpecialRoute {
        special: Special::OpenApi,
        path: "/openapi.json",
        role: Some(Role::Viewer),
        summary: "This document",
    },
    SpecialRoute { special: Special::Healthz, path: "/healthz", role: None, summary: "Whether the process lives" },
    SpecialRoute {
        special: Special::Readyz,
        path: "/readyz",
        role: None,
        summary: "Whether this node can do its work; followers can, too",
    },
    SpecialRoute {
        special: Special::Metrics,
        path: "/metrics",
        role: None,
        summary: "Metrics in Prometheus' text format",
    },
];

/// What a door has read.
#[derive(Debug)]
pub struct Request {
    /// The id of what it is about, as it was given.
    pub id: Option<String>,
    /// The parameters.
    pub params: Fields,
    /// The body; null when there is none.
    pub body: Value,
    /// What the caller expects of the version that it changes.
    pub expected: Expected,
}

/// What was answered to a request that was done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// The HTTP status: 200, 201, 202 or 204.
    pub status: u16,
    /// The version of the task that is answered.
    pub version: Option<u64>,
    /// JSON; empty with 204.
    pub body: Vec<u8>,
}

impl Reply {
    fn of(status: u16, body: &impl Serialize) -> Result<Self, ApiError> {
        let body = serde_json::to_vec(body).map_err(|e| ApiError::Internal(format!("an answer is not JSON: {e}")))?;
        Ok(Self { status, version: None, body })
    }

    fn of_task(status: u16, task: &TaskView) -> Result<Self, ApiError> {
        Ok(Self { version: Some(task.version), ..Self::of(status, task)? })
    }
}

/// Created, or known before.
fn created(yes: bool) -> u16 {
    if yes { 201 } else { 200 }
}

impl Route {
    /// Does what is asked, as `caller`.
    ///
    /// # Errors
    /// Why it was not done: the caller's role, a broken rule, something that is away.
    pub async fn answer(&self, service: &Service, caller: &Caller, request: Request) -> Result<Reply, ApiError> {
        caller.must_be(self.role)?;
        match tokio::time::timeout(PATIENCE, Box::pin(self.call(service, caller, request))).await {
            Ok(answer) => answer,
            Err(_) => Err(ApiError::Unavailable { what: "the database or NATS", source: None }),
        }
    }

    async fn call(&self, service: &Service, caller: &Caller, request: Request) -> Result<Reply, ApiError> {
        let Request { id, params, body, expected } = request;
        match self.operation {
            Operation::ListTasks => Reply::of(200, &service.list_tasks(ListTasks::read(params)?).await?),
            Operation::GetTask => {
                let id = task_id(id)?;
                params.finish()?;
                Reply::of_task(200, &service.task(&id).await?)
            }
            Operation::PutTask => {
                let id = task_id(id)?;
                params.finish()?;
                let report = service.put_task(caller, &id, body, expected).await?;
                Reply::of_task(created(report.created), &report.task)
            }
            Operation::DeleteTask => {
                let id = task_id(id)?;
                params.finish()?;
                service.delete_task(caller, &id, expected).await?;
                Ok(Reply { status: 204, version: None, body: Vec::new() })
            }
            Operation::PauseTask => {
                let id = task_id(id)?;
                params.finish()?;
                object(body)?.finish()?;
                Reply::of_task(200, &service.pause_task(caller, &id).await?)
            }
            Operation::ResumeTask => {
                let id = task_id(id)?;
                params.finish()?;
                object(body)?.finish()?;
                Reply::of(200, &service.resume_task(caller, &id).await?)
            }
            Operation::TriggerTask => {
                let id = task_id(id)?;
                params.finish()?;
                let requested = service.trigger(caller, &id, body).await?;
                Reply::of(created(requested.created), &requested)
            }
            Operation::BackfillTask => {
                task_id(id)?;
                Err(ApiError::field("", "not_supported", "backfill is not supported by this version of ax"))
            }
            Operation::NextFires => Reply::of(200, &service.next(&task_id(id)?, params).await?),
            Operation::Apply => {
                let options = ApplyOptions::read(params)?;
                Reply::of(200, &service.apply(caller, &body, options).await?)
            }
            Operation::Preview => {
                params.finish()?;
                Reply::of(200, &service.preview(&PreviewRequest::read(object(body)?)?))
            }
            Operation::Upcoming => Reply::of(200, &service.upcoming(UpcomingRequest::read(params)?).await?),
            Operation::Enqueue => {
                params.finish()?;
                Reply::of(201, &service.enqueue(caller, body).await?)
            }
            Operation::ListRuns => Reply::of(200, &service.list_runs(ListRuns::read(params)?).await?),
            Operation::GetRun => {
                let id = run_id(id)?;
                params.finish()?;
                Reply::of(200, &service.run(id).await?)
            }
            Operation::CancelRun => {
                let id = run_id(id)?;
                params.finish()?;
                let run = service.cancel_run(caller, id, object(body)?).await?;
                Reply::of(if run.run.state.is_final() { 200 } else { 202 }, &run)
            }
            Operation::Nodes => {
                params.finish()?;
                Reply::of(200, &service.nodes().await?)
            }
        }
    }
}

fn task_id(id: Option<String>) -> Result<TaskId, ApiError> {
    TaskId::new(&id.unwrap_or_default()).map_err(|e| ApiError::field("task_id", "format", e.to_string()))
}

fn run_id(id: Option<String>) -> Result<RunId, ApiError> {
    id.unwrap_or_default().parse().map_err(|_| ApiError::field("run_id", "format", "a run id is a UUID"))
}

fn object(body: Value) -> Result<Fields, ApiError> {
    Fields::of_body(body, "").map_err(|e| ApiError::of_fields(vec![e]))
}

/// Reads the bytes of a body.
///
/// # Errors
/// They are too many, not JSON, or an object has a key twice; nothing at all is null where `optional`.
pub fn read_json(bytes: &[u8], optional: bool) -> Result<Value, ApiError> {
    if bytes.len() > MAX_BODY_BYTES {
        return Err(too_large());
    }
    if optional && bytes.iter().all(u8::is_ascii_whitespace) {
        return Ok(Value::Null);
    }
    match serde_json::from_slice(bytes) {
        Ok(Strict(value)) => Ok(value),
        Err(e) if e.is_data() => Err(ApiError::Malformed(format!("the body: {e}"))),
        Err(e) => Err(ApiError::Malformed(format!("the body is not JSON in UTF-8: {e}"))),
    }
}

/// Says that a body is too large.
#[must_use]
pub fn too_large() -> ApiError {
    let detail = format!("the body is larger than the limit of {MAX_BODY_BYTES} bytes (16 MiB)");
    ApiError::TooLarge { detail, errors: Vec::new() }
}

/// Reads what the header `If-Match` says: a version, bare or as an entity tag, or `*`.
///
/// # Errors
/// It is something else.
pub fn read_if_match(text: &str) -> Result<Expected, ApiError> {
    let text = text.trim();
    if text == "*" {
        return Ok(Expected::Existing);
    }
    let bare = text.strip_prefix("W/").unwrap_or(text).trim_matches('"');
    let version = bare.parse().map_err(|_| ApiError::field("If-Match", "format", "is a version, a whole number"))?;
    Ok(Expected::Version(version))
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Get => "GET",
            Self::Put => "PUT",
            Self::Post => "POST",
            Self::Delete => "DELETE",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_bare_and_as_an_etag() {
        let read = |text: &str| read_if_match(text).ok();
        assert_eq!(read("3"), Some(Expected::Version(3)));
        assert_eq!(read("\"3\""), Some(Expected::Version(3)));
        assert_eq!(read("W/\"3\""), Some(Expected::Version(3)));
        assert_eq!(read("*"), Some(Expected::Existing));
        assert_eq!(read("x"), None);
    }

    #[test]
    fn addresses_are_unique_and_what_changes_needs_more_than_a_viewer() {
        let mut seen = std::collections::HashSet::new();
        for route in ROUTES {
            assert!(seen.insert(format!("{} {}", route.method, route.path)), "{route:?}");
            assert!(seen.insert(route.subject.to_owned()), "{route:?}");
            assert_eq!(route.path.contains("{id}"), route.about != Subject::None, "{route:?}");
            let reads = route.method == Method::Get || route.operation == Operation::Preview;
            assert_eq!(reads, route.role == Role::Viewer, "{route:?}");
        }
    }
}
