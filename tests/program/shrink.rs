//! `biformer shrink`: pictures made smaller once, and training on them.

use crate::common::program::{biformer, contents, fresh, text};
#[cfg(unix)]
use crate::common::program::{command, limited, unread};
use crate::common::samples;
use image::{GenericImageView, ImageFormat};
use std::fs;
use std::path::Path;

#[test]
fn pictures_become_smaller_under_their_names() {
    let folder = fresh("shrink");
    let [photos, small] = ["photos", "small"].map(|name| folder.join(name));
    for class in ["train/cat", "train/dog", "val/cat", "val/dog"] {
        fs::create_dir_all(photos.join(class)).unwrap();
        for (name, colour) in [("a.JPG", [200, 90, 20]), ("b.png", [20, 90, 200]), ("c.webp", [90, 200, 20])] {
            let bright = colour.map(|byte| byte + 30);
            let paint = |x, _| image::Rgb(if x > 200 { bright } else { colour });
            image::RgbImage::from_fn(400, 300, paint).save(photos.join(class).join(name)).unwrap();
        }
        samples::picture(&photos.join(class).join("d.png"), 50, 64, [9; 3]);
    }
    fs::write(photos.join("train/cat/notes.txt"), "about cats").unwrap();
    // One is named as few are.
    fs::rename(photos.join("val/cat/a.JPG"), photos.join("val/cat/a.jpe")).unwrap();
    let shrink = || biformer(&["shrink", "--data", text(&photos), "--output", text(&small), "--side", "64"]);
    let said = shrink().ok();
    assert!(said.out.contains("small: 16 pictures written"), "{said:?}");
    assert!(said.err.contains("skipped 1 file"), "{said:?}");
    let formats = [("a.JPG", ImageFormat::Jpeg), ("b.png", ImageFormat::Png), ("c.webp", ImageFormat::WebP)];
    for (name, format) in formats {
        let bytes = fs::read(small.join("val/dog").join(name)).unwrap();
        assert_eq!(image::guess_format(&bytes).unwrap(), format);
        let [was, is] = [&photos, &small].map(|data| {
            let bytes = fs::read(data.join("val/dog").join(name)).unwrap();
            image::load_from_memory(&bytes).unwrap()
        });
        assert_eq!(is.dimensions(), (85, 64), "{name}");
        // The same picture: dark on the left, and bright on the right.
        for x in [10, 70] {
            let (was, is) = (was.get_pixel(x * 400 / 85, 100), is.get_pixel(x, 21));
            assert!(was.0.iter().zip(is.0).all(|(&was, is)| was.abs_diff(is) < 6), "{name}: {was:?} {is:?}");
        }
    }
    assert_eq!(image::guess_format(&fs::read(small.join("val/cat/a.jpe")).unwrap()).unwrap(), ImageFormat::Jpeg);
    let untouched = |data: &std::path::Path| fs::read(data.join("val/cat/d.png")).unwrap();
    assert!(untouched(&photos) == untouched(&small), "what is small is copied");
    biformer(&["check", "--data", text(&small)]).ok();

    // A format that cannot have so long a side is told, not broken off.
    samples::picture(&photos.join("train/cat/long.png"), 18000, 65, [9; 3]);
    fs::rename(photos.join("train/cat/long.png"), photos.join("train/cat/long.webp")).unwrap();
    let said = shrink();
    assert!(said.status == Some(2) && said.err.contains("more than WebP files can have; name it .png"), "{said:?}");
    fs::remove_file(photos.join("train/cat/long.webp")).unwrap();

    // Called again, for what is new, and what cannot be read.
    fs::write(photos.join("val/dog/e.jpg"), "no picture").unwrap();
    samples::picture(&photos.join("val/dog/f.png"), 90, 90, [77; 3]);
    let before = contents(&small.join("train/cat"));
    let said = shrink();
    assert_eq!(said.status, Some(2), "{said:?}");
    assert!(said.out.contains("small: 1 picture written") && said.out.contains("16 were there already"), "{said:?}");
    assert!(said.err.contains("e.jpg") && said.out.contains("1 picture could not be read"), "{said:?}");
    assert!(before == contents(&small.join("train/cat")));
    assert!(!small.join("val/dog/e.jpg").exists() && small.join("val/dog/f.png").exists());
}

