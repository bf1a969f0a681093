//! The OpenAPI document says what the program does: `docs/openapi.json` is it, and real answers are as it says.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context as _, Result};
use ax_scheduler::api::openapi;
use ax_scheduler::api::operation::{Input, ROUTES, Route, SPECIALS, Subject};
use ax_scheduler::core::run::{Attempt, AttemptOutcome, RunState};
use ax_scheduler::ports::{Batch, Store as _};
use ax_shared::{RunId, Timestamp};
use reqwest::Method;
use serde_json::{Value, json};

use crate::world::{Answer, NOW, World, task};

/// `AX_WRITE_OPENAPI=1 cargo test -p ax-scheduler --test api openapi` writes the file anew.
#[test]
fn the_file_is_what_the_program_says() -> Result<()> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/openapi.json");
    if std::env::var_os("AX_WRITE_OPENAPI").is_some() {
        std::fs::write(&file, openapi::TEXT.as_str())?;
    }
    let written = std::fs::read_to_string(&file).context("docs/openapi.json")?;
    assert!(
        written == *openapi::TEXT,
        "docs/openapi.json is old: AX_WRITE_OPENAPI=1 cargo test -p ax-scheduler --test api openapi"
    );
    let document: Value = serde_json::from_str(&written)?;
    assert_eq!(document["openapi"], "3.1.0");
    let mut names = BTreeSet::new();
    for operation in document["paths"]
        .as_object()
        .context("no paths")?
        .values()
        .flat_map(|path| path.as_object())
        .flat_map(|o| o.values())
    {
        let name = operation["operationId"].as_str().context("no operationId")?;
        assert!(names.insert(name.to_owned()), "{name} twice");
        assert!(
            operation["summary"].is_string() && operation["responses"].as_object().is_some_and(|r| !r.is_empty()),
            "{name}"
        );
    }
    // Every reference leads somewhere.
    for (_, end) in written.match_indices("\"#/").map(|(at, _)| (at, written[at + 2..].split('"').next().unwrap())) {
        assert!(document.pointer(end).is_some(), "{end} leads nowhere");
    }
    Ok(())
}

/// What a value has that its schema does not allow, lacks, or does not know.
fn differences(root: &Value, schema: &Value, value: &Value, at: &str) -> Vec<String> {
    let mut found = Vec::new();
    if let Value::Object(object) = value
        && let Some(known) = known_fields(root, schema)
    {
        let unknown = object.keys().filter(|field| !known.contains(*field));
        found.extend(unknown.map(|field| format!("{at}.{field} is not in the document")));
    }
    found.extend(broken(root, schema, value, at));
    found
}

fn resolved<'a>(root: &'a Value, schema: &'a Value) -> &'a Value {
    match schema["$ref"].as_str() {
        Some(place) => root.pointer(place.trim_start_matches('#')).expect("a reference leads somewhere"),
        None => schema,
    }
}

/// Every field that a schema names; none when any is allowed.
fn known_fields(root: &Value, schema: &Value) -> Option<BTreeSet<String>> {
    let schema = resolved(root, schema);
    let mut known = BTreeSet::new();
    let mut closed = false;
    for branch in ["allOf", "oneOf", "anyOf"].iter().filter_map(|word| schema[*word].as_array()).flatten() {
        if branch["type"] != "null" {
            known.extend(known_fields(root, branch)?);
            closed = true;
        }
    }
    if let Some(properties) = schema["properties"].as_object() {
        known.extend(properties.keys().cloned());
        closed = true;
    }
    if schema["additionalProperties"].is_object() { None } else { closed.then_some(known) }
}

fn broken(root: &Value, schema: &Value, value: &Value, at: &str) -> Vec<String> {
    let schema = resolved(root, schema);
    let mut found = Vec::new();
    let shown = || value.to_string().chars().take(80).collect::<String>();
    for branch in schema["allOf"].as_array().into_iter().flatten() {
        found.extend(broken(root, branch, value, at));
    }
    for word in ["oneOf", "anyOf"] {
        if let Some(branches) = schema[word].as_array()
            && !branches.iter().any(|branch| broken(root, branch, value, at).is_empty())
        {
            found.push(format!("{at} is none of {word}: {}", shown()));
        }
    }
    let types: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one],
        Value::Array(some) => some.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let is = |kind: &str| match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("a type {other}"),
    };
    if !types.is_empty() && !types.iter().any(|kind| is(kind)) {
        found.push(format!("{at} is not {types:?}: {}", shown()));
    }
    if let Some(words) = schema["enum"].as_array()
        && !words.contains(value)
    {
        found.push(format!("{at} is none of {words:?}: {}", shown()));
    }
    if schema["format"] == "date-time"
        && let Some(text) = value.as_str()
        && text.parse::<Timestamp>().is_err()
    {
        found.push(format!("{at} is no instant: {text}"));
    }
    if let Some(number) = value.as_f64() {
        let beyond = schema["minimum"].as_f64().is_some_and(|least| number < least)
            || schema["maximum"].as_f64().is_some_and(|most| number > most);
        found.extend(beyond.then(|| format!("{at} is beyond its range: {number}")));
    }
    if let Value::Object(object) = value {
        for field in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            found.extend((!object.contains_key(field)).then(|| format!("{at} lacks {field}")));
        }
        for (field, schema) in schema["properties"].as_object().into_iter().flatten() {
            if let Some(value) = object.get(field) {
                found.extend(differences(root, schema, value, &format!("{at}.{field}")));
            }
        }
    }
    for (i, item) in value.as_array().into_iter().flatten().enumerate() {
        if schema["items"].is_object() {
            found.extend(differences(root, &schema["items"], item, &format!("{at}[{i}]")));
        }
    }
    found
}

