//! Who is served, and with which rights.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use ax_scheduler::api::http::{self, BindError};
use ax_scheduler::api::nats::NatsDoor;
use ax_scheduler::api::operation::{Method, ROUTES};
use ax_scheduler::api::tokens::TRUSTED;
use ax_scheduler::core::definitions::AuditEntry;
use ax_scheduler::core::token::{self, Role, Token};
use ax_scheduler::ports::Store as _;
use ax_shared::{Prefix, Timestamp};
use reqwest::header;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::world::{Answer, NOW, World, service, task};

fn line(name: &str) -> AuditEntry {
    AuditEntry { at: NOW, actor: "t".into(), action: "token".into(), subject: name.into(), detail: json!({}) }
}

impl World {
    /// Makes a token that every request after this one is judged with.
    async fn token(&self, name: &str, role: Role, expires_at: Option<Timestamp>) -> Result<String> {
        let secret = token::secret([name.len() as u8 + role as u8; 32]);
        let token = Token { name: name.into(), role, hash: token::hash(&secret), created_at: NOW, expires_at };
        anyhow::ensure!(self.store.add_token(&token, &line(name)).await?);
        self.tokens.refresh().await?;
        Ok(secret)
    }

    async fn revoke(&self, name: &str) -> Result<()> {
        anyhow::ensure!(self.store.revoke_token(name, &line(name)).await?);
        Ok(self.tokens.refresh().await?)
    }

    async fn with_token(&self, method: reqwest::Method, path: &str, token: &str, body: &str) -> Result<Answer> {
        let value = format!("Bearer {token}");
        self.send(method, path, Some(body.into()), &[("Authorization", &value)]).await
    }
}

#[tokio::test]
async fn without_tokens_only_loopback_may_be_served() -> Result<()> {
    let world = World::start().await?;
    for addr in ["0.0.0.0:80", "[::]:80", "192.0.2.1:80", "[::ffff:127.0.0.1]:80"] {
        let refused = http::admit(addr.parse()?, world.tokens.clone()).err();
        let Some(BindError::NotLoopback(_)) = &refused else { panic!("{addr}: {refused:?}") };
        assert!(refused.unwrap().to_string().contains("ax token create NAME --role admin"));
    }
    assert!(http::admit("127.0.0.1:80".parse()?, world.tokens.clone())?.loopback);
    world.token("a", Role::Viewer, None).await?;
    assert!(!http::admit("0.0.0.0:80".parse()?, world.tokens.clone())?.loopback);
    Ok(())
}

#[tokio::test]
async fn with_tokens_each_route_takes_its_role() -> Result<()> {
    let world = World::start().await?;
    world.put("a", task("a", json!({}))).await?.is(201);
    let run = world.post("/tasks/a/trigger", json!({})).await?.is(201)["run_id"].as_str().unwrap().to_owned();
    let roles = [Role::Viewer, Role::Operator, Role::Admin];
    let mut tokens = Vec::new();
    for role in roles {
        tokens.push(world.token(role.as_str(), role, None).await?);
    }
    for route in ROUTES {
        let id = if route.path.starts_with("/runs") { &run } else { "a" };
        let path = route.path.replace("{id}", id);
        let method = reqwest::Method::from_bytes(route.method.to_string().as_bytes())?;
        let refused = world.send(method.clone(), &path, None, &[]).await?.refused(401);
        assert_eq!(refused.header(header::WWW_AUTHENTICATE), "Bearer realm=\"ax\"", "{path}");
        for (role, token) in roles.into_iter().zip(&tokens) {
            // A body that nothing can be done with: who may ask is decided before it is read.
            let answer = world.with_token(method.clone(), &path, token, "{").await?;
            if role < route.role {
                let told = answer.refused(403).body["detail"].as_str().unwrap().to_owned();
                assert!(
                    told.contains(&format!("takes the role {}", route.role.as_str())) && told.contains(role.as_str()),
                    "{path}: {told}"
                );
            } else if route.method == Method::Get {
                answer.is(200);
            } else if route.method != Method::Delete {
                assert!([400, 422].contains(&answer.status.as_u16()), "{path}: {}", answer.body);
            } else {
                assert_eq!(answer.status, 204, "{path}");
                world
                    .with_token(reqwest::Method::PUT, "/tasks/a", &tokens[2], &task("a", json!({})).to_string())
                    .await?
                    .is(201);
            }
        }
    }
    world.get("/nothing").await?.refused(401);
    world.get("/events").await?.refused(401);
    Ok(())
}

