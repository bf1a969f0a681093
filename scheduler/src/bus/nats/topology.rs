//! Streams and buckets, made when they are not there and corrected when they differ.
//!
//! Settings are handled as JSON: what a newer server or an operator has set beside ours survives a correction.
//! Only what ax relies on is corrected. Sizes, ages, replicas and storage beyond that are set once, at creation, and
//! then belong to the operator.

use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::NatsBus;
use super::api::{ask, code, order};
use crate::ports::BusError;

/// Where AX_TRIGGERS keeps the id of the database that it belongs to.
const DATABASE_ID: &str = "ax_database_id";
/// Looks at one stream before giving up: other nodes may be making it at the same time.
const ATTEMPTS: u32 = 20;
const PAUSE: Duration = Duration::from_millis(50);

const SECOND: u64 = 1_000_000_000;
const DAY: u64 = 24 * 3600 * SECOND;
const MIB: u64 = 1024 * 1024;
/// A server without room for a stream's size is asked for half of it, down to this.
const LEAST_BYTES: u64 = 64 * MIB;
/// Time for which a message id is remembered.
const DUPLICATE_WINDOW: u64 = 120 * SECOND;

/// A stream as ax wants it.
struct Plan {
    name: String,
    /// Settings that ax relies on.
    fixed: Map<String, Value>,
    /// Settings at creation.
    initial: Map<String, Value>,
}

#[derive(Deserialize)]
struct Info {
    config: Map<String, Value>,
}

/// Names of `wanted` settings that `there` does not have. Servers leave out what is false or empty.
pub(super) fn differences(there: &Map<String, Value>, wanted: &Map<String, Value>) -> Vec<String> {
    let differs = |(name, want): &(&String, &Value)| match (there.get(*name), want) {
        (Some(Value::Object(there)), Value::Object(want)) => !differences(there, want).is_empty(),
        (Some(there), want) => there != *want,
        (None, Value::Bool(false)) => false,
        (None, want) => want.as_u64() != Some(0),
    };
    wanted.iter().filter(differs).map(|(name, _)| name.clone()).collect()
}

