//! Folders of images: what belongs to a class, what is skipped, and what is wrong with some.

use std::collections::BTreeSet;
use std::fs;
use std::sync::Arc;

use crate::support::*;
use data::{Error, Split, Statistics, open};

#[test]
fn an_image_folder_is_sorted_and_ignores_what_is_no_image() {
    let root = tempfile::tempdir().unwrap();
    write_folder(root.path(), 3);
    fs::write(root.path().join("train/cat/.hidden.png"), "").unwrap();
    fs::write(root.path().join("train/cat/notes.txt"), "").unwrap();
    fs::create_dir(root.path().join("train/.cache")).unwrap();
    fs::write(root.path().join("train/README"), "").unwrap();
    fs::rename(root.path().join("train/cat/002.png"), root.path().join("train/cat/002.PNG")).unwrap();

    let train = open(root.path().to_str().unwrap(), Split::Train).unwrap();
    assert_eq!(train.classes(), ["cat", "dog"]);
    assert_eq!(train.statistics(), Statistics::IMAGENET);
    let seen: Vec<_> =
        (0..train.len()).map(|i| train.get(i).unwrap()).map(|s| (s.label, s.image.pixel(0, 0))).collect();
    let expected = [(0, 10), (1, 100)].into_iter().flat_map(|(l, r)| (0..3).map(move |n| (l, Some([r, n, 0]))));
    assert_eq!(seen, expected.collect::<Vec<_>>());
    let image = train.get(0).unwrap().image;
    assert_eq!((image.height(), image.width()), (48, 40));
}

#[test]
fn every_format_is_read_under_all_its_names() {
    use image::ImageFormat::{Bmp, Jpeg, Png, Pnm, Tiff, WebP};
    let root = tempfile::tempdir().unwrap();
    let formats = [Bmp, Jpeg, Jpeg, Png, Pnm, Pnm, Pnm, Tiff, Tiff, WebP];
    let names = ["bmp", "jpeg", "jpg", "png", "pnm", "ppm", "pgm", "tif", "tiff", "webp"];
    for (name, format) in names.iter().zip(formats) {
        fs::write(root.path().join(format!("1.{name}")), textured(40, 48, format)).unwrap();
    }
    let arbitrary = b"P7\nWIDTH 1\nHEIGHT 2\nDEPTH 3\nMAXVAL 255\nTUPLTYPE RGB\nENDHDR\n\x01\x02\x03\x04\x05\x06";
    fs::write(root.path().join("1.pam"), arbitrary).unwrap();
    fs::write(root.path().join("1.pbm"), b"P4\n1 2\n\x80\x00").unwrap();
    let (pictures, skipped) = data::pictures_below(root.path()).unwrap();
    assert_eq!((pictures.len(), skipped), (12, None));
    for picture in pictures {
        data::load_image(&picture).unwrap_or_else(|error| panic!("{}: {error}", picture.display()));
    }
    assert_eq!(data::load_image(root.path().join("1.pam")).unwrap().pixel(1, 0), Some([4, 5, 6]));
}

#[test]
fn images_in_folders_below_a_class_belong_to_it() {
    let root = tempfile::tempdir().unwrap();
    write_folder(root.path(), 2);
    for name in ["001/b.png", "001/a.png", "more/deep/er/1.jpeg", ".hidden/1.png", "0.png"] {
        write_picture(&root.path().join("train/cat").join(name), 8, 8, [0; 3]);
    }
    // A folder may be called anything, but these are the system's, or hold small copies, or the pictures of a run.
    write_picture(&root.path().join("train/dog/x.png/1.png"), 8, 8, [0; 3]);
    for name in
        ["dog/@eaDir/1.png/small.png", "dog/more/lost+found/1.png", "@eaDir/cat/small.png", "__MACOSX/cat/._1.png"]
    {
        write_picture(&root.path().join("train").join(name), 8, 8, [0; 3]);
    }
    let run = root.path().join("train/cat/more/run");
    write_picture(&run.join("curves.png"), 8, 8, [0; 3]);
    fs::write(run.join(data::OF_A_RUN), "").unwrap();
    let train = open(root.path().to_str().unwrap(), Split::Train).unwrap();
    let cat =
        ["0.png", "000.png", "001/a.png", "001/b.png", "001.png", "more/deep/er/1.jpeg"].map(|name| ("cat", name));
    let dog = ["000.png", "001.png", "x.png/1.png"].map(|name| ("dog", name));
    let expected: Vec<_> =
        cat.iter().chain(&dog).map(|(class, name)| root.path().join("train").join(class).join(name)).collect();
    let paths: Vec<_> = (0..train.len()).map(|index| train.path(index).unwrap()).collect();
    assert_eq!(paths, expected);
    assert_eq!((train.labels(), train.path(9)), (Some(&[0, 0, 0, 0, 0, 0, 1, 1, 1][..]), None));
    let cats = root.path().join("train/cat");
    assert_eq!(data::pictures_below(&cats).unwrap(), (expected[..6].to_vec(), None));
    assert_eq!(data::pictures_below(&run).unwrap().0, [run.join("curves.png")], "where that is asked for");
    fs::write(cats.join("more/1.heic"), "").unwrap();
    let note = data::pictures_below(&cats).unwrap().1.unwrap();
    assert!(
        note.starts_with("skipped 1 file in ") && note.ends_with("that is no image by its name: 1 .heic"),
        "{note}"
    );
}

