//! Which files in a folder are images, and which are not.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, DirEntry};
use std::path::{Path, PathBuf};

use crate::folder::PARTS;
use crate::{Error, Result};

/// The extensions of image files: those of the formats that [`load_image`](crate::load_image) reads.
const EXTENSIONS: [&str; 14] =
    ["png", "jpg", "jpeg", "jpe", "jfif", "webp", "bmp", "tif", "tiff", "ppm", "pgm", "pbm", "pam", "pnm"];
/// How many extensions a message lists.
const LISTED: usize = 5;
/// Folders of file systems, which most users cannot read; of Synology's, with small copies of each image; and of ZIP
/// files made by macOS, with what it knows of each file.
const OF_THE_SYSTEM: [&str; 5] = ["lost+found", "System Volume Information", "$RECYCLE.BIN", "@eaDir", "__MACOSX"];

/// The files below a folder that are not hidden.
#[derive(Default)]
pub(crate) struct Listing {
    /// Those named as images are, sorted by path.
    pub images: Vec<PathBuf>,
    pub others: Others,
}

impl Listing {
    /// Walks through `folder` and the folders below it that are neither hidden, nor the system's, nor those of runs,
    /// each once. Symbolic links are followed, except those that lead to an enclosing folder.
    ///
    /// Errors: [`Error::Io`].
    pub fn below(folder: &Path) -> Result<Self> {
        Self::of(folder, Level::Class)
    }

    fn of(folder: &Path, level: Level) -> Result<Self> {
        let mut listing = Self::default();
        let root = fs::canonicalize(folder).map_err(Error::io(folder))?;
        listing.walk(folder, &root, level, &mut HashSet::from([root.clone()]))?;
        listing.images.sort_unstable();
        Ok(listing)
    }

    /// Adds what is below `folder`, whose path without symbolic links is `place`. The folders in `seen` have already
    /// been visited in the same class, so the walk ends however they link to each other.
    fn walk(&mut self, folder: &Path, place: &Path, level: Level, seen: &mut HashSet<PathBuf>) -> Result<()> {
        let mut entries: Vec<DirEntry> = visible(folder)?.collect::<Result<_>>()?;
        // In an order that is the same everywhere: of two ways to a folder the first is taken.
        entries.sort_unstable_by_key(DirEntry::file_name);
        for entry in entries {
            let path = entry.path();
            if !is_folder(&entry)? {
                match is_picture(&path) {
                    true => self.images.push(path),
                    false => self.others.count(&path),
                }
                continue;
            }
            if is_of_the_system(&entry.file_name()) || is_run(&path) {
                continue;
            }
            let is_link = entry.file_type().is_ok_and(|kind| kind.is_symlink());
            let inner = match is_link {
                true => fs::canonicalize(&path).map_err(Error::io(&path))?,
                false => place.join(entry.file_name()),
            };
            if place.starts_with(&inner) {
                continue;
            }
            match level {
                Level::Class if seen.insert(inner.clone()) => self.walk(&path, &inner, level, seen)?,
                Level::Class => {}
                _ => {
                    let level = level.below(&entry.file_name());
                    self.walk(&path, &inner, level, &mut HashSet::from([inner.clone()]))?;
                }
            }
        }
        Ok(())
    }
}

/// What a folder is to a data set. Each class is walked through by itself, as when it is learned from: what another one
/// has as well, through a link, belongs to both.
#[derive(Clone, Copy)]
enum Level {
    Data,
    Part,
    /// A class, or a folder in one.
    Class,
}

impl Level {
    /// What a folder of this name is in one of this level.
    fn below(self, name: &OsStr) -> Self {
        match self {
            Self::Data if PARTS.iter().any(|part| name == part.name()) => Self::Part,
            _ => Self::Class,
        }
    }
}

/// Files that are no images, counted by extension: in lower case, empty where there is none.
#[derive(Default)]
pub(crate) struct Others(BTreeMap<String, usize>);

impl Others {
    /// The files that are no images directly in a folder, as far as it can be read.
    pub fn of(folder: &Path) -> Self {
        let mut others = Self::default();
        let files =
            visible(folder).into_iter().flatten().flatten().filter(|entry| is_folder(entry).is_ok_and(|it| !it));
        files.map(|entry| entry.path()).filter(|path| !is_picture(path)).for_each(|path| others.count(&path));
        others
    }

    fn count(&mut self, path: &Path) {
        let extension = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
        *self.0.entry(extension).or_default() += 1;
    }

