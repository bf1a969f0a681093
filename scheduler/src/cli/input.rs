//! What commands read: documents out of files and standard input, payloads.

use std::path::{Path, PathBuf};

use serde_json::value::RawValue;
use tokio::io::AsyncReadExt as _;

use super::client::usage;
use super::{Failure, REFUSED};
use crate::api::http::MAX_BODY_BYTES;

/// What a person calls a file; `-` is standard input.
pub(super) fn name_of(path: &Path) -> String {
    if path == Path::new("-") { "standard input".to_owned() } else { path.display().to_string() }
}

/// Reads a file, or standard input for `-`, as text; failures name it.
pub(super) async fn read(path: &Path) -> Result<String, Failure> {
    let failed = |what: String| Failure { code: REFUSED, error: anyhow::anyhow!("{}: {what}", name_of(path)) };
    let mut bytes = Vec::new();
    let limit = MAX_BODY_BYTES as u64 + 1;
    let read = if path == Path::new("-") {
        tokio::io::stdin().take(limit).read_to_end(&mut bytes).await
    } else {
        match tokio::fs::File::open(path).await {
            Ok(file) => file.take(limit).read_to_end(&mut bytes).await,
            Err(e) => Err(e),
        }
    };
    read.map_err(|e| failed(format!("cannot be read: {e}")))?;
    if bytes.len() > MAX_BODY_BYTES {
        return Err(failed(format!("is larger than the limit of {MAX_BODY_BYTES} bytes (16 MiB)")));
    }
    String::from_utf8(bytes).map_err(|e| failed(format!("is not UTF-8 from byte {} on", e.utf8_error().valid_up_to())))
}

/// Reads a file of JSON and leaves it as it is written; failures name the file, and line and column in it.
pub(super) async fn read_json(path: &Path) -> Result<Box<RawValue>, Failure> {
    let text = read(path).await?;
    serde_json::from_str(&text)
        .map_err(|e| Failure { code: REFUSED, error: anyhow::anyhow!("{}: is not JSON: {e}", name_of(path)) })
}

/// Reads a payload: JSON, or `@FILE` (`@-` = standard input) that holds it.
pub(super) async fn payload(text: Option<&str>) -> Result<Option<Box<RawValue>>, Failure> {
    let Some(text) = text else { return Ok(None) };
    if let Some(file) = text.strip_prefix('@') {
        return Ok(Some(read_json(&PathBuf::from(file)).await?));
    }
    let read = serde_json::from_str(text);
    Ok(Some(read.map_err(|e| usage(format_args!("--payload is not JSON: {e} (text needs quotes: '\"text\"')")))?))
}