/// Checks an answer against what the document says of its operation.
#[track_caller]
fn check(document: &Value, route: &Route, answer: &Answer) {
    let told = &document["paths"][format!("/api/v1{}", route.path)][route.method.to_string().to_lowercase()];
    assert!(told.is_object(), "{} {} is not in the document", route.method, route.path);
    let response = &told["responses"][answer.status.as_str()];
    assert!(response.is_object(), "{} {}: {} is not in the document", route.method, route.path, answer.status);
    let kind = answer.header(reqwest::header::CONTENT_TYPE);
    match response["content"].as_object() {
        None => assert_eq!(answer.body, Value::Null),
        Some(content) => {
            let schema =
                &content.get(kind).unwrap_or_else(|| panic!("{kind} is not in the document: {content:?}"))["schema"];
            let found = differences(document, schema, &answer.body, "");
            assert!(found.is_empty(), "{} {}: {found:#?}\n{}", route.method, route.path, answer.body);
        }
    }
}

/// A world in which every kind of answer has something to tell.
async fn furnished() -> Result<(World, String)> {
    let world = World::start().await?;
    let full = json!({"description": "d", "cron_expr": "0 2 * * *", "timezone": "Asia/Shanghai", "labels": {"team": "x"},
        "source": "s", "payload": {"a": [1]}, "weight": 2.5, "status": "paused"});
    world
        .post("/apply", json!([task("a", full), task("b", json!({})), task("c", json!({"delay_seconds": 5}))]))
        .await?
        .is(200);
    world.clock.advance(3 * 24 * 3_600_000);
    world.call(Method::POST, "/tasks/a/resume", None).await?.is(200);
    let run_id = world.post("/tasks/b/trigger", json!({"reason": "r", "payload": {"x": 1}})).await?.is(201)["run_id"]
        .as_str()
        .context("no run_id")?
        .to_owned();
    let id: RunId = run_id.parse()?;
    let (mut run, _) = world.store.run(id).await?.context("no run")?;
    let later = NOW.plus_millis(3 * 24 * 3_600_000);
    run.adopted = true;
    run.state = RunState::Failed;
    (run.attempt, run.lateness_ms, run.worker_id) = (2, Some(-1), Some("w".into()));
    (run.published_at, run.started_at, run.finished_at) = (Some(later), Some(later), Some(later));
    run.result = Some(json!({"rows": 7}));
    let attempt = |n, outcome| Attempt {
        run_id: id,
        attempt: n,
        outcome: Some(outcome),
        worker_id: Some("w".into()),
        started_at: Some(later),
        finished_at: Some(later),
        error: Some("e".into()),
    };
    let attempts = vec![attempt(1, AttemptOutcome::TimedOut), attempt(2, AttemptOutcome::Failed)];
    let epoch = world.store.shard().await?.epoch;
    world.store.commit(epoch, &Batch { runs: vec![run], attempts, ..Batch::default() }).await?;
    Ok((world, run_id))
}

#[tokio::test]
async fn real_answers_are_as_the_document_says() -> Result<()> {
    let (world, run_id) = furnished().await?;
    let (status, served) = world.page("/openapi.json").await?;
    assert!(status == 200 && served == *openapi::TEXT);
    let document = world.get("/openapi.json").await?.is(200);
    for route in ROUTES {
        let id = if route.about == Subject::Run { run_id.as_str() } else { "a" };
        let path = route.path.replace("{id}", id);
        let method = Method::from_bytes(route.method.to_string().as_bytes())?;
        let bodies = match route.subject {
            "task.put" => vec![task("a", json!({"priority": 7})), task("a", json!({"priority": 0}))],
            "task.trigger" => vec![json!({}), json!({"idempotency_key": "k"}), json!({"idempotency_key": "k"})],
            "apply" => {
                vec![json!({"tasks": [task("n", json!({})), {"task_id": "m", "executor_group": "g"}]}), json!(1)]
            }
            "preview" => {
                vec![json!({"cron_expr": "@daily", "after": "2026-01-01T00:00:00Z"}), json!({"cron_expr": "x"})]
            }
            "enqueue" => vec![json!({"runs": [{"task_id": "b"}]}), json!({"runs": [{"task_id": "none"}]})],
            _ => vec![Value::Null],
        };
        let mut seen = BTreeSet::new();
        for body in bodies {
            let body = (!body.is_null()).then_some(body);
            let answer = world.call(method.clone(), &path, body).await?;
            seen.insert(answer.status.as_u16());
            check(&document, route, &answer);
        }
        // Deleting comes before others that need the task.
        if route.subject == "task.delete" {
            world.put("a", task("a", json!({"cron_expr": "EVERY 1h"}))).await?.is(201);
        }
        let done = seen.iter().any(|status| *status < 300);
        assert_eq!(done, route.subject != "task.backfill", "{}: {seen:?}", route.subject);
        if route.about != Subject::None {
            let absent = if route.about == Subject::Run { "01a0c450-6c00-87fd-80a1-7d7022967b9c" } else { "none" };
            let body = (route.input == Input::Body).then(|| json!({}));
            check(&document, route, &world.call(method.clone(), &route.path.replace("{id}", absent), body).await?);
        }
        check(&document, route, &world.call(method.clone(), &format!("{path}?zzz=1"), Some(json!({}))).await?);
    }
    let (_, ready) = world.page("/readyz").await?;
    let schema = json!({"$ref": "#/components/schemas/Readiness"});
    assert_eq!(differences(&document, &schema, &serde_json::from_str(&ready)?, ""), [""; 0]);
    Ok(())
}

