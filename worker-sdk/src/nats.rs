//! Where NATS is and how to sign on.

use std::path::PathBuf;
use std::time::Duration;

use async_nats::{Client, ConnectOptions, ServerAddr};

use crate::WorkerError;

const DEFAULT_URL: &str = "nats://127.0.0.1:4222";
const ADDRESS_WITHIN: Duration = Duration::from_secs(2);
const PING_EVERY: Duration = Duration::from_secs(5);
const RECONNECT_AT_MOST: Duration = Duration::from_secs(1);

/// Where NATS is and how to sign on. An address is enough in most cases:
///
/// ```
/// use ax_worker::{Nats, Worker};
///
/// let worker = Worker::new("nats://127.0.0.1:4222", "payment");
/// let worker = Worker::new(Nats::from_env(), "payment");
/// ```
#[derive(Clone)]
pub struct Nats {
    urls: String,
    options: Option<ConnectOptions>,
    credentials: Option<PathBuf>,
}

impl std::fmt::Debug for Nats {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Options may hold a password too.
        let urls = masked(&self.urls);
        f.debug_struct("Nats").field("urls", &urls).field("credentials", &self.credentials).finish_non_exhaustive()
    }
}

impl Nats {
    /// One address or several separated by commas, with `user:password@` or `token@` where the server wants them.
    pub fn new(urls: impl Into<String>) -> Self {
        Self { urls: urls.into(), options: None, credentials: None }
    }

    /// The addresses in `NATS_URL`, else `nats://127.0.0.1:4222`; the credentials file in `NATS_CREDS`, if any.
    #[must_use]
    pub fn from_env() -> Self {
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let credentials = set("NATS_CREDS").map(PathBuf::from);
        Self { credentials, ..Self::new(set("NATS_URL").unwrap_or_else(|| DEFAULT_URL.into())) }
    }

    /// Signs on with a credentials file (JWT and nkey).
    #[must_use]
    pub fn credentials_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.credentials = Some(path.into());
        self
    }

    /// Connects with options of your own (TLS, nkeys …) in place of those that suit a worker: a ping every 5 s, and
    /// reconnecting without delay at first, then at least once a second.
    #[must_use]
    pub fn options(mut self, options: ConnectOptions) -> Self {
        self.options = Some(options);
        self
    }

    /// Connects. The connection comes back for ever.
    pub(crate) async fn connect(&self) -> Result<Client, WorkerError> {
        let servers = self
            .urls
            .split(',')
            .map(|url| url.trim().parse::<ServerAddr>().map_err(|e| WorkerError::Address(masked(&self.urls), e)))
            .collect::<Result<Vec<_>, _>>()?;
        let mut options = self.options.clone().unwrap_or_else(|| {
            ConnectOptions::new()
                .name("ax worker")
                .connection_timeout(ADDRESS_WITHIN)
                .ping_interval(PING_EVERY)
                .reconnect_delay_callback(reconnect_delay)
        });
        // async-nats ignores what stands before the @ of an address.
        if let Some(server) = servers.iter().find(|server| server.has_user_pass()) {
            let user = percent_decoded(server.username().unwrap_or_default());
            options = match server.password() {
                Some(password) => options.user_and_password(user, percent_decoded(password)),
                None => options.token(user),
            };
        }
        if let Some(path) = &self.credentials {
            let read = options.credentials_file(path).await;
            options = read.map_err(|e| WorkerError::Credentials(path.clone(), e))?;
        }
        options.connect(servers).await.map_err(WorkerError::Connect)
    }
}

impl From<&str> for Nats {
    fn from(urls: &str) -> Self {
        Self::new(urls)
    }
}

impl From<String> for Nats {
    fn from(urls: String) -> Self {
        Self::new(urls)
    }
}

/// Addresses without what one signs on with. A password may contain a comma or an @, so everything up to the last @ goes,
/// but for the scheme.
fn masked(urls: &str) -> String {
    let Some(at) = urls.rfind('@') else { return urls.to_owned() };
    let (secret, rest) = urls.split_at(at);
    let scheme = secret.split_once("://").map(|(scheme, _)| scheme);
    match scheme.filter(|scheme| scheme.bytes().all(|b| b.is_ascii_alphabetic())) {
        Some(scheme) => format!("{scheme}://***{rest}"),
        None => format!("***{rest}"),
    }
}

fn reconnect_delay(attempts: usize) -> Duration {
    match u32::try_from(attempts.saturating_sub(1)).unwrap_or(u32::MAX) {
        0 => Duration::ZERO,
        doublings => Duration::from_millis(2_u64.saturating_pow(doublings)).min(RECONNECT_AT_MOST),
    }
}

fn percent_decoded(text: &str) -> String {
    percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_read_and_reconnecting_begins_at_once() {
        assert_eq!(percent_decoded("p%40ss%"), "p@ss%");
        assert_eq!((reconnect_delay(1), reconnect_delay(usize::MAX)), (Duration::ZERO, RECONNECT_AT_MOST));
    }

    #[tokio::test]
    async fn a_password_is_printed_neither_by_an_error_nor_by_debug() {
        for (urls, shown) in [
            ("nats://me:secret@a b", "nats://***@a b"),
            ("me:se,cret@a b", "***@a b"),
            ("nats://me:se@cret@a:1,tls://token-secret@b c", "nats://***@b c"),
        ] {
            let nats = Nats::new(urls);
            let error = nats.connect().await.unwrap_err();
            assert!(matches!(&error, WorkerError::Address(url, _) if url == shown), "{error}");
            let printed = format!("{error} {error:?} {nats:?}");
            assert!(!printed.contains("cret") && !printed.contains("me:"), "{printed}");
        }
    }

    #[tokio::test]
    async fn what_is_no_address_or_cannot_be_read_is_named() {
        let error = Nats::new("nats://a b").connect().await.unwrap_err();
        assert!(matches!(&error, WorkerError::Address(url, _) if url == "nats://a b"), "{error}");
        let error = Nats::new("127.0.0.1:1").credentials_file("/nowhere/x.creds").connect().await.unwrap_err();
        assert!(error.to_string().contains("/nowhere/x.creds"), "{error}");
    }
}
