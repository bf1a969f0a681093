//! Configuration: flags, then `AX_*` variables, then `ax.toml`, then defaults; validated once into strong types.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use ax_shared::Prefix;
use serde::{Deserialize, Serialize};

use crate::app::NodeOptions;
use crate::bus::nats::NatsConfig;
use crate::loops::Settings;
use crate::telemetry::otel::OtelConfig;

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The file is not TOML, has an unknown key, or a value of the wrong type.
    #[error("{path}: {message}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong where.
        message: String,
    },
    /// A value breaks its rule.
    #[error("{key} = {value:?}: {rule}")]
    Value {
        /// The key.
        key: &'static str,
        /// What was given.
        value: String,
        /// The rule.
        rule: String,
    },
}

/// Everything that can be configured, each from a flag, a variable or the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// NATS, several addresses separated by commas [default: nats://127.0.0.1:4222]
    #[arg(long, env = "AX_NATS_URL", value_name = "URL", hide_env_values = true)]
    pub nats_url: Option<String>,
    /// NATS credentials file
    #[arg(long, env = "AX_NATS_CREDS", value_name = "FILE")]
    pub nats_creds: Option<PathBuf>,
    /// Database: postgres://… or sqlite://PATH [default: sqlite://.ax/ax.db]
    #[arg(long, env = "AX_DATABASE_URL", value_name = "URL", hide_env_values = true)]
    pub database_url: Option<String>,
    /// Address of the HTTP API; other than loopback it takes a token, see `ax token`; port 0 takes a free one [default: 127.0.0.1:8420]
    #[arg(long, env = "AX_HTTP_ADDR", value_name = "ADDR")]
    pub http_addr: Option<String>,
    /// Name of this node, unique among those that run [default: the host's name]
    #[arg(long, env = "AX_NODE_ID", value_name = "NAME")]
    pub node_id: Option<String>,
    /// What goes before every subject, stream and bucket [default: ax]
    #[arg(long, env = "AX_PREFIX", value_name = "PREFIX")]
    pub prefix: Option<String>,
    /// Lifetime of the lease, whole seconds from 2s on: after how long a frozen leader is replaced [default: 5s]
    #[arg(long, env = "AX_LEASE_TTL", value_name = "DURATION")]
    pub lease_ttl: Option<String>,
    /// How far ahead runs are committed, 500ms to 60s [default: 2s]
    #[arg(long, env = "AX_PLAN_HORIZON", value_name = "DURATION")]
    pub plan_horizon: Option<String>,
    /// How often the leader looks for what was missed, 1s to 1h [default: 60s]
    #[arg(long, env = "AX_SWEEP_INTERVAL", value_name = "DURATION")]
    pub sweep_interval: Option<String>,
    /// Refuse definitions that leave timeout, retries or dedup window to their defaults [default: false]
    #[arg(long, env = "AX_STRICT", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub strict: Option<bool>,
    /// What is logged, e.g. info or info,ax::run=warn [default: info]
    #[arg(long, env = "AX_LOG", value_name = "FILTER")]
    pub log: Option<String>,
    /// text or json [default: text on a terminal, json elsewhere]
    #[arg(long, env = "AX_LOG_FORMAT", value_name = "FORMAT")]
    pub log_format: Option<String>,
    /// For the commands that ask a server: where its API is [default: http://127.0.0.1:8420]
    #[arg(skip)]
    pub api_url: Option<String>,
    /// For the commands that ask a server: bearer token
    #[arg(skip)]
    pub token: Option<String>,
}

