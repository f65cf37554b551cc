//! Symbolic links in folders of images.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::support::*;
use data::{Error, Split, open};

#[test]
fn links_are_followed_but_not_round_in_circles() {
    let root = tempfile::tempdir().unwrap();
    write_folder(root.path(), 1);
    let class = root.path().join("train/cat");
    let elsewhere = tempfile::tempdir().unwrap();
    write_picture(&elsewhere.path().join("inner/1.png"), 8, 8, [0; 3]);
    symlink(elsewhere.path(), class.join("linked")).unwrap();
    // To itself, to the class, above it, from one to the other and back, and nowhere.
    symlink("self", class.join("self")).unwrap();
    symlink(".", class.join("here")).unwrap();
    symlink("../..", class.join("up")).unwrap();
    symlink(&class, elsewhere.path().join("inner/back")).unwrap();
    symlink("nowhere", class.join("gone")).unwrap();
    // A hundred folders that all link to one another: more ways than anyone could walk.
    let hundred = (0..100).map(|number| elsewhere.path().join(format!("of{number}"))).collect::<Vec<_>>();
    for folder in &hundred {
        fs::create_dir(folder).unwrap();
        hundred.iter().for_each(|other| symlink(other, folder.join(other.file_name().unwrap())).unwrap());
    }
    let train = open(root.path().to_str().unwrap(), Split::Train).unwrap();
    let paths: Vec<_> = (0..train.len()).map(|index| train.path(index).unwrap().to_owned()).collect();
    assert_eq!(paths, [class.join("000.png"), class.join("linked/inner/1.png"), root.path().join("train/dog/000.png")]);
}

/// What is listed without regard to classes is what the classes have, also where several have the same.
#[test]
fn each_class_has_what_it_links_to() {
    let below = |folder: &Path| data::pictures_below(folder).unwrap().0;
    let images = |root: &Path, splits: &[Split]| -> Vec<PathBuf> {
        let sets = splits.iter().map(|&split| open(root.to_str().unwrap(), split).unwrap());
        sets.flat_map(|set| (0..set.len()).map(move |index| set.path(index).unwrap().to_owned())).collect()
    };
    let root = tempfile::tempdir().unwrap();
    let classes = root.path().join("train");
    for path in ["cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png", "wolf/1.png", "wolf/grey/2.png"] {
        write_picture(&classes.join(path), 8, 8, [0; 3]);
    }
    // A folder before the one that it leads to; twice to the same, which is read once; and round in circles.
    symlink("../wolf", classes.join("dog/wolves")).unwrap();
    symlink("../wolf/grey", classes.join("dog/wolves too")).unwrap();
    symlink("../dog", classes.join("wolf/dogs")).unwrap();
    symlink("..", classes.join("cat/up")).unwrap();
    assert_eq!(below(&classes).len(), 2 + 4 + 4);
    assert_eq!(below(&classes), images(&classes, &[Split::All]));
    // A whole split.
    symlink("train", root.path().join("val")).unwrap();
    assert_eq!(below(root.path()).len(), 2 * (2 + 4 + 4));
    assert_eq!(below(root.path()), images(root.path(), &[Split::Train, Split::Val]));
    // What leads to all of the data is none.
    symlink("..", classes.join("up")).unwrap();
    symlink(".", root.path().join("here")).unwrap();
    assert_eq!(below(root.path()).len(), 2 * (2 + 4 + 4));
    // In a class that leads to all classes they are met once more, however they link to one another.
    let other = tempfile::tempdir().unwrap();
    symlink(root.path(), other.path().join("all")).unwrap();
    assert_eq!(below(other.path()).len(), 6);
}

/// What a link to a disk that is not mounted stands for, nobody can tell.
#[test]
fn a_class_that_is_a_link_to_nothing_is_missed() {
    for below in ["train", ""] {
        let root = tempfile::tempdir().unwrap();
        let classes = root.path().join(below);
        for class in ["cat", "dog"] {
            (0..3).for_each(|number| write_picture(&classes.join(class).join(format!("{number}.png")), 8, 8, [0; 3]));
        }
        open(root.path().to_str().unwrap(), Split::Train).unwrap();
        let link = classes.join("emu");
        symlink("/nowhere/emu", &link).unwrap();
        let error = fails(root.path(), Split::Train);
        let said = error.to_string();
        assert!(matches!(&error, Error::Unsupported { path, .. } if *path == link), "{said}");
        assert!(said.contains("a link to /nowhere/emu, which is missing"), "{said}");
    }
    // Nor can the images to be tested on.
    for split in ["val", "test"] {
        let root = tempfile::tempdir().unwrap();
        write_folder(root.path(), 3);
        let other = if split == "val" { "test" } else { "val" };
        let _ = fs::rename(root.path().join(split), root.path().join(other));
        symlink("/nowhere", root.path().join(split)).unwrap();
        let error = fails(root.path(), Split::Train);
        assert!(error.to_string().contains("a link to /nowhere, which is missing"), "{split}: {error}");
    }
}
