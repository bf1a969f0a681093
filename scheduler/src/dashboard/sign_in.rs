//! Signing in with a token, and out.
//!
//! The cookie holds the token itself, so that every node knows it and a revoked one is of no use. It is `HttpOnly` and
//! `SameSite=Strict`; and the guard refuses what a page of another origin sends, this form included.

use askama::Template;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::{Frame, page_of};
use crate::api::ApiError;
use crate::api::http::guard::COOKIE;
use crate::api::http::{Door, HttpError, challenge};
use crate::api::service::Service;

/// Where a person signs in.
pub(crate) const SIGN_IN: &str = "/sign-in";
/// Where a person signs out.
pub(crate) const SIGN_OUT: &str = "/sign-out";
/// How long a person stays signed in, in seconds: twelve hours.
const STAY_S: u32 = 12 * 3600;
/// The most bytes of the form.
const MAX_FORM: usize = 8 * 1024;

#[derive(Template)]
#[template(path = "sign_in.html")]
struct SignInPage {
    node: String,
    now: String,
    refresh: bool,
    signed_in: bool,
    to: String,
    refused: bool,
}

/// The form in the place of the page `to`; `refused` = a token was shown that does not count.
pub(crate) fn ask_to_sign_in(service: &Service, to: &str, refused: bool) -> Response {
    let frame = Frame::of(service, &HeaderMap::new());
    let page = SignInPage {
        node: frame.node,
        now: super::pages::instant(frame.now),
        refresh: false,
        signed_in: false,
        to: place(to).to_owned(),
        refused,
    };
    let mut response = page_of(StatusCode::UNAUTHORIZED, page.render());
    response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge(refused));
    response
}

pub(super) async fn form(State(door): State<Door>) -> Response {
    if !door.access.tokens.any() {
        return see_other("/");
    }
    ask_to_sign_in(&door.service, "/", false)
}

pub(super) async fn sign_in(State(door): State<Door>, headers: HeaderMap, body: Body) -> Response {
    let Ok(bytes) = axum::body::to_bytes(body, MAX_FORM).await else {
        let detail = "the form is too large or ended early".to_owned();
        return HttpError(ApiError::Malformed(detail)).into_response();
    };
    let field = |name: &str| form_field(&bytes, name).unwrap_or_default();
    let (token, to) = (field("token"), field("to"));
    let token = token.trim();
    match door.access.tokens.bearer(token) {
        Ok(caller) => {
            tracing::info!(actor = caller.actor, "signed in");
            // A proxy says whether the browser talks TLS to it.
            let tls = headers.get("x-forwarded-proto").is_some_and(|proto| proto == "https");
            with_cookie(see_other(place(&to)), token, STAY_S, tls)
        }
        Err(ApiError::Unauthorized { .. }) => ask_to_sign_in(&door.service, &to, true),
        Err(error) => HttpError(error).into_response(),
    }
}

pub(super) async fn sign_out() -> Response {
    with_cookie(see_other("/"), "", 0, false)
}

/// A place on this site, whatever is asked for.
fn place(to: &str) -> &str {
    let ours = to.starts_with('/') && !to.starts_with("//") && to.bytes().all(|c| c.is_ascii_graphic() && c != b'\\');
    if ours && ![SIGN_IN, SIGN_OUT].contains(&to) { to } else { "/" }
}

fn see_other(place: &str) -> Response {
    let location = HeaderValue::from_str(place).unwrap_or(HeaderValue::from_static("/"));
    (
        StatusCode::SEE_OTHER,
        [(header::LOCATION, location), (header::CACHE_CONTROL, HeaderValue::from_static("no-store"))],
    )
        .into_response()
}

fn with_cookie(mut response: Response, token: &str, seconds: u32, tls: bool) -> Response {
    let secure = if tls { "; Secure" } else { "" };
    let cookie = format!("{COOKIE}={token}; Path=/; HttpOnly; SameSite=Strict; Max-Age={seconds}{secure}");
    if let Ok(cookie) = HeaderValue::from_str(&cookie) {
        response.headers_mut().append(header::SET_COOKIE, cookie);
    }
    response
}

/// A field of a form, as a browser encodes it.
fn form_field(form: &[u8], name: &str) -> Option<String> {
    let form = std::str::from_utf8(form).ok()?;
    let (_, value) = form.split('&').filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name)?;
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let hex = (*first == b'%').then(|| tail.get(..2)).flatten().and_then(|hex| std::str::from_utf8(hex).ok());
        match (first, hex.and_then(|hex| u8::from_str_radix(hex, 16).ok())) {
            (_, Some(byte)) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            (b'+', None) => {
                bytes.push(b' ');
                rest = tail;
            }
            (other, None) => {
                bytes.push(*other);
                rest = tail;
            }
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_only_led_to_places_of_this_site() {
        for good in ["/", "/tasks/a.b", "/runs/1?x=y"] {
            assert_eq!(place(good), good);
        }
        for bad in ["", "//evil.example", "https://evil.example", "/\\evil.example", "/sign-out", "/a b", "/\r\nx"] {
            assert_eq!(place(bad), "/", "{bad}");
        }
    }

    #[test]
    fn a_form_is_read_as_a_browser_writes_it() {
        let form = b"to=%2Ftasks%2Fa&token=+ax_1%2B%";
        assert_eq!(form_field(form, "to").as_deref(), Some("/tasks/a"));
        assert_eq!(form_field(form, "token").as_deref(), Some(" ax_1+%"));
        assert_eq!(form_field(form, "none"), None);
    }
}
