//! Tokens from the first one, made without a server, to the last one, revoked beside running nodes.

use anyhow::{Context as _, Result, ensure};
use ax_tests::ax::{Finished, Node, command, finish};
use ax_tests::world::{Database, World, task};
use ax_tests::{Deadline, Scratch, eventually};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

/// How soon a token that was made or revoked counts. About a second is promised; the machine may be busy.
const SOON: Deadline = Deadline::seconds(10);

/// Runs `ax token …` on the database of a world.
async fn token(world: &World, arguments: &[&str]) -> Result<Finished> {
    let folder = Scratch::new("token")?;
    let mut command = command(folder.path())?;
    command.env("AX_DATABASE_URL", &world.database_url).arg("token").args(arguments);
    finish(command, b"").await
}

/// Makes a token and returns its text.
async fn create(world: &World, name: &str, role: &str) -> Result<String> {
    let made = token(world, &["create", name, "--role", role]).await?.ok()?;
    ensure!(made.stdout.starts_with("ax_") && made.stdout.trim().len() == 46, "{made:?}");
    ensure!(made.stderr.contains("only time") && !made.stderr.contains(made.stdout.trim()), "{made:?}");
    Ok(made.stdout.trim().to_owned())
}

async fn status(url: &str, method: Method, path: &str, token: Option<&str>, body: Value) -> Result<StatusCode> {
    let mut request = reqwest::Client::new().request(method, format!("{url}{path}")).body(body.to_string());
    if let Some(token) = token {
        request = request.bearer_auth(token);
    }
    Ok(request.send().await?.status())
}

async fn reaches(url: &str, path: &str, token: Option<&str>, wanted: u16) -> Result<()> {
    eventually(SOON, &format!("{path} answers {wanted}"), || async {
        let seen = status(url, Method::GET, path, token, Value::Null).await?;
        Ok((seen == wanted).then_some(()))
    })
    .await
}

#[tokio::test]
async fn from_the_first_token_to_the_last_on_postgres() -> Result<()> {
    from_the_first_token_to_the_last(Database::Postgres).await
}

#[tokio::test]
async fn from_the_first_token_to_the_last_on_sqlite() -> Result<()> {
    from_the_first_token_to_the_last(Database::Sqlite).await
}

async fn from_the_first_token_to_the_last(database: Database) -> Result<()> {
    let world = World::start(database).await?;
    let mut options = world.options("n1");
    options.http_addr = Some("0.0.0.0:0".into());
    let (code, told) = Node::refused(&options).await?;
    ensure!(code == Some(1) && told.contains("ax token create NAME --role admin"), "{code:?} {told}");

    // The first token is made without a server, the node serves with it.
    let admin = create(&world, "root", "admin").await?;
    let node = Node::start(&options).await?;
    let port = node.url().rsplit(':').next().context("no port")?;
    let url = format!("http://127.0.0.1:{port}");
    let url = url.as_str();
    ensure!(status(url, Method::GET, "/api/v1/tasks", None, Value::Null).await? == 401);
    ensure!(status(url, Method::PUT, "/api/v1/tasks/a", Some(&admin), task("a", json!({}))).await? == 201);
    for probe in ["/healthz", "/readyz", "/metrics"] {
        ensure!(status(url, Method::GET, probe, None, Value::Null).await? == 200, "{probe}");
    }

    // Others are made beside the running node, on SQLite too, and count within a second.
    let viewer = create(&world, "eve", "viewer").await?;
    reaches(url, "/api/v1/tasks", Some(&viewer), 200).await?;
    ensure!(status(url, Method::POST, "/api/v1/tasks/a/trigger", Some(&viewer), json!({})).await? == 403);
    let operator = create(&world, "otto", "operator").await?;
    reaches(url, "/api/v1/tasks", Some(&operator), 200).await?;
    ensure!(status(url, Method::POST, "/api/v1/tasks/a/trigger", Some(&operator), json!({})).await? == 201);
    ensure!(status(url, Method::DELETE, "/api/v1/tasks/a", Some(&operator), Value::Null).await? == 403);

    // The command line says what to do.
    let cli = async |token: Option<&str>, arguments: &[&str]| -> Result<Finished> {
        let folder = Scratch::new("cli")?;
        let mut command = command(folder.path())?;
        command.env("AX_API_URL", url).args(arguments);
        token.map(|token| command.env("AX_TOKEN", token));
        finish(command, b"").await
    };
    let without = cli(None, &["task", "ls"]).await?;
    ensure!(without.code == Some(1) && without.stderr.contains("AX_TOKEN or --token"), "{without:?}");
    let wrong = cli(Some("ax_wrong"), &["task", "ls"]).await?;
    ensure!(wrong.code == Some(1) && wrong.stderr.contains("unknown or has been revoked"), "{wrong:?}");
    let weak = cli(Some(&viewer), &["task", "pause", "a"]).await?;
    ensure!(weak.code == Some(1) && weak.stderr.contains("takes the role operator"), "{weak:?}");
    cli(Some(&operator), &["task", "pause", "a"]).await?.ok()?;
    let help = cli(Some("ax_secret"), &["task", "ls", "--help"]).await?.ok()?;
    ensure!(help.stdout.contains("AX_TOKEN") && !help.stdout.contains("ax_secret"), "{}", help.stdout);

    let listed = token(&world, &["ls", "--json"]).await?.ok()?.json()?;
    let names: Vec<&str> =
        listed["tokens"].as_array().context("no tokens")?.iter().filter_map(|t| t["name"].as_str()).collect();
    ensure!(names == ["eve", "otto", "root"], "{listed}");
    ensure!(!listed.to_string().contains("ax_"), "secrets are not kept: {listed}");
    let again = token(&world, &["create", "eve", "--role", "admin"]).await?;
    ensure!(again.code == Some(1) && again.stderr.contains("already"), "{again:?}");

    // Revoked ones count no more; with the last one gone nobody is served any more.
    token(&world, &["revoke", "eve"]).await?.ok()?;
    reaches(url, "/api/v1/tasks", Some(&viewer), 401).await?;
    ensure!(status(url, Method::GET, "/api/v1/tasks", Some(&operator), Value::Null).await? == 200);
    token(&world, &["revoke", "otto"]).await?.ok()?;
    let last = token(&world, &["revoke", "root"]).await?.ok()?;
    ensure!(last.stdout.contains("last token"), "{last:?}");
    reaches(url, "/api/v1/tasks", Some(&admin), 401).await?;
    ensure!(status(url, Method::GET, "/api/v1/tasks", None, Value::Null).await? == 401);
    ensure!(status(url, Method::GET, "/healthz", None, Value::Null).await? == 200);
    let gone = token(&world, &["revoke", "root"]).await?;
    ensure!(gone.code == Some(1) && gone.stderr.contains("no token"), "{gone:?}");
    Ok(())
}

