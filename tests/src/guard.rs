//! Ends what a test process started, however that process ended: by a panic, by Ctrl-C, by SIGKILL.
//!
//! One small shell runs beside every test process that uses this crate, in a process group of its own. It is told each
//! child's process group and each folder as they come and go. When its standard input closes, which the kernel sees to when
//! the test process is gone, it kills the groups and removes the folders that are left.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, OnceLock};

use anyhow::{Context, Result};

const SCRIPT: &str = r#"
trap '' INT TERM HUP
nl='
'
groups=' ' folders=$nl
while read -r what value; do
  case $what in
    +group) groups="$groups$value " ;;
    -group) case $groups in *" $value "*) groups="${groups%%" $value "*} ${groups#*" $value "}" ;; esac ;;
    +folder) folders="$folders$value$nl" ;;
    -folder) case $folders in *"$nl$value$nl"*) folders="${folders%%"$nl$value$nl"*}$nl${folders#*"$nl$value$nl"}" ;; esac ;;
  esac
done
for group in $groups; do kill -CONT "-$group"; kill -QUIT "-$group"; done 2>/dev/null
for tenth in 1 2 3 4 5 6 7 8 9 10; do
  left=
  for group in $groups; do kill -0 "-$group" 2>/dev/null && left=1; done
  [ -z "$left" ] && break
  sleep 0.1
done
for group in $groups; do kill -KILL "-$group"; done 2>/dev/null
IFS=$nl
for folder in $folders; do rm -rf "$folder"; done
"#;

struct Guard {
    stdin: ChildStdin,
    _shell: Child,
}

fn tell(line: &str) -> Result<()> {
    static GUARD: OnceLock<Mutex<Option<Guard>>> = OnceLock::new();
    let mut guard = GUARD.get_or_init(|| Mutex::new(None)).lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if guard.is_none() {
        let mut shell = Command::new("sh")
            .args(["-c", SCRIPT])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .context("start the guard shell")?;
        let stdin = shell.stdin.take().context("the guard shell has no input")?;
        *guard = Some(Guard { stdin, _shell: shell });
    }
    if let Some(guard) = guard.as_mut() {
        guard.stdin.write_all(format!("{line}\n").as_bytes()).context("tell the guard shell")?;
    }
    Ok(())
}

pub(crate) fn watch_group(leader: u32) -> Result<()> {
    tell(&format!("+group {leader}"))
}

/// Forgets a group whose leader has been reaped: its number may be given to somebody else.
pub(crate) fn forget_group(leader: u32) {
    tell(&format!("-group {leader}")).ok();
}

/// A folder that is removed with this value, or by the guard when the test process dies first.
#[derive(Debug)]
pub struct Scratch {
    folder: tempfile::TempDir,
}

impl Scratch {
    /// Makes an empty folder. `name` tells people what it is for.
    ///
    /// # Errors
    /// When the system's temporary folder cannot be written.
    pub fn new(name: &str) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix(&format!("ax-{name}-")).tempdir().context("make a folder")?;
        tell(&format!("+folder {}", folder.path().display()))?;
        Ok(Self { folder })
    }

    /// Returns the folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the path of `name` in the folder; makes nothing.
    #[must_use]
    pub fn join(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Removed here, so that the guard need not know; TempDir finds nothing left to do.
        if std::fs::remove_dir_all(self.path()).is_ok() {
            tell(&format!("-folder {}", self.path().display())).ok();
        }
    }
}