#[test]
fn a_side_that_nobody_names_is_of_256() {
    let folder = fresh("shrink-default");
    let [photos, small] = ["photos", "small"].map(|name| folder.join(name));
    fs::create_dir_all(&photos).unwrap();
    for (name, width, height) in [("wide.png", 600, 300), ("high.png", 300, 600), ("just.png", 256, 300)] {
        samples::picture(&photos.join(name), width, height, [9; 3]);
    }
    biformer(&["shrink", "--data", text(&photos), "--output", text(&small)]).ok();
    let size = |name: &str| image::load_from_memory(&fs::read(small.join(name)).unwrap()).unwrap().dimensions();
    assert_eq!(["wide.png", "high.png", "just.png"].map(size), [(512, 256), (256, 512), (256, 300)]);
}

#[test]
fn photographs_are_never_touched() {
    let folder = fresh("shrink-refused");
    let photos = folder.join("photos");
    fs::create_dir_all(&photos).unwrap();
    biformer(&["shrink", "--data", text(&photos), "--output", text(&folder.join("small"))])
        .refused(&["photos: holds no image (.png"]);
    samples::picture(&photos.join("a.png"), 40, 30, [1, 2, 3]);
    let before = contents(&photos);
    let mut inside =
        vec!["photos", "photos/small", "photos/../photos", "missing/../photos", "missing/x/../../photos/y"];
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(&photos, folder.join("link")).unwrap();
        inside.extend(["link", "link/x/y"]);
    }
    for output in inside {
        biformer(&["shrink", "--data", text(&photos), "--output", text(&folder.join(output)), "--side", "8"])
            .refused(&["--output", "lies in --data", "another folder"]);
    }
    biformer(&["shrink", "--data", text(&photos), "--output", text(&folder)]).refused(&[
        "--output",
        "--data lies in it",
        "another folder",
    ]);
    assert!(before == contents(&photos) && !folder.join("small").exists() && !folder.join("missing").exists());
    let file = folder.join("file");
    fs::write(&file, "").unwrap();
    biformer(&["shrink", "--data", text(&photos), "--output", text(&file)]).refused(&[
        "--output",
        "no folder",
        "name another",
    ]);
    biformer(&["shrink", "--data", text(&file), "--output", text(&folder)]).refused(&["--data", "expected a folder"]);
    biformer(&["shrink", "--data", "/nowhere", "--output", text(&file)])
        .refused(&["--data /nowhere: expected a folder"]);
    let said = biformer(&["shrink", "--data", text(&photos), "--output", text(&file), "--side", "0"]);
    assert!(said.status == Some(2) && said.err.contains("--side"), "{said:?}");
}

/// Threads write at the same time, and names need not be texts; a picture's must not end up under another's.
#[test]
#[cfg(target_os = "linux")]
fn names_that_are_no_texts_are_kept_apart() {
    use std::os::unix::ffi::OsStrExt;
    let folder = fresh("shrink-names");
    let [photos, small] = ["photos", "small"].map(|name| folder.join(name));
    fs::create_dir_all(&photos).unwrap();
    let grey = folder.join("grey.png");
    let name = |byte: u8| std::ffi::OsStr::from_bytes(&[byte, b'.', b'p', b'n', b'g']).to_owned();
    for byte in 0x80..=0xff {
        samples::picture(&grey, 20, 20, [byte; 3]);
        fs::rename(&grey, photos.join(name(byte))).unwrap();
    }
    fs::create_dir_all(&small).unwrap();
    fs::write(small.join(".biformer-killed.tmp"), "what a killed program left").unwrap();
    let asked = ["shrink", "--data", text(&photos), "--output", text(&small), "--side", "8", "--threads", "8"];
    assert!(biformer(&asked).ok().out.contains("128 pictures written"));
    for byte in 0x80..=0xff {
        let picture = image::load_from_memory(&fs::read(small.join(name(byte))).unwrap()).unwrap();
        assert_eq!(picture.get_pixel(1, 1).0[0], byte);
    }
    let left = fs::read_dir(&small).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(left.filter(|name| name != ".lock").count(), 128);
}

