//! Streams and their messages, as their leaders have them.

use std::collections::BTreeMap;

use ax_shared::Timestamp;
use data_encoding::BASE64;
use serde::Deserialize;
use serde_json::{Value, json};

use super::NatsBus;
use super::api::{Api, ask, code};
use crate::ports::{BusError, StreamMessage, StreamState};

#[derive(Deserialize)]
struct Info {
    created: String,
    state: InfoState,
}

#[derive(Deserialize)]
struct InfoState {
    messages: u64,
    first_seq: u64,
    last_seq: u64,
}

#[derive(Deserialize)]
struct Got {
    message: Stored,
}

#[derive(Deserialize)]
struct Stored {
    subject: String,
    seq: u64,
    #[serde(default)]
    hdrs: String,
    #[serde(default)]
    data: String,
    time: String,
}

impl Stored {
    fn read(self) -> Option<StreamMessage> {
        let headers = BASE64.decode(self.hdrs.as_bytes()).ok()?;
        Some(StreamMessage {
            seq: self.seq,
            subject: self.subject,
            headers: parse_headers(std::str::from_utf8(&headers).ok()?),
            payload: BASE64.decode(self.data.as_bytes()).ok()?.into(),
            at: self.time.parse::<Timestamp>().ok()?,
        })
    }
}

/// Reads a header block, `NATS/1.0` line first; of a repeated header the first value.
fn parse_headers(block: &str) -> BTreeMap<String, String> {
    let mut headers = BTreeMap::new();
    for (name, value) in block.lines().skip(1).filter_map(|line| line.split_once(':')) {
        headers.entry(name.to_owned()).or_insert_with(|| value.trim().to_owned());
    }
    headers
}

/// Reads a message of a stream from the stream's leader. `which` is `{"seq": …}`, `{"last_by_subj": …}`
/// or `{"seq": …, "next_by_subj": …}`.
pub(super) async fn message(api: &Api, stream: &str, which: &Value) -> Result<Option<StreamMessage>, BusError> {
    match ask::<Got>(api, "message_get", format!("STREAM.MSG.GET.{stream}"), which).await? {
        Ok(got) => match got.message.read() {
            Some(message) => Ok(Some(message)),
            None => Err(BusError::Refused(format!("a message of {stream} is not readable"))),
        },
        Err(error) if error.is(code::MESSAGE_NOT_FOUND) => Ok(None),
        Err(error) => Err(error.into_bus_error(&format!("read a message of {stream}"))),
    }
}

impl NatsBus {
    pub(super) async fn stream_state(&self, stream: &str) -> Result<StreamState, BusError> {
        match ask::<Info>(&self.api, "stream_info", format!("STREAM.INFO.{stream}"), &json!({})).await? {
            Ok(info) => Ok(StreamState {
                incarnation: info.created,
                first_seq: info.state.first_seq,
                last_seq: info.state.last_seq,
                messages: info.state.messages,
            }),
            Err(error) => Err(error.into_bus_error(&format!("ask about the stream {stream}"))),
        }
    }

    pub(super) async fn trigger_by_seq(&self, seq: u64) -> Result<Option<StreamMessage>, BusError> {
        message(&self.api, &self.config.prefix.triggers_stream(), &json!({ "seq": seq })).await
    }

    pub(super) async fn trigger_from(&self, seq: u64) -> Result<Option<StreamMessage>, BusError> {
        let which = json!({ "seq": seq, "next_by_subj": ">" });
        message(&self.api, &self.config.prefix.triggers_stream(), &which).await
    }

    pub(super) async fn last_trigger_of(&self, subject: &str) -> Result<Option<StreamMessage>, BusError> {
        message(&self.api, &self.config.prefix.triggers_stream(), &json!({ "last_by_subj": subject })).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_repeated_header_the_first_value_counts() {
        let headers = parse_headers("NATS/1.0\r\nA: 1\r\nB:two: 2\r\nA: 3\r\n\r\n");
        assert_eq!(
            headers.into_iter().collect::<Vec<_>>(),
            [("A".to_owned(), "1".to_owned()), ("B".to_owned(), "two: 2".to_owned())]
        );
    }
}
