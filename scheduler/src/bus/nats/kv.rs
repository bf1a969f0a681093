//! Groups, workers and idempotency keys in their buckets.

use std::collections::BTreeMap;
use std::time::Duration;

use async_nats::HeaderMap;
use ax_shared::wire::{GroupConfig, WorkerEntry};
use ax_shared::{Group, RunId, TaskId};
use bytes::Bytes;
use data_encoding::BASE32_NOPAD;
use futures::{StreamExt, TryStreamExt, stream};
use serde::Deserialize;
use serde_json::json;
use sha2::{Digest, Sha256};

use super::NatsBus;
use super::api::ask;
use super::lease::{Slot, slot, write};
use crate::ports::BusError;

/// Keys that are read at once.
const READ_AHEAD: usize = 64;
/// Lost races for one key before the caller is told to try again later.
const CLAIM_ATTEMPTS: usize = 16;

#[derive(Deserialize)]
struct SubjectsPage {
    #[serde(default)]
    total: usize,
    state: Subjects,
}

#[derive(Deserialize)]
struct Subjects {
    #[serde(default)]
    subjects: Option<BTreeMap<String, u64>>,
}

impl NatsBus {
    /// Every key of a bucket with its value, from the stream's leader.
    async fn read_bucket(&self, bucket: &str) -> Result<Vec<(String, Bytes)>, BusError> {
        let before_key = format!("$KV.{bucket}.");
        let subject = format!("STREAM.INFO.KV_{bucket}");
        let mut keys: Vec<String> = Vec::new();
        loop {
            let question = json!({ "subjects_filter": format!("{before_key}>"), "offset": keys.len() });
            let page: SubjectsPage = ask(&self.api, "bucket_keys", &subject, &question)
                .await?
                .map_err(|error| error.into_bus_error(&format!("list the keys of {bucket}")))?;
            let subjects = page.state.subjects.unwrap_or_default();
            let last = subjects.is_empty() || keys.len() + subjects.len() >= page.total;
            keys.extend(subjects.into_keys().filter_map(|s| s.strip_prefix(&before_key).map(ToOwned::to_owned)));
            if last {
                break;
            }
        }
        stream::iter(keys)
            .map(|key| async move {
                Ok(match slot(&self.api, bucket, &key).await? {
                    Slot::Value(message) => Some((key, message.payload)),
                    // Deleted, or expired since the keys were listed.
                    Slot::Empty | Slot::Marker(_) => None,
                })
            })
            .buffered(READ_AHEAD)
            .try_filter_map(|entry| async move { Ok(entry) })
            .try_collect()
            .await
    }

    pub(super) async fn read_groups(&self) -> Result<BTreeMap<Group, GroupConfig>, BusError> {
        let bucket = self.config.prefix.bucket("groups");
        let mut groups = BTreeMap::new();
        for (key, value) in self.read_bucket(&bucket).await? {
            match (Group::new(&key), serde_json::from_slice(&value)) {
                (Ok(group), Ok(config)) => {
                    groups.insert(group, config);
                }
                _ => tracing::warn!(bucket, key, "an entry is not a group and is passed over"),
            }
        }
        Ok(groups)
    }

    pub(super) async fn write_group(&self, group: &Group, config: Option<&GroupConfig>) -> Result<(), BusError> {
        let bucket = self.config.prefix.bucket("groups");
        let mut headers = HeaderMap::new();
        let value = match config {
            Some(config) => serde_json::to_vec(config).map_err(|error| BusError::Refused(error.to_string()))?.into(),
            None => {
                headers.insert("KV-Operation", "DEL");
                Bytes::new()
            }
        };
        write(&self.api, "group_put", format!("$KV.{bucket}.{group}"), headers, None, value)
            .await?
            .map_err(|error| error.into_bus_error(&format!("write the group {group} to {bucket}")))?;
        Ok(())
    }

    pub(super) async fn read_workers(&self) -> Result<Vec<WorkerEntry>, BusError> {
        let bucket = self.config.prefix.bucket("workers");
        let mut workers = Vec::new();
        for (key, value) in self.read_bucket(&bucket).await? {
            match serde_json::from_slice(&value) {
                Ok(worker) => workers.push(worker),
                Err(_) => tracing::debug!(bucket, key, "an entry is not a worker and is passed over"),
            }
        }
        Ok(workers)
    }

    pub(super) async fn claim(
        &self,
        task: &TaskId,
        key: &str,
        proposed: RunId,
        window: Duration,
    ) -> Result<RunId, BusError> {
        let bucket = self.config.prefix.bucket("dedup");
        let key = format!("{task}.{}", BASE32_NOPAD.encode(&Sha256::digest(key.as_bytes())));
        // The server counts in whole seconds; a key must not be forgotten early.
        let seconds = window.as_secs() + u64::from(window.subsec_nanos() > 0);
        let mut expected = 0;
        for _ in 0..CLAIM_ATTEMPTS {
            let mut headers = HeaderMap::new();
            headers.insert("Nats-TTL", format!("{}s", seconds.max(1)));
            let value = Bytes::from(proposed.to_string());
            let subject = format!("$KV.{bucket}.{key}");
            match write(&self.api, "claim", subject, headers, Some(expected), value).await? {
                Ok(_) => return Ok(proposed),
                Err(error) if error.is_lost_race() => {}
                Err(error) => return Err(error.into_bus_error(&format!("write to {bucket}"))),
            }
            expected = match slot(&self.api, &bucket, &key).await? {
                Slot::Value(message) => {
                    return std::str::from_utf8(&message.payload)
                        .ok()
                        .and_then(|text| text.parse().ok())
                        .ok_or_else(|| BusError::Refused(format!("the key {key} of {bucket} does not hold a run id")));
                }
                Slot::Empty => 0,
                Slot::Marker(revision) => revision,
            };
        }
        Err(BusError::Unavailable(format!("the key {key} of {bucket} keeps changing")))
    }
}