#[test]
fn where_nothing_is_divided_one_image_in_five_is_held_out() {
    for (below, noted) in [("train", "train/"), ("", "photos/")] {
        let parent = tempfile::tempdir().unwrap();
        let root = parent.path().join("photos");
        let place = |class: &str, number: usize| root.join(below).join(class).join(format!("{number}.png"));
        let write = |class: &str, numbers: std::ops::Range<usize>| {
            numbers.for_each(|number| write_picture(&place(class, number), 8, 8, [0; 3]));
        };
        write("cat", 0..100);
        write("dog", 0..2);
        fs::write(place("cat", 0).with_extension("gif"), "").unwrap();
        let images = |split| {
            let set = open(root.to_str().unwrap(), split).unwrap();
            assert_eq!(set.classes(), ["cat", "dog"]);
            let paths: BTreeSet<_> = (0..set.len()).map(|index| set.path(index).unwrap().to_owned()).collect();
            (paths, set.notes().join("\n"))
        };
        let ((train, about_train), (test, about_test)) = (images(Split::Train), images(Split::Test));
        assert_eq!((train.len() + test.len(), train.is_disjoint(&test)), (102, true));
        assert!((10..30).contains(&test.len()), "{} of 102", test.len());
        assert!([&train, &test].iter().all(|set| set.contains(&place("dog", 0)) != set.contains(&place("dog", 1))));
        assert!(about_train.contains(&format!("skipped 1 file in {noted} ")), "{about_train}");
        assert!(about_test.contains(&about_train), "{about_train}, {about_test}");
        assert!(about_test.contains(&format!("{} of 102 images are held out as the test", test.len())), "{about_test}");
        // Among other classes they are no less what they were.
        for split in [Split::Train, Split::Test] {
            let set = open(root.to_str().unwrap(), split).unwrap();
            let among = data::among(Arc::clone(&set), &["cat", "cow", "dog"].map(str::to_owned)).unwrap();
            assert_eq!((among.is_held_out(), among.notes()), (split == Split::Test, set.notes()));
            assert_eq!(among.path(1), set.path(1));
        }
        let all = images(Split::All).0;
        assert_eq!(all, train.union(&test).cloned().collect());
        write("cat", 100..150);
        assert!(images(Split::Train).0.is_superset(&train) && images(Split::Test).0.is_superset(&test));
    }
    // What lies beside train/ may have been meant, and is named.
    let root = tempfile::tempdir().unwrap();
    for path in ["train/cat/1.png", "train/cat/2.png", "bus/1.png", "valid/dog/1.png"] {
        write_picture(&root.path().join(path), 8, 8, [0; 3]);
    }
    let train = open(root.path().to_str().unwrap(), Split::Train).unwrap();
    assert_eq!(train.notes(), ["skipped 2 folders beside train/: bus, valid"]);
    write_picture(&root.path().join("train/dog/1.png"), 8, 8, [0; 3]);
    write_picture(&root.path().join("valid/cat/1.png"), 8, 8, [0; 3]);
    let error = fails(root.path(), Split::Train).to_string();
    assert!(error.contains(" lacks val/ and test/. It has valid/: if that is to be tested on, call it val"), "{error}");
    // A folder that cannot be read, but by root, is skipped as well where the system has it so. It may be a class else.
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let root = tempfile::tempdir().unwrap();
        for path in ["cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png"] {
            write_picture(&root.path().join(path), 8, 8, [0; 3]);
        }
        let lost = root.path().join("lost+found");
        fs::create_dir(&lost).unwrap();
        fs::set_permissions(&lost, fs::Permissions::from_mode(0o000)).unwrap();
        let train = open(root.path().to_str().unwrap(), Split::Train).unwrap();
        assert!(train.notes()[0].starts_with("skipped 1 folder without an image of its own: lost+found"));
        let shut = root.path().join("emu");
        fs::rename(&lost, &shut).unwrap();
        match fs::read_dir(&shut) {
            Ok(_) => eprintln!("skipped: this user reads every folder"),
            Err(_) => assert!(matches!(fails(root.path(), Split::Train), Error::Io { path, .. } if path == shut)),
        }
    }
    // One folder of images is no data set, nor are folders of folders.
    let root = tempfile::tempdir().unwrap();
    for path in ["cat/1.png", "a/cow/1.png", "a/dog/1.png"] {
        write_picture(&root.path().join(path), 8, 8, [0; 3]);
    }
    assert!(matches!(fails(root.path(), Split::Train), Error::NoDataset { .. }));
}

