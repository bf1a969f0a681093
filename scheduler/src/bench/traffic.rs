//! What went over NATS and what the database did: counters of others, read before and after.
//!
//! A counter that cannot be read is told as absent, never as zero.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;
use sqlx::{Connection as _, PgConnection};

const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// Whom to ask.
#[derive(Debug, Clone, Default)]
pub(super) struct Counted {
    /// The nats-server's monitor.
    pub(super) nats_monitor: Option<String>,
    /// The nodes' addresses.
    pub(super) nodes: Vec<String>,
    /// The Postgres database.
    pub(super) postgres: Option<String>,
}

/// Counters at one moment.
#[derive(Debug, Clone, Default)]
pub(super) struct Counts {
    nats: Option<[u64; 4]>,
    operations: Option<BTreeMap<String, u64>>,
    transactions: Option<u64>,
}

/// What the nats-server counted from and to its clients; messages between its own parts are not among it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct NatsTraffic {
    pub(super) messages_in: u64,
    pub(super) messages_out: u64,
    pub(super) bytes_in: u64,
    pub(super) bytes_out: u64,
    /// Messages in and out for each instant that was owed.
    pub(super) messages_per_run: f64,
    /// Bytes in and out for each instant that was owed.
    pub(super) bytes_per_run: f64,
}

/// What was asked of the database.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct SqlTraffic {
    /// Operations of the scheduler's store by name; one is one statement or a short transaction.
    pub(super) operations: BTreeMap<String, u64>,
    pub(super) operations_per_run: f64,
    /// Transactions that Postgres committed.
    pub(super) transactions: Option<u64>,
}

impl Counted {
    /// Reads every counter.
    pub(super) async fn read(&self) -> Counts {
        let (nats, operations, transactions) =
            tokio::join!(self.read_nats(), self.read_operations(), self.read_transactions());
        Counts { nats, operations, transactions }
    }

    async fn read_nats(&self) -> Option<[u64; 4]> {
        let text = get(&format!("{}/varz", self.nats_monitor.as_ref()?)).await?;
        let varz: Value = serde_json::from_str(&text).ok()?;
        let number = |key: &str| varz[key].as_u64();
        Some([number("in_msgs")?, number("out_msgs")?, number("in_bytes")?, number("out_bytes")?])
    }

    async fn read_operations(&self) -> Option<BTreeMap<String, u64>> {
        if self.nodes.is_empty() {
            return None;
        }
        let mut sum = BTreeMap::new();
        for node in &self.nodes {
            for (operation, count) in operations(&get(&format!("{node}/metrics")).await?) {
                *sum.entry(operation).or_insert(0) += count;
            }
        }
        Some(sum)
    }

    async fn read_transactions(&self) -> Option<u64> {
        let url = self.postgres.as_ref()?;
        let asked = async {
            let mut connection = PgConnection::connect(url).await.ok()?;
            let statement = "select xact_commit from pg_stat_database where datname = current_database()";
            let count: i64 = sqlx::query_scalar(statement).fetch_one(&mut connection).await.ok()?;
            let _ = connection.close().await;
            u64::try_from(count).ok()
        };
        tokio::time::timeout(ANSWER_WITHIN, asked).await.ok()?
    }
}

impl Counts {
    pub(super) fn nats_since(&self, before: &Self, runs: u64) -> Option<NatsTraffic> {
        let (now, before) = (self.nats?, before.nats?);
        let grown = |index: usize| now[index].saturating_sub(before[index]);
        Some(NatsTraffic {
            messages_in: grown(0),
            messages_out: grown(1),
            bytes_in: grown(2),
            bytes_out: grown(3),
            messages_per_run: per(grown(0) + grown(1), runs),
            bytes_per_run: per(grown(2) + grown(3), runs),
        })
    }

    pub(super) fn sql_since(&self, before: &Self, runs: u64) -> Option<SqlTraffic> {
        let (now, before_of) = (self.operations.as_ref()?, before.operations.as_ref()?);
        let operations: BTreeMap<String, u64> = now
            .iter()
            .map(|(name, count)| (name.clone(), count - before_of.get(name).copied().unwrap_or(0).min(*count)))
            .filter(|(_, count)| *count > 0)
            .collect();
        let transactions = self.transactions.zip(before.transactions).map(|(now, then)| now.saturating_sub(then));
        let operations_per_run = per(operations.values().sum(), runs);
        Some(SqlTraffic { operations, operations_per_run, transactions })
    }
}

fn per(count: u64, runs: u64) -> f64 {
    (count as f64 / runs.max(1) as f64 * 1000.0).round() / 1000.0
}

async fn get(url: &str) -> Option<String> {
    let client = reqwest::Client::builder().timeout(ANSWER_WITHIN).no_proxy().build().ok()?;
    let answer = client.get(url).send().await.ok()?.error_for_status().ok()?;
    answer.text().await.ok()
}

/// Counts of `ax_sql_seconds` by operation, out of the text of `/metrics`.
fn operations(metrics: &str) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for line in metrics.lines() {
        let Some(rest) = line.strip_prefix("ax_sql_seconds_count{") else { continue };
        let Some((labels, count)) = rest.rsplit_once("} ") else { continue };
        let operation = labels.split(',').find_map(|label| label.strip_prefix("op=\"")?.strip_suffix('"'));
        if let (Some(operation), Ok(count)) = (operation, count.trim().parse::<u64>()) {
            *counts.entry(operation.to_owned()).or_insert(0) += count;
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_read_from_the_text_of_metrics() {
        let text = "# HELP ax_sql_seconds …\nax_sql_seconds_bucket{op=\"plan\",db=\"postgres\",le=\"1\"} 3\n\
                    ax_sql_seconds_count{op=\"plan\",db=\"postgres\"} 4\nax_sql_seconds_count{db=\"postgres\",op=\"flush\"} 9\n";
        let counts = operations(text);
        assert_eq!(counts, BTreeMap::from([("plan".to_owned(), 4), ("flush".to_owned(), 9)]));
    }

    #[test]
    fn what_cannot_be_read_is_absent_and_what_did_not_grow_is_left_out() {
        let counts = |nats, plan| Counts {
            nats,
            operations: Some(BTreeMap::from([("plan".to_owned(), plan), ("task".to_owned(), 1)])),
            transactions: None,
        };
        let (before, after) = (counts(Some([1, 2, 3, 4]), 5), counts(Some([11, 22, 303, 404]), 15));
        let nats = after.nats_since(&before, 10).unwrap();
        assert_eq!((nats.messages_in, nats.messages_out, nats.messages_per_run), (10, 20, 3.0));
        let sql = after.sql_since(&before, 10).unwrap();
        assert_eq!((sql.operations, sql.transactions), (BTreeMap::from([("plan".to_owned(), 10)]), None));
        assert!(counts(None, 5).nats_since(&before, 10).is_none());
    }
}
