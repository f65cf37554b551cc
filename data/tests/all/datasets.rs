//! Each layout is recognised and read as it should be, and each way it can be wrong has its error.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use crate::support::*;
use approx::assert_relative_eq;
use data::{Dataset, Error, Image, InMemory, Split, Statistics, load_image, open};

#[test]
fn embedded_images_and_labels() {
    let counts = |set: &dyn Dataset| {
        let mut counts = vec![0; 10];
        (0..set.len()).for_each(|index| counts[set.get(index).unwrap().label as usize] += 1);
        counts
    };
    let train = open("embedded", Split::Train).unwrap();
    let test = open("embedded", Split::Test).unwrap();
    assert_eq!((train.len(), test.len()), (5000, 1000));
    assert_eq!(counts(&*train), [505, 460, 519, 486, 519, 488, 519, 486, 520, 498]);
    assert_eq!(counts(&*test), [103, 89, 100, 103, 90, 86, 112, 102, 106, 109]);
    assert_eq!(train.classes()[0], "airplane");
    assert_eq!(train.classes()[9], "truck");

    // Read from the PNG sheets by an independent decoder (zlib and the five filters, in Python).
    for (set, index, label, row, column, colour) in [
        (&train, 0, 6, 0, 0, [59, 62, 63]),
        (&train, 0, 6, 31, 31, [123, 92, 72]),
        (&train, 101, 3, 5, 17, [62, 57, 41]),
        (&train, 4999, 6, 16, 3, [41, 29, 14]),
        (&test, 101, 5, 5, 17, [65, 73, 82]),
        (&test, 999, 8, 16, 3, [135, 75, 74]),
    ] {
        let sample = set.get(index).unwrap();
        assert_eq!((sample.label, sample.image.pixel(row, column)), (label, Some(colour)), "image {index}");
    }
    assert!(matches!(train.get(5000), Err(Error::Index { index: 5000, len: 5000, .. })));
}

#[test]
fn embedded_statistics() {
    let train = open("embedded", Split::Train).unwrap();
    let (mut sums, mut squares) = ([0f64; 3], [0f64; 3]);
    for index in 0..train.len() {
        for pixel in train.get(index).unwrap().image.pixels().as_chunks::<3>().0 {
            for channel in 0..3 {
                let value = f64::from(pixel[channel]) / 255.0;
                sums[channel] += value;
                squares[channel] += value * value;
            }
        }
    }
    let count = (train.len() * 1024) as f64;
    for channel in 0..3 {
        let mean = sums[channel] / count;
        let std = (squares[channel] / count - mean * mean).sqrt();
        // Of these 5,000 images, by the same Python.
        assert_relative_eq!(mean, [0.491261122, 0.481415418, 0.444467383][channel], max_relative = 1e-8);
        assert_relative_eq!(std, [0.247599263, 0.244497316, 0.262745477][channel], max_relative = 1e-8);
        // Near those of the whole set.
        assert_relative_eq!(mean as f32, train.statistics().mean[channel], max_relative = 0.01);
        assert_relative_eq!(std as f32, train.statistics().std[channel], max_relative = 0.01);
    }
}