/// Lays `wanted` over `there`.
pub(super) fn merge(there: &mut Map<String, Value>, wanted: Map<String, Value>) {
    for (name, want) in wanted {
        match (there.get_mut(&name), want) {
            (Some(Value::Object(there)), Value::Object(want)) => merge(there, want),
            (_, want) => {
                there.insert(name, want);
            }
        }
    }
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

impl NatsBus {
    /// Makes or corrects every stream and bucket, AX_TRIGGERS first: it says whether this is our installation at all.
    pub(super) async fn prepare_topology(&self, database_id: Uuid) -> Result<(), BusError> {
        for plan in self.plans(database_id) {
            self.ensure(&plan, database_id).await?;
        }
        Ok(())
    }

    fn plans(&self, database_id: Uuid) -> Vec<Plan> {
        let prefix = &self.config.prefix;
        let mut event_subjects = vec![prefix.all_events()];
        event_subjects.extend(prefix.server_events());
        let stream = |name: String, role: &str, description: &str, fixed: Value, initial: Value| {
            let mut plan = Plan { name, fixed: object(fixed), initial: object(initial) };
            merge(&mut plan.fixed, object(json!({ "metadata": { "ax_role": role } })));
            plan.initial.insert("description".into(), description.into());
            plan.initial.entry("storage").or_insert_with(|| "file".into());
            plan
        };
        let bucket = |name: &str, description: &str, more: Value| {
            let bucket = prefix.bucket(name);
            let mut fixed = object(json!({
                "subjects": [format!("$KV.{bucket}.>")], "retention": "limits", "discard": "new",
                "max_msgs_per_subject": 1, "allow_rollup_hdrs": true, "deny_delete": true, "allow_direct": true,
            }));
            merge(&mut fixed, object(more));
            stream(format!("KV_{bucket}"), name, description, Value::Object(fixed), json!({}))
        };
        let lease_ttl = u64::try_from(self.config.lease_ttl.as_nanos()).unwrap_or(u64::MAX);
        let results = prefix.bucket("results");
        vec![
            stream(
                prefix.triggers_stream(),
                "triggers",
                "one message for each run that waits for a worker or is with one",
                json!({
                    "subjects": [prefix.all_triggers()], "retention": "workqueue", "storage": "file",
                    "allow_direct": true, "deny_purge": true, "deny_delete": false,
                    "duplicate_window": DUPLICATE_WINDOW,
                    // A message leaves by an ack or by the scheduler's hand, never by age or to make room.
                    "max_age": 0, "discard": "new",
                    "metadata": { DATABASE_ID: database_id.to_string() },
                }),
                json!({}),
            ),
            stream(
                prefix.events_stream(),
                "events",
                "what workers tell about runs, and the server about triggers, in one order",
                json!({
                    "subjects": event_subjects, "retention": "limits", "discard": "old", "allow_direct": true,
                    "duplicate_window": DUPLICATE_WINDOW,
                }),
                // The history is in SQL; this is what a scheduler that was away for a day can catch up on.
                json!({ "max_age": DAY, "max_bytes": 2048 * MIB }),
            ),
            stream(
                prefix.logs_stream(),
                "logs",
                "log lines of runs",
                json!({ "subjects": [prefix.all_logs()], "retention": "limits", "discard": "old", "allow_direct": true }),
                json!({ "max_age": 7 * DAY, "max_bytes": 1024 * MIB }),
            ),
            stream(
                prefix.dead_stream(),
                "dead",
                "copies of triggers whose deliveries are used up, for operators",
                json!({ "subjects": [prefix.all_dead()], "retention": "limits", "discard": "old", "allow_direct": true }),
                json!({ "max_age": 30 * DAY }),
            ),
            bucket(
                "leader",
                "who leads: a lease, renewed by compare-and-set, that dies with the bucket's max_age",
                json!({ "max_age": lease_ttl, "duplicate_window": lease_ttl.min(DUPLICATE_WINDOW), "storage": "file" }),
            ),
            bucket(
                "dedup",
                "which run an idempotency key means, for its window",
                json!({ "allow_msg_ttl": true, "subject_delete_marker_ttl": 60 * SECOND }),
            ),
            bucket("dag", "upstream tasks that a run still waits for", json!({})),
            bucket("groups", "consumers that the workers of a group pull", json!({})),
            bucket(
                "workers",
                "workers that live, told by themselves every 3 s",
                json!({ "max_age": 10 * SECOND, "duplicate_window": 10 * SECOND }),
            ),
            stream(
                format!("OBJ_{results}"),
                "results",
                "results too large for an event",
                json!({
                    "subjects": [format!("$O.{results}.C.>"), format!("$O.{results}.M.>")], "retention": "limits",
                    "discard": "new", "allow_rollup_hdrs": true, "allow_direct": true,
                }),
                json!({}),
            ),
        ]
    }

    /// Three where the server is one of a cluster, as long as the cluster has that many.
    fn replicas(&self) -> u64 {
        if self.api.client().server_info().cluster.is_some() { 3 } else { 1 }
    }

    async fn ensure(&self, plan: &Plan, database_id: Uuid) -> Result<(), BusError> {
        let name = &plan.name;
        let mut corrections = 0;
        for _ in 0..ATTEMPTS {
            let there = match ask::<Info>(&self.api, "stream_info", format!("STREAM.INFO.{name}"), &json!({})).await? {
                Ok(info) => info.config,
                Err(error) if error.is(code::STREAM_NOT_FOUND) => {
                    if self.create(plan).await? {
                        return Ok(());
                    }
                    // Another node was faster, and perhaps is not done yet.
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
                Err(error) => return Err(error.into_bus_error(&format!("ask about the stream {name}"))),
            };
            check_owner(name, &there, database_id)?;
            let differing = differences(&there, &plan.fixed);
            if let Some(setting) = differing.iter().find(|s| ["retention", "storage"].contains(&s.as_str())) {
                return Err(BusError::Incompatible(format!(
                    "the stream {name} has {setting} {}, ax needs {}, and NATS cannot change it: remove the stream or \
                     choose another prefix",
                    there.get(setting).unwrap_or(&Value::Null),
                    plan.fixed[setting],
                )));
            }
            if differing.is_empty() {
                return self.raise_replicas(name, there).await;
            }
            if corrections == 2 {
                return Err(BusError::Incompatible(format!(
                    "the stream {name} does not keep the settings that ax needs: {}",
                    differing.join(", ")
                )));
            }
            corrections += 1;
            tracing::info!(stream = %name, settings = ?differing, "correcting a stream");
            let mut config = there;
            merge(&mut config, plan.fixed.clone());
            order(&self.api, "stream_update", format!("STREAM.UPDATE.{name}"), &config)
                .await?
                .map_err(|error| error.into_bus_error(&format!("correct {} of {name}", differing.join(", "))))?;
            // Looks again: two installations may be claiming the stream at the same time.
        }
        Err(BusError::Unavailable(format!("the stream {name} is still being made")))
    }

    /// False when a stream of that name is there by now.
    async fn create(&self, plan: &Plan) -> Result<bool, BusError> {
        let name = &plan.name;
        let mut config = plan.initial.clone();
        merge(&mut config, plan.fixed.clone());
        config.insert("name".into(), name.as_str().into());
        config.insert("num_replicas".into(), self.replicas().into());
        loop {
            match order(&self.api, "stream_create", format!("STREAM.CREATE.{name}"), &config).await? {
                Ok(()) => return Ok(true),
                Err(error) if error.is(code::STREAM_NAME_IN_USE) => return Ok(false),
                Err(error)
                    if (error.is(code::CLUSTER_NO_PEERS) || error.is(code::REPLICAS_NOT_SUPPORTED))
                        && config["num_replicas"] != 1 =>
                {
                    tracing::warn!(stream = %name, %error, "no room for three replicas: making one");
                    config.insert("num_replicas".into(), 1.into());
                }
                Err(error) if error.is(code::STORAGE_EXCEEDED) => {
                    let bytes = config.get("max_bytes").and_then(Value::as_u64).unwrap_or(0) / 2;
                    if bytes < LEAST_BYTES {
                        return Err(error.into_bus_error(&format!("create the stream {name}")));
                    }
                    tracing::warn!(stream = %name, max_bytes = bytes, "the server has less room: making it smaller");
                    config.insert("max_bytes".into(), bytes.into());
                }
                Err(error) => return Err(error.into_bus_error(&format!("create the stream {name}"))),
            }
        }
    }

    async fn raise_replicas(&self, name: &str, there: Map<String, Value>) -> Result<(), BusError> {
        let wanted = self.replicas();
        if there.get("num_replicas").and_then(Value::as_u64).is_none_or(|replicas| replicas >= wanted) {
            return Ok(());
        }
        let mut config = there;
        config.insert("num_replicas".into(), wanted.into());
        match order(&self.api, "stream_update", format!("STREAM.UPDATE.{name}"), &config).await? {
            Ok(()) => tracing::info!(stream = %name, replicas = wanted, "gave a stream more replicas"),
            Err(error) => tracing::warn!(stream = %name, %error, "a stream has fewer than three replicas"),
        }
        Ok(())
    }
}

/// Refuses a stream of another database. One without an owner is taken over by the correction.
fn check_owner(name: &str, there: &Map<String, Value>, database_id: Uuid) -> Result<(), BusError> {
    let owner = there.get("metadata").and_then(|metadata| metadata.get(DATABASE_ID)).and_then(Value::as_str);
    match owner {
        Some(owner) if owner != database_id.to_string() => Err(BusError::Incompatible(format!(
            "the stream {name} belongs to the database {owner}, and this node uses the database {database_id}: use \
             that database, or another prefix"
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_leaves_out_is_false_or_zero_and_what_it_adds_is_left_alone() {
        let there = object(json!({ "a": 1, "metadata": { "mine": "x", "_nats.level": "2" }, "extra": true }));
        let wanted = object(json!({ "a": 1, "b": false, "c": 0, "metadata": { "mine": "x" } }));
        assert!(differences(&there, &wanted).is_empty());
        let wanted = object(json!({ "a": 2, "b": true, "c": 5, "metadata": { "mine": "y" } }));
        assert_eq!(differences(&there, &wanted), ["a", "b", "c", "metadata"]);
        let mut merged = there;
        merge(&mut merged, wanted);
        assert_eq!(
            Value::Object(merged),
            json!({ "a": 2, "b": true, "c": 5, "extra": true, "metadata": { "mine": "y", "_nats.level": "2" } })
        );
    }
}
