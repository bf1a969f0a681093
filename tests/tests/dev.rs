//! `ax dev` leaves nothing behind and does not touch what another one uses.

use std::time::Duration;

use anyhow::{Result, ensure};
use ax_tests::api::Api;
use ax_tests::process::Process;
use ax_tests::{Deadline, Scratch, ax, dev, eventually};

const START: Duration = Duration::from_secs(60);

fn command(folder: &Scratch) -> Result<std::process::Command> {
    let mut command = ax::command(folder.path())?;
    command.args(["dev", "--demo"]).env("AX_HTTP_ADDR", "127.0.0.1:0").env("AX_NATS_SERVER", dev::nats_server()?);
    Ok(command)
}

#[tokio::test]
async fn a_second_one_in_the_same_folder_is_refused_and_the_first_goes_on() -> Result<()> {
    let folder = Scratch::new("dev")?;
    let mut first = Process::spawn("first ax dev", &mut command(&folder)?)?;
    let url = first.ready(START, |output| output.after("ax: listening on ")).await?;
    let api = Api::new(&url);
    api.runs_reach("demo.heartbeat", "succeeded", 1, Deadline::seconds(60)).await?;

    let mut second = Process::spawn("second ax dev", &mut command(&folder)?)?;
    ensure!(!second.wait(START).await?.success());
    ensure!(second.output().text().contains("already runs in"), "{}", second.output().text());

    let so_far = api.runs("task_id=demo.heartbeat&state=succeeded").await?.len();
    api.runs_reach("demo.heartbeat", "succeeded", so_far + 2, Deadline::seconds(60)).await?;
    ensure!(first.terminate(Duration::from_secs(30)).await?.success());
    Ok(())
}

#[tokio::test]
async fn its_nats_server_ends_with_it_however_it_ends() -> Result<()> {
    let folder = Scratch::new("dev")?;
    let mut process = Process::spawn("ax dev", &mut command(&folder)?)?;
    process.ready(START, |output| output.after("ax: listening on ")).await?;
    let pid = std::fs::read_to_string(folder.join(".ax/nats/nats.pid"))?;
    let proc = format!("/proc/{}/cmdline", pid.trim());
    let lives = || std::fs::read(&proc).is_ok_and(|line| String::from_utf8_lossy(&line).contains("jetstream"));
    ensure!(lives(), "the pid file names the private nats-server");
    process.kill9()?;
    eventually(Deadline::seconds(20), "the private nats-server has ended", || async { Ok((!lives()).then_some(())) })
        .await
}
