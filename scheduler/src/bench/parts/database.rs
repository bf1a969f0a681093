//! The database that the nodes use: private and removed after, or one of its own on a server that was named.

use anyhow::{Context as _, bail};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, SqliteConnection};

use super::postgres::{self, Postgres};
use super::{Parts, short_id};
use crate::config::without_password;

/// Which database is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::bench) enum Choice {
    /// Postgres when its programs are found, else SQLite.
    Auto,
    /// A file in the folder.
    Sqlite,
    /// A private server.
    Postgres,
    /// A Postgres server that runs already; a database is made on it and dropped after.
    Server(String),
}

impl std::str::FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "sqlite" => Ok(Self::Sqlite),
            "postgres" => Ok(Self::Postgres),
            _ if text.starts_with("postgres://") || text.starts_with("postgresql://") => {
                Ok(Self::Server(text.to_owned()))
            }
            _ => Err("must be auto, sqlite, postgres or postgres://USER@HOST/DATABASE".into()),
        }
    }
}

/// The database of a run.
#[derive(Debug)]
pub(in crate::bench) struct Database {
    url: String,
    version: String,
    private: Option<Postgres>,
    /// Server and name of what has to be dropped.
    made: Option<(String, String)>,
}

impl Database {
    pub(super) async fn start(parts: &Parts, choice: &Choice) -> anyhow::Result<Self> {
        match choice {
            Choice::Sqlite => Self::sqlite(parts).await,
            Choice::Server(url) => Self::on(url, None).await,
            Choice::Auto | Choice::Postgres => match (postgres::programs(), choice) {
                (Some(programs), _) => {
                    let server = Postgres::start(parts, &programs).await?;
                    Self::on(&server.url(), Some(server)).await
                }
                (None, Choice::Auto) => Self::sqlite(parts).await,
                (None, _) => bail!("no Postgres found: neither in PATH nor under /usr/lib/postgresql"),
            },
        }
    }

    async fn sqlite(parts: &Parts) -> anyhow::Result<Self> {
        let mut memory = SqliteConnection::connect("sqlite::memory:").await.context("open SQLite")?;
        let version: String = sqlx::query_scalar("select sqlite_version()").fetch_one(&mut memory).await?;
        let url = format!("sqlite://{}", parts.folder().join("ax.db").display());
        Ok(Self { url, version: format!("SQLite {version}"), private: None, made: None })
    }

    async fn on(server: &str, private: Option<Postgres>) -> anyhow::Result<Self> {
        let shown = without_password(server);
        let mut connection =
            PgConnection::connect(server).await.with_context(|| format!("connect to Postgres at {shown}"))?;
        let version: String = sqlx::query_scalar("show server_version").fetch_one(&mut connection).await?;
        let name = format!("ax_bench_{}", short_id());
        sqlx::query(AssertSqlSafe(format!("create database {name}")))
            .execute(&mut connection)
            .await
            .with_context(|| format!("make a database on {shown}"))?;
        connection.close().await?;
        let mut url = reqwest::Url::parse(server).with_context(|| format!("read the address {shown}"))?;
        url.set_path(&name);
        // A private server takes its databases with it.
        let made = private.is_none().then(|| (server.to_owned(), name));
        Ok(Self { url: url.into(), version: format!("PostgreSQL {version}"), private, made })
    }

    pub(in crate::bench) fn url(&self) -> &str {
        &self.url
    }

    /// Kind and version.
    pub(in crate::bench) fn version(&self) -> &str {
        &self.version
    }

    pub(in crate::bench) fn is_postgres(&self) -> bool {
        self.url.starts_with("postgres")
    }

    /// Where it is, for people.
    pub(in crate::bench) fn place(&self) -> &'static str {
        match (self.is_postgres(), &self.private) {
            (false, _) => "a private SQLite file",
            (true, Some(_)) => "a private Postgres",
            (true, None) => "a Postgres from outside",
        }
    }

    pub(super) fn private(&self) -> Option<&Postgres> {
        self.private.as_ref()
    }

    pub(super) fn check(&mut self) -> anyhow::Result<()> {
        self.private.as_mut().map_or(Ok(()), Postgres::check)
    }

    pub(super) async fn stop(self, parts: &Parts) -> anyhow::Result<()> {
        if let Some((server, name)) = self.made {
            let mut connection = PgConnection::connect(&server).await.context("connect to drop the database")?;
            sqlx::query(AssertSqlSafe(format!("drop database if exists {name} with (force)")))
                .execute(&mut connection)
                .await
                .with_context(|| format!("drop the database {name}"))?;
        }
        match self.private {
            Some(server) => server.stop(parts).await,
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_database_is_named_by_kind_or_by_a_server() {
        assert_eq!("auto".parse(), Ok(Choice::Auto));
        assert_eq!("postgres".parse(), Ok(Choice::Postgres));
        assert_eq!("postgres://a@b/c".parse(), Ok(Choice::Server("postgres://a@b/c".into())));
        for bad in ["", "mysql://a/b", "sqlite://ax.db", "Postgres"] {
            assert!(bad.parse::<Choice>().is_err(), "{bad}");
        }
    }
}