/// Who may what over NATS is configured from the document: a subject too many is a right too many.
#[test]
fn the_document_lists_the_subjects_of_each_role() -> Result<()> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/api.md");
    let text = std::fs::read_to_string(path)?;
    for role in [Role::Viewer, Role::Operator, Role::Admin] {
        let of_role = ROUTES.iter().filter(|route| route.role == role);
        let subjects: Vec<String> = of_role.map(|route| format!("`{}`", route.subject)).collect();
        let also = if role == Role::Viewer { "" } else { "also " };
        let row = format!("| `{}` | {also}{} |", role.as_str(), subjects.join(" "));
        assert!(text.contains(&row), "docs/api.md, Over NATS, lacks:\n{row}");
    }
    Ok(())
}

#[tokio::test]
async fn a_token_that_does_not_count_is_refused_and_says_why() -> Result<()> {
    let world = World::start().await?;
    let good = world.token("good", Role::Admin, None).await?;
    let short = world.token("short-lived", Role::Admin, Some(NOW.plus_millis(1000))).await?;
    let get = reqwest::Method::GET;
    world.with_token(get.clone(), "/tasks", &short, "").await?.is(200);
    world.clock.advance(1000);
    for (token, why) in
        [(short.as_str(), "expired"), ("ax_nonsense", "unknown"), ("", "unknown"), (&good[1..], "unknown")]
    {
        let refused = world.with_token(get.clone(), "/tasks", token, "").await?.refused(401);
        assert!(refused.body["detail"].as_str().unwrap().contains(why), "{token}: {}", refused.body);
        assert!(refused.header(header::WWW_AUTHENTICATE).contains("invalid_token"));
    }
    for value in [format!("Basic {good}"), good.clone(), format!("Bearer\u{a0}{good}")] {
        world.send(get.clone(), "/tasks", None, &[("Authorization", &value)]).await?.refused(401);
    }
    world.send(get.clone(), "/tasks", None, &[("Authorization", &format!("bearer {good}"))]).await?.is(200);
    world.revoke("good").await?;
    world.with_token(get.clone(), "/tasks", &good, "").await?.refused(401);
    // The expired one still counts as a token: nobody is let in without.
    world.get("/tasks").await?.refused(401);
    world.revoke("short-lived").await?;
    world.get("/tasks").await?.is(200);
    Ok(())
}

#[tokio::test]
async fn elsewhere_than_on_loopback_nobody_is_served_once_the_last_token_is_revoked() -> Result<()> {
    let world = World::with(false, false).await?;
    let token = world.token("last", Role::Admin, None).await?;
    let get = reqwest::Method::GET;
    let bearer = format!("Bearer {token}");
    // The host is that by which others know this machine.
    let headers = [("Authorization", bearer.as_str()), ("Host", "ax.example:8420")];
    world.send(get.clone(), "/tasks", None, &headers).await?.is(200);
    world
        .send(get.clone(), "/tasks", None, &[headers[0], headers[1], ("Origin", "http://evil.example")])
        .await?
        .refused(403);
    world.revoke("last").await?;
    let refused = world.send(get.clone(), "/tasks", None, &headers).await?.refused(401);
    assert!(refused.body["detail"].as_str().unwrap().contains("ax token create"), "{}", refused.body);
    for probe in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(world.page(probe).await?.0, 200, "{probe}");
    }
    Ok(())
}

#[tokio::test]
async fn the_audit_names_the_token() -> Result<()> {
    let world = World::start().await?;
    let token = world.token("ci", Role::Admin, None).await?;
    world.with_token(reqwest::Method::PUT, "/tasks/a", &token, &task("a", json!({})).to_string()).await?.is(201);
    let last = world.store.audit().pop().unwrap();
    assert_eq!((last.actor.as_str(), last.action.as_str()), ("ci", "task.created"));
    Ok(())
}

