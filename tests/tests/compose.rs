//! What `docker-compose.yml`, the Dockerfiles and `deploy/` say is what the programs accept, and it runs: here as plain
//! processes, since tests have no container engine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ax_tests::nats::free_ports;
use ax_tests::process::Process;
use ax_tests::{Deadline, Scratch, ax, dev, eventually, postgres};
use serde_json::Value;

fn file(path: &str) -> Result<String> {
    std::fs::read_to_string(dev::root().join(path)).with_context(|| path.to_owned())
}

fn words(list: &Value) -> Result<Vec<String>> {
    let list = list.as_array().with_context(|| format!("not a list: {list}"))?;
    list.iter().map(|word| Ok(word.as_str().with_context(|| format!("not a word: {word}"))?.to_owned())).collect()
}

/// The compose file, anchors and merges resolved.
struct Compose(Value);

impl Compose {
    fn read() -> Result<Self> {
        Ok(Self(serde_saphyr::from_str(&file("docker-compose.yml")?)?))
    }

    fn services(&self) -> Result<BTreeMap<String, Value>> {
        let services = self.0["services"].as_object().context("no services")?;
        Ok(services.iter().map(|(name, service)| (name.clone(), service.clone())).collect())
    }

    fn service(&self, name: &str) -> Result<Value> {
        self.services()?.remove(name).with_context(|| format!("no service {name}"))
    }

    /// The services that run `ax server`.
    fn nodes(&self) -> Result<Vec<(String, Value)>> {
        let is_node = |service: &Value| service["command"] == serde_json::json!(["server"]);
        Ok(self.services()?.into_iter().filter(|(_, service)| is_node(service)).collect())
    }
}

fn environment(service: &Value) -> BTreeMap<String, String> {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    service["environment"].as_object().into_iter().flatten().map(|(name, value)| (name.clone(), text(value))).collect()
}

/// What runs as a service's health check.
fn health(service: &Value) -> Result<Vec<String>> {
    let mut test = words(&service["healthcheck"]["test"])?;
    ensure!(test.first().is_some_and(|first| first == "CMD"), "not a plain command: {test:?}");
    test.remove(0);
    Ok(test)
}

/// Seconds of `30s`.
fn seconds(duration: &Value) -> Result<u64> {
    let text = duration.as_str().with_context(|| format!("not a duration: {duration}"))?;
    Ok(text.strip_suffix('s').context("not in seconds")?.parse()?)
}

/// The instructions of a Dockerfile, with lines that go on put together.
fn dockerfile(path: &str) -> Result<Vec<(String, String)>> {
    let text = file(path)?.replace("\\\n", " ");
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| {
            let (instruction, rest) = line.split_once(' ').with_context(|| line.to_owned())?;
            Ok((instruction.to_owned(), rest.split_whitespace().collect::<Vec<_>>().join(" ")))
        })
        .collect()
}

fn instruction<'a>(dockerfile: &'a [(String, String)], name: &str) -> Result<&'a str> {
    let last = dockerfile.iter().rev().find(|(instruction, _)| instruction == name);
    Ok(last.with_context(|| format!("no {name}"))?.1.as_str())
}

/// A value of nats-server's configuration file.
fn nats_setting(name: &str) -> Result<String> {
    let text = file("deploy/nats.conf")?;
    let line = text.lines().find_map(|line| line.trim().strip_prefix(name)?.strip_prefix(':'));
    Ok(line.with_context(|| format!("no {name}"))?.trim().trim_matches('"').to_owned())
}

fn port(address: &str) -> Result<u16> {
    Ok(address.rsplit(':').next().context("no port")?.parse()?)
}

fn version(text: &str) -> Vec<u32> {
    text.split('.').map_while(|part| part.parse().ok()).collect()
}

