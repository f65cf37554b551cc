//! Writing files without ever harming one that is there.

use crate::error::Result;
use crate::reading::{NOT_REGULAR, io};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
#[cfg(unix)]
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Writes a file so that whatever happens, even a full disk or a power cut, there is either the old file or the new one
/// under its name: the bytes are written to a temporary file beside it, which is synced and then renamed. An existing
/// path that is not a regular file (a folder, a device) is left alone, with an error. The owner and the permissions of
/// an existing file are kept as far as the system allows. Errors: [`Error::Io`](crate::Error::Io).
pub fn write_safely(path: &Path, bytes: &[u8]) -> Result<()> {
    write_with(path, |file| file.write_all(bytes))
}

/// Copies a regular file as [`write_safely`] writes one, with the same errors.
pub fn copy_safely(from: &Path, to: &Path) -> Result<()> {
    let mut source = File::open(from).map_err(|cause| io(from, cause))?;
    write_with(to, |file| std::io::copy(&mut source, file).map(drop))
}

pub(crate) fn write_with(path: &Path, put: impl FnOnce(&mut File) -> std::io::Result<()>) -> Result<()> {
    let (path, temporary) = &with_temporary(path)?;
    let written = File::create(temporary).and_then(|mut file| {
        if let Ok(before) = fs::metadata(path) {
            // Errors are ignored: not every file system has owners and permissions, and not every user may change a
            // file's owner, though perhaps its group.
            #[cfg(unix)]
            let _ = (fchown(&file, None, Some(before.gid())), fchown(&file, Some(before.uid()), None));
            let _ = file.set_permissions(before.permissions());
        }
        put(&mut file)?;
        file.sync_all()
    });
    let renamed = written.and_then(|()| fs::rename(temporary, path));
    if let Err(cause) = renamed {
        // The first error is the one to tell; a leftover that cannot be removed changes nothing.
        let _ = fs::remove_file(temporary);
        return Err(io(path, cause));
    }
    #[cfg(unix)]
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        // Makes the rename itself durable; not every file system can, and the file is complete either way.
        let _ = File::open(folder).and_then(|folder| folder.sync_all());
    }
    Ok(())
}

/// Checks that [`write_safely`] can create its temporary file, and that a file can have this name, to be called before
/// the work whose result is to be written. Errors: [`Error::Io`](crate::Error::Io) with the reason why not.
pub fn ensure_writable(path: &Path) -> Result<()> {
    if path.as_os_str().as_encoded_bytes().last().is_some_and(|&last| std::path::is_separator(last.into())) {
        return Err(io(path, std::io::Error::other("that is the name of a folder; add a file's")));
    }
    let (path, temporary) = &with_temporary(path)?;
    let probed = match fs::symlink_metadata(path) {
        // A name that is too long, for instance.
        Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => Err(cause),
        _ => File::create(temporary).and_then(|_| fs::remove_file(temporary)),
    };
    probed.map_err(|cause| io(path, cause))
}

/// Random for each process: it distinguishes this one from another with the same process ID, on another machine or in
/// another container, that writes the same file; and it gives short names to files with long ones.
static RANDOM: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// The longest name, in bytes, that a temporary file's contains: systems allow 255 in all.
const MAX_NAME: usize = 200;

/// The file that a path names, through links (renaming would replace them), and the temporary one beside it.
fn with_temporary(path: &Path) -> Result<(PathBuf, PathBuf)> {
    if fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        return Err(io(path, std::io::Error::other(NOT_REGULAR)));
    }
    let path = through_links(path).map_err(|cause| io(path, cause))?;
    // As text, two different names that are not valid UTF-8 could become the same.
    let (mut name, own) = (OsString::from("."), path.file_name().unwrap_or(OsStr::new("file")));
    if own.len() > MAX_NAME {
        name.push(format!("{:016x}", RANDOM.hash_one(own)));
    } else {
        name.push(own);
    }
    // Two threads may write the same file.
    static WRITTEN: AtomicU64 = AtomicU64::new(0);
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    name.push(format!(".{}{:06}{number}.tmp", std::process::id(), RANDOM.hash_one(0) % 1_000_000));
    let temporary = path.with_file_name(name);
    Ok((path, temporary))
}

/// The target of a path through symbolic links, which need not exist yet.
fn through_links(path: &Path) -> std::io::Result<PathBuf> {
    const MAX_LINKS: usize = 40; // as many as Linux follows
    let next = |link: &PathBuf| Some(link.parent()?.join(fs::read_link(link).ok()?));
    let place = std::iter::successors(Some(path.to_owned()), next).take(MAX_LINKS).last();
    let place = place.unwrap_or_else(|| path.to_owned());
    match fs::canonicalize(&place) {
        Err(error) if place.is_symlink() => Err(error),
        Err(_) => Ok(place),
        Ok(real) => Ok(real),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_write_the_same_file_leave_it_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::thread::scope(|scope| {
            for byte in 1..=4 {
                let path = &path;
                scope.spawn(move || (0..25).for_each(|_| write_safely(path, &vec![byte; 100_000]).unwrap()));
            }
        });
        let bytes = fs::read(&path).unwrap();
        assert!(bytes.len() == 100_000 && bytes.iter().all(|&byte| byte == bytes[0]));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
