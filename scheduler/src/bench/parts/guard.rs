//! Ends every part and removes the folder however this process ends: by Ctrl-C, by a panic, by SIGKILL.
//!
//! A small shell waits for the end of its input, which the kernel sees to when we are gone. It is told each process
//! group and the folder as they come and go.

use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use anyhow::Context as _;

/// SIGINT stops every part of ours at once and in order; what does not listen is killed two seconds later.
const SCRIPT: &str = r#"
trap '' INT TERM HUP
groups=' ' folder=
while read -r what value; do
  case $what in
    +group) groups="$groups$value " ;;
    -group) case $groups in *" $value "*) groups="${groups%%" $value "*} ${groups#*" $value "}" ;; esac ;;
    +folder) folder=$value ;;
    -folder) folder= ;;
  esac
done
for group in $groups; do kill -INT "-$group"; done 2>/dev/null
for tenth in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
  left=
  for group in $groups; do kill -0 "-$group" 2>/dev/null && left=1; done
  [ -z "$left" ] && break
  sleep 0.1
done
for group in $groups; do kill -KILL "-$group"; done 2>/dev/null
[ -n "$folder" ] && rm -rf "$folder"
"#;

/// The shell, as long as we live.
#[derive(Debug)]
pub(super) struct Guard {
    shell: Child,
    input: Mutex<Option<ChildStdin>>,
}

impl Guard {
    pub(super) fn start() -> anyhow::Result<Self> {
        let mut shell = Command::new("/bin/sh")
            .args(["-c", SCRIPT])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .context("start a shell")?;
        let input = Mutex::new(shell.stdin.take());
        Ok(Self { shell, input })
    }

    fn tell(&self, line: &str) {
        // A shell that is gone guards nothing any more; what we end ourselves ends all the same.
        if let Some(input) = self.input.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            let _ = input.write_all(format!("{line}\n").as_bytes());
        }
    }

    pub(super) fn watch(&self, group: u32) {
        self.tell(&format!("+group {group}"));
    }

    /// The group has ended: its number may be given to somebody else.
    pub(super) fn forget(&self, group: u32) {
        self.tell(&format!("-group {group}"));
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.input.lock().unwrap_or_else(PoisonError::into_inner).take());
        let _ = self.shell.wait();
    }
}

/// Where everything lies; removed with this value.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
}

impl Folder {
    /// Makes an empty one in the system's folder for temporary files.
    pub(super) fn make(guard: &Guard) -> anyhow::Result<Self> {
        let path = std::env::temp_dir().join(format!("ax-bench-{}", uuid::Uuid::new_v4().simple()));
        std::fs::create_dir(&path).with_context(|| format!("make the folder {}", path.display()))?;
        guard.tell(&format!("+folder {}", path.display()));
        Ok(Self { path })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left of it is the guard's.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
