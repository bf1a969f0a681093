//! Where the programs are that tests start. What `scripts/setup` put under `.dev/` comes before `PATH`; an environment
//! variable comes before both: `AX_NATS_SERVER`, `AX_OLD_NATS_SERVER`, `AX_NATS_CLI`, `AX_PYTHON`, `AX_BIN`.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

/// Returns the root of the repository.
#[must_use]
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or_else(|| Path::new(".")).to_path_buf()
}

/// Returns the folder of the examples.
#[must_use]
pub fn examples() -> PathBuf {
    root().join("examples")
}

/// Finds the nats-server that ax is tested with.
///
/// # Errors
/// When there is none: `scripts/setup` fetches it.
pub fn nats_server() -> Result<PathBuf> {
    find("nats-server", "AX_NATS_SERVER", ".dev/venv/bin/nats-server", true)
}

/// Finds the nats-server 2.9 that ax has to refuse.
///
/// # Errors
/// When there is none: `scripts/setup` builds it.
pub fn old_nats_server() -> Result<PathBuf> {
    find("nats-server 2.9", "AX_OLD_NATS_SERVER", ".dev/old/nats-server", false)
}

/// Finds the `nats` command line program.
///
/// # Errors
/// When there is none: `scripts/setup` builds it.
pub fn nats_cli() -> Result<PathBuf> {
    find("nats", "AX_NATS_CLI", ".dev/bin/nats", true)
}

/// Finds a Python that has nats-py.
///
/// # Errors
/// When there is none: `scripts/setup` makes one.
pub fn python() -> Result<PathBuf> {
    find("python3", "AX_PYTHON", ".dev/venv/bin/python", false)
}

fn find(name: &str, variable: &str, below_root: &str, in_path: bool) -> Result<PathBuf> {
    if let Some(named) = std::env::var_os(variable) {
        return Ok(PathBuf::from(named));
    }
    let own = root().join(below_root);
    if own.exists() {
        return Ok(own);
    }
    if in_path && let Some(path) = std::env::var_os("PATH") {
        let found = std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.exists());
        if let Some(found) = found {
            return Ok(found);
        }
    }
    bail!("{name} is missing ({}); scripts/setup puts it there", own.display())
}
