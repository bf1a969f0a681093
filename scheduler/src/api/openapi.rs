//! The OpenAPI 3.1 document: paths out of the table of operations, schemas out of the types that are answered.
//!
//! `docs/openapi.json` is this document, held equal by a test; the same bytes are served.

use std::sync::LazyLock;

use ax_shared::definition::Status;
use ax_shared::{FieldError, Group, TaskDefinition, TaskId, Timestamp};
use serde_json::{Map, Value, json};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use super::Problem;
use super::operation::{Input, Method, Operation, ROUTES, Route, SPECIALS, Special, SpecialRoute, Subject};
use super::service::{DEFAULT_LIMIT, MAX_LIMIT};
use super::view::{
    ApplyReport, Enqueued, Fires, Nodes, Readiness, Requested, Resumed, RunDetail, RunPage, TaskPage, TaskView,
    Upcoming,
};
use crate::core::run::RunState;

/// What starts a run by hand. Everything may be left out.
#[derive(ToSchema)]
#[expect(dead_code, reason = "a description of what `Order::read` reads")]
struct Trigger {
    /// In the place of the task's payload; at most 512 KiB.
    payload: Option<Value>,
    /// How much later the run is due, in milliseconds; at most 100 years.
    delay_ms: Option<u64>,
    /// Two requests with one key, within the task's `dedup_window_seconds`, are one run.
    #[schema(min_length = 1, max_length = 512)]
    idempotency_key: Option<String>,
    /// Why, for the history.
    #[schema(max_length = 500)]
    reason: Option<String>,
}

/// Runs beside the schedule.
#[derive(ToSchema)]
#[expect(dead_code, reason = "a description of what `enqueue` reads")]
struct Enqueue {
    /// All or none are added.
    #[schema(max_items = 10_000)]
    runs: Vec<EnqueueRun>,
}

/// One run beside the schedule.
#[derive(ToSchema)]
#[expect(dead_code, reason = "a description of what `enqueue` reads")]
struct EnqueueRun {
    /// Of this task.
    task_id: TaskId,
    /// In the place of the task's payload; at most 512 KiB.
    payload: Option<Value>,
    /// How much later the run is due, in milliseconds; at most 100 years.
    delay_ms: Option<u64>,
    /// Two requests with one key, within the task's `dedup_window_seconds`, are one run.
    #[schema(min_length = 1, max_length = 512)]
    idempotency_key: Option<String>,
}

/// An expression whose instants are asked for.
#[derive(ToSchema)]
#[expect(dead_code, reason = "a description of what `PreviewRequest::read` reads")]
struct Preview {
    /// The expression.
    #[schema(max_length = 256)]
    cron_expr: String,
    /// IANA zone; `UTC` when left out.
    #[schema(max_length = 64)]
    timezone: Option<String>,
    /// Instants strictly after this, which is also the anchor of `EVERY`; now when left out.
    after: Option<Timestamp>,
    /// How many; 10 when left out.
    #[schema(minimum = 1, maximum = 500)]
    count: Option<u32>,
}

/// The document as it is served and checked in.
pub static TEXT: LazyLock<String> =
    LazyLock::new(|| serde_json::to_string_pretty(&document()).unwrap_or_default() + "\n");

/// The document.
#[must_use]
pub fn document() -> Value {
    let mut paths: Map<String, Value> = Map::new();
    for route in ROUTES {
        let methods = paths.entry(format!("/api/v1{}", route.path)).or_insert_with(|| json!({}));
        methods[route.method.to_string().to_lowercase()] = operation(route);
    }
    for special in SPECIALS {
        paths.insert(special.path.to_owned(), json!({"get": special_operation(special)}));
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "ax",
            "version": crate::VERSION,
            "description": "Definitions and runs of the ax scheduler. Every node answers every call. The same operations are \
                            served over NATS, see x-ax-subject. Without any token only the node's own machine is served, and \
                            no token is asked for.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": schemas(),
            "securitySchemes": {"token": {
                "type": "http",
                "scheme": "bearer",
                "description": "A token that `ax token create` made. Its role, viewer, operator or admin, has to be at least \
                                the x-ax-role of the operation.",
            }},
        },
    })
}

