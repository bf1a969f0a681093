//! The durable pull consumers of AX_TRIGGERS.

use ax_shared::ConsumerName;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::NatsBus;
use super::api::{ANSWER_WITHIN, Failure, ask, code, order};
use super::topology::differences;
use crate::ports::{BusError, ConsumerState};

/// Open pulls that a consumer holds at once: one or a few for each worker process of the group.
const MAX_WAITING: u32 = 4096;

#[derive(Deserialize)]
struct Info {
    name: String,
    config: Map<String, Value>,
    delivered: Delivered,
    num_pending: u64,
    num_ack_pending: u64,
    num_waiting: u64,
}

#[derive(Deserialize)]
struct Delivered {
    stream_seq: u64,
}

#[derive(Deserialize)]
struct Page {
    total: usize,
    #[serde(default)]
    consumers: Option<Vec<Info>>,
}

impl From<Info> for ConsumerState {
    fn from(info: Info) -> Self {
        Self {
            name: info.name,
            delivered_seq: info.delivered.stream_seq,
            pending: info.num_pending,
            ack_pending: info.num_ack_pending,
            waiting: info.num_waiting,
        }
    }
}

impl NatsBus {
    fn consumer_config(&self, name: &ConsumerName) -> Map<String, Value> {
        let ConsumerName { group, queue, profile } = name;
        let Value::Object(config) = json!({
            "name": name.to_string(),
            "durable_name": name.to_string(),
            "description": format!(
                "runs of group {group}, queue {queue}: {} s for an attempt, {} deliveries",
                profile.timeout_s(),
                profile.max_deliver()
            ),
            "metadata": { "ax_group": group, "ax_queue": queue, "ax_profile": profile },
            "filter_subject": self.config.prefix.triggers_of(group, queue, *profile),
            "deliver_policy": "all",
            "replay_policy": "instant",
            "ack_policy": "explicit",
            "ack_wait": u64::from(profile.ack_wait_s()) * 1_000_000_000,
            "max_deliver": profile.max_deliver(),
            // NAKed messages in backoff count as pending; any limit would let them block the lane.
            "max_ack_pending": -1,
            "max_waiting": MAX_WAITING,
            // Every ack makes a metric: for a worker that sends no events, that is how its success is known.
            "sample_freq": "100",
        }) else {
            unreachable!("an object literal is an object")
        };
        config
    }

    async fn consumer_info(&self, name: &str) -> Result<Option<Info>, BusError> {
        let stream = self.config.prefix.triggers_stream();
        match ask::<Info>(&self.api, "consumer_info", format!("CONSUMER.INFO.{stream}.{name}"), &json!({})).await? {
            Ok(info) => Ok(Some(info)),
            Err(error) if error.is(code::CONSUMER_NOT_FOUND) => Ok(None),
            Err(error) => Err(error.into_bus_error(&format!("ask about the consumer {name}"))),
        }
    }

    pub(super) async fn consumer_state(&self, name: &str) -> Result<Option<ConsumerState>, BusError> {
        Ok(self.consumer_info(name).await?.map(ConsumerState::from))
    }

    pub(super) async fn list_consumers(&self) -> Result<Vec<ConsumerState>, BusError> {
        let subject = format!("CONSUMER.LIST.{}", self.config.prefix.triggers_stream());
        let mut states: Vec<ConsumerState> = Vec::new();
        loop {
            let page: Page = ask(&self.api, "consumer_list", &subject, &json!({ "offset": states.len() }))
                .await?
                .map_err(|error| error.into_bus_error("list the consumers"))?;
            let infos = page.consumers.unwrap_or_default();
            let last = infos.is_empty() || states.len() + infos.len() >= page.total;
            states.extend(infos.into_iter().map(ConsumerState::from));
            if last {
                return Ok(states);
            }
        }
    }

    pub(super) async fn make_consumer(&self, name: &ConsumerName) -> Result<(), BusError> {
        let wanted = self.consumer_config(name);
        let stream = self.config.prefix.triggers_stream();
        let config = match self.consumer_info(&name.to_string()).await? {
            None => wanted,
            Some(there) => {
                let differing = differences(&there.config, &wanted);
                if differing.is_empty() {
                    return Ok(());
                }
                tracing::info!(consumer = %name, settings = ?differing, "correcting a consumer");
                let mut config = there.config;
                super::topology::merge(&mut config, wanted);
                config
            }
        };
        let filter = self.config.prefix.triggers_of(&name.group, &name.queue, name.profile);
        let subject = format!("CONSUMER.CREATE.{stream}.{name}.{filter}");
        order(&self.api, "consumer_create", subject, &json!({ "stream_name": stream, "config": config }))
            .await?
            .map_err(|error| error.into_bus_error(&format!("create or correct the consumer {name}")))
    }

    pub(super) async fn delete_consumer(&self, name: &str) -> Result<(), BusError> {
        let subject = format!("CONSUMER.DELETE.{}.{name}", self.config.prefix.triggers_stream());
        match order(&self.api, "consumer_delete", subject, &json!({})).await? {
            Ok(()) => Ok(()),
            Err(error) if error.is(code::CONSUMER_NOT_FOUND) => Ok(()),
            Err(error) => Err(error.into_bus_error(&format!("remove the consumer {name}"))),
        }
    }

    pub(super) async fn poke_consumer(&self, name: &str) -> Result<(), BusError> {
        let subject = format!("$JS.API.CONSUMER.MSG.NEXT.{}.{name}", self.config.prefix.triggers_stream());
        // No message fits into one byte, so none is delivered; looking for one makes the server drop those whose
        // deliveries are used up, and say so.
        let body = json!({ "batch": 1, "no_wait": true, "max_bytes": 1 }).to_string();
        match self.api.request("poke", subject, None, body.into(), ANSWER_WITHIN).await {
            Ok(_) => Ok(()),
            Err(Failure::NoResponders) => {
                Err(BusError::Unavailable(format!("the consumer {name} is not there or has no leader")))
            }
            Err(failure) => Err(failure.into()),
        }
    }
}
