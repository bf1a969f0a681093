//! `ax nodes`.

use clap::Args;

use super::Failure;
use super::client::{Client, ClientArgs};
use super::output::{Local, Table, cell, list};
use crate::config::Layer;

/// `ax nodes`.
#[derive(Debug, Args)]
pub(super) struct NodesArgs {
    #[command(flatten)]
    client: ClientArgs,
}

pub(super) async fn nodes(args: NodesArgs, file: Layer) -> Result<(), Failure> {
    let answer = Client::new(&args.client, &file)?.get(&["nodes"], &[]).await?;
    let local = Local::new();
    answer.show(|page| {
        let mut table =
            Table::new(&["NODE", "ROLE", "EPOCH", "VERSION", "HTTP", "HOST", "PID", "CLOCK OFFSET", "STARTED"]);
        for node in list(page, "nodes") {
            let role = if node["leader"] == true { "leader" } else { "follower" };
            table.row([
                cell(node, "node_id"),
                role.to_owned(),
                cell(node, "epoch"),
                cell(node, "version"),
                cell(node, "http_addr"),
                cell(node, "host"),
                cell(node, "pid"),
                node["clock_offset_ms"].as_f64().map(|ms| format!("{ms:+.1} ms")).unwrap_or_default(),
                local.cell(node, "started_at"),
            ]);
        }
        table.print("no node answered");
    })
}