#[tokio::test]
async fn known_tokens_go_on_for_a_while_without_the_database() -> Result<()> {
    let world = World::start().await?;
    let token = world.token("a", Role::Viewer, None).await?;
    let get = reqwest::Method::GET;
    // Nobody reads them again here, which is what a database that is away looks like.
    world.clock.advance(i64::try_from(TRUSTED.as_millis())?);
    world.with_token(get.clone(), "/tasks", &token, "").await?.is(200);
    world.clock.advance(1);
    world.with_token(get.clone(), "/tasks", &token, "").await?.refused(503);
    world.tokens.refresh().await?;
    world.with_token(get, "/tasks", &token, "").await?.is(200);
    Ok(())
}

#[tokio::test]
async fn a_person_signs_in_and_out() -> Result<()> {
    let world = World::start().await?;
    let token = world.token("anna", Role::Operator, None).await?;
    world.with_token(reqwest::Method::GET, "/tasks", &token, "").await?.is(200);
    let (status, html) = world.page("/tasks/a").await?;
    assert_eq!(status, 401);
    assert!(html.contains("action=\"/sign-in\"") && html.contains("value=\"/tasks/a\""), "{html}");

    let form = |token: &str, to: &str| format!("token={token}&to={to}");
    let own = format!("http://{}", world.addr);
    let origin = [("Origin", own.as_str())];
    let wrong = world.submit("/sign-in", form("ax_wrong", "%2F"), &origin).await?;
    assert_eq!((wrong.status.as_u16(), wrong.header(header::SET_COOKIE)), (401, ""));
    assert!(wrong.body.as_str().unwrap().contains("unknown"));
    let evil = world.submit("/sign-in", form(&token, "%2F"), &[("Origin", "http://evil.example")]).await?;
    assert_eq!((evil.status.as_u16(), evil.header(header::SET_COOKIE)), (403, ""));
    let away = world.submit("/sign-in", form(&token, "%2F%2Fevil.example"), &origin).await?;
    assert_eq!((away.status.as_u16(), away.header(header::LOCATION)), (303, "/"));

    let done = world.submit("/sign-in", form(&token, "%2Ftasks%2Fa"), &origin).await?;
    assert_eq!((done.status.as_u16(), done.header(header::LOCATION)), (303, "/tasks/a"));
    let set = done.header(header::SET_COOKIE).to_owned();
    assert!(set.contains("HttpOnly") && set.contains("SameSite=Strict") && set.contains("Path=/"), "{set}");
    let cookie = set.split(';').next().unwrap();

    let html = world.page_with("/", &[("Cookie", cookie)]).await?;
    assert!(html.0 == 200 && html.1.contains("sign out"), "{html:?}");
    // What a browser adds by itself changes nothing, unless a page of ours sent it.
    let post = reqwest::Method::POST;
    let body = || Some(br#"{"runs": []}"#.to_vec());
    world.send(post.clone(), "/enqueue", body(), &[("Cookie", cookie)]).await?.refused(403);
    world
        .send(post.clone(), "/enqueue", body(), &[("Cookie", cookie), ("Origin", "http://evil.example")])
        .await?
        .refused(403);
    world.send(post.clone(), "/enqueue", body(), &[("Cookie", cookie), origin[0]]).await?.is(201);
    world.send(reqwest::Method::GET, "/tasks", None, &[("Cookie", cookie)]).await?.is(200);

    let out = world.submit("/sign-out", String::new(), &[("Cookie", cookie), origin[0]]).await?;
    assert!(out.header(header::SET_COOKIE).contains("Max-Age=0"));
    world.revoke("anna").await?;
    assert_eq!(world.page("/").await?.0, 200, "without tokens there is nothing to sign in to");
    assert_eq!(world.page("/sign-in").await?.0, 200);
    Ok(())
}

/// What a listener was told at the start of a stream would otherwise hold for as long as it listens.
#[tokio::test]
async fn a_live_stream_ends_with_the_token_that_opened_it() -> Result<()> {
    let world = World::start().await?;
    let token = world.token("short", Role::Viewer, None).await?;
    world.token("another", Role::Viewer, None).await?;
    let mut stream = tokio::net::TcpStream::connect(world.addr).await?;
    let request = format!(
        "GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut head = [0; 12];
    stream.read_exact(&mut head).await?;
    assert_eq!(&head, b"HTTP/1.1 200");
    world.revoke("short").await?;
    let mut rest = Vec::new();
    tokio::time::timeout(Duration::from_secs(10), stream.read_to_end(&mut rest)).await??;
    Ok(())
}

/// What reads nothing from the database would otherwise go on with tokens that may have been revoked long ago.
#[tokio::test]
async fn a_live_stream_ends_when_the_database_has_been_away_for_too_long() -> Result<()> {
    let world = World::start().await?;
    let token = world.token("a", Role::Viewer, None).await?;
    let mut stream = tokio::net::TcpStream::connect(world.addr).await?;
    let request = format!(
        "GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut head = [0; 12];
    stream.read_exact(&mut head).await?;
    assert_eq!(&head, b"HTTP/1.1 200");
    world.clock.advance(i64::try_from(TRUSTED.as_millis())? + 1);
    let mut rest = Vec::new();
    tokio::time::timeout(Duration::from_secs(10), stream.read_to_end(&mut rest)).await??;
    Ok(())
}

/// A proxy on this machine connects from loopback for whoever reaches it.
#[tokio::test]
async fn without_tokens_what_comes_through_a_proxy_is_refused() -> Result<()> {
    let world = World::start().await?;
    let get = reqwest::Method::GET;
    let headers = [
        ("Forwarded", "for=192.0.2.1"),
        ("X-Forwarded-For", "127.0.0.1"),
        ("X-Forwarded-Host", "localhost"),
        ("X-Forwarded-Proto", "https"),
        ("X-Real-IP", "192.0.2.1"),
        ("Via", "1.1 proxy"),
    ];
    for header in headers {
        let refused = world.send(get.clone(), "/tasks", None, &[header]).await?.refused(403);
        assert!(refused.body["detail"].as_str().unwrap().contains("`ax token create`"), "{}", refused.body);
        assert_eq!(world.page_with("/", &[header]).await?.0, 403, "{header:?}");
    }
    let token = world.token("a", Role::Viewer, None).await?;
    let bearer = format!("Bearer {token}");
    for header in headers {
        world.send(get.clone(), "/tasks", None, &[header, ("Authorization", &bearer)]).await?.is(200);
        world.send(get.clone(), "/tasks", None, &[header]).await?.refused(401);
    }
    Ok(())
}

/// NATS does not tell who sends; the audit has what the sender says.
#[tokio::test]
async fn the_audit_names_who_asks_over_nats() -> Result<()> {
    let world = World::start().await?;
    world.token("a", Role::Viewer, None).await?;
    let service = service(world.store.clone(), world.bus.clone(), world.clock.clone(), false);
    let door = NatsDoor::open(world.bus.client(), Prefix::default(), Arc::new(service)).await?;
    let client = world.nats.client().await?;
    for (name, actor) in [(None, "nats"), (Some("nightly job"), "nats:nightly job"), (Some(""), "nats")] {
        let mut headers = async_nats::HeaderMap::new();
        name.iter().for_each(|name| headers.insert("Ax-Actor", *name));
        let id = format!("t{}", actor.len() + name.map_or(0, |_| 1));
        let body = task(&id, json!({})).to_string();
        client.request_with_headers("ax.api.v1.apply", headers, body.into()).await?;
        let last = world.store.audit().pop().unwrap();
        assert_eq!((last.actor.as_str(), last.subject.as_str()), (actor, id.as_str()));
    }
    door.close().await;
    assert!(client.request("ax.api.v1.nodes", "".into()).await.is_err(), "a door that is closed answers nobody");
    Ok(())
}
