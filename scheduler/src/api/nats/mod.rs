//! The NATS door: the operations of the table as a micro service. Requests are answered; a message without a reply
//! subject is done in silence, and told as an event when it is refused.
//!
//! ```text
//!   micro     what `nats micro` asks           request   a message → what the operation reads
//! ```
//!
//! Who may ask what is a matter of permissions on subjects, which NATS keeps. One node of the queue group gets each
//! request. Every operation has turns of its own, so that one that is slow holds up no other; what waits for a turn is
//! bounded in bytes, and what is beyond that is refused as unavailable. Subscriptions come back with the connection; an
//! answer that was not sent before it was lost is sent then, or never.

mod micro;
mod request;

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::{Client, HeaderMap, Message, SubscribeError, Subscriber};
use ax_shared::Prefix;
use futures::StreamExt as _;
use serde_json::json;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::micro::{Endpoint, Micro, QUEUE_GROUP};
use super::ApiError;
use super::operation::{Method, PATIENCE, ROUTES, Reply, Route};
use super::service::Service;
use crate::metrics as names;

/// Requests of one operation that are worked on at the same time.
const TURNS: usize = 16;
/// Room for requests that wait or are worked on, in KiB: 64 MiB.
const ROOM_KIB: usize = 64 * 1024;
/// How long requests under way may take when the node stops.
const DRAIN: Duration = Duration::from_secs(5);

/// The door, open until [`NatsDoor::close`].
pub struct NatsDoor {
    client: Client,
    stop: CancellationToken,
    tasks: TaskTracker,
    answering: tokio::task::JoinHandle<()>,
}

struct Door {
    client: Client,
    service: Arc<Service>,
    prefix: Prefix,
    micro: Micro,
    room: Arc<Semaphore>,
    tasks: TaskTracker,
}

impl NatsDoor {
    /// Begins to answer on `<prefix>.api.v1.>`, as the service `<prefix>`.
    ///
    /// # Errors
    /// The connection has ended for good.
    pub async fn open(client: Client, prefix: Prefix, service: Arc<Service>) -> Result<Self, SubscribeError> {
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        let micro = describe(&prefix, &service);
        let questions = micro::questions(&client, &micro).await?;
        let mut listening = Vec::new();
        for endpoint in &micro.endpoints {
            listening.push(client.queue_subscribe(endpoint.subject.clone(), QUEUE_GROUP.to_owned()).await?);
        }
        let room = Arc::new(Semaphore::new(ROOM_KIB));
        let door = Arc::new(Door { client: client.clone(), service, prefix, micro, room, tasks: tasks.clone() });
        for (index, requests) in listening.into_iter().enumerate() {
            tasks.spawn(door.clone().listen(index, requests, stop.clone()));
        }
        let answering = tokio::spawn(async move { micro::answer(&door.client, &door.micro, questions).await });
        Ok(Self { client, stop, tasks, answering })
    }

    /// Takes no more requests, answers those under way, at most for some seconds.
    pub async fn close(self) {
        self.stop.cancel();
        self.answering.abort();
        self.tasks.close();
        let answered = async {
            self.tasks.wait().await;
            // What was answered is in the client's buffer until now.
            let _ = self.client.flush().await;
        };
        if tokio::time::timeout(DRAIN, answered).await.is_err() {
            tracing::warn!("some requests over NATS were not answered before the end");
        }
    }
}

fn describe(prefix: &Prefix, service: &Service) -> Micro {
    let endpoint = |route: &Route| Endpoint {
        name: route.subject.replace('.', "-"),
        subject: prefix.api(route.subject),
        metadata: json!({
            "http": format!("{} /api/v1{}", route.method, route.path),
            "summary": route.summary,
            "changes": (route.method != Method::Get).to_string(),
        }),
        counts: micro::Counts::default(),
    };
    Micro {
        name: prefix.as_str().to_owned(),
        id: uuid::Uuid::new_v4().simple().to_string(),
        version: crate::VERSION.to_owned(),
        description: "The ax scheduler: definitions and runs, as over HTTP".to_owned(),
        metadata: json!({"node_id": service.node_id()}),
        started_at: service.now(),
        endpoints: ROUTES.iter().map(endpoint).collect(),
    }
}

