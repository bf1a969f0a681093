//! What stands between a worker and its server: a connection that can be cut, and confirmations that get lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::{Context, Result};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// A relay to a nats-server.
pub(crate) struct Between {
    port: u16,
    cut: watch::Sender<bool>,
    deaf: Arc<AtomicBool>,
    lost: Arc<AtomicUsize>,
}

impl Between {
    pub(crate) async fn to(server: &str) -> Result<Self> {
        let server = server.trim_start_matches("nats://").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let port = listener.local_addr()?.port();
        let (cut, is_cut) = watch::channel(false);
        let (deaf, lost) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let between = Self { port, cut, deaf: deaf.clone(), lost: lost.clone() };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if *is_cut.borrow() {
                    continue;
                }
                let Ok(server) = TcpStream::connect(&server).await else { continue };
                let (mut is_cut, deaf, lost) = (is_cut.clone(), deaf.clone(), lost.clone());
                tokio::spawn(async move {
                    let (mut from_client, to_client) = client.into_split();
                    let (from_server, mut to_server) = server.into_split();
                    tokio::select! {
                        _ = tokio::io::copy(&mut from_client, &mut to_server) => {}
                        _ = relay(from_server, to_client, &deaf, &lost) => {}
                        _ = is_cut.wait_for(|cut| *cut) => {}
                    }
                });
            }
        });
        Ok(between)
    }

    pub(crate) fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Ends all connections and lets none come about, until it is mended.
    pub(crate) fn cut(&self) {
        self.cut.send_replace(true);
    }

    pub(crate) fn mend(&self) {
        self.cut.send_replace(false);
    }

    /// Whether confirmations of acks are lost.
    pub(crate) fn lose_confirmations(&self, lose: bool) {
        self.deaf.store(lose, Ordering::SeqCst);
    }

    /// Confirmations lost so far.
    pub(crate) fn lost(&self) -> usize {
        self.lost.load(Ordering::SeqCst)
    }
}

/// Passes on what a server says, but for confirmations of acks: messages to an inbox without headers and payload.
async fn relay(from: OwnedReadHalf, mut to: OwnedWriteHalf, deaf: &AtomicBool, lost: &AtomicUsize) -> Result<()> {
    let mut from = BufReader::new(from);
    loop {
        let mut said = String::new();
        if from.read_line(&mut said).await? == 0 {
            return Ok(());
        }
        let mut payload = Vec::new();
        if said.starts_with("MSG ") || said.starts_with("HMSG ") {
            let size: usize = said.split_whitespace().last().context("no size")?.parse()?;
            payload.resize(size + 2, 0);
            from.read_exact(&mut payload).await?;
        }
        if said.starts_with("MSG _INBOX.") && payload.len() == 2 && deaf.load(Ordering::SeqCst) {
            lost.fetch_add(1, Ordering::SeqCst);
            continue;
        }
        to.write_all(said.as_bytes()).await?;
        to.write_all(&payload).await?;
    }
}