#[tokio::test]
async fn the_compose_file_fits_together_and_ax_accepts_its_environment() -> Result<()> {
    let compose = Compose::read()?;
    let services = compose.services()?;
    ensure!(compose.nodes()?.len() == 2, "not two nodes");
    for (name, service) in &services {
        for (other, how) in service["depends_on"].as_object().into_iter().flatten() {
            let other = services.get(other).with_context(|| format!("{name} waits for {other}, which is not there"))?;
            match how["condition"].as_str() {
                Some("service_healthy") => drop(health(other)?),
                Some("service_completed_successfully") => {
                    ensure!(other["restart"].is_null(), "{name}: never completes");
                }
                how => anyhow::bail!("{name} waits for {how:?}"),
            }
        }
        for volume in service["volumes"].as_array().into_iter().flatten() {
            let source = volume.as_str().and_then(|text| text.split(':').next()).context("a volume")?;
            let there = match source.strip_prefix("./") {
                Some(path) => dev::root().join(path).is_file(),
                None => compose.0["volumes"].get(source).is_some(),
            };
            ensure!(there, "{name}: {source} is not there");
        }
        for published in service["ports"].as_array().into_iter().flatten() {
            ensure!(
                published.as_str().is_some_and(|p| p.starts_with("127.0.0.1:")),
                "{name} is open to others: {published}"
            );
        }
        if let Some(context) = service["build"].as_str() {
            let path = Path::new(context).join("Dockerfile");
            ensure!(dev::root().join(&path).is_file(), "{name}: {} is not there", path.display());
        }
        let is_restarted = service["restart"] == "unless-stopped" && seconds(&service["stop_grace_period"])? >= 10;
        ensure!(is_restarted || name == "setup", "{name} does not come back, or is not given the time to end");
    }

    let folder = Scratch::new("compose")?;
    let (nats, database) = (compose.service("nats")?, environment(&compose.service("postgres")?));
    let mut names = Vec::new();
    for (name, node) in compose.nodes()? {
        let environment = environment(&node);
        let mut command = ax::command(folder.path())?;
        command.args(["config", "--json"]).envs(&environment);
        let config = ax::finish(command, b"").await?.ok()?.json()?;
        for (variable, value) in &environment {
            let key = variable.strip_prefix("AX_").context("not a variable of ax")?.to_lowercase();
            let shown = config[&key].as_str().with_context(|| format!("{variable} is no setting"))?;
            let is_it = shown == value || shown == value.replace(":ax@", ":***@");
            ensure!(is_it, "{variable} = {value} is {shown}");
        }
        ensure!(environment["AX_NATS_URL"] == format!("nats://nats:{}", port(&nats_setting("listen")?)?), "{name}");
        let url = ["USER", "PASSWORD", "DB"].map(|part| database[&format!("POSTGRES_{part}")].clone());
        ensure!(
            environment["AX_DATABASE_URL"] == format!("postgres://{}:{}@postgres/{}", url[0], url[1], url[2]),
            "{name}"
        );
        let inside = port(&environment["AX_HTTP_ADDR"])?;
        let published = words(&node["ports"])?;
        ensure!(published.len() == 1 && port(&published[0])? == inside, "{name}: {published:?}");
        names.push((node["hostname"].clone(), published));
        // An own name, which is also that of the service.
        ensure!(node["hostname"] == name.as_str(), "{name}");
        ensure!(seconds(&node["stop_grace_period"])? >= 30, "{name}");
    }
    ensure!(names[0].0 != names[1].0 && names[0].1 != names[1].1, "two nodes share a name or a port: {names:?}");
    let setup = environment(&compose.service("setup")?);
    ensure!(setup["AX_DATABASE_URL"] == environment(&compose.nodes()?[0].1)["AX_DATABASE_URL"], "another database");

    ensure!(port(&words(&nats["ports"])?[0])? == port(&nats_setting("listen")?)?, "the port of NATS");
    let url = health(&nats)?.pop().context("no address")?;
    ensure!(url.starts_with(&format!("http://{}/healthz", nats_setting("http")?)), "{url}");
    let mounted = words(&nats["volumes"])?;
    ensure!(words(&nats["command"])? == ["nats-server", "-c", "/etc/nats/nats.conf"], "{nats}");
    ensure!(mounted.contains(&"./deploy/nats.conf:/etc/nats/nats.conf:ro".to_owned()), "{mounted:?}");
    ensure!(mounted.contains(&format!("nats:{}", nats_setting("store_dir")?)), "{mounted:?}");
    let mut check = Command::new(dev::nats_server()?);
    check.args(["-t", "-c"]).arg(dev::root().join("deploy/nats.conf"));
    ax::finish(check, b"").await?.ok()?;

    let group = words(&compose.service("worker")?["command"])?.pop().context("no group")?;
    let tasks: Value = serde_json::from_str(&file("examples/tasks/demo.json")?)?;
    let in_group = |task: &Value| task["executor_group"] == group.as_str();
    ensure!(tasks["tasks"].as_array().is_some_and(|tasks| tasks.iter().any(in_group)), "nothing to do for {group}");
    Ok(())
}

