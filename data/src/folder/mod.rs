//! An image folder: one folder a class, one file an image, decoded when asked for.

mod advice;
mod undivided;

pub(crate) use advice::nearly;
pub(crate) use undivided::Undivided;

use advice::{lacking, lacks_split, loose_in, no_class, pictures_in, some_of, some_runs, untested};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use crate::held_out::{ONE_IN, held_out};
use crate::listing::{Listing, Others, is_folder, is_of_the_system, is_run, visible};
use crate::{Dataset, Error, Result, Sample, Split, Statistics, load_image};

/// What a folder may be divided into.
pub(crate) const PARTS: [Split; 3] = [Split::Train, Split::Val, Split::Test];

/// The images below `ROOT/train/CLASS/`, `ROOT/val/CLASS/` or `ROOT/test/CLASS/`, also in folders of their own there.
/// Where there is only `train/`, or only `ROOT/CLASS/`, about one in five images is held out as the test.
///
/// Classes are sorted by name and their files by path, so an index means the same on every machine. Hidden files and
/// folders are ignored; so are files without an image extension (see [`extensions`](crate::extensions)), but they are
/// counted. Symbolic links are followed, but not round in circles. Opening lists names and reads no image.
#[derive(Debug)]
pub(crate) struct ImageFolder {
    name: String,
    classes: Vec<String>,
    paths: Vec<PathBuf>, // grouped by class
    labels: Vec<u32>,
    held_out: bool,
    notes: Vec<String>,
}

impl ImageFolder {
    /// Lists the images of one split of a folder that is divided.
    ///
    /// Its classes are those of the training images, some of which a test split may lack; without training images, they
    /// are the split's own.
    ///
    /// Errors: [`Error::Lacking`] where a split or all of its classes are not there, [`Error::UntaughtClasses`] where a
    /// test has classes that the training images have not, [`Error::EmptyClass`], [`Error::Classes`] where several
    /// classes are empty, [`Error::Unsupported`] where a class of the test holds a run in the training images, and for
    /// a class name that is not UTF-8, [`Error::Io`].
    pub fn divided(root: &Path, split: Split) -> Result<Self> {
        if split == Split::All {
            let parts = PARTS.map(Split::name).into_iter().filter(|part| root.join(part).is_dir());
            let parts = parts.collect::<Vec<_>>().join(" and ");
            let help = format!("It is divided into {parts}: name one of them.");
            return Err(Error::Lacking { path: root.to_owned(), looked_for: "undivided images".to_owned(), help });
        }
        // The training split is checked against the split that training will evaluate on: every class there must have
        // training images.
        let tested = if split == Split::Train { evaluated(root) } else { split };
        let (train, test) = (root.join(Split::Train.name()), root.join(tested.name()));
        if !test.is_dir() {
            return Err(lacks_split(root, tested));
        }
        let Classes { names: mut classes, mut runs } = Classes::of(&test)?;
        let mut lacking = vec![];
        if split == Split::Train || train.is_dir() {
            let taught = Classes::of(&train)?;
            let theirs = std::mem::replace(&mut classes, taught.names);
            if split == Split::Train {
                runs = taught.runs;
            }
            let only = |these: &[String], those: &[String]| -> Vec<String> {
                these.iter().filter(|class| those.binary_search(class).is_err()).cloned().collect()
            };
            let untaught = only(&theirs, &classes);
            if let Some(run) = untaught.iter().map(|class| train.join(class)).find(|folder| is_run(folder)) {
                return Err(no_class(run));
            }
            if !untaught.is_empty() {
                return Err(Error::UntaughtClasses { train, taught: classes, test, classes: untaught });
            }
            lacking = only(&classes, &theirs);
        }
        let folder = if split == Split::Train { train } else { test };
        let is_there =
            |class: &str| split == Split::Train || lacking.binary_search_by(|name| name.as_str().cmp(class)).is_err();
        let (images, others) = Self::list(root, &folder, classes, is_there, |_, _, images| Ok(images))?;
        let loose = loose_in(&root.join(split.name()), split.name());
        let mut beside = folder_names(root)?;
        beside.retain(|name| PARTS.iter().all(|part| !is_part(root, name, *part)));
        let beside = some_of(&beside, "called neither train, val nor test");
        let images =
            images.noting(others.skipped(&format!("{}/", split.name()))).noting(beside).noting(runs).noting(loose);
        Ok(if split == Split::Train { images } else { images.noting(untested(&lacking, split)) })
    }