#[tokio::test]
async fn every_route_is_in_the_document_and_nothing_else() -> Result<()> {
    let (world, run_id) = furnished().await?;
    let document = openapi::document();
    let paths = document["paths"].as_object().context("no paths")?;
    let tabled: BTreeSet<String> = ROUTES
        .iter()
        .map(|route| format!("/api/v1{}", route.path))
        .chain(SPECIALS.iter().map(|special| special.path.to_owned()))
        .collect();
    assert_eq!(paths.keys().cloned().collect::<BTreeSet<_>>(), tabled);
    let client = reqwest::Client::builder().no_proxy().build()?;
    for (path, methods) in paths {
        let real = path.replace("{id}", if path.contains("/runs/") { &run_id } else { "a" });
        for method in ["GET", "PUT", "POST", "DELETE", "PATCH"] {
            let url = format!("http://{}{real}", world.addr);
            let status = client.request(Method::from_bytes(method.as_bytes())?, url).send().await?.status();
            let told = methods.get(method.to_lowercase());
            assert_eq!(told.is_none(), status == 405, "{method} {path} answers {status}");
            if let Some(told) = told {
                assert_ne!(status, 404, "{method} {path}");
                assert_eq!(told["x-ax-role"].is_null(), told["security"] == json!([]), "{method} {path}");
                if real.ends_with("/tasks/a") && method == "DELETE" {
                    world.put("a", task("a", json!({}))).await?.is(201);
                }
            }
        }
    }
    Ok(())
}

/// Which parameters and fields there are, the program tells with every one that it does not know.
#[tokio::test]
async fn what_is_read_is_what_is_documented() -> Result<()> {
    let (world, run_id) = furnished().await?;
    let document = openapi::document();
    let told = |answer: Answer| -> BTreeSet<String> {
        let errors = answer.body["errors"].as_array().cloned().unwrap_or_default();
        let message = errors.iter().find(|e| e["rule"] == "unknown_field").map(|e| e["message"].to_string());
        let known = message.as_deref().and_then(|m| m.split("known here: ").nth(1)).expect("the known ones are told");
        let known = known.trim_matches('"').split(", ").map(ToOwned::to_owned);
        // In the contract, and not supported by this version.
        known.filter(|field| !["none", "trigger_time", "force", "prune"].contains(&field.as_str())).collect()
    };
    for route in ROUTES.iter().filter(|route| route.subject != "task.backfill") {
        let path = route.path.replace("{id}", if route.about == Subject::Run { &run_id } else { "a" });
        let method = Method::from_bytes(route.method.to_string().as_bytes())?;
        let operation = &document["paths"][format!("/api/v1{}", route.path)][method.as_str().to_lowercase()];
        let body = (route.input != Input::Parameters).then(|| json!({}));
        let answer = world.call(method.clone(), &format!("{path}?zzz=1"), body).await?.refused(422);
        let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
        let queried = parameters.iter().filter(|p| p["in"] == "query").filter_map(|p| p["name"].as_str());
        assert_eq!(told(answer), queried.map(ToOwned::to_owned).collect(), "parameters of {path}");

        let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
        if schema.is_null() || ["task.put", "apply"].contains(&route.subject) {
            continue;
        }
        let answer = world.call(method, &path, Some(json!({"zzz": 1}))).await?.refused(422);
        assert_eq!(told(answer), known_fields(&document, schema).unwrap_or_default(), "body of {path}");
    }
    // A definition tells no list; each documented field with its default is taken, and each default is as documented.
    let canonical = world.put("z", task("z", json!({}))).await?.is(201);
    let input = resolved(&document, &document["components"]["schemas"]["TaskInput"]).clone();
    for field in input["properties"].as_object().context("no properties")?.keys() {
        let value = canonical.get(field).cloned().unwrap_or(Value::Null);
        world.put("z", task("z", json!({field: value}))).await?.is(200);
    }
    Ok(())
}
