//! The routes under `/api/v1`.

use std::convert::Infallible;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures::{Stream, StreamExt};

use super::Door;
use super::problem::HttpError;
use super::request::{Actor, Body, IfMatch, Params, RequiredBody, RunPath, TaskPath};
use crate::api::ApiError;
use crate::api::fields::Fields;
use crate::api::service::{ApplyOptions, ListRuns, ListTasks, PreviewRequest, UpcomingRequest};
use crate::api::view::{
    ApplyReport, Enqueued, Fires, Nodes, Requested, Resumed, RunDetail, RunPage, TaskPage, TaskView, Upcoming,
};

type Answer<T> = Result<T, HttpError>;

pub(super) fn routes() -> Router<Door> {
    Router::new()
        .route("/tasks", get(list_tasks))
        .route("/tasks/{id}", get(get_task).put(put_task).delete(delete_task))
        .route("/tasks/{id}/pause", post(pause_task))
        .route("/tasks/{id}/resume", post(resume_task))
        .route("/tasks/{id}/trigger", post(trigger))
        .route("/tasks/{id}/next", get(next))
        .route("/tasks/{id}/backfill", post(backfill))
        .route("/apply", post(apply))
        .route("/preview", post(preview))
        .route("/upcoming", get(upcoming))
        .route("/enqueue", post(enqueue))
        .route("/runs", get(list_runs))
        .route("/runs/{id}", get(get_run))
        .route("/nodes", get(nodes))
        .route("/events", get(events))
}

/// The version of a task as an entity tag, which `If-Match` takes.
fn with_etag(status: StatusCode, task: TaskView) -> Response {
    let etag = HeaderValue::from_str(&format!("\"{}\"", task.version)).ok();
    let mut response = (status, Json(task)).into_response();
    if let Some(etag) = etag {
        response.headers_mut().insert(header::ETAG, etag);
    }
    response
}

async fn list_tasks(State(door): State<Door>, Params(fields): Params) -> Answer<Json<TaskPage>> {
    Ok(Json(door.service.list_tasks(ListTasks::read(fields)?).await?))
}

async fn get_task(State(door): State<Door>, TaskPath(id): TaskPath, Params(fields): Params) -> Answer<Response> {
    fields.finish()?;
    Ok(with_etag(StatusCode::OK, door.service.task(&id).await?))
}

async fn put_task(
    State(door): State<Door>,
    TaskPath(id): TaskPath,
    Actor(caller): Actor,
    IfMatch(expected): IfMatch,
    Params(fields): Params,
    RequiredBody(body): RequiredBody,
) -> Answer<Response> {
    fields.finish()?;
    let report = door.service.put_task(&caller, &id, body, expected).await?;
    Ok(with_etag(if report.created { StatusCode::CREATED } else { StatusCode::OK }, report.task))
}

async fn delete_task(
    State(door): State<Door>,
    TaskPath(id): TaskPath,
    Actor(caller): Actor,
    IfMatch(expected): IfMatch,
    Params(fields): Params,
) -> Answer<StatusCode> {
    fields.finish()?;
    door.service.delete_task(&caller, &id, expected).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn pause_task(
    State(door): State<Door>,
    TaskPath(id): TaskPath,
    Actor(caller): Actor,
    Params(fields): Params,
    Body(body): Body,
) -> Answer<Response> {
    fields.finish()?;
    no_fields(body)?;
    Ok(with_etag(StatusCode::OK, door.service.pause_task(&caller, &id).await?))
}

async fn resume_task(
    State(door): State<Door>,
    TaskPath(id): TaskPath,
    Actor(caller): Actor,
    Params(fields): Params,
    Body(body): Body,
) -> Answer<Json<Resumed>> {
    fields.finish()?;
    no_fields(body)?;
    Ok(Json(door.service.resume_task(&caller, &id).await?))
}

fn no_fields(body: serde_json::Value) -> Result<(), ApiError> {
    Fields::of_body(body, "").map_err(|e| ApiError::of_fields(vec![e]))?.finish()
}

async fn trigger(
    State(door): State<Door>,
    TaskPath(id): TaskPath,
    Actor(caller): Actor,
    Params(fields): Params,
    Body(body): Body,
) -> Answer<(StatusCode, Json<Requested>)> {
    fields.finish()?;
    let requested = door.service.trigger(&caller, &id, body).await?;
    Ok((if requested.created { StatusCode::CREATED } else { StatusCode::OK }, Json(requested)))
}

async fn backfill(TaskPath(_): TaskPath) -> HttpError {
    HttpError(ApiError::field("", "not_supported", "backfill is not supported by this version of ax"))
}

async fn next(State(door): State<Door>, TaskPath(id): TaskPath, Params(fields): Params) -> Answer<Json<Fires>> {
    Ok(Json(door.service.next(&id, fields).await?))
}

async fn apply(
    State(door): State<Door>,
    Actor(caller): Actor,
    Params(fields): Params,
    RequiredBody(document): RequiredBody,
) -> Answer<Json<ApplyReport>> {
    let options = ApplyOptions::read(fields)?;
    Ok(Json(door.service.apply(&caller, &document, options).await?))
}

async fn preview(
    State(door): State<Door>,
    Params(fields): Params,
    RequiredBody(body): RequiredBody,
) -> Answer<Json<Fires>> {
    fields.finish()?;
    let fields = Fields::of_body(body, "").map_err(|e| ApiError::of_fields(vec![e]))?;
    Ok(Json(door.service.preview(&PreviewRequest::read(fields)?)))
}

async fn upcoming(State(door): State<Door>, Params(fields): Params) -> Answer<Json<Upcoming>> {
    Ok(Json(door.service.upcoming(UpcomingRequest::read(fields)?).await?))
}

async fn enqueue(
    State(door): State<Door>,
    Params(fields): Params,
    RequiredBody(body): RequiredBody,
) -> Answer<(StatusCode, Json<Enqueued>)> {
    fields.finish()?;
    Ok((StatusCode::CREATED, Json(door.service.enqueue(body).await?)))
}

async fn list_runs(State(door): State<Door>, Params(fields): Params) -> Answer<Json<RunPage>> {
    Ok(Json(door.service.list_runs(ListRuns::read(fields)?).await?))
}

async fn get_run(State(door): State<Door>, RunPath(id): RunPath, Params(fields): Params) -> Answer<Json<RunDetail>> {
    fields.finish()?;
    Ok(Json(door.service.run(id).await?))
}

async fn nodes(State(door): State<Door>, Params(fields): Params) -> Answer<Json<Nodes>> {
    fields.finish()?;
    Ok(Json(door.service.nodes().await?))
}

/// State changes of runs as server-sent events: event = the state, data = the notice. Ends with the connection to NATS
/// or with the node; a browser connects again by itself.
async fn events(
    State(door): State<Door>,
    Params(fields): Params,
) -> Answer<Sse<impl Stream<Item = Result<Event, Infallible>>>> {
    fields.finish()?;
    let notices = door.service.notices().await?;
    let events = notices
        .take_until(door.shutdown.cancelled_owned())
        .map(|(state, body)| Ok(Event::default().event(state).data(String::from_utf8_lossy(&body))));
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(Duration::from_secs(15))))
}