    /// A split of the images in one folder.
    ///
    /// Errors: [`Error::Lacking`] where there is no such split, [`Error::SingleImage`], [`Error::EmptyClass`],
    /// [`Error::Classes`], [`Error::Io`].
    pub fn part_of(root: &Path, all: Undivided, split: Split) -> Result<Self> {
        if split == Split::Val {
            let help = format!("About one in {ONE_IN} of its images is held out, as the split test.");
            return Err(Error::Lacking { path: root.to_owned(), looked_for: "val/".to_owned(), help });
        }
        let divided = AtomicUsize::new(0);
        let part = |class: &str, folder: &Path, images: Vec<PathBuf>| match images.len() {
            _ if split == Split::All => Ok(images),
            1 => Err(Error::SingleImage { class: class.to_owned(), path: folder.to_owned() }),
            _ => {
                divided.fetch_add(images.len(), Ordering::Relaxed);
                let held_out = held_out(folder, &images);
                let wanted = images.into_iter().zip(held_out).filter(|&(_, held)| held == (split == Split::Test));
                Ok(wanted.map(|(image, _)| image).collect())
            }
        };
        let (images, others) = Self::list(root, &all.folder, all.classes, |_| true, part)?;
        let name = all.folder.file_name().unwrap_or(all.folder.as_os_str()).display();
        let loose = loose_in(&all.folder, &name.to_string());
        let mut images = images.noting(others.skipped(&format!("{name}/")));
        images.notes.extend(all.skipped);
        let images = images.noting(loose);
        if split != Split::Test {
            return Ok(images);
        }
        let (held, all) = (images.len(), divided.into_inner());
        let are = if held == 1 { "is" } else { "are" };
        let note = format!("there is neither val/ nor test/: {held} of {all} images {are} held out as the test");
        Ok(Self { held_out: true, ..images.noting(Some(note)) })
    }

    /// The images of each class for which `is_there` holds, as far as `wanted` selects them, given the class's name,
    /// its folder and its images; and the other files there.
    fn list(
        root: &Path,
        folder: &Path,
        classes: Vec<String>,
        is_there: impl Fn(&str) -> bool + Sync,
        wanted: impl Fn(&str, &Path, Vec<PathBuf>) -> Result<Vec<PathBuf>> + Sync,
    ) -> Result<(Self, Others)> {
        let of_class = |class: &String| {
            if !is_there(class) {
                return Ok((vec![], Others::default()));
            }
            let folder = folder.join(class);
            let Listing { images, others } = images_of(&folder, class)?;
            Ok((wanted(class, &folder, images)?, others))
        };
        // In parallel, because ImageNet has 1.3 million names, perhaps on a network disk.
        let listed: Vec<Result<(Vec<PathBuf>, Others)>> = classes.par_iter().map(of_class).collect();
        let (mut paths, mut labels, mut others, mut faults) = (vec![], vec![], Others::default(), vec![]);
        for (label, listed) in (0u32..).zip(listed) {
            match listed {
                Ok((images, beside)) => {
                    paths.extend(images);
                    labels.resize(paths.len(), label);
                    others.add(beside);
                }
                Err(fault) => faults.push(fault),
            }
        }
        // All faults are reported at once, so that the user need not find them one by one.
        match faults.len() {
            0 => {}
            1 => return Err(faults.remove(0)),
            _ => return Err(Error::Classes(faults)),
        }
        let name = root.file_name().unwrap_or(root.as_os_str()).to_string_lossy().into_owned();
        Ok((Self { name, classes, paths, labels, held_out: false, notes: vec![] }, others))
    }

    fn noting(mut self, note: Option<String>) -> Self {
        self.notes.extend(note);
        self
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
        self.paths.len()
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let (Some(path), Some(&label)) = (self.paths.get(index), self.labels.get(index)) else {
            return Err(Error::Index { dataset: self.name.clone(), index, len: self.len() });
        };
        Ok(Sample { image: load_image(path)?, label })
    }

    fn statistics(&self) -> Statistics {
        Statistics::IMAGENET
    }

    fn labels(&self) -> Option<&[u32]> {
        Some(&self.labels)
    }

    fn path(&self, index: usize) -> Option<&Path> {
        self.paths.get(index).map(PathBuf::as_path)
    }

    fn is_held_out(&self) -> bool {
        self.held_out
    }

    fn notes(&self) -> &[String] {
        &self.notes
    }
}

