//! Folders whose images are not divided into those to learn from and others.

use super::advice::{some_of, some_runs};
use super::{Classes, PARTS, class_name, dangling, dangling_in, folder_names, is_part};
use crate::listing::{Others, is_of_the_system, is_picture, is_run, picture_below, visible};
use crate::{Error, Result, Split};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// Classes whose images are not divided into those to learn from and others.
pub(crate) struct Undivided {
    pub folder: PathBuf,
    pub classes: Vec<String>,
    /// What a user should know of folders beside those of the classes.
    pub skipped: Vec<String>,
}

impl Undivided {
    /// The classes in `train` or, if there is no such folder, those in the root itself: two or more folders, each with
    /// an image directly in it. There may be other folders, such as that of the runs.
    ///
    /// Errors: [`Error::Unsupported`] where a split, or what may be a class, is a link to nothing; [`Error::Lacking`]
    /// where a folder beside `train` has the same classes, or a folder beside two or more classes has images, but only
    /// in its subfolders; those of [`Classes::of`] for `train`, and those of reading the root, or what may be a class.
    pub fn of(root: &Path) -> Result<Option<Self>> {
        let [train, val, test] = PARTS.map(|split| root.join(split.name()));
        if let Some(error) = [&train, &val, &test].into_iter().find_map(|part| dangling(part.clone())) {
            return Err(error);
        }
        if val.is_dir() || test.is_dir() {
            return Ok(None);
        }
        if train.is_dir() {
            let Classes { names: classes, runs } = Classes::of(&train)?;
            let mut beside = folder_names(root)?;
            beside.retain(|name| !is_part(root, name, Split::Train));
            // A folder that cannot be read counts as one that is skipped.
            let theirs = |name: &OsString| folder_names(&root.join(name)).unwrap_or_default();
            if let Some(name) = beside.iter().find(|name| theirs(name).iter().eq(classes.iter().map(OsStr::new))) {
                let help = format!(
                    "It has {}/: if that is to be tested on, call it val or test, or else move it elsewhere.",
                    name.display()
                );
                return Err(Error::Lacking { path: root.to_owned(), looked_for: "val/ and test/".to_owned(), help });
            }
            let skipped = some_of(&beside, "beside train/").into_iter().chain(runs).collect();
            return Ok(Some(Self { classes, folder: train, skipped }));
        }
        let (mut classes, mut others, mut runs, mut shut) = (Vec::new(), Vec::new(), Vec::new(), None);
        for name in folder_names(root)? {
            let folder = root.join(&name);
            match has_picture(&folder) {
                _ if is_of_the_system(&name) => others.push(name),
                _ if is_run(&folder) => runs.push(name),
                Ok(true) => classes.push(class_name(root, name)?),
                Ok(false) => others.push(name),
                Err(error) => shut = shut.or(Some(error)),
            }
        }
        shut = shut.or(dangling_in(root)?);
        // An unreadable folder beside real classes is an error: to skip it would silently drop a class. If there are no
        // classes at all, this is probably the wrong folder, and the caller says what it lacks.
        if let (Some(error), false) = (shut, classes.is_empty()) {
            return Err(error);
        }
        if classes.len() < 2 {
            return Ok(None);
        }
        // One of these folders may be meant as a class as well, and if it were skipped, it would not be missed until
        // the model is used.
        let mut theirs = others.iter().filter(|name| !is_of_the_system(name));
        let deeper = theirs.find_map(|name| Some((name, picture_below(&root.join(name))?)));
        if let Some((name, image)) = deeper {
            let path = root.join(name);
            let root = root.display();
            let help = format!(
                "It has some in folders of its own, such as {}: if it is a class, move one of them up, or all classes into \
                 {root}/train/; if it is none, move it elsewhere.",
                image.display()
            );
            return Err(Error::Lacking { path, looked_for: "an image of its own".to_owned(), help });
        }
        let own = if others.len() == 1 { "without an image of its own" } else { "without images of their own" };
        // It may be a class in a format that is not read.
        for name in others.iter_mut().filter(|name| !is_of_the_system(name)) {
            let files = Others::of(&root.join(&*name)).to_string();
            if !files.is_empty() {
                name.push(format!(" ({files})"));
            }
        }
        let skipped = some_of(&others, own).into_iter().chain(some_runs(&runs)).collect();
        Ok(Some(Self { folder: root.to_owned(), classes, skipped }))
    }
}

/// Whether a folder has a picture directly in it. It stops at the first picture: there may be a million.
pub(super) fn has_picture(folder: &Path) -> Result<bool> {
    for entry in visible(folder)? {
        if is_picture(&entry?.path()) {
            return Ok(true);
        }
    }
    Ok(false)
}
