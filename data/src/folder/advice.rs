//! Notes for the user about an image folder, and about a folder that is nearly one.

use super::undivided::has_picture;
use super::{PARTS, Undivided, folder_names};
use crate::error::listed;
use crate::listing::{OF_A_RUN, Others, extensions, is_of_the_system, is_picture, is_run, picture_below, visible};
use crate::{Error, Split};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// How many folders are looked into.
const LOOKED_INTO: usize = 5;

/// A sentence that says what a folder holds that is not a data set but may have been meant as an image folder; empty if
/// that cannot be determined.
pub(crate) fn nearly(root: &Path) -> String {
    let Ok(mut folders) = folder_names(root) else { return String::new() };
    folders.retain(|name| !is_of_the_system(name));
    let misnamed = misnamed(root, Split::Train);
    if !misnamed.is_empty() {
        return misnamed;
    }
    if let Some(part) = [Split::Val, Split::Test].into_iter().find(|part| root.join(part.name()).is_dir()) {
        return format!("It has {0}/, but no train/; if {0} is a class, give it another name. ", part.name());
    }
    let shown = root.display();
    let is_image_folder = |path: &PathBuf| {
        PARTS.iter().any(|part| path.join(part.name()).is_dir()) || matches!(Undivided::of(path), Ok(Some(_)))
    };
    let inner = folders.iter().take(LOOKED_INTO).map(|name| root.join(name)).filter(is_image_folder);
    match &inner.collect::<Vec<_>>()[..] {
        [] => {}
        [inner] => return format!("{} is an image folder: name that. ", inner.display()),
        [first, second, ..] => {
            let (first, second) = (first.display(), second.display());
            return format!(
                "{first} and {second} are image folders: name one of them, or if they are classes, move all of them into \
                 {shown}/train/. "
            );
        }
    }
    let count = pictures_in(root);
    if count > 0 {
        let images = counted(count);
        return format!("{shown} itself holds {images}: if it is a class, name the folder above it. ");
    }
    let (runs, folders): (Vec<OsString>, Vec<OsString>) =
        folders.into_iter().partition(|name| is_run(&root.join(name)));
    let (runs, other) = match named(&runs) {
        Some(runs) => (format!("Folders with a {OF_A_RUN} are those of runs, and no classes: {runs}. "), "other "),
        None => (String::new(), ""),
    };
    let classes: Vec<&OsString> =
        folders.iter().filter(|name| has_picture(&root.join(name)).unwrap_or(false)).collect();
    let hint = match (classes.as_slice(), folders.first()) {
        ([class], _) => {
            let others = folders.iter().filter(|name| name != class);
            let deeper = others.map(|name| root.join(name)).find_map(|other| picture_below(&other));
            let deeper = deeper.map_or_else(String::new, |image| {
                format!(" (in train/ classes may have them deeper, as {} is)", image.display())
            });
            let class = class.display();
            format!(
                "Of its {other}folders only {class}/ itself has images{deeper}: it takes two classes to tell apart. "
            )
        }
        (_, Some(first)) => {
            let others = Others::of(&root.join(first)).to_string();
            let deeper = match others.is_empty() {
                true => "in train/ classes may have them deeper".to_owned(),
                false => format!("it has {others}, and what is read is {}", extensions()),
            };
            format!("None of its {other}folders, such as {}/, has images of its own; {deeper}. ", first.display())
        }
        (_, None) => format!("It has no {other}folders. "),
    };
    runs + &hint
}

/// The error for an evaluation split that does not exist, though the other one (val or test) may.
pub(super) fn lacks_split(root: &Path, split: Split) -> Error {
    let Some(other) = [Split::Val, Split::Test].into_iter().find(|other| root.join(other.name()).is_dir()) else {
        return lacking(root, "train/, and folders of images");
    };
    let (looked_for, help) =
        (format!("{}/", split.name()), format!("{}It has {}/.", misnamed(root, split), other.name()));
    Error::Lacking { path: root.to_owned(), looked_for, help }
}

/// The advice about a folder that is named like a split except for capitals, or by the split's longer name (such as
/// training).
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

pub(super) fn lacking(path: &Path, looked_for: &str) -> Error {
    Error::Lacking {
        path: path.to_owned(),
        looked_for: looked_for.to_owned(),
        help: "An image folder has CLASS/*.png|jpg|.., or train/CLASS/ and the same classes in val/ or test/."
            .to_owned(),
    }
}

/// What a user should know of images beside the folders of the classes, if there are any.
pub(super) fn loose_in(folder: &Path, name: &str) -> Option<String> {
    let count = pictures_in(folder);
    (count > 0).then(|| format!("skipped {} in {name}/ itself, beside the folders of the classes", counted(count)))
}

/// So many images.
fn counted(images: usize) -> String {
    format!("{images} image{}", if images == 1 { "" } else { "s" })
}

/// What a user should know of classes that a test has no images of, if there are any.
pub(super) fn untested(classes: &[String], split: Split) -> Option<String> {
    let (lacks, some) = (split.name(), listed(classes));
    (!classes.is_empty()).then(|| format!("{lacks}/ lacks {} of the classes: {some}", classes.len()))
}

/// What a user should know of folders that were skipped, if there are any.
pub(super) fn some_of(folders: &[OsString], which: &str) -> Option<String> {
    let s = if folders.len() == 1 { "" } else { "s" };
    named(folders).map(|some| format!("skipped {} folder{s} {which}: {some}", folders.len()))
}

/// The names of the first of some folders, if there are any.
fn named(folders: &[OsString]) -> Option<String> {
    let names: Vec<_> = folders.iter().map(|name| name.to_string_lossy()).collect();
    (!names.is_empty()).then(|| listed(&names))
}

/// The same of folders that were skipped because they hold runs.
pub(super) fn some_runs(folders: &[OsString]) -> Option<String> {
    some_of(folders, if folders.len() == 1 { "that holds a run" } else { "that hold runs" })
}

/// The error of a folder that would be a class if it did not hold a run.
pub(super) fn no_class(path: PathBuf) -> Error {
    let what = format!("it holds a run ({OF_A_RUN}), so it is no class; move the run's files elsewhere");
    Error::Unsupported { path, what }
}

/// How many pictures lie in a folder itself, as far as that can be seen.
pub(super) fn pictures_in(folder: &Path) -> usize {
    visible(folder).map_or(0, |entries| entries.flatten().filter(|entry| is_picture(&entry.path())).count())
}