/// Beside classes, a folder whose images all lie deeper may be one, too: it is not skipped. Others are.
#[test]
fn no_class_is_passed_over_because_its_images_lie_deeper() {
    let root = tempfile::tempdir().unwrap();
    for path in ["cat/1.png", "cat/2.png", "cow/1.png", "cow/2.png", "runs/mine/curves.png", "run/curves.png"] {
        write_picture(&root.path().join(path), 8, 8, [0; 3]);
    }
    ["runs/mine", "run"]
        .iter()
        .for_each(|run| fs::write(root.path().join(run).join("checkpoint.safetensors"), "").unwrap());
    fs::create_dir_all(root.path().join("notes/2023")).unwrap();
    // As a telephone names its photographs: it may be a class.
    ["1.HEIC", "2.heic", "list.txt"]
        .iter()
        .for_each(|name| fs::write(root.path().join("notes").join(name), "").unwrap());
    for thrown_away in ["$RECYCLE.BIN/1.png", "$RECYCLE.BIN/S-1-5/2.png"] {
        write_picture(&root.path().join(thrown_away), 8, 8, [0; 3]);
    }
    let train = open(root.path().to_str().unwrap(), Split::Train).unwrap();
    assert_eq!(train.classes(), ["cat", "cow"]);
    let without = "skipped 3 folders without images of their own: $RECYCLE.BIN, notes (2 .heic, 1 .txt), runs";
    assert_eq!(train.notes(), [without, "skipped 1 folder that holds a run: run"]);
    write_picture(&root.path().join("dog/2023/may/1.png"), 8, 8, [0; 3]);
    let error = fails(root.path(), Split::Train).to_string();
    let image = root.path().join("dog/2023/may/1.png");
    let hint =
        format!("dog lacks an image of its own. It has some in folders of its own, such as {}: ", image.display());
    assert!(error.contains(&hint), "{error}");
    // Where classes are known to be such, they may have theirs at any depth.
    fs::create_dir(root.path().join("train")).unwrap();
    for class in ["cat", "cow", "dog"] {
        fs::rename(root.path().join(class), root.path().join("train").join(class)).unwrap();
    }
    write_picture(&root.path().join("train/dog/2023/may/2.png"), 8, 8, [0; 3]);
    assert_eq!(open(root.path().to_str().unwrap(), Split::Train).unwrap().classes(), ["cat", "cow", "dog"]);
}

