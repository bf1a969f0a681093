//! Pages for people: plain HTML made on the server, no script, everything escaped.
//!
//! They read through the same service as the API and never count a table. Where tokens are needed, a person signs in
//! with one: a cookie holds it that no script can read and that no other site's page makes the browser send.

mod pages;
mod sign_in;

use ax_shared::{RunId, TaskId, Timestamp};
use axum::Router;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};

use self::pages::{HomePage, ProblemPage, RunPage, TaskPage};
pub(crate) use self::sign_in::{SIGN_IN, SIGN_OUT, ask_to_sign_in};
use crate::api::ApiError;
use crate::api::fields::Fields;
use crate::api::http::{Door, Params, guard};
use crate::api::service::{ListRuns, ListTasks, Service};

/// The pages' routes.
pub(crate) fn routes() -> Router<Door> {
    Router::new()
        .route("/", get(home))
        .route("/tasks/{id}", get(task))
        .route("/runs/{id}", get(run))
        .route(SIGN_IN, get(sign_in::form).post(sign_in::sign_in))
        .route(SIGN_OUT, post(sign_in::sign_out))
}

/// What every page shows.
struct Frame {
    node: String,
    now: Timestamp,
    /// Whether a person has signed in, who may sign out.
    signed_in: bool,
}

impl Frame {
    fn of(service: &Service, headers: &HeaderMap) -> Self {
        let signed_in = guard::cookie(headers).is_some();
        Self { node: service.node_id().to_owned(), now: service.now(), signed_in }
    }
}

async fn home(
    State(door): State<Door>,
    headers: HeaderMap,
    params: Result<Params, crate::api::http::HttpError>,
) -> Response {
    let service = &door.service;
    let frame = Frame::of(service, &headers);
    let page = async {
        let Params(fields) = params.map_err(|refused| refused.0)?;
        let tasks = service.list_tasks(ListTasks::read(fields)?).await?;
        let runs = service.list_runs(ListRuns::newest(frame.now.plus_millis(10_000), 50)).await?;
        Ok(HomePage::of(&frame, tasks, &runs))
    };
    respond(&frame, page.await)
}

async fn task(
    State(door): State<Door>,
    headers: HeaderMap,
    id: Result<Path<String>, axum::extract::rejection::PathRejection>,
) -> Response {
    let service = &door.service;
    let frame = Frame::of(service, &headers);
    let page = async {
        let id = id.ok().and_then(|Path(id)| TaskId::new(&id).ok());
        let id = id.ok_or_else(|| ApiError::NotFound("this is not the id of a task".to_owned()))?;
        let view = service.task(&id).await?;
        let count = Fields::of_query(vec![("count".to_owned(), "5".to_owned())]);
        let fires = service.next(&id, count).await?;
        let runs = service.list_runs(ListRuns::of_task(id, 50)).await?;
        Ok(TaskPage::of(&frame, &view, &fires, &runs))
    };
    respond(&frame, page.await)
}

async fn run(
    State(door): State<Door>,
    headers: HeaderMap,
    id: Result<Path<String>, axum::extract::rejection::PathRejection>,
) -> Response {
    let service = &door.service;
    let frame = Frame::of(service, &headers);
    let page = async {
        let id = id.ok().and_then(|Path(id)| id.parse::<RunId>().ok());
        let id = id.ok_or_else(|| ApiError::NotFound("this is not the id of a run".to_owned()))?;
        Ok(RunPage::of(&frame, &service.run(id).await?))
    };
    respond(&frame, page.await)
}

fn respond<P: askama::Template>(frame: &Frame, page: Result<P, ApiError>) -> Response {
    let (status, html) = match page {
        Ok(page) => (StatusCode::OK, page.render()),
        Err(error) => {
            error.log();
            let status = StatusCode::from_u16(error.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            (status, askama::Template::render(&ProblemPage::of(frame, &error.problem())))
        }
    };
    page_of(status, html)
}

/// A page with the headers that every page has.
fn page_of(status: StatusCode, html: askama::Result<String>) -> Response {
    let mut response = match html {
        Ok(html) => (status, Html(html)).into_response(),
        Err(error) => {
            tracing::error!(%error, "a page could not be rendered");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    };
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_SECURITY_POLICY,
        HeaderValue::from_static(
            "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'self'; frame-ancestors 'none'",
        ),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}
