//! Connecting: addresses, options, and what a server must be to carry ax.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_nats::{Client, ConnectError, ConnectErrorKind, ConnectOptions, Event, ServerAddr};
use serde::Deserialize;
use serde_json::json;

use super::api::{Failure, ask};
use super::{NatsBus, NatsConfig};
use crate::ports::BusError;

/// All that connecting may take, name resolution included.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// What one address may take.
const ADDRESS_WITHIN: Duration = Duration::from_secs(2);
/// Three unanswered pings show a connection that is open and dead.
const PING_EVERY: Duration = Duration::from_secs(2);
/// The longest pause between two attempts to reconnect.
const RECONNECT_AT_MOST: Duration = Duration::from_secs(1);
/// Messages that a subscription may hold before they are dropped: more than flow control lets through.
const SUBSCRIPTION_CAPACITY: usize = 256 * 1024;
/// Nobody can listen on port 0.
const NOWHERE: &str = "nats://127.0.0.1:0";
/// Lowest level of the JetStream API: TTL of single messages, delete markers, metadata.
const API_LEVEL: u64 = 2;

/// Since when the connection has been up.
#[derive(Debug, Clone, Default)]
pub(super) struct Uptime(Arc<Mutex<Option<Instant>>>);

impl Uptime {
    pub(super) fn elapsed(&self) -> Duration {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).map_or(Duration::ZERO, |since| since.elapsed())
    }

    fn set(&self, since: Option<Instant>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = since;
    }
}

/// Opens the connection that everything but publishing goes over. It reconnects for ever, at once the first time.
pub(super) async fn general(config: &NatsConfig, uptime: &Uptime) -> Result<Client, BusError> {
    let seen = uptime.clone();
    let options = options(config).await?.event_callback(move |event| {
        match event {
            Event::Connected => seen.set(Some(Instant::now())),
            Event::Disconnected | Event::Closed => seen.set(None),
            _ => {}
        }
        std::future::ready(())
    });
    open(options, addresses(config)?).await
}

/// Opens a connection that is used until it is lost and never again.
///
/// async-nats has no such setting: `max_reconnects(0)` means unlimited, and with 1 it still comes back while the
/// server is up. So its list of servers is replaced, once connected, by an address where nobody can listen.
pub(super) async fn unrepeatable(config: &NatsConfig) -> Result<Client, BusError> {
    let options = options(config)
        .await?
        .name(format!("{} publisher", config.name))
        .ignore_discovered_servers()
        .max_reconnects(Some(1));
    let mut last = BusError::Unavailable("no address of NATS is configured".into());
    // One address at a time, since max_reconnects counts attempts at any of them.
    for address in addresses(config)? {
        match open(options.clone(), vec![address]).await {
            Ok(client) => return seal(client).await,
            Err(error) => last = error,
        }
    }
    Err(last)
}

async fn seal(client: Client) -> Result<Client, BusError> {
    let nowhere: Vec<ServerAddr> = NOWHERE.parse().into_iter().collect();
    let sealed = tokio::time::timeout(ADDRESS_WITHIN, client.set_server_pool(nowhere.as_slice())).await;
    // Had it come back before it was sealed, nothing would have been published over it yet; better none than a doubtful one.
    let once = client.statistics().connects.load(Ordering::Relaxed) == 1;
    match sealed {
        Ok(Ok(())) if once => Ok(client),
        _ => Err(BusError::Unavailable("the publishing connection was lost while it was opened".into())),
    }
}

async fn options(config: &NatsConfig) -> Result<ConnectOptions, BusError> {
    let mut options = ConnectOptions::new()
        .name(&config.name)
        .connection_timeout(ADDRESS_WITHIN)
        .ping_interval(PING_EVERY)
        .subscription_capacity(SUBSCRIPTION_CAPACITY)
        .reconnect_delay_callback(reconnect_delay);
    if let Some(file) = &config.creds {
        options = options.credentials_file(file).await.map_err(|error| {
            BusError::Refused(format!("the NATS credentials file {} cannot be used: {error}", file.display()))
        })?;
    }
    // async-nats ignores what stands before the @ of an address.
    if let Some(address) = addresses(config)?.iter().find(|address| address.has_user_pass()) {
        let user = percent_decoded(address.username().unwrap_or_default());
        options = match address.password() {
            Some(password) => options.user_and_password(user, percent_decoded(password)),
            None => options.token(user),
        };
    }
    Ok(options)
}

fn reconnect_delay(attempts: usize) -> Duration {
    let doublings = u32::try_from(attempts.saturating_sub(1)).unwrap_or(u32::MAX);
    match doublings {
        0 => Duration::ZERO,
        _ => Duration::from_millis(1).saturating_mul(2_u32.saturating_pow(doublings)).min(RECONNECT_AT_MOST),
    }
}

