//! Bringing a schema up to date, one forward step per file of `migrations/`.

use sqlx::migrate::{Migrate, MigrateError, Migrator};

use crate::ports::StoreError;

/// Applies the steps that are missing and answers their names. The caller gives up the connection afterwards: when a
/// step fails it still holds the lock that orders migrations.
///
/// # Errors
/// [`StoreError::Refused`] when the schema is newer than this program or not of its making.
pub(super) async fn migrate<C: Migrate>(connection: &mut C, steps: &Migrator) -> Result<Vec<String>, StoreError> {
    let table = &steps.table_name;
    connection.lock().await.map_err(failed)?;
    connection.ensure_migrations_table(table).await.map_err(failed)?;
    if let Some(version) = connection.dirty_version(table).await.map_err(failed)? {
        return Err(StoreError::Refused(format!("step {version} of the database's schema was left half-applied")));
    }
    let applied = connection.list_applied_migrations(table).await.map_err(failed)?;
    let newest = steps.iter().map(|step| step.version).max().unwrap_or_default();
    for step in &applied {
        let Some(known) = steps.iter().find(|known| known.version == step.version) else {
            return Err(StoreError::Refused(format!(
                "the database's schema is at step {}, newer than the {newest} that this version of ax knows: use a newer ax",
                step.version
            )));
        };
        if known.checksum != step.checksum {
            return Err(StoreError::Refused(format!(
                "step {} of the database's schema is another one than that of this version of ax",
                step.version
            )));
        }
    }
    let mut names = Vec::new();
    for step in steps.iter().filter(|step| applied.iter().all(|done| done.version != step.version)) {
        connection.apply(table, step).await.map_err(failed)?;
        names.push(format!("{:04} {}", step.version, step.description));
    }
    connection.unlock().await.map_err(failed)?;
    Ok(names)
}

fn failed(error: MigrateError) -> StoreError {
    match error {
        MigrateError::Execute(source) | MigrateError::ExecuteMigration(source, _) => source.into(),
        other => StoreError::Refused(format!("the database's schema cannot be brought up to date: {other}")),
    }
}