/// The split of an image folder that training is evaluated on.
pub(crate) fn evaluated(root: &Path) -> Split {
    if root.join(Split::Val.name()).is_dir() { Split::Val } else { Split::Test }
}

/// The classes in a split.
struct Classes {
    names: Vec<String>,
    /// What a user should know of folders that hold runs, if there are any.
    runs: Option<String>,
}

impl Classes {
    /// Those whose folders are in `split`, of which there must be at least one.
    ///
    /// Errors: [`Error::Unsupported`] for a link to nothing, a folder that holds a run where there is no other, and a
    /// name that is not UTF-8; [`Error::Lacking`] where there is none; [`Error::Io`].
    fn of(split: &Path) -> Result<Self> {
        dangling_in(split)?.map_or(Ok(()), Err)?;
        let names = folder_names(split)?.into_par_iter().filter(|name| !is_of_the_system(name));
        // In parallel, as each is a request, perhaps to another machine.
        let (runs, names): (Vec<OsString>, Vec<OsString>) = names.partition(|name| is_run(&split.join(name)));
        let names = names.into_iter().map(|name| class_name(split, name)).collect::<Result<Vec<_>>>()?;
        if names.is_empty() {
            return Err(runs.first().map_or_else(|| without_classes(split), |run| no_class(split.join(run))));
        }
        let above = split.file_name().unwrap_or_default();
        let runs: Vec<OsString> = runs.iter().map(|name| [above, name].join(OsStr::new("/"))).collect();
        Ok(Self { names, runs: some_runs(&runs) })
    }
}

/// The error of a split without a folder for a class.
fn without_classes(split: &Path) -> Error {
    if pictures_in(split) > 0 {
        // Pictures to be labelled are often handed out as test/.
        let unlabelled = match split.ends_with(Split::Train.name()) {
            true => String::new(),
            false => format!(
                "if they have no classes, rename or move the folder: with neither val/ nor test/, about one in {ONE_IN} of \
                 train/ is held out as the test; "
            ),
        };
        let help = format!(
            "Its images lie in it directly: {unlabelled}if it is a class, give it another name; train, val and test are parts."
        );
        return Error::Lacking { path: split.to_owned(), looked_for: "a folder for each class".to_owned(), help };
    }
    lacking(split, "a folder for each class")
}

/// The name of a class whose images lie in a folder of this name.
fn class_name(above: &Path, folder: OsString) -> Result<String> {
    let unsupported = |folder| Error::Unsupported {
        path: above.join::<OsString>(folder),
        what: "a class name must be UTF-8".to_owned(),
    };
    folder.into_string().map_err(unsupported)
}

/// The names of the folders in another, sorted.
fn folder_names(folder: &Path) -> Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in visible(folder)? {
        let entry = entry?;
        if is_folder(&entry)? {
            names.push(entry.file_name());
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// Whether the folder of this name in a data set is that of a part. Where capitals do not matter, as on a Mac, `Train`
/// is.
fn is_part(root: &Path, name: &OsStr, part: Split) -> bool {
    let place = |name: &OsStr| fs::canonicalize(root.join(name)).ok();
    let part = OsStr::new(part.name());
    name == part || name.eq_ignore_ascii_case(part) && place(name).is_some_and(|there| place(part) == Some(there))
}

/// The error of a link in a folder that leads to nothing, if there is one: it may have been a class.
fn dangling_in(folder: &Path) -> Result<Option<Error>> {
    for entry in visible(folder)? {
        let entry = entry?;
        if entry.file_type().is_ok_and(|kind| kind.is_symlink())
            && let Some(error) = dangling(entry.path())
        {
            return Ok(Some(error));
        }
    }
    Ok(None)
}

/// The error of a path that is a link to nothing.
fn dangling(path: PathBuf) -> Option<Error> {
    let target = fs::read_link(&path).ok().filter(|_| !path.exists())?;
    let what = format!("a link to {}, which is missing; mend or remove it", target.display());
    Some(Error::Unsupported { path, what })
}

/// The files in one class's folder, of which there must be an image.
fn images_of(folder: &Path, class: &str) -> Result<Listing> {
    let listing = Listing::below(folder)?;
    match listing.images.is_empty() {
        true => {
            let others = listing.others.to_string();
            Err(Error::EmptyClass { class: class.to_owned(), path: folder.to_owned(), others })
        }
        false => Ok(listing),
    }
}
