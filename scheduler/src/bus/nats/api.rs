//! One request and its answer: with a deadline, never queued on a connection that is down, measured.

use std::future::Future;
use std::time::{Duration, Instant};

use async_nats::connection::State;
use async_nats::{Client, HeaderMap, Message, Request, RequestErrorKind};
use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::metrics as names;
use crate::ports::BusError;

/// What an answer of JetStream may take.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(3);

/// A connection and what is asked over it. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Api {
    client: Client,
}

/// Why a request has no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// The connection is down or went down; the request may or may not have arrived.
    Disconnected,
    /// Nobody listens on the subject.
    NoResponders,
    /// Nobody answered in time.
    TimedOut,
    /// Larger than the server accepts, or a subject that cannot be.
    Invalid(String),
}

impl From<Failure> for BusError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Disconnected => Self::Unavailable("not connected".into()),
            Failure::NoResponders => Self::Unavailable("JetStream has no leader or is off".into()),
            Failure::TimedOut => Self::Unavailable("no answer in time".into()),
            Failure::Invalid(why) => Self::Refused(why),
        }
    }
}

/// An error that JetStream answered.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
pub(super) struct ApiError {
    /// Like an HTTP status.
    pub(super) code: u32,
    /// JetStream's own number for it.
    #[serde(default)]
    pub(super) err_code: u32,
    /// Text for people.
    #[serde(default)]
    pub(super) description: String,
}

/// Numbers of JetStream's errors, as listed in the server's errors.json.
pub(super) mod code {
    pub(crate) const ACCOUNT_RESOURCES_EXCEEDED: u32 = 10002;
    pub(crate) const CLUSTER_NO_PEERS: u32 = 10005;
    pub(crate) const CONSUMER_NOT_FOUND: u32 = 10014;
    pub(crate) const MESSAGE_NOT_FOUND: u32 = 10037;
    pub(crate) const NOT_ENABLED_FOR_ACCOUNT: u32 = 10039;
    pub(crate) const SEQUENCE_NOT_FOUND: u32 = 10043;
    pub(crate) const STORAGE_EXCEEDED: u32 = 10047;
    pub(crate) const MESSAGE_DELETE_FAILED: u32 = 10057;
    pub(crate) const STREAM_NAME_IN_USE: u32 = 10058;
    pub(crate) const STREAM_NOT_FOUND: u32 = 10059;
    pub(crate) const WRONG_LAST_SEQUENCE: u32 = 10071;
    pub(crate) const REPLICAS_NOT_SUPPORTED: u32 = 10074;
    pub(crate) const NOT_ENABLED: u32 = 10076;
    /// A duplicate of a message that is still on its way through a replicated stream.
    pub(crate) const DUPLICATE_IN_PROCESS: u32 = 10158;
    /// What a replicated stream says for [`WRONG_LAST_SEQUENCE`] while another write to the subject is in flight.
    pub(crate) const WRONG_LAST_SEQUENCE_IN_FLIGHT: u32 = 10164;
}

impl ApiError {
    pub(super) fn is(&self, err_code: u32) -> bool {
        self.err_code == err_code
    }

    pub(super) fn is_jetstream_off(&self) -> bool {
        self.is(code::NOT_ENABLED) || self.is(code::NOT_ENABLED_FOR_ACCOUNT)
    }

    /// Whether a compare-and-set found something else than expected.
    pub(super) fn is_lost_race(&self) -> bool {
        self.is(code::WRONG_LAST_SEQUENCE) || self.is(code::WRONG_LAST_SEQUENCE_IN_FLIGHT)
    }

    /// Whether the same request may succeed later.
    pub(super) fn is_transient(&self) -> bool {
        self.code >= 500 || self.is(code::DUPLICATE_IN_PROCESS) || self.is(code::ACCOUNT_RESOURCES_EXCEEDED)
    }

    /// `doing` completes "cannot …".
    pub(super) fn into_bus_error(self, doing: &str) -> BusError {
        let text = format!("cannot {doing}: {self}");
        if self.is_jetstream_off() {
            BusError::Incompatible(text)
        } else if self.is_transient() {
            BusError::Unavailable(text)
        } else {
            BusError::Refused(text)
        }
    }
}

impl std::fmt::Display for ApiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.description, self.err_code)
    }
}