/// Several nodes hear of a token that was made with none of them.
#[tokio::test]
async fn every_node_hears_of_a_token() -> Result<()> {
    let world = World::start(Database::Postgres).await?;
    let nodes = [world.node("n1").await?, world.node("n2").await?];
    for node in &nodes {
        ensure!(status(node.url(), Method::GET, "/api/v1/tasks", None, Value::Null).await? == 200);
    }
    let admin = create(&world, "root", "admin").await?;
    for node in &nodes {
        reaches(node.url(), "/api/v1/tasks", None, 401).await?;
        reaches(node.url(), "/api/v1/tasks", Some(&admin), 200).await?;
    }
    token(&world, &["revoke", "root"]).await?.ok()?;
    for node in &nodes {
        reaches(node.url(), "/api/v1/tasks", None, 200).await?;
    }
    Ok(())
}

/// While the database is away, known tokens go on and unknown ones are still told from them.
#[tokio::test]
async fn known_tokens_outlive_an_outage_of_the_database() -> Result<()> {
    let mut postgres = ax_tests::postgres::Postgres::start().await?;
    let mut world = World::start(Database::Sqlite).await?;
    world.database_url = postgres.create_database().await?;
    let admin = create(&world, "root", "admin").await?;
    let node = world.node("n1").await?;
    postgres.stop().await?;
    // What needs no database tells who is let in.
    let preview = json!({"cron_expr": "@daily"});
    for _ in 0..3 {
        ensure!(status(node.url(), Method::POST, "/api/v1/preview", Some(&admin), preview.clone()).await? == 200);
        ensure!(status(node.url(), Method::POST, "/api/v1/preview", Some("ax_x"), preview.clone()).await? == 401);
    }
    let asked = status(node.url(), Method::GET, "/api/v1/tasks", Some(&admin), Value::Null).await?;
    ensure!(asked == 503, "{asked}");
    postgres.start_again().await?;
    reaches(node.url(), "/api/v1/tasks", Some(&admin), 200).await
}

#[tokio::test]
async fn what_is_wrong_with_a_token_command_is_told() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    for (arguments, code, part) in [
        (&["ls"][..], 1, "there is no database"),
        (&["create", "a b", "--role", "admin"], 2, "1 to 64 characters"),
        (&["create", "a", "--role", "root"], 2, "viewer"),
        (&["create", "a"], 2, "--role"),
        (&["create", "a", "--role", "viewer", "--expires", "yesterday"], 2, "90d"),
        (&["create", "a", "--role", "viewer", "--expires", "2020-01-01T00:00:00Z"], 2, "ahead"),
    ] {
        let done = token(&world, arguments).await?;
        ensure!(done.code == Some(code) && done.stderr.contains(part), "{arguments:?}: {done:?}");
    }
    // The default database of whatever folder one happens to be in is nobody's: a token in it would protect nothing.
    let folder = Scratch::new("token")?;
    let mut elsewhere = command(folder.path())?;
    elsewhere.args(["token", "create", "a", "--role", "viewer"]);
    let done = finish(elsewhere, b"").await?;
    ensure!(done.code == Some(1) && done.stderr.contains("AX_DATABASE_URL"), "{done:?}");
    ensure!(!folder.join(".ax").exists(), "a database was made");
    let made = token(&world, &["create", "a", "--role", "viewer", "--expires", "1h", "--json"]).await?.ok()?.json()?;
    ensure!(made["role"] == "viewer" && made["expires_at"].is_string() && made["token"].is_string(), "{made}");
    // The database file does not hold what would let somebody in who reads it.
    let secret = made["token"].as_str().context("no token")?;
    let path = world.database_url.strip_prefix("sqlite://").context("no path")?;
    for file in [path.to_owned(), format!("{path}-wal")] {
        let held = std::fs::read(&file).unwrap_or_default();
        ensure!(!held.windows(secret.len()).any(|window| window == secret.as_bytes()), "{file} holds the token");
    }
    Ok(())
}

/// Without tokens a private installation goes on as before; with one, a browser is asked to sign in.
#[tokio::test]
async fn a_page_asks_a_person_to_sign_in() -> Result<()> {
    let world = World::start(Database::Sqlite).await?;
    let node = world.node("n1").await?;
    let page = async |path: &str| reqwest::get(format!("{}{path}", node.url())).await;
    ensure!(page("/").await?.status() == 200);
    create(&world, "root", "viewer").await?;
    reaches(node.url(), "/", None, 401).await?;
    ensure!(page("/tasks/a").await?.text().await?.contains("Sign in"));
    Ok(())
}
