//! Where a command's results may go.

use anyhow::{Result, bail};
use model::{TensorFile, expect_writable};
use std::fs;
use std::path::Path;

/// What a command leaves behind.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// Reports in JSON, a list of them.
    Json,
    /// What `eval` wrote of each image: lines of JSON.
    Predictions,
    /// A picture.
    Png,
    /// What `forward` computed.
    Tensors,
    /// What `export` took out of a run.
    Weights,
}

/// Checks, before the work, that a result can be written, and that it takes the place of nothing but an earlier one:
/// a slip of the hand must not cost a checkpoint, or what the results are made from.
pub fn expect_output(option: &str, path: &Path, kind: Kind) -> Result<()> {
    if path.is_file() && !kind.holds(path) {
        bail!("{option} {}: what is there is no earlier result; name another file", path.display());
    }
    Ok(expect_writable(path)?)
}

/// What tells weights that `export` wrote from others, which they are not to replace: an entry of the file's metadata.
pub const EXPORTED: (&str, &str) = ("producer", "biformer export");

impl Kind {
    /// Whether a file is empty, or has such contents.
    fn holds(self, path: &Path) -> bool {
        let read = || fs::read(path).unwrap_or_default();
        fs::metadata(path).is_ok_and(|file| file.len() == 0)
            || match self {
                Kind::Json => serde_json::from_slice::<Vec<serde_json::Value>>(&read()).is_ok(),
                Kind::Predictions => {
                    let bytes = read();
                    let mut lines = serde_json::Deserializer::from_slice(&bytes).into_iter::<serde_json::Value>();
                    !bytes.trim_ascii().is_empty()
                        && lines.all(|line| line.is_ok_and(|line| line.get("predicted").is_some()))
                }
                Kind::Png => read().starts_with(b"\x89PNG"),
                Kind::Tensors => TensorFile::read(path).is_ok_and(|file| {
                    let fits = |name: &String| {
                        ["logits", "pooled"].contains(&name.as_str())
                            || name.starts_with("out")
                            || name.ends_with(".routes")
                    };
                    file.metadata.is_empty() && file.tensors.keys().all(fits)
                }),
                Kind::Weights => TensorFile::read(path)
                    .is_ok_and(|file| file.metadata.get(EXPORTED.0).is_some_and(|producer| producer == EXPORTED.1)),
            }
    }
}