#[tokio::test]
async fn the_dockerfiles_build_what_is_there_and_start_it_as_ax_wants_it() -> Result<()> {
    let own = dockerfile("Dockerfile")?;
    let workspace = file("Cargo.toml")?;
    let wanted = workspace.lines().find_map(|line| line.strip_prefix("rust-version = ")).context("no rust-version")?;
    let rust = own[0].1.strip_prefix("rust:").and_then(|tag| tag.split('-').next()).context("not built with rust")?;
    ensure!(version(rust) >= version(wanted.trim_matches('"')), "rust {rust} is older than {wanted}");
    // The system that it is built on is the one that it runs on: both link the same libc.
    ensure!(own[0].1.contains("bookworm") && own.iter().any(|(_, rest)| rest == "debian:bookworm-slim"), "{own:?}");
    let build = &own.iter().find(|(name, rest)| name == "RUN" && rest.contains("cargo build")).context("no build")?.1;
    for part in ["--release", "--locked", "--package ax-scheduler", "--bin ax", "target/release/ax /out/ax"] {
        ensure!(build.contains(part), "{part} in {build}");
    }
    let package = file("scheduler/Cargo.toml")?;
    ensure!(package.contains("name = \"ax-scheduler\"") && package.contains("[[bin]]\nname = \"ax\""), "no program ax");
    ensure!(own.iter().any(|(_, rest)| rest.ends_with("/out/ax /usr/local/bin/ax")), "ax is not copied");
    ensure!(instruction(&own, "USER")? != "root" && instruction(&own, "USER")? != "0", "it runs as root");
    ensure!(instruction(&own, "STOPSIGNAL")? == "SIGTERM", "what ax ends by");
    ensure!(instruction(&own, "HEALTHCHECK")?.ends_with(r#"CMD ["ax", "health"]"#), "{own:?}");
    let node = &Compose::read()?.nodes()?[0].1;
    ensure!(instruction(&own, "EXPOSE")? == port(&environment(node)["AX_HTTP_ADDR"])?.to_string(), "the port");
    let entry: Value = serde_json::from_str(instruction(&own, "ENTRYPOINT")?)?;
    ensure!(
        words(&entry)? == ["ax"] && words(&serde_json::from_str(instruction(&own, "CMD")?)?)? == ["server"],
        "{own:?}"
    );
    for words in [["server", "--help"], ["health", "--help"], ["migrate", "--help"], ["token", "--help"]] {
        ax::run("http://127.0.0.1:1", &words).await?.ok()?;
    }
    // The build needs every member of the workspace and what they include.
    for pattern in file(".dockerignore")?.lines().filter(|line| !line.starts_with('#')) {
        let needed =
            ["Cargo.toml", "Cargo.lock", "shared", "scheduler", "worker-sdk", "tests", "migrations", "examples"];
        ensure!(!needed.contains(&pattern.trim_matches('/')) && pattern != "*", "{pattern} is needed");
    }

    let worker = dockerfile("examples/raw-worker/Dockerfile")?;
    for (_, rest) in worker.iter().filter(|(name, _)| name == "COPY") {
        let source = rest.split(' ').next().context("COPY")?;
        ensure!(dev::examples().join("raw-worker").join(source).is_file(), "{source} is not there");
    }
    let setup = file("scripts/setup")?;
    let tested = setup.lines().find_map(|line| line.strip_prefix("nats_py=")).context("no nats_py")?;
    ensure!(worker.iter().any(|(_, rest)| rest.contains(&format!("nats-py=={tested}"))), "nats-py is not {tested}");
    Ok(())
}

#[tokio::test]
async fn the_systemd_unit_starts_what_its_readme_installs_with_settings_that_ax_accepts() -> Result<()> {
    let (unit, readme) = (file("deploy/ax.service")?, file("deploy/README.md")?);
    let value = |key: &str| unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let start = value("ExecStart").context("no ExecStart")?;
    let (program, arguments) = start.split_once(' ').context("no arguments")?;
    ensure!(readme.contains(&format!("target/release/ax {program}")), "{program} is not what is installed");
    ensure!(arguments == "server" && value("KillSignal").is_none(), "{start}");
    ensure!(value("TimeoutStopSec").context("no TimeoutStopSec")?.parse::<u64>()? >= 30, "no time to end");
    let env = value("EnvironmentFile").context("no EnvironmentFile")?;
    ensure!(readme.contains(env), "{env} is not told");
    let (_, example) = readme.split_once("```ini\n").context("no example of it")?;
    let (example, _) = example.split_once("```").context("no end of the example")?;
    let folder = Scratch::new("unit")?;
    let mut command = ax::command(folder.path())?;
    command.args(["config", "--json"]);
    for line in example.lines() {
        let (name, value) = line.split_once('=').context("not a setting")?;
        command.env(name, value);
    }
    let config = ax::finish(command, b"").await?.ok()?.json()?;
    ensure!(config["node_id"] == "n1" && config["database_url"] == "postgres://ax:***@db/ax", "{config}");
    Ok(())
}

/// The compose file's services as processes of this machine: names of services and paths of containers replaced.
struct Stack {
    compose: Compose,
    folder: Scratch,
    replacements: Vec<(String, String)>,
    http: BTreeMap<String, u16>,
    path: String,
}

impl Stack {
    async fn new() -> Result<Self> {
        let (compose, folder) = (Compose::read()?, Scratch::new("stack")?);
        let database = postgres::database().await?;
        let database = database.rsplit('@').next().context("an address")?;
        let ports = free_ports(4)?;
        let nodes = compose.nodes()?;
        let http = nodes.iter().zip(&ports[2..]).map(|((name, _), port)| (name.clone(), *port)).collect();
        let of = |what: &str, with: String| (what.to_owned(), with);
        let replacements = vec![
            of("nats://nats:4222", format!("nats://127.0.0.1:{}", ports[0])),
            of("0.0.0.0:4222", format!("127.0.0.1:{}", ports[0])),
            of("127.0.0.1:8222", format!("127.0.0.1:{}", ports[1])),
            of("@postgres/ax", format!("@{database}")),
            of("/etc/nats/nats.conf", folder.join("nats.conf").display().to_string()),
            of("/setup.sh", dev::root().join("deploy/setup.sh").display().to_string()),
            of("/var/lib/ax", folder.path().display().to_string()),
            of("\"/data\"", format!("{:?}", folder.join("data"))),
        ];
        let programs = [ax::program()?, dev::nats_server()?, dev::python()?];
        let folders = programs.iter().filter_map(|program| program.parent());
        let path = folders
            .fold(std::env::var("PATH").unwrap_or_default(), |path, folder| format!("{}:{path}", folder.display()));
        Ok(Self { compose, folder, replacements, http, path })
    }

    fn here(&self, text: &str) -> String {
        self.replacements.iter().fold(text.to_owned(), |text, (what, with)| text.replace(what, with))
    }

    /// A command that sees the environment of a service and nothing else of ax.
    fn command(&self, name: &str, words: &[String]) -> Result<Command> {
        let service = self.compose.service(name)?;
        let (program, arguments) = words.split_first().context("an empty command")?;
        let mut command = Command::new(self.here(program));
        command.args(arguments.iter().map(|argument| self.here(argument))).current_dir(self.folder.path());
        for (variable, _) in std::env::vars_os() {
            let variable = variable.to_string_lossy().into_owned();
            if ["AX_", "OTEL_", "NATS_", "PG"].iter().any(|prefix| variable.starts_with(prefix)) {
                command.env_remove(variable);
            }
        }
        command.env("PATH", &self.path);
        for (variable, value) in environment(&service) {
            command.env(variable, self.here(&value));
        }
        if let Some(port) = self.http.get(name) {
            // Both nodes share this machine, its name and its ports.
            command.env("AX_NODE_ID", name).env("AX_HTTP_ADDR", format!("0.0.0.0:{port}"));
        }
        if name == "postgres" {
            let address = self.here("@postgres/ax");
            command.env("PGPORT", port(address.split('/').next().unwrap_or_default())?.to_string());
        }
        Ok(command)
    }

    async fn health(&self, name: &str) -> Result<ax::Finished> {
        let words = health(&self.compose.service(name)?)?;
        ax::finish(self.command(name, &words)?, b"").await
    }

    /// Waits as compose does before it starts what depends on a service.
    async fn healthy(&self, name: &str) -> Result<()> {
        eventually(Deadline::seconds(60), &format!("{name} is healthy"), || async {
            self.health(name).await?.ok()?;
            Ok(Some(()))
        })
        .await
    }

    fn start(&self, name: &str) -> Result<Process> {
        let service = self.compose.service(name)?;
        let mut words = words(&service["command"])?;
        if service["image"] == "ax" {
            words.insert(0, "ax".into());
        }
        Process::spawn(name, &mut self.command(name, &words)?)
    }

    async fn setup(&self) -> Result<String> {
        let entrypoint = words(&self.compose.service("setup")?["entrypoint"])?;
        let finished = ax::finish(self.command("setup", &entrypoint)?, b"").await?.ok()?;
        let token = std::fs::read_to_string(self.folder.join("admin.token"))?.trim().to_owned();
        ensure!(!token.is_empty() && !finished.stdout.contains(&token), "the token is in the log: {finished:?}");
        Ok(token)
    }

    /// Runs `ax` as a person at the host does.
    async fn ax(&self, node: &str, token: &str, arguments: &[&str]) -> Result<ax::Finished> {
        let mut command = ax::command(&dev::root())?;
        command.env("AX_API_URL", format!("http://127.0.0.1:{}", self.http[node])).args(arguments);
        if !token.is_empty() {
            command.env("AX_TOKEN", token);
        }
        ax::finish(command, b"").await
    }

    /// Waits until a task has more runs that succeeded than `count`, and returns how many.
    async fn more_than(&self, node: &str, token: &str, count: usize) -> Result<usize> {
        eventually(Deadline::seconds(60), "more runs have succeeded", || async {
            let found =
                self.ax(node, token, &["run", "ls", "--task", "demo.heartbeat", "--state", "succeeded", "--json"]);
            let found = found.await?.ok()?.json()?["runs"].as_array().map_or(0, Vec::len);
            Ok((found > count).then_some(found))
        })
        .await
    }
}

#[tokio::test]
async fn the_services_of_the_compose_file_work_together() -> Result<()> {
    let stack = Stack::new().await?;
    std::fs::write(stack.folder.join("nats.conf"), stack.here(&file("deploy/nats.conf")?))?;
    let mut nats = stack.start("nats")?;
    stack.healthy("nats").await?;
    stack.healthy("postgres").await?;

    // Again and again the same token; another one only when it is lost, and the lost one is worth nothing then.
    let lost = stack.setup().await?;
    ensure!(stack.setup().await? == lost, "the token changed for no reason");
    std::fs::remove_file(stack.folder.join("admin.token"))?;
    let token = stack.setup().await?;
    ensure!(token != lost, "the same token twice");

    let mut nodes = BTreeMap::new();
    for (name, _) in stack.compose.nodes()? {
        ensure!(stack.health(&name).await?.code == Some(3), "nobody answers yet");
        nodes.insert(name.clone(), stack.start(&name)?);
    }
    for name in nodes.keys() {
        stack.healthy(name).await?;
    }
    let _worker = {
        let mut words = vec![dev::python()?.display().to_string(), "-u".into()];
        words.push(dev::examples().join("raw-worker/worker.py").display().to_string());
        words.extend(self::words(&stack.compose.service("worker")?["command"])?);
        Process::spawn("worker", &mut stack.command("worker", &words)?)?
    };

    for refused in ["", lost.as_str()] {
        let finished = stack.ax("ax-1", refused, &["task", "ls"]).await?;
        ensure!(finished.code == Some(1), "served without a token of today: {finished:?}");
    }
    stack.ax("ax-1", &token, &["apply", "-f", "examples/tasks/demo.json"]).await?.ok()?;
    let count = stack.more_than("ax-2", &token, 1).await?;

    let shown = stack.ax("ax-1", &token, &["nodes", "--json"]).await?.ok()?.json()?;
    let leads = |node: &&Value| node["leader"] == true;
    let leader = shown["nodes"].as_array().into_iter().flatten().find(leads).context("no leader")?["node_id"].clone();
    let leader = leader.as_str().context("a name")?.to_owned();
    let other = nodes.keys().find(|name| **name != leader).context("one node only")?.clone();
    let mut stopped = nodes.remove(&leader).context("the leader")?;
    let grace = Duration::from_secs(seconds(&stack.compose.service(&leader)?["stop_grace_period"])?);
    let begun = Instant::now();
    ensure!(stopped.terminate(grace).await?.success(), "it did not end by itself");
    ensure!(begun.elapsed() < grace / 2, "{grace:?} are too few: it took {:?}", begun.elapsed());
    ensure!(stack.health(&leader).await?.code == Some(3), "a stopped node is healthy");
    stack.more_than(&other, &token, count + 1).await?;
    stack.health(&other).await?.ok()?;

    // Without NATS a node lives, and is not ready.
    nats.kill9()?;
    eventually(Deadline::seconds(30), "a node without NATS is unhealthy", || async {
        Ok((stack.health(&other).await?.code == Some(1)).then_some(()))
    })
    .await?;

    let complaints = [stopped, nodes.remove(&other).context("the other node")?];
    for node in complaints {
        let text = node.output().text();
        ensure!(!text.contains("no option reads"), "a variable that ax does not know:\n{text}");
    }
    Ok(())
}

/// `sh` blocks of documents are run elsewhere; what compose needs a container engine for is held here.
#[test]
fn the_document_names_services_volumes_and_files_that_exist() -> Result<()> {
    let (document, compose) = (file("docs/deployment.md")?, Compose::read()?);
    let services = compose.services()?;
    let mut named = 0;
    for line in document.lines().filter(|line| line.contains("docker compose")) {
        let mut rest = line.split_whitespace().skip_while(|word| !word.ends_with("compose")).skip(1);
        if let Some("exec" | "stop" | "restart" | "logs" | "kill" | "run") = rest.next() {
            let is_service = |word: &str| services.contains_key(word.trim_end_matches(['`', ')']));
            ensure!(rest.any(is_service), "of no service: {line}");
            named += 1;
        }
    }
    ensure!(named >= 2, "the document shows {named} commands");
    for path in ["deploy/nats.conf", "deploy/setup.sh", "examples/tasks/demo.json", "deploy/ax.service"] {
        ensure!(document.contains(path) && dev::root().join(path).is_file(), "{path}");
    }
    Ok(())
}

/// What `setup.sh` does with an `ax` that lists tokens so: its exit code and what it changed.
fn set_up(listing: &str, held: Option<&str>) -> Result<(Option<i32>, Vec<String>, Option<String>)> {
    use std::os::unix::fs::PermissionsExt as _;

    let folder = Scratch::new("setup")?;
    let (program, token, changes) = (folder.join("ax"), folder.join("admin.token"), folder.join("changes"));
    let script = format!(
        "#!/bin/sh\ncase \"$1 $2\" in\n'migrate ') ;;\n'token ls') {listing} ;;\n*) echo \"$2\" >>'{}'; echo ax_new ;;\nesac\n",
        changes.display()
    );
    // Copied, so that this process never holds what is executed open for writing.
    std::fs::write(folder.join("script"), script)?;
    std::fs::set_permissions(folder.join("script"), std::fs::Permissions::from_mode(0o755))?;
    ensure!(Command::new("cp").arg("-p").arg(folder.join("script")).arg(&program).status()?.success());
    if let Some(held) = held {
        std::fs::write(&token, held)?;
    }
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap_or_default());
    let setup = dev::root().join("deploy/setup.sh");
    let done = Command::new("sh").arg(setup).arg(&token).env("PATH", path).output()?;
    let changes = std::fs::read_to_string(changes).unwrap_or_default().lines().map(ToOwned::to_owned).collect();
    Ok((done.status.code(), changes, std::fs::read_to_string(token).ok().map(|text| text.trim().to_owned())))
}

#[test]
fn a_database_that_does_not_answer_costs_no_good_token() -> Result<()> {
    let kept = Some("ax_good".to_owned());
    let none: Vec<String> = Vec::new();
    ensure!(set_up("exit 1", Some("ax_good"))? == (Some(1), none.clone(), kept.clone()));
    let listed = r#"printf '{\n  "tokens": [ { "name" : "admin", "role": "admin" } ]\n}\n'"#;
    ensure!(set_up(listed, Some("ax_good"))? == (Some(0), none, kept), "however the list is laid out");

    let new = Some("ax_new".to_owned());
    ensure!(set_up(listed, None)? == (Some(0), vec!["revoke".into(), "create".into()], new.clone()));
    let other = r#"echo '{"tokens":[{"name":"admin2","role":"admin"}]}'"#;
    ensure!(set_up(other, Some("ax_old"))? == (Some(0), vec!["create".into()], new), "not ours");
    Ok(())
}

/// Whoever asks a node's container for the token finds what `setup` wrote.
#[test]
fn the_token_is_read_where_it_is_written() -> Result<()> {
    let compose = Compose::read()?;
    let written = words(&compose.service("setup")?["entrypoint"])?.pop().context("no file")?;
    ensure!(
        file("docs/deployment.md")?.contains(&written)
            && file("docker-compose.yml")?.contains(&format!("cat {written}"))
    );
    let folder = PathBuf::from(&written).parent().context("a folder")?.display().to_string();
    ensure!(words(&compose.service("setup")?["volumes"])?.contains(&format!("token:{folder}")), "not kept");
    for (name, node) in compose.nodes()? {
        ensure!(words(&node["volumes"])?.contains(&format!("token:{folder}:ro")), "{name} has not got it");
    }
    Ok(())
}
