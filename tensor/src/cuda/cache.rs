//! Compiled kernels on disk, in a folder that only the user may access, because the files are executed later.

use std::fs::{self, DirBuilder, File};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Names the folder for compiled kernels.
const VARIABLE: &str = "BIFORMER_CACHE";

/// What an environment variable names, if it is set to anything.
pub(super) fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The cache folder; `None` if none of the variables that locate it is set.
pub(super) fn folder() -> Option<PathBuf> {
    variable(VARIABLE)
        .or_else(|| Some(variable("XDG_CACHE_HOME")?.join("biformer")))
        .or_else(|| Some(variable("HOME")?.join(".cache").join("biformer")))
        .or_else(|| Some(variable("LOCALAPPDATA")?.join("biformer"))) // Windows
}

/// The contents that [`write`] stored; `None` if the file is missing or damaged.
pub(super) fn read(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = fs::read(path).ok()?;
    contents(&bytes)?;
    bytes.truncate(bytes.len() - CHECK);
    Some(bytes)
}

/// Makes a folder, and those that it is to lie in, for the user alone.
pub(super) fn make(folder: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

/// Writes a file, followed by an eight-byte checksum that reveals damage. The write is atomic, because other processes
/// and threads may read or write the same file.
pub(super) fn write(path: &Path, contents: &[u8]) -> io::Result<()> {
    static WRITES: AtomicU64 = AtomicU64::new(0);
    make(path.parent().unwrap_or(Path::new(".")))?;
    let number = WRITES.fetch_add(1, Ordering::Relaxed);
    let half = path.with_extension(format!("{}.{number}.half", std::process::id()));
    let written = File::create(&half).and_then(|mut file| {
        file.write_all(contents)?;
        file.write_all(&checksum(contents).to_le_bytes())?;
        file.sync_all()?;
        fs::rename(&half, path)
    });
    if written.is_err() {
        // The first error is the one to tell.
        let _ = fs::remove_file(&half);
    }
    written
}

const CHECK: usize = size_of::<u64>();

fn contents(bytes: &[u8]) -> Option<&[u8]> {
    let (contents, check) = bytes.split_last_chunk::<CHECK>()?;
    (checksum(contents) == u64::from_le_bytes(*check)).then_some(contents)
}

fn checksum(bytes: &[u8]) -> u64 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_cached_comes_back_and_damage_is_seen() {
        let folder = std::env::temp_dir().join(format!("biformer-cache-{}", std::process::id()));
        let path = folder.join("deeper/file");
        assert_eq!(read(&path), None);
        write(&path, &[1, 2, 10, 0, 5]).unwrap();
        assert_eq!(read(&path).unwrap(), [1, 2, 10, 0, 5]);
        let bytes = fs::read(&path).unwrap();
        // The library that lies there is executed.
        #[cfg(unix)]
        assert_eq!(
            std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&folder).unwrap().permissions()) & 0o777,
            0o700
        );
        assert!(write(&folder.join("deeper"), &[1]).is_err(), "a folder is there");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "what was written by halves is gone");
        fs::remove_dir_all(folder).unwrap();
        for length in 0..bytes.len() {
            assert_eq!(contents(&bytes[..length]), None, "cut to {length}");
        }
        for place in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[place] ^= 4;
            assert_eq!(contents(&damaged), None, "byte {place}");
        }
    }
}
