//! What can go wrong between a file and a batch.

use crate::{Split, extensions, look_alike};
use std::io;
use std::path::{Path, PathBuf};

/// The result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// A failure, one variant for each kind. Each message is complete in itself (it includes its cause), so no variant
/// reports a [`source`](std::error::Error::source) that would say the same again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or folder is not there.
    #[error("{} is missing: looked for {looked_for}. {help}", path.display())]
    Missing {
        /// Where it should be.
        path: PathBuf,
        /// What was looked for there.
        looked_for: String,
        /// What the user can do.
        help: String,
    },
    /// A folder is there, and no data set is recognised in it.
    #[error("{} is no data set. {seen}{}", path.display(), layouts())]
    NoDataset {
        /// The folder.
        path: PathBuf,
        /// What the folder holds, and how to make it a data set: empty, or a sentence followed by a space.
        seen: String,
    },
    /// A data set's folder is there, and lacks what belongs to it, or this split.
    #[error("{} lacks {looked_for}. {help}", path.display())]
    Lacking {
        /// The folder.
        path: PathBuf,
        /// What was looked for there.
        looked_for: String,
        /// What the user can do.
        help: String,
    },
    /// A file or folder holds less, or another amount, than its format promises.
    #[error("{} holds {got} instead of {expected}; copy or download it again", path.display())]
    Truncated {
        /// The file or folder.
        path: PathBuf,
        /// What the format promises.
        expected: String,
        /// What is there.
        got: String,
    },
    /// A label names no class.
    #[error("{place}: label {label} is outside the {classes} classes{}; the data are damaged, or of other classes",
        classes.checked_sub(1).map_or_else(String::new, |last| format!(" (0 to {last})")))]
    Label {
        /// The file and its record, or the data set and its sample, counted from 0.
        place: String,
        /// The label found.
        label: u32,
        /// The number of classes.
        classes: usize,
    },
    /// Classes are none of those that are known.
    #[error("{} none of the {} that are known: {}{}", those(names), classes.len(), listed(classes),
        spelt_otherwise(names, classes))]
    UnknownClasses {
        /// The classes.
        names: Vec<String>,
        /// The known classes.
        classes: Vec<String>,
    },
    /// A file is not an image that can be decoded within the limits.
    #[error("cannot decode {}: {cause}", path.display())]
    Undecodable {
        /// The file.
        path: PathBuf,
        /// The decoder's complaint.
        cause: String,
    },
    /// A test of an image folder has classes that the training images have not.
    #[error("{} has classes that {} has not: {}; add images of them there, or take them out{}", test.display(),
        train.display(), listed(classes), spelt_otherwise(classes, taught))]
    UntaughtClasses {
        /// The training folder.
        train: PathBuf,
        /// Its classes.
        taught: Vec<String>,
        /// The evaluation folder.
        test: PathBuf,
        /// The classes.
        classes: Vec<String>,
    },
    /// A class folder holds no image.
    #[error("class {class:?} is empty: {} holds {}; remove the folder or fill it", path.display(), match others.as_str() {
        "" => format!("no image ({})", extensions()),
        others => format!("{others}, but no image ({})", extensions()),
    })]
    EmptyClass {
        /// The class.
        class: String,
        /// Its folder.
        path: PathBuf,
        /// What it holds instead: how many files of which extension, or nothing.
        others: String,
    },
    /// A class from which test images are to be held out has only one image.
    #[error("class {class:?} has one image in {}, and needs one to learn from and one to be tested on; add images, or \
        remove the folder", path.display())]
    SingleImage {
        /// The class.
        class: String,
        /// Its folder.
        path: PathBuf,
    },
    /// Several classes of an image folder have a fault.
    #[error("{}", several(.0))]
    Classes(
        /// What is wrong with each.
        Vec<Error>,
    ),
    /// More images were undecodable than the loader was set to tolerate.
    #[error("too many images cannot be read (max_bad_images is {limit}): {}; repair or replace them, or raise that number",
        first.join("; "))]
    TooManyBadImages {
        /// The number that would have been tolerated.
        limit: usize,
        /// What was wrong with the first few.
        first: Vec<String>,
    },
    /// None of the images of a data set could be decoded.
    #[error("none of the images can be decoded: {}; repair or replace them", first.join("; "))]
    NoGoodImage {
        /// What was wrong with the first few.
        first: Vec<String>,
    },
    /// A file or folder could not be read: the operating system refused, or there is too little memory to decode it.
    #[error("cannot read {}: {cause}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The complaint.
        cause: io::Error,
    },
    /// Something is there, but of a kind that this crate does not read.
    #[error("{} is not supported: {what}", path.display())]
    Unsupported {
        /// The file or folder.
        path: PathBuf,
        /// What it is, and what would do.
        what: String,
    },
    /// A setting is out of its range.
    #[error("setting `{name}`: {problem}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// A sample was asked for that the data set does not have.
    #[error("{dataset} has {len} samples, no sample {index}")]
    Index {
        /// The data set's name.
        dataset: String,
        /// The sample asked for.
        index: usize,
        /// The number of samples.
        len: usize,
    },
    /// Any other error that a program's own [`Dataset`](crate::Dataset) reports. A loader passes it on as it is, and
    /// ends the epoch with it.
    #[error("{0}")]
    Other(Box<dyn std::error::Error + Send + Sync>),
    /// A loader thread could not be started, the making of a batch panicked, or it was told to stop.
    #[error("a loader thread failed: {0}")]
    Worker(String),
}

