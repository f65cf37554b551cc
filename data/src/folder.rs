//! An image folder: one folder a class, one file an image, decoded when asked for.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use crate::held_out::{ONE_IN, held_out};
use crate::listing::{Listing, Others, is_folder, is_picture, visible};
use crate::{Dataset, Error, Result, Sample, Split, Statistics, load_image};

/// How many classes an error lists.
const LISTED: usize = 5;
/// What a folder may be divided into.
const PARTS: [Split; 3] = [Split::Train, Split::Val, Split::Test];
/// Folders that a file system keeps to itself, and that are shut to most.
const OF_THE_SYSTEM: [&str; 3] = ["lost+found", "System Volume Information", "$RECYCLE.BIN"];

/// The images below `ROOT/train/CLASS/`, `ROOT/val/CLASS/` or `ROOT/test/CLASS/`, also in folders of their own there.
/// Where there is only `train/`, or only `ROOT/CLASS/`, about one in five images is held out as the test.
///
/// Classes are sorted by name and their files by path, so an index means the same on every machine. Hidden names are passed
/// over; files that are not named as images are (see [`extensions`](crate::extensions)), too, but counted. Symbolic links are
/// followed, but not round in circles. Opening lists names and reads no image.
pub struct ImageFolder {
    name: String,
    classes: Vec<String>,
    paths: Vec<PathBuf>, // grouped by class
    labels: Vec<u32>,
    held_out: bool,
    notes: Vec<String>,
}

impl ImageFolder {
    /// Lists the images of one split.
    ///
    /// Its classes are those of the training images, of which a test may lack some; without training images, its own.
    ///
    /// Errors: [`Error::Lacking`] where a split or all of its classes are not there, [`Error::UntaughtClasses`] where a test
    /// has classes that the training images have not, [`Error::EmptyClass`], [`Error::SingleImage`],
    /// [`Error::Unsupported`] for a class name that is not UTF-8, [`Error::Io`].
    pub fn open(root: &Path, split: Split) -> Result<Self> {
        if let Some(classes) = Undivided::of(root)? {
            return Self::part_of(root, classes, split);
        }
        if split == Split::All {
            let (looked_for, help) = ("images that are not divided".to_owned(), "Name one of its parts.".to_owned());
            return Err(Error::Lacking { path: root.to_owned(), looked_for, help });
        }
        // Nothing is to be learned that could not be tested.
        let held_out = if split == Split::Train { evaluated(root) } else { split };
        let (train, test) = (root.join(Split::Train.name()), root.join(held_out.name()));
        if !test.is_dir() {
            return Err(lacks_split(root, held_out));
        }
        let (mut classes, mut lacking) = (class_names(&test)?, vec![]);
        if split == Split::Train || train.is_dir() {
            let tested = std::mem::replace(&mut classes, class_names(&train)?);
            let only = |these: &[String], those: &[String]| -> Vec<String> {
                these.iter().filter(|class| those.binary_search(class).is_err()).cloned().collect()
            };
            let mut untaught = only(&tested, &classes);
            if !untaught.is_empty() {
                untaught.truncate(LISTED);
                return Err(Error::UntaughtClasses { train, test, classes: untaught });
            }
            lacking = only(&classes, &tested);
        }
        let folder = if split == Split::Train { train } else { test };
        let is_there =
            |class: &str| split == Split::Train || lacking.binary_search_by(|name| name.as_str().cmp(class)).is_err();
        let (images, others) = Self::list(root, &folder, classes, is_there, |_, _, images| Ok(images))?;
        let loose = loose_in(&root.join(split.name()), split.name());
        let mut beside = folder_names(root)?;
        beside.retain(|name| PARTS.iter().all(|part| name != part.name()));
        let beside = some_of(&beside, "called neither train, val nor test");
        let images = images.noting(others.passed_over(&format!("{}/", split.name()))).noting(beside).noting(loose);
        Ok(if split == Split::Train { images } else { images.noting(untested(&lacking, split)) })
    }

    /// A split of the images in one folder.
    fn part_of(root: &Path, all: Undivided, split: Split) -> Result<Self> {
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
        let images = images.noting(others.passed_over(&format!("{name}/"))).noting(all.passed_over).noting(loose);
        if split != Split::Test {
            return Ok(images);
        }
        let (held, all) = (images.len(), divided.into_inner());
        let are = if held == 1 { "is" } else { "are" };
        let note = format!("there is neither val/ nor test/: {held} of {all} images {are} held out as the test");
        Ok(Self { held_out: true, ..images.noting(Some(note)) })
    }