impl Layer {
    /// Reads a file; none named = `ax.toml` in the working directory, if there is one.
    ///
    /// # Errors
    /// It cannot be read or understood, or a named one is not there.
    pub fn from_file(named: Option<&Path>) -> Result<Self, ConfigError> {
        let path = named.unwrap_or(Path::new("ax.toml"));
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && named.is_none() => return Ok(Self::default()),
            Err(source) => return Err(ConfigError::Read { path: path.to_owned(), source }),
        };
        toml::from_str(&text)
            .map_err(|e| ConfigError::File { path: path.to_owned(), message: e.to_string().trim().to_owned() })
    }

    /// This layer, with what it leaves open taken from the one below.
    #[must_use]
    pub fn over(self, below: Self) -> Self {
        Self {
            nats_url: self.nats_url.or(below.nats_url),
            nats_creds: self.nats_creds.or(below.nats_creds),
            database_url: self.database_url.or(below.database_url),
            http_addr: self.http_addr.or(below.http_addr),
            node_id: self.node_id.or(below.node_id),
            prefix: self.prefix.or(below.prefix),
            lease_ttl: self.lease_ttl.or(below.lease_ttl),
            plan_horizon: self.plan_horizon.or(below.plan_horizon),
            sweep_interval: self.sweep_interval.or(below.sweep_interval),
            strict: self.strict.or(below.strict),
            log: self.log.or(below.log),
            log_format: self.log_format.or(below.log_format),
            api_url: self.api_url.or(below.api_url),
            token: self.token.or(below.token),
        }
    }
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// The effective configuration of a server.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Addresses of NATS. Defaults to `nats://127.0.0.1:4222`.
    pub nats_urls: Vec<String>,
    /// Credentials file.
    pub nats_creds: Option<PathBuf>,
    /// The database. Defaults to `sqlite://.ax/ax.db`.
    pub database_url: String,
    /// Whether the database was named rather than left to its default.
    pub database_given: bool,
    /// Whether NATS was named rather than left to its default.
    pub nats_given: bool,
    /// Address of the HTTP API. Defaults to 127.0.0.1:8420.
    pub http_addr: SocketAddr,
    /// Name of this node. Defaults to the host's name.
    pub node_id: String,
    /// Goes before every subject, stream and bucket. Defaults to `ax`.
    pub prefix: Prefix,
    /// Lifetime of the lease. Defaults to 5 s.
    pub lease_ttl: Duration,
    /// How far ahead runs are committed. Defaults to 2 s.
    pub plan_horizon: Duration,
    /// How often the leader looks for what was missed. Defaults to 60 s.
    pub sweep_interval: Duration,
    /// Whether definitions that leave important fields to their defaults are refused. Defaults to false.
    pub strict: bool,
    /// What is logged. Defaults to `info`.
    pub log: String,
    /// How log lines look; none = by what standard error is.
    pub log_format: Option<LogFormat>,
    /// Where traces go, from the standard variables `OTEL_*`. Defaults to nowhere.
    pub otel: OtelConfig,
}

impl ServerConfig {
    /// Checks a merged layer.
    ///
    /// # Errors
    /// The first value that breaks its rule, naming key and rule.
    pub fn new(layer: Layer) -> Result<Self, ConfigError> {
        let nats_given = layer.nats_url.is_some();
        let nats = layer.nats_url.unwrap_or_else(|| "nats://127.0.0.1:4222".into());
        let nats_urls: Vec<String> = nats.split(',').map(|u| u.trim().to_owned()).filter(|u| !u.is_empty()).collect();
        if nats_urls.is_empty() {
            return Err(refuse("nats_url", nats, "must name at least one address"));
        }
        let schemes = ["nats://", "tls://", "ws://", "wss://"];
        if let Some(other) =
            nats_urls.iter().find(|u| u.contains("://") && !schemes.iter().any(|scheme| u.starts_with(scheme)))
        {
            return Err(refuse("nats_url", other, "must begin with nats://, tls://, ws:// or wss://"));
        }
        let database_given = layer.database_url.is_some();
        let database_url = layer.database_url.unwrap_or_else(|| "sqlite://.ax/ax.db".into());
        if !["postgres:", "postgresql:", "sqlite:"].iter().any(|scheme| database_url.starts_with(scheme)) {
            return Err(refuse("database_url", database_url, "must be postgres://USER@HOST/DATABASE or sqlite://PATH"));
        }
        let http = layer.http_addr.unwrap_or_else(|| "127.0.0.1:8420".into());
        let http_addr = http
            .replace("localhost:", "127.0.0.1:")
            .parse()
            .map_err(|_| refuse("http_addr", http, "must be ADDRESS:PORT, e.g. 127.0.0.1:8420"))?;
        let node_id = layer.node_id.unwrap_or_else(|| host_as_name(&crate::app::host()));
        if !is_node_name(&node_id) {
            return Err(refuse("node_id", node_id, "must be 1 to 64 characters out of A–Z a–z 0–9 _ -"));
        }
        let prefix = layer.prefix.unwrap_or_else(|| "ax".into());
        let prefix = Prefix::new(&prefix).map_err(|e| refuse("prefix", prefix, e.to_string()))?;
        let lease_ttl = duration("lease_ttl", layer.lease_ttl, 5_000, 2_000..=300_000)?;
        if lease_ttl.subsec_millis() != 0 {
            return Err(refuse("lease_ttl", format!("{lease_ttl:?}"), "must be whole seconds"));
        }
        let log_format = match layer.log_format.as_deref() {
            None => None,
            Some("text") => Some(LogFormat::Text),
            Some("json") => Some(LogFormat::Json),
            Some(other) => return Err(refuse("log_format", other, "must be text or json")),
        };
        let log = layer.log.unwrap_or_else(|| "info".into());
        tracing_subscriber::EnvFilter::from_str(&log).map_err(|e| refuse("log", log.clone(), e.to_string()))?;
        Ok(Self {
            nats_urls,
            nats_creds: layer.nats_creds,
            database_url,
            database_given,
            nats_given,
            http_addr,
            node_id,
            prefix,
            lease_ttl,
            plan_horizon: duration("plan_horizon", layer.plan_horizon, 2_000, 500..=60_000)?,
            sweep_interval: duration("sweep_interval", layer.sweep_interval, 60_000, 1_000..=3_600_000)?,
            strict: layer.strict.unwrap_or(false),
            log,
            log_format,
            otel: OtelConfig::from_env(),
        })
    }

