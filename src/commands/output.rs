//! Where a command's results may go.

use crate::folder_lock::is_lock;
use crate::paths::resolved;
use crate::pictures;
use crate::trainer::checkpoint::FILE_NAME;
use crate::trainer::folder::FILES;
use anyhow::{Context, Result, bail};
use model::{TensorFile, ensure_writable};
use serde_json::Value;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

/// An upper bound on the bytes of a report on every operation, with a wide margin.
const MAX_REPORT: u64 = 1 << 24;
/// How many of its first bytes identify another kind of result.
const BEGINNING: u64 = 1 << 16;

/// What a command leaves behind.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// What `gradcheck` found: a list in JSON.
    Checks,
    /// What `eval` wrote of each image: lines of JSON.
    Predictions,
    /// A plot.
    Picture,
    /// What `forward` computed.
    Tensors,
    /// What `export` took out of a run.
    Weights,
}

/// Checks, before the work, that a result can be written, and that it overwrites nothing but an earlier result of the
/// same kind: a typing mistake must not cost a checkpoint, or the files that the results are computed from. Where no
/// path is named, there is nothing to check.
pub fn ensure_output<'p>(option: &str, path: impl Into<Option<&'p Path>>, kind: Kind) -> Result<()> {
    let Some(path) = path.into() else { return Ok(()) };
    if path == Path::new("-") {
        bail!("{option} -: results go to files; name one (./- for one of that name)");
    }
    let pytorch = path.extension().is_some_and(|extension| extension == "pth" || extension == "pt");
    if matches!(kind, Kind::Tensors | Kind::Weights) && pytorch {
        bail!(
            "{option} {}: it would be a safetensors file, which PyTorch reads with safetensors.torch.load_file; name it \
             .safetensors",
            path.display()
        );
    }
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.exists()) {
        bail!("{option} {}: there is no folder {}; make it first", path.display(), folder.display());
    }
    if path.is_file() && (!kind.holds(path) || is_lock(path)) {
        bail!("{option} {}: what is there is no earlier result; name another file", path.display());
    }
    let place = resolved(path).with_context(|| format!("{option} {}", path.display()))?;
    let is_of_run = place.file_name().is_some_and(|name| FILES.iter().any(|file| name == *file));
    if is_of_run && place.with_file_name(FILE_NAME).exists() {
        bail!("{option} {}: that name is one of a run's own files; choose another", path.display());
    }
    let other = path.extension().filter(|extension| !extension.eq_ignore_ascii_case("png"));
    if let (Kind::Picture, Some(other)) = (kind, other) {
        bail!("{option} {}: it would be a PNG and no {}; name it .png", path.display(), other.display());
    }
    Ok(ensure_writable(path)?)
}

/// The metadata entry that marks a tensor file as written by a command; files without it must not be overwritten.
const PRODUCER: &str = "producer";
/// The producer of exported weights.
pub const EXPORT: &str = "biformer export";
/// The producer of results that a model computed.
pub const FORWARD: &str = "biformer forward";
/// The suffix of the name of a weight's gradient, among those results.
pub const GRADIENT: &str = ".grad";

/// Says in a file which command wrote it.
pub fn sign(file: &mut TensorFile, producer: &str) {
    file.metadata.insert(PRODUCER.to_owned(), producer.to_owned());
}

fn is_from(path: &Path, producer: &str) -> bool {
    TensorFile::read_metadata(path).is_ok_and(|metadata| metadata.get(PRODUCER).is_some_and(|of| of == producer))
}

impl Kind {
    /// Whether a file is empty, or has such contents.
    fn holds(self, path: &Path) -> bool {
        let is = |value: &Value, field: &str| value.get(field).is_some();
        fs::metadata(path).is_ok_and(|file| file.len() == 0)
            || match self {
                Kind::Checks => {
                    let list = serde_json::from_slice::<Vec<Value>>(&beginning(path, MAX_REPORT));
                    let checked = |report: &Value| is(report, "passed") && (is(report, "op") || is(report, "part"));
                    list.is_ok_and(|list| list.iter().all(checked))
                }
                Kind::Predictions => {
                    // One line is enough, and there may be a million.
                    let bytes = beginning(path, BEGINNING);
                    let mut lines = serde_json::Deserializer::from_slice(&bytes).into_iter::<Value>();
                    lines.next().is_some_and(|line| line.is_ok_and(|line| is(&line, "image") && is(&line, "predicted")))
                }
                Kind::Picture => pictures::is_own(&beginning(path, BEGINNING)),
                Kind::Tensors => is_from(path, FORWARD),
                Kind::Weights => is_from(path, EXPORT),
            }
    }
}

/// At most the first `most` bytes of a file; none if it cannot be read.
fn beginning(path: &Path, most: u64) -> Vec<u8> {
    let mut bytes = vec![];
    let read = File::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes));
    read.map_or_else(|_| vec![], |_| bytes)
}