impl Door {
    /// Takes the requests of one operation until stopped, then those that were on their way.
    async fn listen(self: Arc<Self>, index: usize, mut requests: Subscriber, stop: CancellationToken) {
        let turns = Arc::new(Semaphore::new(TURNS));
        let mut stopping = false;
        loop {
            let message = tokio::select! {
                () = stop.cancelled(), if !stopping => {
                    stopping = true;
                    let _ = requests.drain().await;
                    continue;
                }
                message = requests.next() => message,
            };
            let Some(message) = message else { return };
            let (door, turns) = (self.clone(), turns.clone());
            let kib = u32::try_from(message.payload.len() / 1024 + 1).unwrap_or(u32::MAX);
            match self.room.clone().try_acquire_many_owned(kib) {
                Ok(room) => {
                    self.tasks.spawn(async move {
                        let begun = Instant::now();
                        let answer = match tokio::time::timeout(PATIENCE, turns.acquire()).await {
                            Ok(_turn) => door.answer(index, &message).await,
                            Err(_) => Err(ApiError::Busy),
                        };
                        door.send(index, &message, begun, answer).await;
                        drop(room);
                    });
                }
                Err(_) => door.send(index, &message, Instant::now(), Err(ApiError::Busy)).await,
            }
        }
    }

    async fn answer(&self, index: usize, message: &Message) -> Result<Reply, ApiError> {
        let route = &ROUTES[index];
        let request = request::read(route, message)?;
        let reply = route.answer(&self.service, &request::caller(message), request).await?;
        let limit = self.client.server_info().max_payload;
        if message.reply.is_some() && reply.body.len() > limit {
            return Err(ApiError::TooLarge {
                detail: format!(
                    "the answer has {} bytes, more than the {limit} that this NATS server carries in a message \
                     (max_payload): ask for less, with limit, or over HTTP",
                    reply.body.len()
                ),
                errors: Vec::new(),
            });
        }
        Ok(reply)
    }

    /// Sends an answer, or tells of a refusal that nobody waits for, and counts both.
    async fn send(&self, index: usize, message: &Message, begun: Instant, answer: Result<Reply, ApiError>) {
        let (endpoint, operation) = (&self.micro.endpoints[index], ROUTES[index].subject);
        let (status, refused) = match answer {
            Ok(reply) => {
                if let Some(to) = message.reply.clone() {
                    let body = if reply.body.is_empty() { b"{}".to_vec() } else { reply.body };
                    let _ = self.client.publish(to, body.into()).await;
                }
                (reply.status, None)
            }
            Err(error) => {
                error.log();
                let problem = error.problem();
                let text = format!("{}: {}", problem.title, problem.detail);
                match message.reply.clone() {
                    Some(to) => {
                        let mut headers = HeaderMap::new();
                        headers.insert(async_nats::service::NATS_SERVICE_ERROR, header_text(&text).as_str());
                        let code = problem.status.to_string();
                        headers.insert(async_nats::service::NATS_SERVICE_ERROR_CODE, code.as_str());
                        if let Some(seconds) = error.retry_after_s() {
                            headers.insert("Retry-After", seconds.to_string().as_str());
                        }
                        let body = json!({"error": problem}).to_string();
                        let _ = self.client.publish_with_headers(to, headers, body.into()).await;
                    }
                    None => {
                        let event = json!({
                            "at": self.service.now(),
                            "subject": message.subject.as_str(),
                            "problem": problem,
                        });
                        let _ = self.client.publish(self.prefix.alert("rejected"), event.to_string().into()).await;
                    }
                }
                (problem.status, Some(format!("{}:{text}", problem.status)))
            }
        };
        let took = begun.elapsed();
        endpoint.counts.add(took, refused);
        metrics::counter!(names::NATS_REQUESTS.name, "operation" => operation, "status" => status.to_string())
            .increment(1);
        tracing::debug!(operation, status, elapsed_ms = took.as_millis() as u64, "request over NATS");
    }
}

/// Text that a header can hold: one short line of ASCII.
fn header_text(text: &str) -> String {
    text.chars().take(300).map(|c| if c.is_ascii_graphic() || c == ' ' { c } else { '?' }).collect()
}
