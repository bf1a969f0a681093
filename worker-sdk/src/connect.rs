//! Connecting as suits a worker.

use std::time::Duration;

use async_nats::{Client, ConnectOptions, ServerAddr};

use crate::WorkerError;

const ADDRESS_WITHIN: Duration = Duration::from_secs(2);
const PING_EVERY: Duration = Duration::from_secs(5);
const RECONNECT_AT_MOST: Duration = Duration::from_secs(1);

/// Connects to NATS; the connection comes back for ever. `url` is one address or several separated by commas, with
/// `user:password@` or `token@` where the server wants them.
///
/// # Errors
/// [`WorkerError::Address`] for what is no address, [`WorkerError::Connect`] when no server answers within 2 s each.
pub async fn connect(url: &str) -> Result<Client, WorkerError> {
    let servers = url
        .split(',')
        .map(|url| url.trim().parse::<ServerAddr>().map_err(|error| WorkerError::Address(url.to_owned(), error)))
        .collect::<Result<Vec<_>, _>>()?;
    let mut options = ConnectOptions::new()
        .name("ax worker")
        .connection_timeout(ADDRESS_WITHIN)
        .ping_interval(PING_EVERY)
        .reconnect_delay_callback(reconnect_delay);
    // async-nats ignores what stands before the @ of an address.
    if let Some(server) = servers.iter().find(|server| server.has_user_pass()) {
        let user = percent_decoded(server.username().unwrap_or_default());
        options = match server.password() {
            Some(password) => options.user_and_password(user, percent_decoded(password)),
            None => options.token(user),
        };
    }
    options.connect(servers).await.map_err(WorkerError::Connect)
}

fn reconnect_delay(attempts: usize) -> Duration {
    match u32::try_from(attempts.saturating_sub(1)).unwrap_or(u32::MAX) {
        0 => Duration::ZERO,
        doublings => Duration::from_millis(2_u64.saturating_pow(doublings)).min(RECONNECT_AT_MOST),
    }
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let hex = (*first == b'%').then(|| tail.get(..2)).flatten().and_then(|hex| std::str::from_utf8(hex).ok());
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_read_and_reconnecting_begins_at_once() {
        assert_eq!(percent_decoded("p%40ss%"), "p@ss%");
        assert_eq!((reconnect_delay(1), reconnect_delay(usize::MAX)), (Duration::ZERO, RECONNECT_AT_MOST));
    }
}
