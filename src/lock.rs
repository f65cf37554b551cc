//! Folders that one process at a time writes to.

use crate::paths::ensure_regular;
use anyhow::{Context, Result};
use std::fs::{File, TryLockError};
use std::path::Path;

/// Stays when the work is done: to remove it would pull it from under a process that has just opened it.
pub const LOCK: &str = ".lock";

/// A folder that nobody else writes to meanwhile; which ends with the process, however that ends.
#[derive(Debug)]
pub struct Locked(File);

impl Locked {
    /// Locks a folder that is there; none where another process has. Errors: the lock cannot be written.
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
        // Closing is not enough: a process that is being started just now has the file open, too, for a moment.
        let _ = self.0.unlock();
    }
}

/// Whether a file would be the lock of a folder.
pub fn is_lock(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == LOCK)
}
