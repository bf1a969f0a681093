//! `ax token`: who may ask over HTTP. It works on the database itself, so that the first token needs no server, and beside
//! running ones, which hear of it within a second.

use std::fs::File;
use std::io::Read as _;
use std::sync::Arc;

use anyhow::Context as _;
use ax_shared::Timestamp;
use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Value, json};

use super::client::usage;
use super::output::{Table, printable};
use super::{Failure, say};
use crate::config::{Layer, ServerConfig, without_password};
use crate::core::definitions::AuditEntry;
use crate::core::token::{self, Role, Token};
use crate::ports::Store;

/// `ax token`.
#[derive(Debug, Args)]
pub(super) struct TokenArgs {
    #[command(subcommand)]
    command: TokenCommand,
    /// Database: postgres://… or sqlite://PATH [default: sqlite://.ax/ax.db]
    #[arg(long, env = "AX_DATABASE_URL", value_name = "URL", hide_env_values = true, global = true)]
    database_url: Option<String>,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum TokenCommand {
    /// Make a token and print it, once: it is not kept
    Create {
        /// What it is called, in the audit too
        name: String,
        /// What its bearer may do
        #[arg(long)]
        role: RoleArg,
        /// From when on it is refused: an instant in RFC 3339, or a time from now such as 90d, 12h, 30m
        #[arg(long, value_name = "WHEN")]
        expires: Option<String>,
    },
    /// List the tokens that have not been revoked
    Ls,
    /// Revoke a token; within a second no node takes it any more
    Revoke {
        /// What it is called
        name: String,
    },
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum RoleArg {
    /// Sees everything
    Viewer,
    /// Also triggers, enqueues, pauses and resumes
    Operator,
    /// Also defines and deletes tasks
    Admin,
}

impl From<RoleArg> for Role {
    fn from(role: RoleArg) -> Self {
        match role {
            RoleArg::Viewer => Self::Viewer,
            RoleArg::Operator => Self::Operator,
            RoleArg::Admin => Self::Admin,
        }
    }
}

pub(super) async fn token(args: TokenArgs, file: Layer) -> Result<(), Failure> {
    let layer = Layer { database_url: args.database_url.clone(), ..Layer::default() };
    // The file's other keys are the server's business; only its database counts here.
    let below = Layer { database_url: file.database_url, ..Layer::default() };
    let config = ServerConfig::new(layer.over(below)).map_err(|e| usage(e.to_string()))?;
    let (url, named) = (config.database_url, config.database_given);
    match &args.command {
        TokenCommand::Create { name, role, expires } => {
            // In a wrong folder the default would be a new database, whose tokens protect nothing.
            create(&args, (&url, named), name, (*role).into(), expires.as_deref()).await
        }
        TokenCommand::Ls => list(&args, &url).await,
        TokenCommand::Revoke { name } => revoke(&args, &url, name).await,
    }
}

async fn create(
    args: &TokenArgs,
    (url, may_make): (&str, bool),
    name: &str,
    role: Role,
    expires: Option<&str>,
) -> Result<(), Failure> {
    token::check_name(name).map_err(|rule| usage(format_args!("the name {:?}: {rule}", printable(name))))?;
    let now = Timestamp::from_jiff(jiff::Timestamp::now());
    let expires_at = expires.map(|when| until(when, now)).transpose()?;
    let (store, beside) = crate::store::open_beside(url, may_make).await?;
    // Beside a node that has the file, the schema is that node's business.
    if !beside {
        store.migrate().await?;
    }
    let secret = token::secret(random().context("take 256 random bits of the system")?);
    let token = Token { name: name.to_owned(), role, hash: token::hash(&secret), created_at: now, expires_at };
    let detail = json!({"role": role, "expires_at": expires_at});
    if !store.add_token(&token, &line(now, "token.created", name, detail)).await? {
        return Err(anyhow::anyhow!("there is a token {name:?} already: revoke it first, or take another name").into());
    }
    if args.json {
        let mut shown = shown(&token);
        shown["token"] = secret.into();
        say(shown);
    } else {
        // The token alone, so that a script can take it; what is for people goes to standard error.
        say(&secret);
        eprintln!(
            "ax: {name} is {} in {}; this is the only time that the token is shown. Use it with AX_TOKEN or --token",
            role.as_str(),
            without_password(url)
        );
    }
    Ok(())
}

async fn list(args: &TokenArgs, url: &str) -> Result<(), Failure> {
    let (store, _) = crate::store::open_beside(url, false).await?;
    let tokens = store.tokens().await?;
    if args.json {
        say(json!({"tokens": tokens.iter().map(shown).collect::<Vec<Value>>()}));
        return Ok(());
    }
    let now = Timestamp::from_jiff(jiff::Timestamp::now());
    let mut table = Table::new(&["NAME", "ROLE", "CREATED (UTC)", "EXPIRES (UTC)"]);
    for token in tokens {
        let expires = match token.expires_at {
            None => "never".to_owned(),
            Some(at) if at <= now => format!("{at} (expired)"),
            Some(at) => at.to_string(),
        };
        table.row([token.name, token.role.as_str().to_owned(), token.created_at.to_string(), expires]);
    }
    table.print("no tokens: only this machine is served, without one");
    Ok(())
}

async fn revoke(args: &TokenArgs, url: &str, name: &str) -> Result<(), Failure> {
    let (store, _): (Arc<dyn Store>, bool) = crate::store::open_beside(url, false).await?;
    let now = Timestamp::from_jiff(jiff::Timestamp::now());
    if !store.revoke_token(name, &line(now, "token.revoked", name, json!({}))).await? {
        return Err(anyhow::anyhow!("there is no token {:?}", printable(name)).into());
    }
    let left = store.tokens().await?.len();
    if args.json {
        say(json!({"name": name, "revoked_at": now}));
    } else if left == 0 {
        say(format_args!(
            "{name} is revoked. It was the last token: nodes on loopback now serve this machine without one, others nobody"
        ));
    } else {
        say(format_args!("{name} is revoked"));
    }
    Ok(())
}

/// A token as `--json` shows it.
fn shown(token: &Token) -> Value {
    json!({"name": token.name, "role": token.role, "created_at": token.created_at, "expires_at": token.expires_at})
}

fn line(at: Timestamp, action: &str, name: &str, detail: Value) -> AuditEntry {
    let user = std::env::var("USER").or_else(|_| std::env::var("LOGNAME")).unwrap_or_else(|_| "somebody".to_owned());
    AuditEntry {
        at,
        actor: format!("{user}@{}", crate::app::host()),
        action: action.to_owned(),
        subject: name.to_owned(),
        detail,
    }
}

/// Reads an instant, or a time from `now` on, that lies ahead.
fn until(when: &str, now: Timestamp) -> Result<Timestamp, Failure> {
    let wrong = |rule: &str| usage(format_args!("--expires {:?}: {rule}", printable(when)));
    let digits = when.find(|c: char| !c.is_ascii_digit()).unwrap_or(when.len());
    let unit_ms = match &when[digits..] {
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => 0,
    };
    let at = match when[..digits].parse::<i64>().ok().filter(|_| unit_ms > 0) {
        Some(n) => now.plus_millis(n.saturating_mul(unit_ms)),
        None => when.parse().map_err(|_| wrong("must be like 90d, 12h, 30m or 2027-01-31T00:00:00Z"))?,
    };
    if at <= now {
        return Err(wrong("must lie ahead"));
    }
    Ok(at)
}

/// 256 bits of the system's random numbers.
fn random() -> std::io::Result<[u8; 32]> {
    let mut bits = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut bits)?;
    Ok(bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expiry_is_an_instant_or_a_time_from_now() {
        let now: Timestamp = "2026-12-01T00:00:00Z".parse().unwrap();
        let read = |when: &str| until(when, now).map(|at| at.to_string()).map_err(|failure| failure.code);
        assert_eq!(read("90d"), Ok("2027-03-01T00:00:00.000Z".to_owned()));
        assert_eq!(read("30m"), Ok("2026-12-01T00:30:00.000Z".to_owned()));
        assert_eq!(read("2027-01-31T01:00:00+01:00"), Ok("2027-01-31T00:00:00.000Z".to_owned()));
        for bad in ["", "0d", "5", "5y", "-1d", "2026-01-01T00:00:00Z", "d"] {
            assert_eq!(read(bad), Err(super::super::USAGE), "{bad}");
        }
    }
}