fn operation(route: &Route) -> Value {
    let mut parameters = Vec::new();
    match route.about {
        Subject::None => {}
        Subject::Task => parameters.push(parameter("path", "id", "The task", &reference("TaskId"))),
        Subject::Run => {
            parameters.push(parameter("path", "id", "The run; dashes may be left out", &json!({"type": "string"})));
        }
    }
    parameters.extend(query(route.operation));
    if matches!(route.operation, Operation::PutTask | Operation::DeleteTask) {
        let text = "The version that is to be changed, bare or as an entity tag, or * for any that exists";
        parameters.push(parameter("header", "If-Match", text, &json!({"type": "string"})));
    }
    let mut told = json!({
        "operationId": operation_id(route),
        "summary": route.summary,
        "tags": [tag(route)],
        "x-ax-role": route.role,
        "x-ax-subject": format!("ax.api.v1.{}", route.subject),
        "parameters": parameters,
        "responses": responses(route),
    });
    if let Some((schema, required)) = body(route) {
        told["requestBody"] = json!({"required": required, "content": {"application/json": {"schema": schema}}});
    }
    told
}

fn special_operation(special: &SpecialRoute) -> Value {
    let text = |kind: &str| json!({"200": {"description": "OK", "content": {kind: {"schema": {"type": "string"}}}}});
    let mut answers = match special.special {
        Special::Events => text("text/event-stream"),
        Special::OpenApi => {
            json!({"200": {"description": "OK", "content": {"application/json": {"schema": {"type": "object"}}}}})
        }
        Special::Healthz | Special::Metrics => text("text/plain"),
        Special::Readyz => json!({"200": answer("OK", &reference("Readiness"))}),
    };
    let name: String = special.path.rsplit('/').next().unwrap_or_default().replace('.', "_");
    let root = if special.path.starts_with("/api/") { "" } else { "root_" };
    let mut told = json!({
        "operationId": format!("{root}{name}"),
        "summary": special.summary,
        "tags": ["node"],
    });
    match special.role {
        Some(role) => {
            told["x-ax-role"] = json!(role);
            let known = ["401", "403", "503"];
            known.iter().for_each(|status| answers[*status] = problem(status));
        }
        None => {
            told["security"] = json!([]);
            if special.special == Special::Readyz {
                answers["503"] = problem("503");
            }
        }
    }
    told["responses"] = answers;
    told
}

/// A name for programs: `task_get`, `apply` …
fn operation_id(route: &Route) -> String {
    route.subject.replace('.', "_")
}

fn tag(route: &Route) -> &'static str {
    match route.operation {
        Operation::Nodes => "node",
        Operation::Preview | Operation::Upcoming | Operation::NextFires => "schedule",
        Operation::TriggerTask
        | Operation::Enqueue
        | Operation::ListRuns
        | Operation::GetRun
        | Operation::CancelRun => "run",
        _ => "task",
    }
}

fn parameter(place: &str, name: &str, description: &str, schema: &Value) -> Value {
    json!({"in": place, "name": name, "description": description, "required": place == "path", "schema": schema})
}

