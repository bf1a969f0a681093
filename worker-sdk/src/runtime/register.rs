//! Definitions from code: applied at start, as a whole, by whichever node of ax answers.

use std::sync::Arc;
use std::time::Duration;

use async_nats::Request;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::Shared;
use crate::WorkerError;

/// How long an apply may take before it is asked for again.
const APPLIED_WITHIN: Duration = Duration::from_secs(10);
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(1);
const TRY_AGAIN_AT_MOST: Duration = Duration::from_secs(15);

/// Why definitions are not applied.
enum Refusal {
    /// They are wrong: asking again cannot help.
    ForGood(WorkerError),
    /// Nobody answers, or not now.
    Later(String),
}

/// Applies `tasks` until they are taken or refused for good, or until `done`.
pub(super) async fn register(
    shared: Arc<Shared>,
    tasks: Vec<Value>,
    done: CancellationToken,
) -> Result<(), WorkerError> {
    let document = json!({ "tasks": tasks }).to_string();
    let mut wait = TRY_AGAIN_AFTER;
    loop {
        let Some(applied) = done.run_until_cancelled(apply(&shared, &document)).await else { return Ok(()) };
        match applied {
            Ok(report) => {
                for warning in report["warnings"].as_array().into_iter().flatten() {
                    tracing::warn!(%warning, "a definition was taken with a warning");
                }
                tracing::info!(
                    created = %report["created"], updated = %report["updated"], unchanged = %report["unchanged"],
                    "definitions applied"
                );
                return Ok(());
            }
            Err(Refusal::ForGood(error)) => return Err(error),
            Err(Refusal::Later(why)) => {
                tracing::warn!(why, "the definitions are not applied yet; trying again");
                if done.run_until_cancelled(tokio::time::sleep(wait)).await.is_none() {
                    return Ok(());
                }
                wait = (wait * 2).min(TRY_AGAIN_AT_MOST);
            }
        }
    }
}

async fn apply(shared: &Shared, document: &str) -> Result<Value, Refusal> {
    let subject = format!("{}.api.v1.apply", shared.prefix.as_str());
    let request = Request::new().payload(document.to_owned().into()).timeout(Some(APPLIED_WITHIN));
    let answer = shared.client.send_request(subject, request).await.map_err(|e| Refusal::Later(e.to_string()))?;
    let header = |name: &str| answer.headers.as_ref()?.get(name).map(|value| value.as_str().to_owned());
    let body: Value = serde_json::from_slice(&answer.payload).unwrap_or_default();
    let Some(code) = header("Nats-Service-Error-Code") else {
        return match body["created"].is_array() {
            true => Ok(body),
            false => Err(Refusal::Later("the answer is not a report of an apply".into())),
        };
    };
    let said = header("Nats-Service-Error").unwrap_or_default();
    match code.parse::<u16>() {
        // Others change definitions at the same moment, or nobody can write at present.
        Ok(409 | 429 | 500..) | Err(_) => Err(Refusal::Later(format!("{code} {said}"))),
        Ok(_) => {
            let problem = body["error"].clone();
            Err(Refusal::ForGood(WorkerError::Refused { said, problem }))
        }
    }
}
