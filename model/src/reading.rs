//! Reading files: regular ones, and no more of them than fits into memory.

use crate::error::{Error, Result};
use std::fs::{self, File};
use std::path::Path;
use tensor::memory::{amount, free_bytes};

/// Refuses to read what takes more memory than there is, if that is known.
pub(crate) fn ensure_free(path: &Path, needed: u64) -> Result<()> {
    // What is free is an estimate, and small files are read as before.
    const SMALL: u64 = 64 << 20;
    match free_bytes() {
        Some(free) if needed > free.max(SMALL) => {
            let [needed, free] = [needed, free].map(amount);
            let reason = format!("reading it takes {needed} of memory, and {free} are free");
            Err(io(path, std::io::Error::new(std::io::ErrorKind::OutOfMemory, reason)))
        }
        _ => Ok(()),
    }
}

/// Opens a regular file. A device or a pipe might never end.
pub(crate) fn open_regular(path: &Path) -> Result<File> {
    let file = fs::metadata(path).and_then(|file| match file.is_file() {
        true => File::open(path),
        false => Err(std::io::Error::other(NOT_REGULAR)),
    });
    file.map_err(|cause| io(path, cause))
}

pub(crate) const NOT_REGULAR: &str = "it is there, but not as a regular file; name another path";

pub(crate) fn io(path: &Path, cause: std::io::Error) -> Error {
    Error::Io { path: path.display().to_string(), cause }
}