fn query(operation: Operation) -> Vec<Value> {
    let of = |name: &str, description: &str, schema: Value| parameter("query", name, description, &schema);
    let time = |name: &str, description: &str| of(name, description, reference("Timestamp"));
    let number = |name: &str, description: &str, default: u64| {
        of(name, description, json!({"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": default}))
    };
    let flag = |name: &str, description: &str| of(name, description, json!({"type": "boolean", "default": false}));
    let text =
        |name: &str, description: &str, most: u64| of(name, description, json!({"type": "string", "maxLength": most}));
    let group = || of("group", "Of this executor group", reference("Group"));
    let limit = || number("limit", "The most entries", DEFAULT_LIMIT);
    let cursor = || of("cursor", "next_cursor of the page before, as it is", json!({"type": "string"}));
    match operation {
        Operation::ListTasks => vec![
            group(),
            of("status", "Enabled or paused", reference("Status")),
            text("label", "Having this label, name or name=value", 400),
            text("q", "Text in id or name", 200),
            limit(),
            cursor(),
        ],
        Operation::NextFires => vec![number("count", "How many", 10)],
        Operation::Apply => vec![
            flag("dry_run", "Only tell what would be done"),
            flag("strict", "Refuse fields that are left to a default which deserves a decision"),
        ],
        Operation::Upcoming => vec![
            time("from", "From when on; now when left out"),
            time("to", "Until when; 24 hours later when left out"),
            group(),
            limit(),
            number("per_task", "The most instants of one task", 10),
        ],
        Operation::ListRuns => vec![
            of("task_id", "Of this task", reference("TaskId")),
            group(),
            of("state", "In any of these states", json!({"type": "array", "items": reference("RunState")})),
            time("from", "Trigger time from here on"),
            time("to", "Trigger time before this"),
            limit(),
            cursor(),
        ],
        _ => Vec::new(),
    }
}

/// The schema of the body, and whether there has to be one.
fn body(route: &Route) -> Option<(Value, bool)> {
    let required = match route.input {
        Input::Parameters => return None,
        Input::OptionalBody => false,
        Input::Body | Input::Document => true,
    };
    let schema = match route.operation {
        Operation::PutTask => reference("TaskInput"),
        Operation::Apply => reference("Document"),
        Operation::TriggerTask => reference("Trigger"),
        Operation::Enqueue => reference("Enqueue"),
        Operation::Preview => reference("Preview"),
        Operation::CancelRun => json!({
            "type": "object", "additionalProperties": false,
            "properties": {"reason": {"type": "string", "maxLength": 500}}
        }),
        // An object without fields.
        _ => json!({"type": "object", "additionalProperties": false}),
    };
    Some((schema, required))
}

fn responses(route: &Route) -> Value {
    let mut all = Map::new();
    let mut ok = |status: &str, schema: &str| {
        let words = match status {
            "201" => "Created",
            "202" => "Accepted: no leader has done it yet",
            _ => "OK",
        };
        all.insert(status.to_owned(), answer(words, &reference(schema)));
    };
    match route.operation {
        Operation::ListTasks => ok("200", "TaskPage"),
        Operation::GetTask | Operation::PauseTask => ok("200", "TaskView"),
        Operation::PutTask => {
            ok("200", "TaskView");
            ok("201", "TaskView");
        }
        Operation::ResumeTask => ok("200", "Resumed"),
        Operation::TriggerTask => {
            ok("200", "Requested");
            ok("201", "Requested");
        }
        Operation::NextFires | Operation::Preview => ok("200", "Fires"),
        Operation::Apply => ok("200", "ApplyReport"),
        Operation::Upcoming => ok("200", "Upcoming"),
        Operation::Enqueue => ok("201", "Enqueued"),
        Operation::ListRuns => ok("200", "RunPage"),
        Operation::GetRun => ok("200", "RunDetail"),
        Operation::CancelRun => {
            ok("200", "RunDetail");
            ok("202", "RunDetail");
        }
        Operation::Nodes => ok("200", "Nodes"),
        Operation::DeleteTask => {
            all.insert("204".to_owned(), json!({"description": "Deleted"}));
        }
        Operation::BackfillTask => {}
    }
    let tagged = matches!(route.operation, Operation::GetTask | Operation::PutTask | Operation::PauseTask);
    for answer in all.values_mut().filter(|_| tagged) {
        answer["headers"] = json!({"ETag": {"description": "The version", "schema": {"type": "string"}}});
    }
    let mut refusals = vec!["400", "401", "403", "422", "503"];
    if route.about != Subject::None {
        refusals.push("404");
    }
    if route.method == Method::Put || route.method == Method::Delete {
        refusals.push("409");
    }
    if matches!(route.operation, Operation::TriggerTask | Operation::Enqueue) {
        refusals.push("409");
    }
    if route.input != Input::Parameters {
        refusals.push("413");
    }
    refusals.into_iter().for_each(|status| drop(all.insert(status.to_owned(), problem(status))));
    Value::Object(all)
}

