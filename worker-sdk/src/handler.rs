//! Handlers without their types.

use std::future::Future;
use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::{RawValue, to_raw_value};

use crate::context::{Attempt, read_payload};
use crate::{Context, Failure};

/// From the payload's text to the result's.
pub(crate) type Run =
    Arc<dyn Fn(Arc<Attempt>, Box<RawValue>) -> BoxFuture<'static, Result<Box<RawValue>, Failure>> + Send + Sync>;

/// Forgets the types of a handler and binds its state. Parsing and writing happen in the handler's own task, so that a
/// large payload holds up nobody else.
pub(crate) fn erase<S, T, F, R, O>(handler: F, state: Arc<S>) -> Run
where
    S: Send + Sync + 'static,
    T: DeserializeOwned + Send + 'static,
    F: Fn(T, Context<S>) -> R + Send + Sync + 'static,
    R: Future<Output = Result<O, Failure>> + Send + 'static,
    O: Serialize,
{
    let handler = Arc::new(handler);
    Arc::new(move |attempt, payload| {
        let (handler, state) = (handler.clone(), state.clone());
        async move {
            // Inside the future: a handler that panics before its first await fails an attempt like any other.
            let job: T = read_payload(&payload)?;
            drop(payload);
            let output = handler(job, Context::new(attempt, state)).await?;
            to_raw_value(&output).map_err(|error| Failure::give_up(format!("the result is not JSON: {error}")))
        }
        .boxed()
    })
}
