//! The leader key: plain compare-and-set on the last message of its subject.
//!
//! The bucket's max_age is the lease's time to live, so a renewal is an update like any other. (A TTL on the single
//! message would be lost: async-nats drops it over a delete marker and has none on update.)

use async_nats::HeaderMap;
use async_nats::header::NATS_EXPECTED_LAST_SUBJECT_SEQUENCE;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::json;

use super::api::{ANSWER_WITHIN, Api, ApiError, answer};
use super::{NatsBus, triggers};
use crate::ports::{BusError, LeaseEntry, LeaseValue, LeaseWrite, StreamMessage};

const KEY: &str = "scheduler";

/// What a key of a bucket holds.
#[derive(Debug)]
pub(super) enum Slot {
    /// Nothing, and no trace of it.
    Empty,
    /// Nothing, and a marker of its deletion or expiry at this revision.
    Marker(u64),
    /// A value.
    Value(StreamMessage),
}

impl Slot {
    /// The revision that a write has to expect which wants to create the key.
    pub(super) fn free_at(&self) -> Option<u64> {
        match self {
            Self::Empty => Some(0),
            Self::Marker(revision) => Some(*revision),
            Self::Value(_) => None,
        }
    }
}

/// Reads a key from its stream's leader.
pub(super) async fn slot(api: &Api, bucket: &str, key: &str) -> Result<Slot, BusError> {
    let which = json!({ "last_by_subj": format!("$KV.{bucket}.{key}") });
    Ok(match triggers::message(api, &format!("KV_{bucket}"), &which).await? {
        None => Slot::Empty,
        Some(message) if is_marker(&message) => Slot::Marker(message.seq),
        Some(message) => Slot::Value(message),
    })
}

/// A client's delete or purge has `KV-Operation`, the server's own marker of an expiry `Nats-Marker-Reason`.
pub(super) fn is_marker(message: &StreamMessage) -> bool {
    message.headers.contains_key("KV-Operation") || message.headers.contains_key("Nats-Marker-Reason")
}

#[derive(Deserialize)]
struct Stored {
    seq: u64,
}

/// Writes a key; with `expected`, only over that revision. `Ok(Err(_))` is what the stream said.
pub(super) async fn write(
    api: &Api,
    op: &'static str,
    subject: String,
    mut headers: HeaderMap,
    expected: Option<u64>,
    value: Bytes,
) -> Result<Result<u64, ApiError>, BusError> {
    if let Some(revision) = expected {
        headers.insert(NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, revision.to_string());
    }
    let message = api.request(op, subject, Some(headers), value, ANSWER_WITHIN).await?;
    Ok(answer::<Stored>(&message.payload)?.map(|stored| stored.seq))
}

impl NatsBus {
    fn lease_bucket(&self) -> String {
        self.config.prefix.bucket("leader")
    }

    pub(super) async fn read_lease(&self) -> Result<Option<LeaseEntry>, BusError> {
        let Slot::Value(message) = slot(&self.api, &self.lease_bucket(), KEY).await? else { return Ok(None) };
        let value = serde_json::from_slice(&message.payload).map_err(|error| {
            BusError::Refused(format!("the key {KEY} of {} is not a lease: {error}", self.lease_bucket()))
        })?;
        Ok(Some(LeaseEntry { value, revision: message.seq }))
    }

    pub(super) async fn take_lease(&self, value: &LeaseValue, expected: Option<u64>) -> Result<LeaseWrite, BusError> {
        let expected = match expected {
            Some(revision) => revision,
            None => match slot(&self.api, &self.lease_bucket(), KEY).await?.free_at() {
                Some(revision) => revision,
                None => return Ok(LeaseWrite::Lost),
            },
        };
        let body = serde_json::to_vec(value).map_err(|error| BusError::Refused(error.to_string()))?;
        self.write_lease(HeaderMap::new(), expected, body.into()).await
    }

    pub(super) async fn release_lease(&self, revision: u64) -> Result<LeaseWrite, BusError> {
        let mut headers = HeaderMap::new();
        headers.insert("KV-Operation", "DEL");
        self.write_lease(headers, revision, Bytes::new()).await
    }

    async fn write_lease(&self, headers: HeaderMap, expected: u64, body: Bytes) -> Result<LeaseWrite, BusError> {
        let subject = format!("$KV.{}.{KEY}", self.lease_bucket());
        match write(&self.api, "lease", subject, headers, Some(expected), body).await? {
            Ok(revision) => Ok(LeaseWrite::Won(revision)),
            Err(error) if error.is_lost_race() => Ok(LeaseWrite::Lost),
            Err(error) => Err(error.into_bus_error("write the lease")),
        }
    }
}
