//! The commands in the documents work. Blocks marked `sh` are run here, in order, against `ax dev --demo`; those marked
//! `console` show something that runs on, or that the scripts do.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ax_tests::api::Api;
use ax_tests::nats::Nats;
use ax_tests::process::Process;
use ax_tests::{Deadline, Scratch, ax, dev};

/// Returns every Markdown file of the project: at the root, and below `docs`, `examples` and `deploy`.
fn documents() -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![dev::root().join("docs"), dev::root().join("examples"), dev::root().join("deploy")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                found.push(path);
            }
        }
    }
    for entry in std::fs::read_dir(dev::root())? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Returns the `sh` blocks of a document.
fn blocks(document: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut block = None::<String>;
    for line in document.lines() {
        match (&mut block, line.trim_start()) {
            (None, "```sh") => block = Some(String::new()),
            (Some(_), "```") => blocks.extend(block.take()),
            (Some(block), _) => {
                block.push_str(line);
                block.push('\n');
            }
            (None, _) => {}
        }
    }
    blocks
}

#[tokio::test]
async fn the_commands_in_the_documents_work() -> Result<()> {
    let nats = Nats::start().await?;
    let folder = Scratch::new("docs")?;
    let mut command = ax::command(folder.path())?;
    command.args(["dev", "--demo"]).env("AX_HTTP_ADDR", "127.0.0.1:0").env("AX_NATS_URL", nats.url());
    let mut demo = Process::spawn("ax dev --demo", &mut command)?;
    let url = demo.ready(Duration::from_secs(60), |output| output.after("ax: listening on ")).await?;
    Api::new(&url).runs_reach("demo.heartbeat", "succeeded", 1, Deadline::seconds(60)).await?;

    // A copy of what the commands read, so that none of them can write into the project.
    let examples = folder.join("examples");
    ensure!(Command::new("cp").arg("-R").arg(dev::examples()).arg(&examples).status()?.success());
    let program = ax::program()?;
    let (nats_cli, python) = (dev::nats_cli()?, dev::python()?);
    let folders: Vec<&Path> = [&program, &nats_cli, &python].into_iter().filter_map(|file| file.parent()).collect();
    let path = std::env::var("PATH").unwrap_or_default();
    let path = folders.iter().fold(path, |path, folder| format!("{}:{path}", folder.display()));

    let mut ran = 0;
    for document in documents()? {
        for block in blocks(&std::fs::read_to_string(&document)?) {
            let mut shell = Command::new("sh");
            shell.args(["-eu", "-c", &block]).current_dir(folder.path());
            shell.env("PATH", &path).env("AX_API_URL", &url).env("NATS_URL", nats.url()).env_remove("AX_NATS_URL");
            ax::finish(shell, b"").await?.ok().with_context(|| format!("{}:\n{block}", document.display()))?;
            ran += 1;
        }
    }
    // The README's own task: what a reader is led to do has to succeed, not only to be accepted.
    let own = Api::new(&url).runs("task_id=report.daily").await?;
    ensure!(own.iter().any(|run| run["state"] == "succeeded"), "the README's task did not run: {own:?}");
    ensure!(ran >= 4, "only {ran} blocks marked `sh` in the documents");
    Ok(())
}
