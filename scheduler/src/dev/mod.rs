//! `ax dev`: everything on one machine, with a live view of what fires, runs and finishes.

mod demo;
pub(crate) mod nats;
mod view;

use std::fs::{File, TryLockError};
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use tokio_util::sync::CancellationToken;

use crate::app::{self, Node, NodeOptions};
use crate::bus::nats::NatsConfig;

/// What `ax dev` is started with.
#[derive(Debug, Clone)]
pub struct DevOptions {
    /// Where its data lies: `nats/`, `ax.db`. Defaults to `.ax`.
    pub folder: PathBuf,
    /// A NATS to use instead of a private one.
    pub nats_url: Option<String>,
    /// Adds the example tasks and a worker that executes them.
    pub demo: bool,
    /// The node that it runs; its NATS address and database are filled in here.
    pub node: NodeOptions,
    /// Whether `node.database_url` was given by the user.
    pub database_given: bool,
}

/// Runs it until `stop` is cancelled.
///
/// # Errors
/// What cannot work, with its cause.
pub async fn run(mut options: DevOptions, stop: CancellationToken) -> anyhow::Result<()> {
    std::fs::create_dir_all(&options.folder)
        .with_context(|| format!("make the folder {}", options.folder.display()))?;
    // Held until the end: whoever does not get it must not touch what lies in the folder, the nats-server least of all.
    let _folder = own(&options.folder)?;
    let server = match &options.nats_url {
        Some(_) => None,
        None => Some(nats::Server::start(&options.folder.join("nats")).await?),
    };
    let url = match (&options.nats_url, &server) {
        (Some(url), _) => url.clone(),
        (None, Some(server)) => server.url().to_owned(),
        (None, None) => unreachable!("a private server was started"),
    };
    options.node.nats = NatsConfig { urls: vec![url.clone()], ..options.node.nats };
    if !options.database_given {
        options.node.database_url = format!("sqlite://{}", options.folder.join("ax.db").display());
    }

    let node = start(options.node.clone(), stop.clone()).await?;
    let Some(node) = node else { return Ok(()) };
    let bus = node.bus();
    let mut view = view::View::start(&bus, &options.node.nats.prefix, stop.child_token()).await?;
    app::announce(node.http_addr());
    view.welcome(&url, node.http_addr(), options.demo, &options.node.nats.prefix);

    let demo = match options.demo {
        true => Some(demo::start(&url, &options.node.nats.prefix, stop.child_token()).await?),
        false => None,
    };
    let ended = match server {
        // A private server that dies takes everything with it: say so at once instead of reconnecting for ever.
        Some(mut server) => {
            let stopped = stop.clone();
            let watched = tokio::spawn(async move {
                tokio::select! {
                    status = server.ended() => {
                        tracing::error!(status, "the private nats-server ended");
                        stopped.cancel();
                    }
                    () = stopped.cancelled() => {}
                }
                server
            });
            let ended = node.wait().await;
            stop.cancel();
            if let Some(demo) = demo {
                demo.end().await;
            }
            if let Ok(server) = watched.await {
                server.stop().await;
            }
            ended
        }
        None => {
            let ended = node.wait().await;
            stop.cancel();
            if let Some(demo) = demo {
                demo.end().await;
            }
            ended
        }
    };
    view.end().await;
    // Whoever wants to begin anew has to know that it would go on.
    view::say(&format!(
        "\n  Stopped. Tasks and history stay in {0}: start again to go on, remove {0} to begin anew.",
        options.folder.display()
    ));
    ended
}

/// Claims the folder for this process.
fn own(folder: &Path) -> anyhow::Result<File> {
    let path = folder.join("dev.lock");
    let mut lock = File::options()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(&path)
        .with_context(|| format!("open {}", path.display()))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut owner = String::new();
            let _ = lock.read_to_string(&mut owner);
            anyhow::bail!(
                "`ax dev` already runs in {} (process {}); stop it, or name another folder with --dir",
                folder.display(),
                owner.trim()
            );
        }
        Err(TryLockError::Error(e)) => return Err(e).with_context(|| format!("lock {}", path.display())),
    }
    lock.set_len(0)
        .and_then(|()| writeln!(lock, "{}", std::process::id()))
        .with_context(|| format!("write {}", path.display()))?;
    Ok(lock)
}

async fn start(options: NodeOptions, stop: CancellationToken) -> anyhow::Result<Option<Node>> {
    let wanted = options.http_addr;
    let started = tokio::select! {
        () = stop.cancelled() => return Ok(None),
        started = Node::start(options.clone(), stop.clone()) => started,
    };
    match started {
        Ok(node) => Ok(Some(node)),
        // A port that is taken need not stop a demonstration.
        Err(e) if is_address_in_use(&e) && wanted.port() != 0 => {
            tracing::warn!(%wanted, "this address is in use; taking a free port instead");
            let http_addr = SocketAddr::new(wanted.ip(), 0);
            Ok(Some(Node::start(NodeOptions { http_addr, ..options }, stop).await?))
        }
        Err(e) => Err(e),
    }
}

fn is_address_in_use(e: &anyhow::Error) -> bool {
    e.chain()
        .any(|cause| cause.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::AddrInUse))
}