    /// The images that `wanted` takes of those of each class that is there, given its name and its folder; and what lies
    /// beside them.
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
        let (mut paths, mut labels, mut others) = (Vec::new(), Vec::new(), Others::default());
        for (label, listed) in (0u32..).zip(listed) {
            let (images, beside) = listed?;
            paths.extend(images);
            labels.resize(paths.len(), label);
            others.add(beside);
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

/// Classes whose images are not divided into those to learn from and others.
pub(crate) struct Undivided {
    pub folder: PathBuf,
    classes: Vec<String>,
    /// Folders beside those of the classes, in a phrase.
    passed_over: Option<String>,
}

impl Undivided {
    /// Those in `train`, or where there is no such folder, two or more in the root itself, each with an image. Other folders
    /// may lie there, such as that of the runs: it looks no deeper for their images, and if the root is the wrong one, has
    /// not walked through a whole disk.
    ///
    /// Errors: [`Error::Lacking`] where a folder beside `train` has the same classes; those of reading `train`, the root, or
    /// what may be a class.
    pub fn of(root: &Path) -> Result<Option<Self>> {
        let [train, val, test] = PARTS.map(|split| root.join(split.name()));
        if val.is_dir() || test.is_dir() {
            return Ok(None);
        }
        if train.is_dir() {
            let classes = class_names(&train)?;
            let mut beside = folder_names(root)?;
            beside.retain(|name| name != Split::Train.name());
            // One that cannot be read is among those that are passed over.
            let theirs = |name: &OsString| folder_names(&root.join(name)).unwrap_or_default();
            if let Some(name) = beside.iter().find(|name| theirs(name).iter().eq(classes.iter().map(OsStr::new))) {
                let help = format!(
                    "It has {}/: if that is to be tested on, call it val, or else move it elsewhere.",
                    name.display()
                );
                return Err(Error::Lacking { path: root.to_owned(), looked_for: "val/ and test/".to_owned(), help });
            }
            let passed_over = some_of(&beside, "beside train/");
            return Ok(Some(Self { classes, folder: train, passed_over }));
        }
        let (mut classes, mut others, mut shut) = (Vec::new(), Vec::new(), None);
        for name in folder_names(root)? {
            match holds_picture(&root.join(&name)) {
                Ok(true) => classes.push(class_name(root, name)?),
                Err(error) if !OF_THE_SYSTEM.iter().any(|of_the_system| name == *of_the_system) => {
                    shut = shut.or(Some(error));
                }
                _ => others.push(name),
            }
        }
        // A model would not learn a class, and nobody notice. The wrong folder is told what it lacks instead.
        if let (Some(error), false) = (shut, classes.is_empty()) {
            return Err(error);
        }
        let own = if others.len() == 1 { "without an image of its own" } else { "without images of their own" };
        let passed_over = some_of(&others, own);
        Ok((classes.len() > 1).then(|| Self { folder: root.to_owned(), classes, passed_over }))
    }
}

/// What a user should know of images beside the folders of the classes, if there are any.
fn loose_in(folder: &Path, name: &str) -> Option<String> {
    let count = pictures_in(folder);
    let s = if count == 1 { "" } else { "s" };
    (count > 0).then(|| format!("passed over {count} image{s} in {name}/ itself, beside the folders of the classes"))
}

/// Whether a picture lies in a folder itself. It looks no further than the first: there may be a million.
fn holds_picture(folder: &Path) -> Result<bool> {
    for entry in visible(folder)? {
        if is_picture(&entry?.path()) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// How many pictures lie in a folder itself, as far as that can be seen.
fn pictures_in(folder: &Path) -> usize {
    visible(folder).map_or(0, |entries| entries.flatten().filter(|entry| is_picture(&entry.path())).count())
}

/// What is in a folder that is no image folder, and could be one, in a sentence.
pub(crate) fn nearly(root: &Path) -> Option<String> {
    let folders = folder_names(root).ok()?;
    let misnamed = misnamed(root, Split::Train);
    if !misnamed.is_empty() {
        return Some(misnamed);
    }
    let is_image_folder = |path: &PathBuf| {
        PARTS.iter().any(|part| path.join(part.name()).is_dir()) || matches!(Undivided::of(path), Ok(Some(_)))
    };
    if let Some(inner) = folders.iter().take(LISTED).map(|name| root.join(name)).find(is_image_folder) {
        return Some(format!("{} is an image folder: name that. ", inner.display()));
    }
    match pictures_in(root) {
        0 => {}
        count => {
            let (holds, s) = (root.display(), if count == 1 { "" } else { "s" });
            return Some(format!(
                "{holds} itself holds {count} image{s}: if it is a class, name the folder above it. "
            ));
        }
    }
    let classes: Vec<&OsString> =
        folders.iter().filter(|name| holds_picture(&root.join(name)).unwrap_or(false)).collect();
    match (classes.as_slice(), folders.first()) {
        ([class], _) => {
            Some(format!("Of its folders only {}/ has images: it takes two classes to tell apart. ", class.display()))
        }
        (_, Some(first)) => {
            let others = Others::of(&root.join(first)).to_string();
            let others = if others.is_empty() { others } else { format!(" (it has {others})") };
            Some(format!(
                "None of its folders, such as {}/{others}, has images of its own; in train/ classes may have them deeper. ",
                first.display()
            ))
        }
        (_, None) => None,
    }
}

/// What a user should know of classes that a test has no images of, if there are any.
fn untested(classes: &[String], split: Split) -> Option<String> {
    let few = classes.iter().take(LISTED).map(String::as_str).collect::<Vec<_>>().join(", ");
    (!classes.is_empty()).then(|| format!("{}/ lacks {} of the classes: {few}", split.name(), classes.len()))
}

/// What a user should know of folders that were passed over, if there are any.
fn some_of(folders: &[OsString], which: &str) -> Option<String> {
    let s = if folders.len() == 1 { "" } else { "s" };
    let few = folders.iter().take(LISTED).map(|name| name.to_string_lossy()).collect::<Vec<_>>().join(", ");
    (!folders.is_empty()).then(|| format!("passed over {} folder{s} {which}: {few}", folders.len()))
}

/// The names of the folders in `split`, of which there must be one.
fn class_names(split: &Path) -> Result<Vec<String>> {
    let classes = folder_names(split)?.into_iter().map(|name| class_name(split, name)).collect::<Result<Vec<_>>>()?;
    if classes.is_empty() && pictures_in(split) > 0 {
        let help =
            "Its images lie in it directly: if it is a class, give it another name; train, val and test are parts.";
        let (path, looked_for) = (split.to_owned(), "a folder for each class".to_owned());
        return Err(Error::Lacking { path, looked_for, help: help.to_owned() });
    }
    if classes.is_empty() {
        return Err(lacking(split, "a folder for each class"));
    }
    Ok(classes)
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

/// The error of a split to evaluate on that is not there, while the other one may be.
fn lacks_split(root: &Path, split: Split) -> Error {
    let Some(other) = [Split::Val, Split::Test].into_iter().find(|other| root.join(other.name()).is_dir()) else {
        return lacking(root, "train/, and folders of images");
    };
    let (looked_for, help) =
        (format!("{}/", split.name()), format!("{}It has {}/.", misnamed(root, split), other.name()));
    Error::Lacking { path: root.to_owned(), looked_for, help }
}

/// What is to be said of a folder that is called as a part is, but for capitals, or by its longer name.
fn misnamed(root: &Path, split: Split) -> String {
    let longer = match split {
        Split::Train => "training",
        Split::Val => "validation",
        Split::Test | Split::All => "testing",
    };
    let folders = folder_names(root).unwrap_or_default();
    let is_like = |name: &&OsString| [split.name(), longer].iter().any(|own| name.eq_ignore_ascii_case(own));
    let like = folders.iter().find(is_like);
    like.map_or_else(String::new, |name| format!("It has {}/: call it {}. ", name.display(), split.name()))
}

fn lacking(path: &Path, looked_for: &str) -> Error {
    Error::Lacking {
        path: path.to_owned(),
        looked_for: looked_for.to_owned(),
        help: "An image folder has CLASS/*.png|jpg|.., or train/CLASS/ and the same classes in val/ or test/."
            .to_owned(),
    }
}
