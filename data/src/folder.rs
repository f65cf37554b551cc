//! An image folder: one folder a class, one file an image, decoded when asked for.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use crate::{Dataset, Error, Result, Sample, Split, Statistics, load_image};

const EXTENSIONS: [&str; 3] = ["png", "jpg", "jpeg"];
/// How many classes an error lists.
const LISTED: usize = 5;

/// The images of `ROOT/train/CLASS/` (training) or of `ROOT/val/CLASS/`, else `ROOT/test/CLASS/` (evaluation).
///
/// Classes and files are sorted by name, so an index means the same on every machine. Hidden files and files that
/// are no `.png`, `.jpg` or `.jpeg` (in any case of letters) are passed over. Opening lists names and reads no image.
pub struct ImageFolder {
    name: String,
    classes: Vec<String>,
    files: Vec<(PathBuf, u32)>, // path and label, grouped by class
}

impl ImageFolder {
    /// Lists the images of one split.
    ///
    /// Without training images the others can be had all the same.
    ///
    /// Errors: [`Error::Lacking`] where a split or all of its classes are not there, [`Error::ClassesDiffer`] where the
    /// splits' classes are not the same, [`Error::EmptyClass`], [`Error::Unsupported`] for a class name that is not
    /// UTF-8, [`Error::Io`].
    pub fn open(root: &Path, split: Split) -> Result<Self> {
        let train = root.join("train");
        let test = [root.join("val"), root.join("test")].into_iter().find(|folder| folder.is_dir());
        let test = test.ok_or_else(|| lacking(root, "val/ or test/ beside train/"))?;

        let others = class_names(&test)?;
        let alone = split == Split::Test && !train.is_dir();
        let classes = if alone { others.clone() } else { class_names(&train)? };
        if classes != others {
            let only = |these: &[String], those: &[String]| {
                these.iter().filter(|class| those.binary_search(class).is_err()).take(LISTED).cloned().collect()
            };
            let (only_first, only_second) = (only(&classes, &others), only(&others, &classes));
            return Err(Error::ClassesDiffer { first: train, second: test, only_first, only_second });
        }

        let folder = match split {
            Split::Train => train,
            Split::Test => test,
        };
        // In parallel, because ImageNet has 1.3 million names, perhaps on a network disk.
        let listed: Vec<Result<Vec<PathBuf>>> =
            classes.par_iter().map(|class| image_files(&folder.join(class), class)).collect();
        let mut files = Vec::new();
        for (label, paths) in (0u32..).zip(listed) {
            files.extend(paths?.into_iter().map(|path| (path, label)));
        }
        let name = root.file_name().unwrap_or(root.as_os_str()).to_string_lossy().into_owned();
        Ok(Self { name, classes, files })
    }
}

impl Dataset for ImageFolder {
    fn name(&self) -> &str {
        &self.name
    }

    fn classes(&self) -> &[String] {
        &self.classes
    }

    fn len(&self) -> usize {
        self.files.len()
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let Some((path, label)) = self.files.get(index) else {
            return Err(Error::Index { dataset: self.name.clone(), index, len: self.len() });
        };
        Ok(Sample { image: load_image(path)?, label: *label })
    }

    fn statistics(&self) -> Statistics {
        Statistics::IMAGENET
    }
}

/// The names of the folders in `split`, sorted.
fn class_names(split: &Path) -> Result<Vec<String>> {
    let mut classes = Vec::new();
    for path in visible(split)?.into_iter().filter(|path| path.is_dir()) {
        match path.file_name().and_then(OsStr::to_str) {
            Some(name) => classes.push(name.to_owned()),
            None => return Err(Error::Unsupported { path, what: "a class name must be UTF-8".to_owned() }),
        }
    }
    if classes.is_empty() {
        return Err(lacking(split, "a folder for each class"));
    }
    classes.sort_unstable();
    Ok(classes)
}

/// The images in one class's folder.
fn image_files(folder: &Path, class: &str) -> Result<Vec<PathBuf>> {
    let files = pictures_in(folder)?;
    match files.is_empty() {
        true => Err(Error::EmptyClass { class: class.to_owned(), path: folder.to_owned() }),
        false => Ok(files),
    }
}

/// The files in `folder` (not in those below it) that are named `.png`, `.jpg` or `.jpeg`, in any case of letters, and
/// not hidden; sorted.
///
/// Errors: [`Error::Io`].
pub fn pictures_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = visible(folder)?;
    files.retain(|path| {
        let extension = path.extension().and_then(OsStr::to_str);
        extension.is_some_and(|found| EXTENSIONS.iter().any(|known| known.eq_ignore_ascii_case(found)))
    });
    files.sort_unstable();
    Ok(files)
}

/// What `folder` holds, without hidden names.
fn visible(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(Error::io(folder))? {
        let entry = entry.map_err(Error::io(folder))?;
        if !entry.file_name().as_encoded_bytes().starts_with(b".") {
            paths.push(entry.path());
        }
    }
    Ok(paths)
}

fn lacking(path: &Path, looked_for: &str) -> Error {
    Error::Lacking {
        path: path.to_owned(),
        looked_for: looked_for.to_owned(),
        help: "An image folder has train/CLASS/*.png|jpg|jpeg and the same classes in val/ or test/.".to_owned(),
    }
}