/// Its pictures are nothing to learn from, wherever it is.
#[test]
fn a_folder_that_holds_a_run_is_no_class() {
    for above in ["", "train/"] {
        let root = tempfile::tempdir().unwrap();
        let folder = |class: &str| root.path().join(above).join(class);
        for path in ["ape/1.png", "ape/2.png", "cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png"] {
            write_picture(&folder(path), 8, 8, [0; 3]);
        }
        fs::write(folder("cat").join(data::OF_A_RUN), "").unwrap();
        let train = open(root.path().to_str().unwrap(), Split::Train).unwrap();
        assert_eq!(train.classes(), ["ape", "dog"], "{above}");
        assert_eq!(train.notes(), [format!("skipped 1 folder that holds a run: {above}cat")]);
        for path in ["ape/1.png", "cat/1.png", "dog/1.png"] {
            write_picture(&root.path().join("val").join(path), 8, 8, [0; 3]);
        }
        if above.is_empty() {
            fs::remove_dir_all(root.path().join("val")).unwrap();
            fs::write(folder("dog").join(data::OF_A_RUN), "").unwrap();
            let error = fails(root.path(), Split::Train).to_string();
            let hint = "Folders with a checkpoint.safetensors are those of runs, and no classes: cat, dog. Of its other \
                        folders only ape/ itself has images";
            assert!(error.contains(hint), "{error}");
            continue;
        }
        // A test of it needs images of it to learn from.
        let error = fails(root.path(), Split::Train).to_string();
        assert!(error.contains("cat is not supported: it holds a run (checkpoint.safetensors)"), "{error}");
        fs::write(root.path().join("val/cat").join(data::OF_A_RUN), "").unwrap();
        for split in [Split::Train, Split::Val] {
            let set = open(root.path().to_str().unwrap(), split).unwrap();
            assert_eq!(set.notes(), [format!("skipped 1 folder that holds a run: {}/cat", split.name())]);
        }
        ["ape", "dog"].iter().for_each(|class| fs::write(folder(class).join(data::OF_A_RUN), "").unwrap());
        let error = fails(root.path(), Split::Train).to_string();
        assert!(error.contains("ape is not supported: it holds a run"), "{error}");
    }
}

#[test]
fn other_files_are_counted_by_extension() {
    let root = tempfile::tempdir().unwrap();
    write_folder(root.path(), 1);
    assert_eq!(open(root.path().to_str().unwrap(), Split::Train).unwrap().notes(), &[] as &[String]);
    let files = ["cat/1.avi", "dog/2.AVI", "dog/3.avi", "cat/notes", "cat/a.gif", "dog/b.gif", "cat/.hidden.bmp"];
    files.iter().for_each(|name| fs::write(root.path().join("train").join(name), "").unwrap());
    let skipped = |split| open(root.path().to_str().unwrap(), split).unwrap().notes().first().cloned();
    let expected =
        "skipped 6 files in train/ that are no images by their names: 3 .avi, 2 .gif, 1 without an extension";
    assert_eq!(skipped(Split::Train).as_deref(), Some(expected));
    assert_eq!(skipped(Split::Val), None);
    // However many kinds there are, it stays a line.
    (0..100).for_each(|n| fs::write(root.path().join(format!("val/cat/x.{n}")), "").unwrap());
    assert!(skipped(Split::Val).unwrap().ends_with(", 95 of other kinds"));

    fs::remove_file(root.path().join("train/cat/000.png")).unwrap();
    let error = fails(root.path(), Split::Train).to_string();
    let holds = "holds 1 without an extension, 1 .avi, 1 .gif, but no image (.png, ";
    assert!(error.contains(&format!("{} {holds}", root.path().join("train").join("cat").display())), "{error}");
}

#[test]
fn images_beside_the_folders_of_the_classes_are_counted() {
    let root = tempfile::tempdir().unwrap();
    for path in ["cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png", "stray.png"] {
        write_picture(&root.path().join(path), 8, 8, [0; 3]);
    }
    let dataset = open(root.path().to_str().unwrap(), Split::All).unwrap();
    let name = root.path().file_name().unwrap().to_str().unwrap();
    assert_eq!((dataset.len(), dataset.classes().len()), (4, 2));
    assert_eq!(dataset.notes(), [format!("skipped 1 image in {name}/ itself, beside the folders of the classes")]);
}

