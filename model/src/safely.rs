//! Writing files without ever harming one that is there.

use crate::error::Result;
use crate::reading::{NOT_REGULAR, io};
use std::fs::{self, File};
use std::io::Write;
#[cfg(unix)]
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;
use tempfile::{NamedTempFile, PersistError};

/// How the names of temporary files begin and end.
const AFFIXES: [&str; 2] = [".biformer-", ".tmp"];

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
    let path = &place(path)?;
    let write = || {
        let mut temporary = temporary_in(folder_of(path))?;
        let file = temporary.as_file_mut();
        if let Ok(before) = fs::metadata(path) {
            // Errors are ignored: not every file system has owners and permissions, and not every user may change a
            // file's owner, though perhaps its group.
            #[cfg(unix)]
            let _ = (fchown(&*file, None, Some(before.gid())), fchown(&*file, Some(before.uid()), None));
            let _ = file.set_permissions(before.permissions());
        }
        put(file)?;
        sync(file)?;
        rename(temporary, path)
    };
    write().map_err(|cause| io(path, cause))?;
    #[cfg(unix)]
    // Makes the renaming itself durable; not every file system can, and the file is complete either way.
    let _ = File::open(folder_of(path)).and_then(|folder| folder.sync_all());
    Ok(())
}

/// Waits until a file is on the disk. On Apple's systems not every file system (such as those of other machines) can do
/// that for certain; what has been written is then with the system.
fn sync(file: &File) -> std::io::Result<()> {
    // EINVAL, ENOTTY and ENOTSUP there.
    let cannot = |error: &std::io::Error| matches!(error.raw_os_error(), Some(22 | 25 | 45));
    match file.sync_all() {
        Err(error) if cfg!(target_vendor = "apple") && cannot(&error) => Ok(()),
        synced => synced,
    }
}

/// Gives a temporary file its name. On Windows nobody can replace a file that somebody else is reading, so there it is
/// tried for some seconds.
fn rename(mut temporary: NamedTempFile, path: &Path) -> std::io::Result<()> {
    const TRIES: u32 = 50;
    // Access denied, or used by another process.
    let is_held = |error: &std::io::Error| cfg!(windows) && matches!(error.raw_os_error(), Some(5 | 32 | 33));
    for _ in 1..TRIES {
        match temporary.persist(path) {
            Err(PersistError { file, error }) if is_held(&error) => temporary = file,
            persisted => return Ok(persisted.map(drop)?),
        }
        thread::sleep(Duration::from_millis(100));
    }
    Ok(temporary.persist(path).map(drop)?)
}

/// Checks that [`write_safely`] can create its temporary file, and that a file can have this name, to be called before
/// the work whose result is to be written. Errors: [`Error::Io`](crate::Error::Io) with the reason why not.
pub fn ensure_writable(path: &Path) -> Result<()> {
    if path.as_os_str().as_encoded_bytes().last().is_some_and(|&last| std::path::is_separator(last.into())) {
        return Err(io(path, std::io::Error::other("that is the name of a folder; add a file's")));
    }
    let path = &place(path)?;
    let probed = match fs::symlink_metadata(path) {
        // A name that is too long, for instance.
        Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => Err(cause),
        _ => temporary_in(folder_of(path)).map(drop),
    };
    probed.map_err(|cause| io(path, cause))
}

/// Removes the temporary files that killed processes have left in a folder, as far as it can: they are litter, worth
/// removing and not worth failing over. Nobody else may be writing to the folder.
pub fn remove_leftovers(folder: &Path) {
    let [prefix, suffix] = AFFIXES.map(str::as_bytes);
    let is_temporary = |name: &[u8]| name.starts_with(prefix) && name.ends_with(suffix);
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if is_temporary(entry.file_name().as_encoded_bytes()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// A new file under a name of its own, which is removed unless it gets another.
fn temporary_in(folder: &Path) -> std::io::Result<NamedTempFile> {
    let [prefix, suffix] = AFFIXES;
    // Created here, because the library's own files are for their owner alone.
    tempfile::Builder::new().prefix(prefix).suffix(suffix).make_in(folder, |path| File::create_new(path))
}

/// The folder of a file: "." where its path has none.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The file that a path names, through links: renaming would replace them.
fn place(path: &Path) -> Result<PathBuf> {
    if fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        return Err(io(path, std::io::Error::other(NOT_REGULAR)));
    }
    through_links(path).map_err(|cause| io(path, cause))
}

/// The target of a path through symbolic links, which need not exist yet.
fn through_links(path: &Path) -> std::io::Result<PathBuf> {
    const PATHS: usize = 1 + 40; // Linux follows forty links
    let next = |link: &PathBuf| Some(link.parent()?.join(fs::read_link(link).ok()?));
    let place = std::iter::successors(Some(path.to_owned()), next).take(PATHS).last();
    let place = place.expect("invariant: the path itself is the first");
    dunce::canonicalize(&place).or_else(|error| if place.is_symlink() { Err(error) } else { Ok(place) })
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

    #[test]
    fn what_a_killed_process_leaves_is_removed_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let (_, left) = temporary_in(folder.path()).unwrap().keep().unwrap();
        let others = [".biformer-notes", "biformer-1.tmp", ".notes.tmp"];
        others.iter().for_each(|name| fs::write(folder.path().join(name), "").unwrap());
        remove_leftovers(folder.path());
        assert!(!left.exists() && others.iter().all(|name| folder.path().join(name).exists()));
    }

    #[cfg(unix)]
    #[test]
    fn a_new_file_has_the_permissions_of_any_and_another_keeps_its_own() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let [any, path] = ["any", "file"].map(|name| folder.path().join(name));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        fs::write(&any, "").unwrap();
        write_safely(&path, b"").unwrap();
        assert_eq!(mode(&path), mode(&any));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        write_safely(&path, b"new").unwrap();
        assert_eq!(mode(&path) & 0o777, 0o640);
    }
}
