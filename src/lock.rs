//! Folders that one process at a time writes to.

use crate::paths::ensure_regular;
use anyhow::{Context, Result};
use std::fs::{File, TryLockError};
use std::path::Path;

/// The name of a folder's lock file. It is not deleted when the work is done: that would race with a process that has
/// just opened it and would then lock a deleted file.
pub const LOCK: &str = ".lock";

/// An exclusive lock on a folder. The operating system releases it when the process ends, however it ends.
#[derive(Debug)]
pub struct Locked(File);

impl Locked {
    /// Locks an existing folder; returns `None` if another process holds the lock. Errors: the lock file cannot be
    /// written.
    pub fn new(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(LOCK);
        ensure_regular(&path)?;
        let file = File::options().create(true).truncate(false).write(true).open(path).context("cannot be written")?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => Ok(None),
            // Not every file system has locks, and the work is possible without.
            Ok(()) | Err(TryLockError::Error(_)) => Ok(Some(Self(file))),
        }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // Closing the file is not enough: a child process that is just being started also has it open for a moment, and
        // with it the lock.
        let _ = self.0.unlock();
    }
}

/// Whether a path has the name of a lock file.
pub fn is_lock(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == LOCK)
}