    /// What a node is started with.
    #[must_use]
    pub fn node(&self) -> NodeOptions {
        NodeOptions {
            node_id: self.node_id.clone(),
            database_url: self.database_url.clone(),
            nats: NatsConfig {
                urls: self.nats_urls.clone(),
                creds: self.nats_creds.clone(),
                prefix: self.prefix.clone(),
                name: format!("ax {}", self.node_id),
                lease_ttl: self.lease_ttl,
            },
            http_addr: self.http_addr,
            strict: self.strict,
            settings: Settings {
                lease_ttl: self.lease_ttl,
                plan_horizon: self.plan_horizon,
                sweep_interval: self.sweep_interval,
                ..Settings::default()
            },
            otel: self.otel.clone(),
        }
    }

    /// The effective values by key, passwords and tokens hidden.
    #[must_use]
    pub fn shown(&self) -> Vec<(&'static str, String)> {
        let ms = |d: Duration| Shown(d).to_string();
        vec![
            ("nats_url", self.nats_urls.iter().map(|u| without_password(u)).collect::<Vec<_>>().join(",")),
            ("nats_creds", self.nats_creds.as_ref().map(|p| p.display().to_string()).unwrap_or_default()),
            ("database_url", without_password(&self.database_url)),
            ("http_addr", self.http_addr.to_string()),
            ("node_id", self.node_id.clone()),
            ("prefix", self.prefix.as_str().to_owned()),
            ("lease_ttl", ms(self.lease_ttl)),
            ("plan_horizon", ms(self.plan_horizon)),
            ("sweep_interval", ms(self.sweep_interval)),
            ("strict", self.strict.to_string()),
            ("log", self.log.clone()),
            (
                "log_format",
                match self.log_format {
                    None => "text on a terminal, else json".into(),
                    Some(LogFormat::Text) => "text".into(),
                    Some(LogFormat::Json) => "json".into(),
                },
            ),
            ("traces", self.otel.shown()),
        ]
    }
}

fn refuse(key: &'static str, value: impl Into<String>, rule: impl Into<String>) -> ConfigError {
    ConfigError::Value { key, value: without_password(&value.into()), rule: rule.into() }
}

/// A host name as a node's name: what a name may not have becomes `-`.
fn host_as_name(host: &str) -> String {
    let name: String =
        host.chars().map(|c| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' }).take(64).collect();
    if name.is_empty() { "node".into() } else { name }
}

fn is_node_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= 64 && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
}

/// The text with the password of an address replaced: between `:` and `@`, and after `password=`, of which Postgres reads
/// the one of a query.
#[must_use]
pub fn without_password(url: &str) -> String {
    without_parameter(&without_authority(url))
}

fn without_authority(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let authority_end = rest.find(['/', '?']).unwrap_or(rest.len());
    let Some(at) = rest[..authority_end].rfind('@') else { return url.to_owned() };
    let user = rest[..at].split(':').next().unwrap_or_default();
    let shown = if rest[..at].contains(':') { format!("{user}:***") } else { "***".to_owned() };
    format!("{scheme}://{shown}{}", &rest[at..])
}

fn without_parameter(text: &str) -> String {
    const NAME: &str = "password=";
    // Changes no length, so that places in it are places in the text.
    let lower = text.to_ascii_lowercase();
    let (mut shown, mut from) = (String::with_capacity(text.len()), 0);
    while let Some(at) = lower[from..].find(NAME) {
        let value = from + at + NAME.len();
        shown.push_str(&text[from..value]);
        shown.push_str("***");
        from = text[value..].find(|c: char| c == '&' || c.is_whitespace()).map_or(text.len(), |end| value + end);
    }
    shown.push_str(&text[from..]);
    shown
}