fn answer(description: &str, schema: &Value) -> Value {
    json!({"description": description, "content": {"application/json": {"schema": schema}}})
}

fn problem(status: &str) -> Value {
    let description = match status {
        "400" => "Malformed: not JSON, or not UTF-8",
        "401" => "No token, or one that does not count",
        "403" => "A role that may not, or a page of another origin",
        "404" => "There is none of that id",
        "409" => "Contradicts the present state",
        "413" => "Too large",
        "422" => "Broken rules, each named",
        _ => "The database or NATS is away; nothing was done",
    };
    let mut told = json!({
        "description": description,
        "content": {"application/problem+json": {"schema": reference("Problem")}},
    });
    match status {
        "401" => told["headers"] = json!({"WWW-Authenticate": {"schema": {"type": "string"}}}),
        "503" => told["headers"] = json!({"Retry-After": {"description": "Seconds", "schema": {"type": "integer"}}}),
        _ => {}
    }
    told
}

fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

fn schemas() -> Value {
    let mut found: Vec<(String, RefOr<Schema>)> = Vec::new();
    macro_rules! with {
        ($($name:ty)*) => {$(
            found.push((<$name>::name().into_owned(), <$name>::schema()));
            <$name>::schemas(&mut found);
        )*};
    }
    with! {
        TaskPage TaskView RunPage RunDetail Resumed Requested Enqueued Fires Upcoming ApplyReport Nodes Readiness
        Problem FieldError Trigger Enqueue Preview TaskDefinition Status RunState TaskId Group Timestamp
    }
    let mut all = Map::new();
    for (name, schema) in found {
        all.insert(name, serde_json::to_value(schema).unwrap_or_default());
    }
    let stretch = all["Stretch"].clone();
    for schema in all.values_mut() {
        unfold(schema, &stretch);
    }
    let input = input_of(&all);
    all.insert("TaskInput".to_owned(), input);
    all.insert(
        "Document".to_owned(),
        json!({
            "description": "One task, an array of tasks, or {\"tasks\": […]}.",
            "oneOf": [
                reference("TaskInput"),
                {"type": "array", "items": reference("TaskInput")},
                {"type": "object", "required": ["tasks"], "additionalProperties": false,
                 "properties": {"tasks": {"type": "array", "items": reference("TaskInput")}}},
            ],
        }),
    );
    for name in ["Trigger", "Enqueue", "EnqueueRun", "Preview"] {
        all[name]["additionalProperties"] = false.into();
    }
    all.into_iter().collect::<std::collections::BTreeMap<_, _>>().into_iter().collect()
}

/// Puts the fields of a stretch, all or none of which are there, in the place of "a stretch or null", which is what is
/// derived of a flattened one and what no object is that has other fields.
fn unfold(schema: &mut Value, stretch: &Value) {
    let folded = json!({"type": "null"});
    for part in schema.get_mut("allOf").and_then(Value::as_array_mut).into_iter().flatten() {
        if part["oneOf"].as_array().is_some_and(|choice| choice.contains(&folded)) {
            *part = json!({
                "type": "object",
                "description": part["oneOf"][0]["description"],
                "properties": stretch["properties"],
            });
        }
    }
}

/// A definition as it is written: what the canonical form has in full may be left out.
fn input_of(all: &Map<String, Value>) -> Value {
    let loose = |name: &str, required: Value| {
        let mut schema = all[name].clone();
        schema["required"] = required;
        schema["additionalProperties"] = false.into();
        schema
    };
    let mut input = loose("TaskDefinition", json!(["executor_group"]));
    input["description"] =
        "A task as it is written. A field that is left out, or null, has its default. `task_id` is required \
                            where the address does not name it."
            .into();
    let backoff = loose("RetryBackoff", json!([]));
    input["properties"]["retry_backoff"] = backoff;
    input["properties"]["status"] = json!({"description": "Defaults to enabled.", "enum": ["enabled", "paused", 1, 0]});
    input
}