    /// Adds the counts of others.
    pub fn add(&mut self, others: Self) {
        others.0.into_iter().for_each(|(extension, count)| *self.0.entry(extension).or_default() += count);
    }

    /// A note for the user about these files, if there are any; `folder` is the name of their folder.
    pub fn skipped(&self, folder: &str) -> Option<String> {
        let total: usize = self.0.values().sum();
        let (files, are) =
            if total == 1 { ("file", "is no image by its name") } else { ("files", "are no images by their names") };
        (total > 0).then(|| format!("skipped {total} {files} in {folder} that {are}: {self}"))
    }
}

/// `12 .webp, 1 .bmp`: those of which there are most come first.
impl fmt::Display for Others {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut counted: Vec<(&String, &usize)> = self.0.iter().collect();
        counted.sort_by_key(|&(_, count)| Reverse(count));
        let rest: usize = counted.iter().skip(LISTED).map(|(_, count)| *count).sum();
        let named = counted.iter().take(LISTED).map(|(extension, count)| match extension.is_empty() {
            true => format!("{count} without an extension"),
            false => format!("{count} .{extension}"),
        });
        let rest = (rest > 0).then(|| format!("{rest} of other kinds"));
        f.write_str(&named.chain(rest).collect::<Vec<_>>().join(", "))
    }
}

/// The files below `folder` that are named as images are (see [`extensions`]), and neither hidden nor in the folder of
/// a run, unless `folder` itself is one; sorted. And what a user should know of the others there. Symbolic links are
/// followed, but not round in circles; if it is an image folder, each class has the images that it is read with.
///
/// Errors: [`Error::Io`].
pub fn pictures_below(folder: &Path) -> Result<(Vec<PathBuf>, Option<String>)> {
    let Listing { images, others } = Listing::of(folder, Level::Data)?;
    Ok((images, others.skipped(&folder.display().to_string())))
}

/// A picture somewhere below a folder, but not in a run folder, if there is one among the first 10,000 names: if the
/// folder is a whole disk, searching all of it would take too long.
pub(crate) fn picture_below(folder: &Path) -> Option<PathBuf> {
    let (mut folders, mut left) = (VecDeque::from([folder.to_owned()]), 10_000_usize);
    while let Some(folder) = folders.pop_front() {
        if is_run(&folder) {
            continue;
        }
        for entry in visible(&folder).into_iter().flatten().flatten() {
            left = left.checked_sub(1)?;
            match is_folder(&entry) {
                Ok(true) if is_of_the_system(&entry.file_name()) => {}
                Ok(true) => folders.push_back(entry.path()),
                Ok(false) if is_picture(&entry.path()) => return Some(entry.path()),
                _ => {}
            }
        }
    }
    None
}

/// The file by which a run's folder is known.
pub const OF_A_RUN: &str = "checkpoint.safetensors";

/// Whether a folder is that of a run, whose pictures are nothing to learn from.
pub(crate) fn is_run(folder: &Path) -> bool {
    folder.join(OF_A_RUN).is_file()
}

/// The entries of `folder` that are not hidden, in the order in which the system lists them.
pub(crate) fn visible(folder: &Path) -> Result<impl Iterator<Item = Result<DirEntry>>> {
    let is_hidden = |entry: &DirEntry| entry.file_name().as_encoded_bytes().starts_with(b".");
    let entries = fs::read_dir(folder).map_err(Error::io(folder))?.map(move |entry| entry.map_err(Error::io(folder)));
    Ok(entries.filter(move |entry| !entry.as_ref().is_ok_and(is_hidden)))
}

/// Whether it is a folder, or a link to one. As a rule the system returns this together with the name: to query each of
/// a million files would take long.
pub(crate) fn is_folder(entry: &DirEntry) -> Result<bool> {
    let kind = entry.file_type().map_err(Error::io(&entry.path()))?;
    Ok(kind.is_dir() || kind.is_symlink() && entry.path().is_dir())
}

/// Whether a folder of this name is the system's, and holds nothing to learn from.
pub(crate) fn is_of_the_system(name: &OsStr) -> bool {
    OF_THE_SYSTEM.iter().any(|of_the_system| name == *of_the_system)
}

/// How images are named, in any case of letters, for messages: `.png, .jpg, ..`.
pub fn extensions() -> String {
    EXTENSIONS.map(|extension| format!(".{extension}")).join(", ")
}

/// Whether a file is named as images are.
pub(crate) fn is_picture(path: &Path) -> bool {
    let extension = path.extension().and_then(OsStr::to_str);
    extension.is_some_and(|found| EXTENSIONS.iter().any(|known| known.eq_ignore_ascii_case(found)))
}