/// What is recognised as a data set.
pub(crate) fn layouts() -> String {
    "A data set is an image folder (CLASS/*.png|jpg|.., or train/CLASS/ and the same classes in val/ or test/), a folder with \
     the binary version of CIFAR-10 or CIFAR-100 (https://www.cs.toronto.edu/~kriz/cifar.html), or \"embedded\"."
        .to_owned()
}

/// The first of some names, and how many others there are.
pub(crate) fn listed(names: &[impl AsRef<str>]) -> String {
    first_of(10, names, ", ", |name| name.as_ref().to_owned())
}

/// What `say` makes of the first `most` items, and how many others there are.
fn first_of<T>(most: usize, items: &[T], separator: &str, say: impl Fn(&T) -> String) -> String {
    let mut said: Vec<String> = items.iter().take(most).map(say).collect();
    if items.len() > most {
        said.push(format!("and {} more", items.len() - most));
    }
    said.join(separator)
}

/// Classes as the subject of a sentence.
fn those(names: &[String]) -> String {
    match names {
        [name] => format!("the class \"{name}\" is"),
        names => format!("the {} classes {} are", names.len(), listed(names)),
    }
}

/// A hint at names of which the known ones are the same, but for their spelling.
fn spelt_otherwise(names: &[String], known: &[String]) -> String {
    let alike = names.iter().find_map(|name| Some((name, known.iter().find(|known| look_alike(name, known))?)));
    alike.map_or_else(String::new, |(name, known)| {
        format!("; \"{name}\" and \"{known}\" differ in capitals or in how an accent is stored: rename one")
    })
}

/// What the first of several errors say, and how many others there are.
fn several(errors: &[Error]) -> String {
    first_of(5, errors, "; ", Error::to_string)
}

/// Whether the system refused for lack of memory, or because too many files are open.
fn lacks_resources(cause: &io::Error) -> bool {
    // ERROR_TOO_MANY_OPEN_FILES, or ENFILE and EMFILE.
    let open_files: &[i32] = if cfg!(windows) { &[4] } else { &[23, 24] };
    cause.kind() == io::ErrorKind::OutOfMemory || cause.raw_os_error().is_some_and(|code| open_files.contains(&code))
}

impl Error {
    /// Whether it is the fault of an image, in whose place another one may be shown. Where there is too little memory
    /// it is not: what a run learns from may not depend on how busy the machine is.
    pub fn is_of_image(&self) -> bool {
        match self {
            Self::Label { .. } | Self::Index { .. } | Self::Other(_) | Self::Worker(_) => false,
            Self::Io { cause, .. } => !lacks_resources(cause),
            _ => true,
        }
    }

    /// For `map_err`: the failure to read `path`.
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |cause| Self::Io { path: path.to_owned(), cause }
    }

    /// The error for a split that a data set with only training and test images does not have.
    pub(crate) fn no_split(path: &Path, split: Split) -> Self {
        let (looked_for, help) = (format!("a split {}", split.name()), "It has train and test images.".to_owned());
        Self::Lacking { path: path.to_owned(), looked_for, help }
    }

    pub(crate) fn setting(name: &'static str, problem: impl Into<String>) -> Self {
        Self::Setting { name, problem: problem.into() }
    }
}
