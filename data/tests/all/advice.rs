//! What is said of a folder that is nearly a data set.

use std::fs;

use crate::support::*;
use data::{Split, open};

/// What a folder lacks is no help to someone who has another one before them.
#[test]
fn what_is_nearly_an_image_folder_is_said() {
    let said = |pictures: &[&str]| {
        let root = tempfile::tempdir().unwrap();
        pictures.iter().for_each(|path| write_picture(&root.path().join(path), 8, 8, [0; 3]));
        fails(root.path(), Split::Train).to_string()
    };
    let cases: [(&[&str], &str); 9] = [
        (
            &["cat/1.png", "cat/2.png", "dog/old/1.png"],
            "only cat/ itself has images (in train/ classes may have them deeper, as ",
        ),
        (&["1.png", "2.png"], "itself holds 2 images: if it is a class, name the folder above it. "),
        (
            &["cat/1.png", "cat/2.png"],
            "Of its folders only cat/ itself has images: it takes two classes to tell apart. ",
        ),
        (&["Train/cat/1.png", "Test/cat/1.png"], "It has Train/: call it train. "),
        (&["training/cat/1.png", "training/dog/1.png", "validation/cat/1.png"], "It has training/: call it train. "),
        (
            &["cat/old/1.png", "dog/old/1.png"],
            "None of its folders, such as cat/, has images of its own; in train/ classes may have them deeper. ",
        ),
        (&["mine/cat/1.png", "mine/dog/1.png"], "mine is an image folder: name that. "),
        (
            &["cat/old/1.png", "cat/new/1.png", "dog/old/1.png", "dog/new/1.png"],
            "dog are image folders: name one of them, or if they are classes, move all of them into ",
        ),
        (&["bus/1.png", "car/1.png", "train/1.png"], "if it is a class, give it another name"),
    ];
    for (pictures, hint) in cases {
        let error = said(pictures);
        assert!(error.contains(hint), "{pictures:?}: {error}");
    }
}

/// A part that goes by another name would be missed, and nobody notice.
#[cfg(target_os = "linux")] // where names differ by capitals
#[test]
fn folders_beside_the_parts_are_named() {
    let root = tempfile::tempdir().unwrap();
    for path in ["train/cat/1.png", "train/dog/1.png", "test/cat/2.png", "test/dog/2.png", "valid/cat/3.png"] {
        write_picture(&root.path().join(path), 8, 8, [0; 3]);
    }
    let source = root.path().to_str().unwrap();
    let noted = open(source, Split::Train).unwrap().notes().to_vec();
    assert_eq!(noted, ["skipped 1 folder called neither train, val nor test: valid"]);
    fs::rename(root.path().join("valid"), root.path().join("Val")).unwrap();
    let noted = open(source, Split::Train).unwrap().notes().to_vec();
    assert_eq!(noted, ["skipped 1 folder called neither train, val nor test: Val"]);
    let lacking = fails(root.path(), Split::Val).to_string();
    assert!(lacking.contains("lacks val/") && lacking.contains("It has Val/: call it val. It has test/."), "{lacking}");
}

/// Links stand for a system on which capitals do not matter.
#[cfg(target_os = "linux")]
#[test]
fn a_part_with_a_capital_is_one_where_capitals_do_not_matter() {
    let root = tempfile::tempdir().unwrap();
    for path in ["Train/cat/1.png", "Train/dog/1.png", "Test/cat/2.png", "Test/dog/2.png"] {
        write_picture(&root.path().join(path), 8, 8, [0; 3]);
    }
    for (part, name) in [("Train", "train"), ("Test", "test")] {
        std::os::unix::fs::symlink(part, root.path().join(name)).unwrap();
    }
    let notes = |split| open(root.path().to_str().unwrap(), split).unwrap().notes().to_vec();
    assert_eq!(notes(Split::Test), [""; 0]);
    // Nor is it one more folder with the same classes, where nothing is divided.
    ["test", "Test/cat/2.png"].iter().for_each(|name| fs::remove_file(root.path().join(name)).unwrap());
    fs::remove_dir_all(root.path().join("Test")).unwrap();
    for number in 2..10 {
        write_picture(&root.path().join(format!("Train/cat/{number}.png")), 8, 8, [0; 3]);
        write_picture(&root.path().join(format!("Train/dog/{number}.png")), 8, 8, [0; 3]);
    }
    assert!(open(root.path().to_str().unwrap(), Split::Train).is_ok());
}

#[test]
fn of_a_folder_without_images_it_is_said_what_is_there() {
    let root = tempfile::tempdir().unwrap();
    for class in ["a", "b"] {
        fs::create_dir(root.path().join(class)).unwrap();
        fs::write(root.path().join(class).join("1.HEIC"), "").unwrap();
    }
    let said = fails(root.path(), Split::Train).to_string();
    let hint =
        "None of its folders, such as a/, has images of its own; it has 1 .heic, and what is read is .png, .jpg, ";
    assert!(said.contains(hint), "{said}");
}

/// As competitions hand them out.
#[test]
fn test_images_without_classes_need_only_be_moved() {
    let root = tempfile::tempdir().unwrap();
    write_folder(root.path(), 3);
    fs::remove_dir_all(root.path().join("val")).unwrap();
    write_picture(&root.path().join("test/1.png"), 8, 8, [0; 3]);
    let error = fails(root.path(), Split::Train).to_string();
    assert!(error.contains("if they have no classes, rename or move the folder"), "{error}");
    fs::rename(root.path().join("test"), root.path().join("unlabelled")).unwrap();
    assert!(open(root.path().to_str().unwrap(), Split::Test).unwrap().is_held_out());
}
