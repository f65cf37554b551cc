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
pub struct Locked {
    lock: File,
    /// Kept open: once the folder is removed, the system could otherwise give its inode number to another one. On
    /// Windows a folder cannot be moved while a file in it is open.
    #[cfg(unix)]
    folder: File,
}

impl Locked {
    /// Locks an existing folder; returns `None` if another process holds the lock. Errors: the lock file cannot be
    /// written.
    pub fn new(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(LOCK);
        ensure_regular(&path)?;
        let lock = File::options().create(true).truncate(false).write(true).open(path).context("cannot be written")?;
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => Ok(None),
            // Not every file system has locks, and the work is possible without.
            Ok(()) | Err(TryLockError::Error(_)) => Ok(Some(Self {
                lock,
                #[cfg(unix)]
                folder: File::open(folder)?,
            })),
        }
    }

    /// Whether the locked folder, and the lock in it, are still at this path: it may have been moved in the meantime,
    /// and another one made in its place; and once a lock file is removed, another process can lock a new one.
    pub fn is_at(&self, path: &Path) -> bool {
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            let identity = |it: std::io::Result<std::fs::Metadata>| it.map(|it| (it.dev(), it.ino()));
            [(&self.folder, path.to_owned()), (&self.lock, path.join(LOCK))].into_iter().all(|(held, path)| {
                let [held, there] = [held.metadata(), std::fs::metadata(path)].map(identity);
                matches!((held, there), (Ok(held), Ok(there)) if held == there)
            })
        }
        #[cfg(not(unix))]
        path.exists()
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // Closing the file is not enough: a child process that is just being started also has it open for a moment, and
        // with it the lock.
        let _ = self.lock.unlock();
    }
}

/// Whether a path has the name of a lock file.
pub fn is_lock(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == LOCK)
}
