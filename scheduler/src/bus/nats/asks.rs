//! Who leads, who is there: core requests, answered by whoever it concerns, and hints to the leader.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_nats::{StatusCode, Subscriber};
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use serde::de::DeserializeOwned;

use super::NatsBus;
use super::api::{Api, Failure};
use crate::ports::{BusError, Guard, Hint, LeaderAnswer, LeaseValue, NodeInfo};

impl NatsBus {
    pub(super) async fn ask_for_leader(&self, timeout: Duration) -> Result<LeaderAnswer, BusError> {
        match self.api.request("ask_leader", self.config.prefix.leader_ask(), None, Bytes::new(), timeout).await {
            Ok(message) => Ok(LeaderAnswer::Alive(read("the leader", &message.payload)?)),
            Err(Failure::NoResponders) => Ok(LeaderAnswer::NoResponders),
            Err(Failure::TimedOut) => Ok(LeaderAnswer::TimedOut),
            Err(failure) => Err(failure.into()),
        }
    }

    pub(super) async fn answer_as_leader(&self, value: LeaseValue) -> Result<Guard, BusError> {
        let body = Bytes::from(write(&value)?);
        let subscriber = self.api.subscribe(self.config.prefix.leader_ask()).await?;
        Ok(answer(self.api.clone(), subscriber, move || Some(body.clone())))
    }

    pub(super) async fn answer_as_node(
        &self,
        node_id: &str,
        info: Arc<dyn Fn() -> NodeInfo + Send + Sync>,
    ) -> Result<Guard, BusError> {
        let mine = self.api.subscribe(self.config.prefix.node_ask(node_id)).await?;
        let all = self.api.subscribe(self.config.prefix.nodes_ask()).await?;
        let body = move || serde_json::to_vec(&info()).ok().map(Bytes::from);
        let guards = (answer(self.api.clone(), mine, body.clone()), answer(self.api.clone(), all, body));
        Ok(Guard::new(move || drop(guards)))
    }

    pub(super) async fn ask_for_node(&self, node_id: &str, timeout: Duration) -> Result<Option<NodeInfo>, BusError> {
        match self.api.request("ask_node", self.config.prefix.node_ask(node_id), None, Bytes::new(), timeout).await {
            Ok(message) => Ok(Some(read("a node", &message.payload)?)),
            Err(Failure::NoResponders | Failure::TimedOut) => Ok(None),
            Err(failure) => Err(failure.into()),
        }
    }

    pub(super) async fn ask_all_nodes(&self, wait: Duration) -> Result<Vec<NodeInfo>, BusError> {
        let deadline = tokio::time::Instant::now() + wait;
        let inbox = self.api.client().new_inbox();
        let mut answers = self.api.subscribe(inbox.clone()).await?;
        let question = self.api.client().publish_with_reply(self.config.prefix.nodes_ask(), inbox, Bytes::new());
        match tokio::time::timeout_at(deadline, question).await {
            Ok(Ok(())) => {}
            _ => return Err(Failure::Disconnected.into()),
        }
        let mut nodes = BTreeMap::new();
        while let Ok(Some(message)) = tokio::time::timeout_at(deadline, answers.next()).await {
            if message.status == Some(StatusCode::NO_RESPONDERS) {
                break;
            }
            // A node of another version may tell something else; it is not worth failing for.
            if let Ok(node) = read::<NodeInfo>("a node", &message.payload) {
                nodes.insert((node.node_id.clone(), node.instance), node);
            }
        }
        Ok(nodes.into_values().collect())
    }

    pub(super) async fn give_hint(&self, hint: Hint) {
        if let Ok(body) = serde_json::to_vec(&hint) {
            self.api.send(self.config.prefix.hint(), body.into()).await;
        }
    }

    pub(super) async fn hear_hints(&self) -> Result<BoxStream<'static, Hint>, BusError> {
        let subscriber = self.api.subscribe(self.config.prefix.hint()).await?;
        Ok(subscriber.filter_map(|message| async move { serde_json::from_slice(&message.payload).ok() }).boxed())
    }
}

/// Answers every request of `questions` with `body` until the guard is dropped.
fn answer(api: Api, mut questions: Subscriber, body: impl Fn() -> Option<Bytes> + Send + Sync + 'static) -> Guard {
    let task = tokio::spawn(async move {
        while let Some(question) = questions.next().await {
            if let (Some(reply), Some(body)) = (question.reply, body()) {
                api.send(reply.to_string(), body).await;
            }
        }
    });
    let task = task.abort_handle();
    Guard::new(move || task.abort())
}

fn read<T: DeserializeOwned>(who: &str, body: &[u8]) -> Result<T, BusError> {
    serde_json::from_slice(body)
        .map_err(|error| BusError::Refused(format!("the answer of {who} is unreadable: {error}")))
}

fn write(value: &impl serde::Serialize) -> Result<Vec<u8>, BusError> {
    serde_json::to_vec(value).map_err(|error| BusError::Refused(error.to_string()))
}