/// ImageNet's are those that the published weights were trained with; CIFAR's are in wide use, to four digits.
#[test]
fn statistics_are_the_published_ones() {
    let known = [
        (Statistics::IMAGENET, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        (Statistics::CIFAR10, [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
        (Statistics::CIFAR100, [0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
    ];
    known.into_iter().for_each(|(ours, mean, std)| assert_eq!(ours, Statistics { mean, std }));
}

#[test]
fn cifar10_in_its_folder_or_one_above() {
    let root = tempfile::tempdir().unwrap();
    let folder = write_cifar10(root.path(), 12);
    for source in [root.path(), &folder] {
        let train = open(source.to_str().unwrap(), Split::Train).unwrap();
        assert_eq!((train.name(), train.len(), train.classes().len()), ("cifar10", 60, 10));
        assert_eq!(train.statistics(), Statistics::CIFAR10);
        let sample = train.get(12 + 11).unwrap(); // the last of the second file
        assert_eq!((sample.label, sample.image.pixel(5, 17)), (1, Some([11, 5, 17])));
        assert_eq!(open(source.to_str().unwrap(), Split::Test).unwrap().len(), 12);
    }
    // A mark of its encoding, with which some editors begin a text, is no part of a name.
    let names = folder.join("batches.meta.txt");
    fs::write(&names, format!("\u{feff}{}", fs::read_to_string(&names).unwrap())).unwrap();
    assert_eq!(open(folder.to_str().unwrap(), Split::Test).unwrap().classes()[0], "airplane");
}

/// `CIFAR10=DIR cargo test -p biformer-data --test all -- --ignored full_set`: two readers, two formats, one content.
#[test]
#[ignore = "needs the full CIFAR-10"]
fn the_embedded_images_are_the_first_of_the_full_set() {
    let source = std::env::var("CIFAR10").expect("the folder of the full CIFAR-10");
    for (split, len) in [(Split::Train, 50_000), (Split::Test, 10_000)] {
        let (full, part) = (open(&source, split).unwrap(), open("embedded", split).unwrap());
        assert_eq!((full.len(), full.classes()), (len, part.classes()));
        assert!((0..part.len()).all(|index| full.get(index).unwrap() == part.get(index).unwrap()));
    }
}

#[test]
fn cifar100_in_its_folder_or_one_above() {
    let root = tempfile::tempdir().unwrap();
    let folder = write_cifar100(root.path(), 45);
    for source in [root.path(), &folder] {
        let test = open(source.to_str().unwrap(), Split::Test).unwrap();
        assert_eq!((test.name(), test.len(), test.classes()[99].as_str()), ("cifar100", 45, "class99"));
        assert_eq!(test.statistics(), Statistics::CIFAR100);
        let sample = test.get(44).unwrap();
        assert_eq!((sample.label, sample.image.pixel(31, 2)), (44, Some([44, 31, 2])));
    }
}

/// Training evaluates on `val`, where there is one; each split can be had by its name.
#[test]
fn the_splits_of_each_layout() {
    let root = tempfile::tempdir().unwrap();
    let source = root.path().to_str().unwrap();
    write_folder(root.path(), 3);
    let len = |split| open(source, split).map(|set| set.len());
    assert_eq!(Split::evaluated(source), Split::Val);
    assert_eq!((len(Split::Train).unwrap(), len(Split::Val).unwrap()), (6, 2));
    let error = fails(root.path(), Split::Test).to_string();
    assert!(error.ends_with(" lacks test/. It has val/."), "{error}");

    for (class, count) in [("cat", 2), ("dog", 1)] {
        (0..count).for_each(|n| write_picture(&root.path().join(format!("test/{class}/{n}.png")), 8, 8, [n; 3]));
    }
    assert_eq!((Split::evaluated(source), len(Split::Val).unwrap(), len(Split::Test).unwrap()), (Split::Val, 2, 3));
    fs::remove_dir_all(root.path().join("val")).unwrap();
    assert_eq!((Split::evaluated(source), len(Split::Train).unwrap(), len(Split::Test).unwrap()), (Split::Test, 6, 3));
    let error = fails(root.path(), Split::Val).to_string();
    assert!(error.ends_with(" lacks val/. It has test/."), "{error}");

    fs::rename(root.path().join("test"), root.path().join("val")).unwrap();
    fs::remove_dir_all(root.path().join("train")).unwrap();
    let error = fails(root.path(), Split::Train);
    assert!(
        matches!(error, Error::NoDataset { .. }) && error.to_string().contains("It has val/, but no train/"),
        "{error}"
    );
    assert_eq!(len(Split::Val).unwrap(), 3);

    let cifar = tempfile::tempdir().unwrap();
    write_cifar10(cifar.path(), 2);
    for source in [cifar.path(), Path::new("embedded")] {
        assert_eq!(Split::evaluated(source.to_str().unwrap()), Split::Test);
        let error = fails(source, Split::Val).to_string();
        assert!(error.ends_with(" lacks a split val. It has train and test images."), "{error}");
    }
    for split in [Split::Train, Split::Val, Split::Test, Split::All] {
        assert_eq!(split.name().parse(), Ok(split));
    }
    assert!("valid".parse::<Split>().unwrap_err().contains("train, val, test and all"));
}

#[test]
fn what_fits_no_layout_or_two() {
    let root = tempfile::tempdir().unwrap();
    let nowhere = fails(&root.path().join("nowhere"), Split::Train);
    assert!(matches!(nowhere, Error::Missing { .. }) && nowhere.to_string().contains("nowhere is missing"));

    let empty = fails(root.path(), Split::Train).to_string();
    for hint in ["no data set", "CIFAR-10 or CIFAR-100", "CLASS/*.png", "train/CLASS/", "embedded"] {
        assert!(empty.contains(hint), "{empty}");
    }
    fs::write(root.path().join("file"), "").unwrap();
    assert!(matches!(fails(&root.path().join("file"), Split::Train), Error::Unsupported { .. }));

    write_cifar10(root.path(), 1);
    write_cifar100(root.path(), 1);
    let both = fails(root.path(), Split::Train);
    assert!(matches!(both, Error::Unsupported { .. }) && both.to_string().contains("more than one data set"));
}

#[test]
fn a_missing_cifar_file_is_named() {
    for file in ["data_batch_4.bin", "batches.meta.txt"] {
        let root = tempfile::tempdir().unwrap();
        fs::remove_file(write_cifar10(root.path(), 2).join(file)).unwrap();
        let error = fails(root.path(), Split::Train);
        assert!(matches!(&error, Error::Missing { path, .. } if path.ends_with(file)), "{error}");
    }
}

#[test]
fn a_label_out_of_range_names_file_and_record() {
    let root = tempfile::tempdir().unwrap();
    let file = write_cifar10(root.path(), 5).join("data_batch_3.bin");
    let mut bytes = fs::read(&file).unwrap();
    bytes[4 * 3073] = 10;
    fs::write(&file, bytes).unwrap();
    let error = fails(root.path(), Split::Train);
    assert!(matches!(&error, Error::Label { label: 10, classes: 10, .. }), "{error}");
    assert!(error.to_string().starts_with(&format!("{}, record 4: label 10", file.display())), "{error}");

    // In CIFAR-100, the coarse label is checked, too.
    for (offset, label, classes) in [(0, 20, 20), (1, 100, 100)] {
        let root = tempfile::tempdir().unwrap();
        let file = write_cifar100(root.path(), 3).join("test.bin");
        let mut bytes = fs::read(&file).unwrap();
        bytes[2 * 3074 + offset] = label;
        fs::write(&file, bytes).unwrap();
        let error = fails(root.path(), Split::Test);
        assert!(matches!(error, Error::Label { classes: found, .. } if found == classes), "{error}");
        assert!(error.to_string().contains("record 2"), "{error}");
    }
}

#[test]
fn images_of_some_classes_stand_among_all_of_them() {
    let dataset = in_memory(20);
    let classes = dataset.classes().to_vec();
    let all: Vec<String> = ["before".to_owned()].into_iter().chain(classes.iter().rev().cloned()).collect();
    let among = data::among(Arc::clone(&dataset), &all).unwrap();
    assert_eq!((among.classes(), among.len(), among.name()), (&all[..], 20, dataset.name()));
    for index in 0..20 {
        let (own, there) = (dataset.get(index).unwrap(), among.get(index).unwrap());
        assert_eq!((&all[there.label as usize], there.image), (&classes[own.label as usize], own.image));
        assert_eq!(among.labels().unwrap()[index], there.label);
    }
    let error = data::among(dataset, &classes[1..]).err().unwrap();
    assert!(matches!(&error, Error::UnknownClasses { names, .. } if *names == classes[..1]), "{error}");
    assert!(!error.to_string().contains("accent"), "{error}");
}

#[test]
fn classes_that_differ_in_spelling_alone_are_pointed_out() {
    for (a, b, alike) in [("Cat", "cat", true), ("caf\u{e9}", "cafe\u{301}", true), ("cafe", "caf\u{e9}", false)] {
        assert_eq!(data::look_alike(a, b), alike, "{a} {b}");
        let [names, classes] = [a, b].map(|name| vec![name.to_owned()]);
        let error = Error::UnknownClasses { names, classes }.to_string();
        assert_eq!(error.contains("differ in capitals or in how an accent is stored: rename one"), alike, "{error}");
    }
}

#[test]
fn a_class_of_imagenet_is_known_by_its_folder_too() {
    let named = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
    let (names, folders) = (named(&["mine", "tench", "tabby"]), named(&["n02123045", "n01440764"]));
    assert_eq!(
        ["tabby", "n02123045", "mine", "goldfish"].map(|name| data::class_among(name, &names)),
        [Some(2), Some(2), Some(0), None]
    );
    assert_eq!(["tabby", "n02123045", "mine"].map(|name| data::class_among(name, &folders)), [Some(0), Some(0), None]);

    let images = InMemory::new("test", folders, Statistics::IMAGENET, 1, vec![0; 6], vec![1, 0]).unwrap();
    let among = data::among(Arc::new(images), &names).unwrap();
    assert_eq!((among.labels(), among.get(1).unwrap().label), (Some(&[1, 2][..]), 2));
}

#[test]
fn what_is_no_image_is_named() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("picture.png");
    assert!(matches!(load_image(&path), Err(Error::Missing { path: named, .. }) if named == path));
    for other in [&b"hello"[..], b"GIF89a\x01\0\x01\0\0\0\0;"] {
        fs::write(&path, other).unwrap();
        let error = load_image(&path).unwrap_err();
        let said = error.to_string();
        assert!(matches!(error, Error::Undecodable { .. }) && said.contains("picture.png"), "{said}");
        assert!(said.ends_with("it is no PNG, JPEG, WebP, BMP, TIFF or PNM"), "{said}");
    }
    assert!(matches!(load_image(root.path()), Err(Error::Unsupported { .. })));
}

#[cfg(unix)]
#[test]
fn what_cannot_be_listed_or_read_is_named() {
    use std::os::unix::fs::symlink;
    let root = tempfile::tempdir().unwrap();
    symlink("circle", root.path().join("circle")).unwrap();
    assert!(matches!(load_image(root.path().join("circle")), Err(Error::Io { .. })));
    symlink("nowhere", root.path().join("dangling")).unwrap();
    let said = load_image(root.path().join("dangling")).unwrap_err().to_string();
    assert!(said.ends_with("looked for an image file. It is a link to nowhere"), "{said}");
    // A device has no end; it must be refused, not read.
    assert!(matches!(load_image("/dev/zero"), Err(Error::Unsupported { .. })));
}

#[test]
fn a_picture_is_its_size_and_its_bytes() {
    let of = |height, width, pixels: &[u8]| Image::new(height, width, pixels.to_vec()).unwrap();
    let bytes: Vec<u8> = (0..18).collect();
    let mut changed = bytes.clone();
    changed[17] += 1;
    let image = of(2, 3, &bytes);
    assert_eq!(image, of(2, 3, &bytes));
    assert_ne!(image, of(2, 3, &changed));
    assert_ne!(image, of(3, 2, &bytes));
    assert_eq!([image.pixel(1, 2), image.pixel(2, 0), image.pixel(0, 3)], [Some([15, 16, 17]), None, None]);
}

#[test]
fn pictures_and_sets_that_do_not_add_up() {
    for (height, width, bytes) in [(0, 3, 0), (2, 2, 11), (usize::MAX, 3, 9)] {
        assert!(matches!(Image::new(height, width, vec![0; bytes]), Err(Error::Setting { .. })));
    }
    let classes = vec!["only".to_owned()];
    for (side, bytes, labels) in [(0, 0, vec![]), (2, 11, vec![0]), (2, 12, vec![1]), (usize::MAX, 12, vec![0])] {
        let set = InMemory::new("wrong", classes.clone(), PLAIN, side, vec![0; bytes], labels);
        assert!(matches!(set, Err(Error::Setting { .. })));
    }
}