/// A name that no text can have is a mistake where it is that of a class, and nowhere else.
#[cfg(target_os = "linux")]
#[test]
fn folders_that_are_no_class_may_be_called_anything() {
    use std::os::unix::ffi::OsStrExt;
    let odd = std::ffi::OsStr::from_bytes(b"caf\xe9");
    for above in ["", "train/"] {
        let root = tempfile::tempdir().unwrap();
        for path in ["cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png"] {
            write_picture(&root.path().join(format!("{above}{path}")), 8, 8, [0; 3]);
        }
        fs::create_dir(root.path().join(odd)).unwrap();
        let source = root.path().to_str().unwrap();
        let dataset = open(source, Split::All).unwrap();
        assert_eq!((dataset.len(), dataset.classes().len()), (4, 2));
        assert!(dataset.notes()[0].starts_with("skipped 1 folder "), "{:?}", dataset.notes());
        write_picture(&root.path().join(above).join(odd).join("1.png"), 8, 8, [0; 3]);
        let error = open(source, Split::All).err().unwrap().to_string();
        assert!(error.contains("a class name must be UTF-8"), "{error}");
    }
}

#[test]
fn a_test_may_lack_classes_and_says_so() {
    let root = tempfile::tempdir().unwrap();
    for path in ["train/cat/1.png", "train/cow/1.png", "train/dog/1.png", "val/cat/2.png", "val/dog/2.png"] {
        write_picture(&root.path().join(path), 8, 8, [0; 3]);
    }
    let [train, val] = [Split::Train, Split::Val].map(|split| open(root.path().to_str().unwrap(), split).unwrap());
    assert_eq!(
        (train.len(), train.classes(), train.notes()),
        (3, &["cat", "cow", "dog"].map(String::from)[..], &[][..])
    );
    assert_eq!((val.len(), val.classes(), val.labels()), (2, train.classes(), Some(&[0, 2][..])));
    assert_eq!(val.notes(), ["val/ lacks 1 of the classes: cow"]);
}

#[test]
fn image_folders_with_something_wrong() {
    let root = tempfile::tempdir().unwrap();
    write_picture(&root.path().join("train/cat/1.png"), 8, 8, [0; 3]);
    let error = fails(root.path(), Split::Train);
    assert!(matches!(&error, Error::SingleImage { class, .. } if class == "cat"), "{error}");
    let error = fails(root.path(), Split::Val);
    assert!(matches!(error, Error::Lacking { .. }) && error.to_string().contains(" lacks val/. "), "{error}");

    fs::create_dir_all(root.path().join("val/cat")).unwrap();
    let error = fails(root.path(), Split::Val);
    assert!(matches!(&error, Error::EmptyClass { class, .. } if class == "cat"), "{error}");
    assert!(
        error
            .to_string()
            .contains(&format!("{} holds no image (.png, ", root.path().join("val").join("cat").display())),
        "{error}"
    );

    // Whoever mends one is not to find the next.
    for class in ["ant", "bee"] {
        fs::create_dir_all(root.path().join("train").join(class)).unwrap();
    }
    write_picture(&root.path().join("train/ant/1.png"), 8, 8, [0; 3]);
    fs::rename(root.path().join("val"), root.path().join("later")).unwrap();
    let error = fails(root.path(), Split::Train);
    assert!(matches!(&error, Error::Classes(faults) if faults.len() == 3), "{error}");
    let error = error.to_string();
    for fault in ["class \"ant\" has one image", "class \"bee\" is empty", "class \"cat\" has one image"] {
        assert!(error.contains(fault) && error.lines().count() == 1, "{error}");
    }
    fs::rename(root.path().join("later"), root.path().join("val")).unwrap();
    ["ant", "bee"].iter().for_each(|class| fs::remove_dir_all(root.path().join("train").join(class)).unwrap());

    let error = fails(root.path(), Split::All).to_string();
    assert!(error.ends_with(" lacks undivided images. It is divided into train and val: name one of them."), "{error}");

    fs::create_dir_all(root.path().join("val/cow")).unwrap();
    for split in [Split::Train, Split::Val] {
        let error = fails(root.path(), split);
        assert!(matches!(&error, Error::UntaughtClasses { classes, .. } if classes == &["cow"]), "{error}");
        assert!(error.to_string().ends_with("add images of them there, or take them out"), "{error}");
    }

    let hollow = tempfile::tempdir().unwrap();
    fs::create_dir_all(hollow.path().join("train")).unwrap();
    fs::create_dir_all(hollow.path().join("test")).unwrap();
    let error = fails(hollow.path(), Split::Train).to_string();
    assert!(error.contains("a folder for each class") && !error.contains("Its images lie"), "{error}");
}
