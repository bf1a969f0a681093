//! What workers received, one line for each run that they were given, from a worker's process to the one that judges.
//!
//! Invariant: a file that lacks its last line is not a record: a worker that did not end in order is never taken for one
//! that received less.

use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use ax_shared::{RunId, Timestamp};
use uuid::Uuid;

/// One receipt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Receipt {
    /// Number of the task.
    pub(super) task: u32,
    /// The instant for which the run is scheduled.
    pub(super) trigger_time: Timestamp,
    pub(super) run_id: RunId,
    pub(super) attempt: u32,
    /// When the worker had it, microseconds since 1970.
    pub(super) received_us: i64,
}

impl Receipt {
    /// Receipt minus the instant for which the run is scheduled; negative when it came too early.
    pub(super) fn lateness_us(&self) -> i64 {
        self.received_us - self.trigger_time.as_millis() * 1000
    }
}

/// Microseconds since 1970.
pub(super) fn now_us() -> i64 {
    i64::try_from(since_1970().as_micros()).unwrap_or(i64::MAX)
}

pub(super) fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Where receipts go.
#[derive(Debug, Clone)]
pub(super) struct Recording(Sender<Option<Receipt>>);

impl Recording {
    pub(super) fn add(&self, receipt: Receipt) {
        // The writer ends by itself only when its disk fails, which the recorder tells in the end.
        let _ = self.0.send(Some(receipt));
    }
}

/// Writes receipts on a thread of its own, so that whoever receives does not wait for a disk.
#[derive(Debug)]
pub(super) struct Recorder {
    receipts: Recording,
    writer: JoinHandle<std::io::Result<()>>,
}

impl Recorder {
    pub(super) fn create(path: &Path) -> anyhow::Result<Self> {
        let file = std::fs::File::create(path).with_context(|| format!("make the record {}", path.display()))?;
        let (receipts, incoming) = channel();
        let writer = std::thread::spawn(move || write(BufWriter::new(file), &incoming));
        Ok(Self { receipts: Recording(receipts), writer })
    }

    pub(super) fn recording(&self) -> Recording {
        self.receipts.clone()
    }

    /// Writes what was received by now and the last line.
    pub(super) fn finish(self) -> anyhow::Result<()> {
        let _ = self.receipts.0.send(None);
        match self.writer.join() {
            Ok(written) => written.context("write the record"),
            Err(_) => bail!("the thread that writes the record panicked"),
        }
    }
}

fn write(mut file: BufWriter<std::fs::File>, incoming: &Receiver<Option<Receipt>>) -> std::io::Result<()> {
    let mut lines = 0_u64;
    while let Ok(Some(receipt)) = incoming.recv() {
        let Receipt { task, trigger_time, run_id, attempt, received_us } = receipt;
        writeln!(file, "{task} {} {} {attempt} {received_us}", trigger_time.as_millis(), run_id.0.simple())?;
        lines += 1;
    }
    writeln!(file, "end {lines}")?;
    file.flush()
}

/// Reads a finished record.
pub(super) fn read(path: &Path) -> anyhow::Result<Vec<Receipt>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read the record {}", path.display()))?;
    parse(&text).with_context(|| format!("read the record {}", path.display()))
}

fn parse(text: &str) -> anyhow::Result<Vec<Receipt>> {
    let mut receipts = Vec::new();
    for line in text.lines() {
        if let Some(count) = line.strip_prefix("end ") {
            if count.parse() == Ok(receipts.len()) {
                return Ok(receipts);
            }
            bail!("it says that it holds {count} receipts, and it holds {}", receipts.len());
        }
        receipts.push(parse_line(line).with_context(|| format!("not a receipt: {line:?}"))?);
    }
    bail!("it is not finished: the worker did not end in order")
}

fn parse_line(line: &str) -> Option<Receipt> {
    let mut parts = line.split(' ');
    let receipt = Receipt {
        task: parts.next()?.parse().ok()?,
        trigger_time: Timestamp::from_millis(parts.next()?.parse().ok()?),
        run_id: RunId(Uuid::try_parse(parts.next()?).ok()?),
        attempt: parts.next()?.parse().ok()?,
        received_us: parts.next()?.parse().ok()?,
    };
    parts.next().is_none().then_some(receipt)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written_and_only_when_it_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record");
        let receipt = |task| Receipt {
            task,
            trigger_time: Timestamp::from_millis(1_796_000_000_000),
            run_id: RunId(Uuid::from_u128(u128::from(task) + 1)),
            attempt: 1,
            received_us: 1_796_000_000_001_234,
        };
        let recorder = Recorder::create(&path).unwrap();
        for task in 0..1000 {
            recorder.recording().add(receipt(task));
        }
        recorder.finish().unwrap();
        assert_eq!(read(&path).unwrap(), (0..1000).map(receipt).collect::<Vec<_>>());
        assert_eq!(receipt(0).lateness_us(), 1234);

        let text = std::fs::read_to_string(&path).unwrap();
        let last = text.trim_end().rfind('\n').unwrap();
        assert!(parse(&text[..last]).unwrap_err().to_string().contains("not finished"));
        assert!(parse("end 1\n").unwrap_err().to_string().contains("holds 0"));
        assert!(parse("1 2 three 4 5\nend 1\n").is_err());
    }
}