/// One would remove what the other has begun.
#[test]
fn one_folder_is_for_one_program_at_a_time() {
    let folder = fresh("shrink-twice");
    let [photos, small] = ["photos", "small"].map(|name| folder.join(name));
    [&photos, &small].iter().for_each(|folder| fs::create_dir_all(folder).unwrap());
    samples::picture(&photos.join("a.png"), 40, 30, [1, 2, 3]);
    let shrink = || biformer(&["shrink", "--data", text(&photos), "--output", text(&small), "--side", "8"]);
    let other = fs::File::create(small.join(".lock")).unwrap();
    other.try_lock().expect("nobody is there yet");
    let begun = small.join(".biformer-killed.tmp");
    fs::write(&begun, "what the other has begun").unwrap();
    shrink().refused(&["--output", "being written there already", "another folder"]);
    assert!(begun.exists());
    drop(other);
    assert!(shrink().ok().out.contains("1 picture written"));
    assert!(!begun.exists());
}

#[test]
#[cfg(unix)]
fn links_lead_no_picture_astray() {
    let folder = fresh("shrink-links");
    let [photos, small] = ["photos", "small"].map(|name| folder.join(name));
    fs::create_dir_all(photos.join("cat")).unwrap();
    samples::picture(&photos.join("cat/a.png"), 40, 30, [1, 2, 3]);
    fs::create_dir_all(&small).unwrap();
    std::os::unix::fs::symlink(&small, photos.join("link")).unwrap();
    let shrink = || biformer(&["shrink", "--data", text(&photos), "--output", text(&small), "--side", "8"]);
    assert!(shrink().ok().out.contains("1 picture written"));
    let said = shrink().ok();
    assert!(said.out.contains("1 was there already") && said.err.contains("note: skipped 1 picture in"), "{said:?}");
    assert!(!small.join("link").exists(), "what was written is no picture to be shrunk again");
    let broken = photos.join("cat/b.png");
    std::os::unix::fs::symlink("nowhere", &broken).unwrap();
    let said = shrink();
    assert!(said.status == Some(2) && said.err.contains("b.png") && said.out.contains("1 picture could"), "{said:?}");
    let asked = ["shrink", "--data", text(&photos), "--output", text(&small), "--side", "8"];
    assert_eq!(unread(command(&asked)).status, Some(2), "how it ended does not depend on who listens");
    fs::remove_file(&broken).unwrap();
    fs::remove_dir_all(small.join("cat")).unwrap();
    std::os::unix::fs::symlink(&photos, small.join("cat")).unwrap();
    shrink().refused(&["small, a folder of --data", "another folder"]);
    fs::remove_file(photos.join("link")).unwrap();
    shrink().refused(&["cat", "into --data", "another --output"]);
    assert!(!photos.join("a.png").exists());
    // Nor below it.
    fs::create_dir(photos.join("dog")).unwrap();
    fs::remove_file(small.join("cat")).unwrap();
    std::os::unix::fs::symlink(photos.join("dog"), small.join("cat")).unwrap();
    shrink().refused(&["cat", "into --data", "another --output"]);
    assert!(contents(&photos.join("dog")).is_empty());
}

/// They are in the same folders as before, for training to read the same.
#[test]
#[cfg(unix)]
fn each_class_and_each_split_keeps_what_it_links_to() {
    let folder = fresh("shrink-classes");
    let [photos, small] = ["photos", "small"].map(|name| folder.join(name));
    let names = [("cat", 2), ("dog", 3), ("wolf", 4)]
        .into_iter()
        .flat_map(|(class, count)| (0..count).map(move |number| format!("train/{class}/{number}.png")));
    for (name, shade) in names.zip(1..) {
        fs::create_dir_all(photos.join(&name).parent().unwrap()).unwrap();
        samples::picture(&photos.join(name), 40, 30, [shade; 3]);
    }
    std::os::unix::fs::symlink("../wolf", photos.join("train/dog/wolves")).unwrap();
    std::os::unix::fs::symlink("train", photos.join("val")).unwrap();
    let table = |data: &Path| biformer(&["check", "--data", text(data)]).out;
    let counts = "class    train      val\ncat          2        2\ndog          7        7\nwolf         4        4\n";
    assert!(table(&photos).starts_with(counts), "{}", table(&photos));
    let said = biformer(&["shrink", "--data", text(&photos), "--output", text(&small), "--side", "8"]).ok();
    assert!(said.out.contains("small: 26 pictures written"), "{said:?}");
    assert!(table(&small).starts_with(counts), "{}", table(&small));
}

