//! A message as a request: what HTTP has in the address and the query string is in the body.

use async_nats::{HeaderMap, Message};
use ax_shared::FieldError;
use ax_shared::subjects::header;
use serde_json::{Map, Value};

use crate::api::ApiError;
use crate::api::fields::Fields;
use crate::api::operation::{Input, Request, Route, read_if_match, read_json};
use crate::api::service::{Caller, Expected, Role};

/// The longest name that a caller can give itself, in characters.
const MAX_ACTOR: usize = 64;

/// Reads a message.
///
/// # Errors
/// Its body is not what the operation reads.
pub(super) fn read(route: &Route, message: &Message) -> Result<Request, ApiError> {
    let optional = matches!(route.input, Input::Parameters | Input::OptionalBody);
    let mut body = read_json(&message.payload, optional)?;
    let id = match route.about.field() {
        Some(field) => Some(take_id(&mut body, field)?),
        None => None,
    };
    let (params, body) = match route.input {
        Input::Parameters => (body, Value::Null),
        Input::OptionalBody | Input::Body => (Value::Null, body),
        Input::Document => opened(body),
    };
    let params = Fields::of_body(params, "").map_err(|e| ApiError::of_fields(vec![e]))?;
    let expected = match header_of(message.headers.as_ref(), "If-Match") {
        Some(text) => read_if_match(text)?,
        None => Expected::Any,
    };
    Ok(Request { id, params, body, expected })
}

/// Takes the id out of a body that has to be an object.
fn take_id(body: &mut Value, field: &str) -> Result<String, ApiError> {
    if body.is_null() {
        *body = Value::Object(Map::new());
    }
    let Value::Object(object) = body else {
        return Err(ApiError::of_fields(vec![FieldError::new("", "type", "must be a JSON object")]));
    };
    match object.remove(field) {
        Some(Value::String(id)) => Ok(id),
        None | Some(Value::Null) => Err(ApiError::field(field, "required", "is required")),
        Some(_) => Err(ApiError::field(field, "type", "must be a string")),
    }
}

/// Parameters and document: `{"document": …, "dry_run": …}`, or the document alone. A task has no field `document`.
fn opened(mut body: Value) -> (Value, Value) {
    let document = body.as_object_mut().and_then(|object| object.remove("document"));
    match document {
        Some(document) => (body, document),
        None => (Value::Null, body),
    }
}

/// Who asks, as far as is known: NATS does not tell, so it is what the sender says of itself. What it may do is a matter
/// of its permissions on subjects.
pub(super) fn caller(message: &Message) -> Caller {
    let named = header_of(message.headers.as_ref(), header::ACTOR)
        .map(|name| name.chars().filter(|c| !c.is_control()).take(MAX_ACTOR).collect::<String>())
        .filter(|name| !name.is_empty());
    let actor = named.map_or_else(|| "nats".to_owned(), |name| format!("nats:{name}"));
    Caller { actor, role: Role::Admin }
}

fn header_of<'a>(headers: Option<&'a HeaderMap>, name: &str) -> Option<&'a str> {
    headers?.get(name).map(async_nats::HeaderValue::as_str)
}