fn addresses(config: &NatsConfig) -> Result<Vec<ServerAddr>, BusError> {
    config
        .urls
        .iter()
        .flat_map(|urls| urls.split(','))
        .map(str::trim)
        .filter(|url| !url.is_empty())
        .map(|url| {
            let address: ServerAddr =
                url.parse().map_err(|error| BusError::Refused(format!("not an address of NATS: {error}")))?;
            if address.host().is_empty() {
                return Err(BusError::Refused("not an address of NATS: it names no host".into()));
            }
            Ok(address)
        })
        .collect()
}

async fn open(options: ConnectOptions, addresses: Vec<ServerAddr>) -> Result<Client, BusError> {
    if addresses.is_empty() {
        return Err(BusError::Refused("no address of NATS is configured".into()));
    }
    // Without user and password.
    let shown: Vec<String> = addresses.iter().map(|a| format!("{}://{}:{}", a.scheme(), a.host(), a.port())).collect();
    let shown = shown.join(", ");
    match tokio::time::timeout(CONNECT_WITHIN, options.connect(addresses.as_slice())).await {
        Ok(Ok(client)) => Ok(client),
        Ok(Err(error)) => Err(refusal(&shown, &error)),
        Err(_) => Err(BusError::Unavailable(format!("no answer from {shown} within {CONNECT_WITHIN:?}"))),
    }
}

fn refusal(shown: &str, error: &ConnectError) -> BusError {
    let cause = std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
    match error.kind() {
        ConnectErrorKind::Authentication | ConnectErrorKind::AuthorizationViolation => {
            BusError::Refused(format!("{shown} refused the credentials: {cause}"))
        }
        ConnectErrorKind::ServerParse => BusError::Refused(format!("{shown} is not an address of NATS: {cause}")),
        _ => BusError::Unavailable(format!("cannot connect to {shown}: {cause} (AX_NATS_URL says where it is)")),
    }
}

fn percent_decoded(text: &str) -> String {
    percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned()
}

#[derive(Deserialize)]
struct Account {
    api: AccountApi,
}

#[derive(Deserialize)]
struct AccountApi {
    #[serde(default)]
    level: u64,
}

impl NatsBus {
    /// Checks version, JetStream and the level of its API.
    pub(super) async fn check_server(&self) -> Result<(), BusError> {
        let info = self.api.client().server_info();
        let place = format!("{}:{}", info.host, info.port);
        if !version_is_supported(&info.version) {
            return Err(BusError::Incompatible(format!(
                "nats-server {} at {place} is too old or a version with known faults: ax needs 2.12.9 or a later \
                 2.12, or 2.14.1 or later",
                info.version
            )));
        }
        let off = || {
            BusError::Incompatible(format!(
                "JetStream is not enabled on the nats-server at {place}: start it with -js, or add a jetstream block \
                 to its configuration"
            ))
        };
        let account: Account = match ask(&self.api, "account", "INFO", &json!({})).await {
            Ok(Ok(account)) => account,
            Ok(Err(error)) if error.is_jetstream_off() => return Err(off()),
            Ok(Err(error)) => return Err(error.into_bus_error("ask about JetStream")),
            Err(Failure::NoResponders) => return Err(off()),
            Err(failure) => return Err(failure.into()),
        };
        if account.api.level < API_LEVEL {
            return Err(BusError::Incompatible(format!(
                "JetStream of nats-server {} at {place} has API level {}: ax needs {API_LEVEL}",
                info.version, account.api.level
            )));
        }
        Ok(())
    }
}

/// 2.12 from 2.12.9 on, else 2.14.1 or later.
fn version_is_supported(version: &str) -> bool {
    let mut parts = version.split(['.', '-', '+']).map(|part| part.parse::<u32>().unwrap_or(0));
    let mut next = || parts.next().unwrap_or(0);
    let version = (next(), next(), next());
    version >= (2, 14, 1) || ((2, 12, 9)..(2, 13, 0)).contains(&version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_versions_known_to_work_are_accepted() {
        for good in ["2.12.9", "2.12.15", "2.14.1", "2.14.1-RC.2", "2.15.1", "3.0.0"] {
            assert!(version_is_supported(good), "{good}");
        }
        for bad in ["2.9.10", "2.10.29", "2.11.8", "2.12.8", "2.13.0", "2.13.9", "2.14.0", "", "dev"] {
            assert!(!version_is_supported(bad), "{bad}");
        }
    }

    #[test]
    fn the_server_of_the_compose_file_is_one_of_them() {
        let compose = include_str!("../../../../docker-compose.yml");
        let tag = compose.split_once("image: nats:").and_then(|(_, rest)| rest.split(['-', '\n']).next());
        assert!(tag.is_some_and(|tag| tag.split('.').count() == 3 && version_is_supported(tag)), "{tag:?}");
    }

    #[test]
    fn credentials_in_an_address_may_be_escaped() {
        assert_eq!(percent_decoded("p%40ss%2Fw%C3%B6rd%"), "p@ss/wörd%");
    }

    #[test]
    fn reconnecting_begins_at_once_and_never_pauses_long() {
        assert_eq!(reconnect_delay(1), Duration::ZERO);
        assert_eq!(reconnect_delay(2), Duration::from_millis(2));
        assert_eq!(reconnect_delay(usize::MAX), RECONNECT_AT_MOST);
    }
}
