//! Real nats-server processes on free ports, with a store of their own.

use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::process::Process;
use crate::{Scratch, dev, eventually};

const START: Duration = Duration::from_secs(20);

/// How a server differs from the plain one: JetStream on, no further configuration, the current version.
#[derive(Debug, Clone, Default)]
pub struct NatsOptions {
    /// Leaves JetStream off.
    pub without_jetstream: bool,
    /// Lines for the server's configuration file, such as `max_payload: 4MB`.
    pub config: String,
    /// The program; the current nats-server when `None`.
    pub program: Option<PathBuf>,
}

/// One nats-server. It keeps its port and its data over [`kill9`](Self::kill9), [`terminate`](Self::terminate) and
/// [`start_again`](Self::start_again).
#[derive(Debug)]
pub struct Nats {
    process: Option<Process>,
    folder: Scratch,
    program: PathBuf,
    port: u16,
}

impl Nats {
    /// Starts a server with JetStream.
    ///
    /// # Errors
    /// When the program is missing or does not come up.
    pub async fn start() -> Result<Self> {
        Self::start_with(NatsOptions::default()).await
    }

    /// Starts a server as `options` say.
    ///
    /// # Errors
    /// When the program is missing or does not come up.
    pub async fn start_with(options: NatsOptions) -> Result<Self> {
        let folder = Scratch::new("nats")?;
        let program = options.program.map_or_else(dev::nats_server, Ok)?;
        let mut config = options.config;
        if !options.without_jetstream {
            config.push_str(&format!("\njetstream {{ store_dir: {:?} }}\n", folder.join("jetstream")));
        }
        std::fs::write(folder.join("nats.conf"), config)?;
        let mut server = Self { process: None, folder, program, port: 0 };
        server.run().await?;
        Ok(server)
    }

    /// Starts the program on its old port, or on a free one the first time, and waits until it accepts clients.
    async fn run(&mut self) -> Result<()> {
        let port = if self.port == 0 { "-1".into() } else { self.port.to_string() };
        let mut process = Process::spawn(
            "nats-server",
            Command::new(&self.program)
                .args(["-a", "127.0.0.1", "-p", &port, "--ports_file_dir"])
                .arg(self.folder.path())
                .arg("-c")
                .arg(self.folder.join("nats.conf")),
        )?;
        let ports = self.folder.join(&format!("nats-server_{}.ports", process.id()));
        self.port = process
            .ready(START, |output| output.text().contains("Server is ready").then(|| client_port(&ports))?)
            .await?;
        self.process = Some(process);
        Ok(())
    }

    /// Returns the address for clients.
    #[must_use]
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Returns the folder of the JetStream store.
    #[must_use]
    pub fn store(&self) -> PathBuf {
        self.folder.join("jetstream")
    }

    /// Connects a client.
    ///
    /// # Errors
    /// When the server does not answer.
    pub async fn client(&self) -> Result<async_nats::Client> {
        async_nats::connect(self.url()).await.context("connect to the test's nats-server")
    }

    /// Connects a client and returns its JetStream side.
    ///
    /// # Errors
    /// When the server does not answer.
    pub async fn jetstream(&self) -> Result<async_nats::jetstream::Context> {
        Ok(async_nats::jetstream::new(self.client().await?))
    }

    /// Returns the running process, for freezing and thawing.
    ///
    /// # Errors
    /// When it is stopped.
    pub fn process(&mut self) -> Result<&mut Process> {
        self.process.as_mut().context("this nats-server is stopped")
    }

    /// Kills the server without warning.
    ///
    /// # Errors
    /// When it is not running.
    pub fn kill9(&mut self) -> Result<()> {
        self.process()?.kill9()?;
        self.process = None;
        Ok(())
    }

    /// Stops the server in order.
    ///
    /// # Errors
    /// When it is not running or does not end.
    pub async fn terminate(&mut self) -> Result<()> {
        self.process()?.terminate(START).await?;
        self.process = None;
        Ok(())
    }

    /// Starts a stopped server on the same port with the same data.
    ///
    /// # Errors
    /// When it is running or does not come up.
    pub async fn start_again(&mut self) -> Result<()> {
        if self.process.is_some() {
            bail!("this nats-server is running");
        }
        self.run().await
    }
}

/// Reads the client port from the file that the server writes once it listens.
fn client_port(file: &Path) -> Option<u16> {
    let ports: Value = serde_json::from_slice(&std::fs::read(file).ok()?).ok()?;
    ports["nats"][0].as_str()?.rsplit(':').next()?.parse().ok()
}

/// Three servers in one JetStream cluster.
#[derive(Debug)]
pub struct NatsCluster {
    /// The members; each can be killed and started again.
    pub nodes: Vec<Nats>,
}

impl NatsCluster {
    /// Starts three servers and waits until JetStream has a leader and all its peers.
    ///
    /// # Errors
    /// When the program is missing or no cluster comes about.
    pub async fn start() -> Result<Self> {
        // The members must know each other's ports beforehand, and somebody else may take a port that was free a moment ago.
        let mut last = None;
        for _ in 0..5 {
            match Self::try_start().await {
                Ok(cluster) => return Ok(cluster),
                Err(error) => last = Some(error),
            }
        }
        Err(last.context("no attempt")?.context("start three nats-servers"))
    }

    async fn try_start() -> Result<Self> {
        let routes = free_ports(3)?;
        let urls: Vec<String> = routes.iter().map(|port| format!("\"nats://127.0.0.1:{port}\"")).collect();
        let started = routes.iter().enumerate().map(|(index, port)| {
            let config = format!(
                "server_name: n{index}\ncluster {{ name: ax, listen: \"127.0.0.1:{port}\", routes: [{}] }}\n",
                urls.join(", ")
            );
            Nats::start_with(NatsOptions { config, ..NatsOptions::default() })
        });
        let nodes = futures::future::try_join_all(started).await?;
        let cluster = Self { nodes };
        let context = async_nats::jetstream::new(cluster.client().await?);
        eventually(START, "the cluster places a stream on three servers", || async {
            let config =
                async_nats::jetstream::stream::Config { name: "READY".into(), num_replicas: 3, ..Default::default() };
            context.create_stream(config).await?;
            Ok(Some(()))
        })
        .await?;
        context.delete_stream("READY").await?;
        Ok(cluster)
    }

    /// Connects a client that knows all members. It waits only a second for an answer, since a cluster without a leader
    /// gives none.
    ///
    /// # Errors
    /// When no member answers.
    pub async fn client(&self) -> Result<async_nats::Client> {
        let options = async_nats::ConnectOptions::new().request_timeout(Some(Duration::from_secs(1)));
        let urls: Vec<String> = self.nodes.iter().map(Nats::url).collect();
        async_nats::connect_with_options(urls, options).await.context("connect to the test's cluster")
    }

    /// Returns the addresses of all members, separated by commas.
    #[must_use]
    pub fn url(&self) -> String {
        self.nodes.iter().map(Nats::url).collect::<Vec<_>>().join(",")
    }
}

/// Finds TCP ports on the loopback that are free now.
///
/// # Errors
/// When the system has none.
pub fn free_ports(count: usize) -> Result<Vec<u16>> {
    let held: Vec<TcpListener> =
        (0..count).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).collect::<Result<_, _>>()?;
    held.iter().map(|listener| Ok(listener.local_addr()?.port())).collect()
}