impl Api {
    pub(super) fn new(client: Client) -> Self {
        Self { client }
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    pub(super) fn is_connected(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Sends a request and waits for its answer.
    pub(super) async fn request(
        &self,
        op: &'static str,
        subject: String,
        headers: Option<HeaderMap>,
        payload: Bytes,
        within: Duration,
    ) -> Result<Message, Failure> {
        // What is given to a lost connection is sent when it is back, long after the caller has stopped waiting.
        if !self.is_connected() {
            return Err(Failure::Disconnected);
        }
        let mut request = Request::new().payload(payload).timeout(Some(within));
        if let Some(headers) = headers {
            request = request.headers(headers);
        }
        // The request's own timeout does not bound the wait for room in the connection's queue.
        timed(op, tokio::time::timeout(within, self.client.send_request(subject, request))).await.map_or(
            Err(Failure::TimedOut),
            |answer| {
                answer.map_err(|error| match error.kind() {
                    RequestErrorKind::TimedOut => Failure::TimedOut,
                    RequestErrorKind::NoResponders => Failure::NoResponders,
                    RequestErrorKind::InvalidSubject => Failure::Invalid("the subject is invalid".into()),
                    RequestErrorKind::MaxPayloadExceeded => Failure::Invalid(chain(&error)),
                    RequestErrorKind::Other => Failure::Disconnected,
                })
            },
        )
    }

    /// Waits until the server has acted on what was sent before, subscriptions above all.
    ///
    /// It handles a connection's commands in order, so the answer to anything tells; async-nats' `flush` only empties
    /// the client's own buffer.
    async fn settled(&self) -> Result<(), BusError> {
        let anything = "$JS.API.INFO".to_owned();
        match self.request("settled", anything, None, Bytes::new(), ANSWER_WITHIN).await {
            Ok(_) | Err(Failure::NoResponders) => Ok(()),
            Err(failure) => Err(failure.into()),
        }
    }

    /// Publishes without an answer, if connected.
    pub(super) async fn send(&self, subject: String, payload: Bytes) {
        if self.is_connected() {
            // Fails only for a subject that cannot be, or when the connection has ended; nobody is told of either.
            let _ = tokio::time::timeout(ANSWER_WITHIN, self.client.publish(subject, payload)).await;
        }
    }

    /// Subscribes, and returns when the server knows.
    pub(super) async fn subscribe(&self, subject: String) -> Result<async_nats::Subscriber, BusError> {
        if !self.is_connected() {
            return Err(Failure::Disconnected.into());
        }
        let subscriber = tokio::time::timeout(ANSWER_WITHIN, self.client.subscribe(subject))
            .await
            .map_err(|_| Failure::TimedOut)?
            .map_err(|error| BusError::Refused(chain(&error)))?;
        self.settled().await?;
        Ok(subscriber)
    }
}

/// Asks JetStream's API: `Ok(Err(_))` when it answered with an error.
pub(super) async fn ask<T: DeserializeOwned>(
    api: &Api,
    op: &'static str,
    subject: impl AsRef<str>,
    body: &impl Serialize,
) -> Result<Result<T, ApiError>, Failure> {
    let body = serde_json::to_vec(body).map_err(|error| Failure::Invalid(error.to_string()))?;
    let message = api.request(op, format!("$JS.API.{}", subject.as_ref()), None, body.into(), ANSWER_WITHIN).await?;
    answer(&message.payload)
}

/// Reads an answer that is `{"error": …}` or a `T`.
pub(super) fn answer<T: DeserializeOwned>(payload: &[u8]) -> Result<Result<T, ApiError>, Failure> {
    #[derive(serde::Deserialize)]
    struct Envelope {
        error: Option<ApiError>,
    }
    let unreadable = |error: serde_json::Error| Failure::Invalid(format!("an answer of NATS is not readable: {error}"));
    let envelope: Envelope = serde_json::from_slice(payload).map_err(unreadable)?;
    match envelope.error {
        Some(error) => Ok(Err(error)),
        None => serde_json::from_slice(payload).map(Ok).map_err(unreadable),
    }
}

/// Asks for something that nobody reads.
pub(super) async fn order(
    api: &Api,
    op: &'static str,
    subject: impl AsRef<str>,
    body: &impl Serialize,
) -> Result<Result<(), ApiError>, Failure> {
    Ok(ask::<Value>(api, op, subject, body).await?.map(drop))
}

/// Records how long `work` takes.
pub(super) async fn timed<T>(op: &'static str, work: impl Future<Output = T>) -> T {
    let start = Instant::now();
    let done = work.await;
    metrics::histogram!(names::NATS.name, "op" => op).record(start.elapsed().as_secs_f64());
    done
}

/// An error with everything behind it.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