/// A class that is a link may lie anywhere, also where the smaller pictures are to go.
#[test]
#[cfg(unix)]
fn photographs_that_are_linked_to_are_never_touched() {
    let folder = fresh("shrink-linked");
    let [photos, store] = ["photos", "store"].map(|name| folder.join(name));
    for class in [photos.join("cat"), store.join("dog/old")] {
        fs::create_dir_all(&class).unwrap();
        samples::picture(&class.join("a.png"), 40, 30, [1, 2, 3]);
    }
    std::os::unix::fs::symlink("../store/dog", photos.join("dog")).unwrap();
    let before = contents(&store.join("dog"));
    let shrink =
        |output: &Path| biformer(&["shrink", "--data", text(&photos), "--output", text(output), "--side", "8"]);
    for output in ["store/dog/old", "store/dog", "store"] {
        shrink(&folder.join(output)).refused(&["--output", "dog/old/a.png of --data lies in it", "another folder"]);
    }
    for output in ["store/dog/new", "store/dog/old/new"] {
        shrink(&folder.join(output)).refused(&["--output", "it lies in", "a folder of --data", "another folder"]);
    }
    // Nor through another link.
    let small = folder.join("small");
    fs::create_dir(&small).unwrap();
    std::os::unix::fs::symlink("../store/dog", small.join("cat")).unwrap();
    shrink(&small).refused(&["cat", "into --data", "another --output"]);
    assert!(before == contents(&store.join("dog")));
    // Pictures that are links leave room beside what they lead to.
    let views = folder.join("views");
    fs::create_dir(&views).unwrap();
    std::os::unix::fs::symlink("../store/dog/old/a.png", views.join("b.png")).unwrap();
    let beside = store.join("small");
    biformer(&["shrink", "--data", text(&views), "--output", text(&beside), "--side", "8"]).ok();
    assert!(beside.join("b.png").is_file());
    let within = ["shrink", "--data", text(&views), "--output", text(&store)];
    biformer(&within).refused(&["views/b.png of --data lies in it", "another folder"]);
}

/// A limit on the size of files stands for a disk that fills up.
#[test]
#[cfg(unix)]
fn a_picture_is_written_whole_or_not_at_all() {
    let folder = fresh("shrink-full");
    let [photos, small] = ["photos", "small"].map(|name| folder.join(name));
    fs::create_dir_all(photos.join("cat")).unwrap();
    // Noise, which does not become small.
    let pixels = (0..270 * 270 * 3).map(|index: u32| (index.wrapping_mul(0x9E37_79B9) >> 16) as u8).collect();
    image::RgbImage::from_raw(270, 270, pixels).unwrap().save(photos.join("cat/a.png")).unwrap();
    let asked = ["shrink", "--data", text(&photos), "--output", text(&small), "--side", "200"];
    limited("ulimit -f 32", &asked).refused(&["cat/a.png"]);
    assert!(contents(&small.join("cat")).is_empty());
    assert!(contents(&small).keys().all(|name| [".lock", "cat"].contains(&&name[..])), "{:?}", contents(&small).keys());
    let said = biformer(&asked).ok().out;
    assert!(image::open(small.join("cat/a.png")).is_ok());
    let megabytes = |folder: &Path| fs::metadata(folder.join("cat/a.png")).unwrap().len() as f64 / 1e6;
    let (before, now) = (megabytes(&photos), megabytes(&small));
    assert!(said.contains(&format!("1 picture written, {before:.1} MB reduced to {now:.1} MB")), "{said}");
}