/// Reads `500ms`, `5s`, `2m`, `1h`.
fn duration(
    key: &'static str,
    given: Option<String>,
    default_ms: u64,
    range_ms: std::ops::RangeInclusive<u64>,
) -> Result<Duration, ConfigError> {
    let Some(text) = given else { return Ok(Duration::from_millis(default_ms)) };
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let factor = match &text[digits..] {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => 0,
    };
    let ms = text[..digits].parse::<u64>().ok().filter(|_| factor > 0).and_then(|n| n.checked_mul(factor));
    let Some(ms) = ms else {
        return Err(refuse(key, text, "must be a whole number with ms, s, m or h, e.g. 5s"));
    };
    if !range_ms.contains(&ms) {
        let shown = |ms: &u64| Shown(Duration::from_millis(*ms)).to_string();
        return Err(refuse(key, text, format!("must be {} to {}", shown(range_ms.start()), shown(range_ms.end()))));
    }
    Ok(Duration::from_millis(ms))
}

/// A duration as it is configured.
struct Shown(Duration);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.0.as_millis();
        match ms {
            0 => write!(f, "0s"),
            _ if ms.is_multiple_of(3_600_000) => write!(f, "{}h", ms / 3_600_000),
            _ if ms.is_multiple_of(60_000) => write!(f, "{}m", ms / 60_000),
            _ if ms.is_multiple_of(1000) => write!(f, "{}s", ms / 1000),
            _ => write!(f, "{ms}ms"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(key: &str, value: &str) -> Layer {
        toml::from_str(&format!("{key} = {value:?}")).unwrap()
    }

    #[test]
    fn every_refusal_names_its_key_and_rule() {
        for (key, value, rule) in [
            ("lease_ttl", "1s", "2s to 5m"),
            ("lease_ttl", "2500ms", "whole seconds"),
            ("lease_ttl", "5", "e.g. 5s"),
            ("sweep_interval", "99999999999999999999h", "e.g. 5s"),
            ("http_addr", "8420", "ADDRESS:PORT"),
            ("node_id", "a b", "A–Z"),
            ("prefix", "Ax", "lower-case"),
            ("log_format", "xml", "text or json"),
            ("nats_url", " , ", "at least one"),
            ("nats_url", "http://localhost", "must begin with nats://"),
            ("database_url", "mysql://ax:secret@localhost/ax", "sqlite://PATH"),
        ] {
            let e = ServerConfig::new(layer(key, value)).unwrap_err().to_string();
            assert!(e.starts_with(key) && e.contains(rule), "{e}");
        }
    }

    #[test]
    fn unknown_keys_of_the_file_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ax.toml");
        std::fs::write(&path, "nats_urll = \"x\"\n").unwrap();
        let e = Layer::from_file(Some(&path)).unwrap_err().to_string();
        assert!(e.contains("nats_urll") && e.contains("ax.toml"), "{e}");
        assert!(Layer::from_file(Some(Path::new("not-there.toml"))).is_err());
    }

    #[test]
    fn an_upper_layer_wins_and_the_defaults_are_as_documented() {
        let merged = layer("node_id", "flag").over(layer("node_id", "file")).over(layer("prefix", "p"));
        let config = ServerConfig::new(merged).unwrap();
        assert_eq!((config.node_id.as_str(), config.prefix.as_str()), ("flag", "p"));
        assert_eq!(config.http_addr.to_string(), "127.0.0.1:8420");
        assert_eq!(config.lease_ttl, Duration::from_secs(5));
        assert_eq!(config.database_url, "sqlite://.ax/ax.db");
    }

    #[test]
    fn passwords_are_not_shown() {
        for (url, shown) in [
            ("postgres://ax:s3cr@t@h:1/db", "postgres://ax:***@h:1/db"),
            ("nats://token@h", "nats://***@h"),
            ("nats://h:4222", "nats://h:4222"),
            ("sqlite://.ax/a@b.db", "sqlite://.ax/a@b.db"),
            ("postgres://ax@h/db?password=s3cr@t&sslmode=require", "postgres://***@h/db?password=***&sslmode=require"),
            ("postgres://h/db?user=ax&Password=a#ä&password=b", "postgres://h/db?user=ax&Password=***&password=***"),
            ("postgres://ax:a@h?password=", "postgres://ax:***@h?password=***"),
            ("host=h password=s3cret user=ax", "host=h password=*** user=ax"),
        ] {
            assert_eq!(without_password(url), shown);
        }
    }
}
