//! `ax health`: whether the node on this machine does its work, for probes of containers that have no other client.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use clap::Args;

use super::{Failure, REFUSED, UNREACHABLE, USAGE, say};
use crate::config::{Layer, ServerConfig};

/// The longest time for the answer: less than what probes are usually given.
const TIMEOUT: Duration = Duration::from_secs(4);

/// `ax health`.
#[derive(Debug, Args)]
#[command(after_help = "Exit codes: 0 ready, 1 not ready, 3 nobody answers. It needs no token.")]
pub(super) struct HealthArgs {
    /// Address that the node serves; for 0.0.0.0 this machine is asked [default: 127.0.0.1:8420]
    #[arg(long, env = "AX_HTTP_ADDR", value_name = "ADDR")]
    http_addr: Option<String>,
    /// Only ask whether the process lives, not whether its database and NATS are there
    #[arg(long)]
    live: bool,
}

pub(super) async fn health(args: HealthArgs, file: Layer) -> Result<(), Failure> {
    let layer = Layer { http_addr: args.http_addr.or(file.http_addr), ..Layer::default() };
    let mut addr = ServerConfig::new(layer).map_err(|e| Failure { code: USAGE, error: e.into() })?.http_addr;
    if addr.ip().is_unspecified() {
        addr.set_ip(if addr.is_ipv4() { IpAddr::V4(Ipv4Addr::LOCALHOST) } else { IpAddr::V6(Ipv6Addr::LOCALHOST) });
    }
    let path = if args.live { "healthz" } else { "readyz" };
    let unreachable = |e: reqwest::Error| Failure { code: UNREACHABLE, error: e.into() };
    // A proxy of the environment has no business between a node and its probe.
    let client = reqwest::Client::builder().timeout(TIMEOUT).no_proxy().build()?;
    let response = client.get(format!("http://{addr}/{path}")).send().await.map_err(unreachable)?;
    let status = response.status();
    let body = response.text().await.map_err(unreachable)?;
    if status.is_success() {
        say(body.trim());
        return Ok(());
    }
    Err(Failure { code: REFUSED, error: anyhow::anyhow!("not ready: {}", body.trim()) })
}
