//! Where a command's results may go.

use crate::lock::is_lock;
use crate::pictures;
use anyhow::{Result, bail};
use model::{TensorFile, ensure_writable};
use serde_json::Value;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

/// Bytes of what a check of every operation leaves behind, with much to spare.
const LARGEST_REPORT: u64 = 1 << 24;
/// The first bytes of other results, by which they are known.
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

/// Checks, before the work, that a result can be written, and that it takes the place of nothing but an earlier one:
/// a slip of the hand must not cost a checkpoint, or what the results are made from.
pub fn ensure_output(option: &str, path: &Path, kind: Kind) -> Result<()> {
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
    let other = path.extension().filter(|extension| !extension.eq_ignore_ascii_case("png"));
    if let (Kind::Picture, Some(other)) = (kind, other) {
        bail!("{option} {}: it would be a PNG and no {}; name it .png", path.display(), other.display());
    }
    Ok(ensure_writable(path)?)
}

/// What tells tensors that a command wrote from others, which they are not to replace: an entry of the file's metadata.
const PRODUCER: &str = "producer";
/// That of weights out of a run.
pub const EXPORT: &str = "biformer export";
/// That of what a model computed.
pub const FORWARD: &str = "biformer forward";
/// How the name of a weight's gradient ends, among what it computed.
pub const GRADIENT: &str = ".grad";

/// Says in a file which command wrote it.
pub fn sign(file: &mut TensorFile, producer: &str) {
    file.metadata.insert(PRODUCER.to_owned(), producer.to_owned());
}

fn is_from(file: &TensorFile, producer: &str) -> bool {
    file.metadata.get(PRODUCER).is_some_and(|of| of == producer)
}

impl Kind {
    /// Whether a file is empty, or has such contents.
    fn holds(self, path: &Path) -> bool {
        let is = |value: &Value, field: &str| value.get(field).is_some();
        fs::metadata(path).is_ok_and(|file| file.len() == 0)
            || match self {
                Kind::Checks => {
                    let list = serde_json::from_slice::<Vec<Value>>(&beginning(path, LARGEST_REPORT));
                    list.is_ok_and(|list| list.iter().all(|report| is(report, "op") && is(report, "kill_rate")))
                }
                Kind::Predictions => {
                    // One line is enough, and there may be a million.
                    let bytes = beginning(path, BEGINNING);
                    let mut lines = serde_json::Deserializer::from_slice(&bytes).into_iter::<Value>();
                    lines.next().is_some_and(|line| line.is_ok_and(|line| is(&line, "image") && is(&line, "predicted")))
                }
                Kind::Picture => pictures::is_own(&beginning(path, BEGINNING)),
                Kind::Tensors => TensorFile::read(path).is_ok_and(|file| {
                    let fits = |name: &String| {
                        ["logits", "pooled", "loss"].contains(&name.as_str())
                            || name.strip_prefix("out").is_some_and(|stage| stage.parse::<u8>().is_ok())
                            || [".routes", GRADIENT].iter().any(|end| name.ends_with(end))
                    };
                    is_from(&file, FORWARD) && file.tensors.keys().all(fits)
                }),
                Kind::Weights => TensorFile::read(path).is_ok_and(|file| is_from(&file, EXPORT)),
            }
    }
}

/// At most so many bytes of a file, none where it cannot be read.
fn beginning(path: &Path, most: u64) -> Vec<u8> {
    let mut bytes = vec![];
    let read = File::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes));
    read.map_or_else(|_| vec![], |_| bytes)
}
