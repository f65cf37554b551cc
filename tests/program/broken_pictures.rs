//! Pictures that cannot be read: what a user is told of them, by which command.

use crate::common::program::{biformer, command, copy_folder, fresh, json, text, unread, with_slashes};
use crate::common::samples;
use std::fs;
use std::path::Path;

#[test]
fn check_names_a_class_without_a_picture_that_can_be_read() {
    let folder = fresh("lost-class");
    let data = samples::image_folder(&folder.join("data"));
    for image in 0..4 {
        fs::write(data.join(format!("val/dark/{image}.png")), "no picture").unwrap();
    }
    let said = biformer(&["check", "--data", text(&data)]);
    assert_eq!(said.status, Some(1), "{said:?}");
    let notes: Vec<&str> = said.err.lines().filter(|line| line.starts_with("note:")).collect();
    assert_eq!(notes, ["note: of dark in val no image can be read"], "and nobody is told to skip them");
}

#[test]
fn check_names_them_all_and_a_run_says_so() {
    let folder = fresh("broken-pictures");
    let data = samples::image_folder(&folder.join("data"));
    let check = || biformer(&["check", "--data", text(&data)]);
    let said = check().ok();
    let table = "class    train      val\ndark        10        4\nlight       10        4\nall         20        8\n";
    assert!(said.out.starts_with(table), "{said:?}");
    assert!(said.out.ends_with("0 of 28 images cannot be read.\n") && said.err.is_empty(), "{said:?}");

    // More of them than an error of training names, in both splits, and one that is of another format. How many there
    // are in a test beside a validation is nothing to training.
    let test = data.join("test");
    copy_folder(&data.join("val"), &test);
    (0..4).for_each(|image| fs::write(test.join(format!("dark/{image}.png")), "no picture").unwrap());
    let said = check();
    assert!(said.status == Some(1) && said.out.ends_with("4 of 36 images cannot be read.\n"), "{said:?}");
    assert!(said.err.contains("note: of dark in test no image can be read\n"), "{said:?}");
    assert!(!said.err.contains("max_bad_images"), "{said:?}");
    fs::write(data.join("train/dark/0.png"), "no picture").unwrap();
    assert!(check().err.ends_with("note: training skips them with --set max_bad_images=1\n"));
    fs::remove_dir_all(test).unwrap();
    let broken = ["train/dark/0.png", "train/light/3.png", "val/dark/0.png", "val/dark/1.png"];
    broken.iter().for_each(|name| fs::write(data.join(name), "no picture").unwrap());
    fs::write(data.join("val/light/more.heic"), "").unwrap();
    let said = check();
    assert_eq!(said.status, Some(1), "{said:?}");
    assert!(said.out.ends_with("4 of 28 images cannot be read.\n"), "{said:?}");
    let err = with_slashes(&said.err);
    let lines: Vec<&str> = err.lines().collect();
    assert_eq!(lines.len(), 6, "{said:?}");
    assert_eq!(lines[5], "note: training skips them with --set max_bad_images=2 (in training and in the test, each)");
    // Whoever reads no further has the answer, too.
    assert_eq!(unread(command(&["check", "--data", text(&data)])).status, Some(1));
    let expected = ["note: skipped 1 file in val/", broken[0], broken[1], broken[2], broken[3]];
    assert!(lines.iter().zip(expected).all(|(line, part)| line.contains(part)), "{lines:?}");

    let (config, run) = (samples::config(&folder, "image_size = 32"), folder.join("run"));
    let train = ["train", "--config", text(&config), "--data", text(&data), "--out", text(&run), "--batch-size", "5"];
    biformer(&train).refused(&["too many images cannot be read", "biformer check --data", "go on with --resume"]);
    // Of a class that is lost as a whole the model learns nothing, wherever that is allowed.
    let lost = folder.join("lost");
    copy_folder(&data, &lost);
    (0..10).for_each(|number| fs::write(lost.join(format!("train/light/{number}.png")), "no picture").unwrap());
    let without = folder.join("without");
    let train_lost = ["train", "--config", text(&config), "--data", text(&lost), "--out", text(&without)];
    let said =
        biformer(&[&train_lost[..], &["--batch-size", "5", "--epochs", "2", "--set", "max_bad_images=20"]].concat());
    let notes = said.ok().err;
    assert_eq!(notes.matches("note: of light no training image can be read\n").count(), 1, "{notes}");
    assert!(!notes.contains("of dark no"), "{notes}");
    // Who takes them away has other data than the run began with.
    broken.iter().for_each(|name| fs::remove_file(data.join(name)).unwrap());
    assert!(check().ok().out.ends_with("0 of 24 images cannot be read.\n"));
    let resume = ["train", "--resume", "--out", text(&run)];
    biformer(&resume).refused(&["18 training images, the run began with 20", "--weights RUN --data DATA --out NEW"]);
    // To evaluate on, these suffice.
    fs::remove_dir_all(data.join("train")).unwrap();
    assert!(check().ok().out.starts_with("class      val\ndark         2\nlight        4\n"));
    for class in ["dark", "light", "more"] {
        fs::create_dir_all(data.join("test").join(class)).unwrap();
        fs::copy(data.join("val/dark/2.png"), data.join("test").join(class).join("0.png")).unwrap();
    }
    check().refused(&["val/ and test/ have different classes"]);
    fs::remove_dir_all(data.join("test/more")).unwrap();
    assert!(
        check().ok().out.starts_with("class      val     test\ndark         2        1\nlight        4        1\n")
    );
}

#[test]
fn check_names_pictures_that_are_there_twice() {
    let folder = fresh("repeated-pictures");
    let data = samples::image_folder(&folder.join("data"));
    let copy = |from: &str, to: &str| _ = fs::copy(data.join(from), data.join(to)).unwrap();
    // In one class of one split that does no harm.
    copy("train/dark/1.png", "train/dark/one-more.png");
    let notes = || -> Vec<String> {
        let said = biformer(&["check", "--data", text(&data)]).ok();
        assert!(said.out.ends_with(" images cannot be read.\n"), "{said:?}");
        let here = format!("{}/", with_slashes(text(&data)));
        with_slashes(&said.err).lines().map(|line| line.replace(&here, "")).collect()
    };
    assert!(notes().is_empty());
    copy("train/dark/2.png", "val/dark/2.png");
    let test =
        "note: 1 image of val is in train, too, the same in each pixel, such as val/dark/2.png and train/dark/2.png";
    assert_eq!(notes(), [test]);
    copy("train/dark/3.png", "val/light/3.png");
    copy("train/dark/4.png", "train/light/4.png");
    let test =
        "note: 2 images of val are in train, too, the same in each pixel, such as val/dark/2.png and train/dark/2.png";
    let classes = "note: 2 images are in another class, too, the same in each pixel, such as train/light/4.png and train/dark/4.png";
    assert_eq!(notes(), [test, classes]);
}

/// With it nothing is lost, and the first command is often the one with the mistake.
#[test]
fn a_run_that_ended_before_its_first_step_may_begin_anew() {
    let folder = fresh("broken-first-step");
    let data = samples::image_folder(&folder.join("data"));
    for name in ["dark", "light"].iter().flat_map(|class| (0..10).map(move |n| format!("train/{class}/{n}.png"))) {
        fs::write(data.join(name), "no picture").unwrap();
    }
    let train = |batch_size| samples::train(&folder, "image_size = 32", &data, &["--batch-size", batch_size]);
    train("5").refused(&["too many images cannot be read"]);
    assert!(folder.join("run/checkpoint.safetensors").exists());
    samples::image_folder(&data);
    train("4").ok();
    train("4").refused(&["holds a run already"]);
}

#[test]
fn pictures_that_are_not_divided_can_be_trained_on() {
    let folder = fresh("broken-undivided");
    let data = samples::image_folder(&folder.join("divided")).join("train");
    let table = "class    train     test\ndark         9        1\nlight        8        2\nall         17        3\n";
    let said = biformer(&["check", "--data", text(&data)]).ok();
    assert!(said.out.starts_with(table), "{said:?}");
    let (config, beside) = (samples::config(&folder, "image_size = 32"), data.join("mine"));
    let train = ["train", "--config", text(&config), "--data", text(&data), "--batch-size", "5", "--epochs", "1"];
    let to = |run: &Path| biformer(&[&train[..], &["--out", text(run)]].concat());
    let among = ["its pictures would be taken for some of the images", "--out, runs/mine for example"];
    to(&beside).refused(&among);
    ["dark/mine", "test/mine"].iter().for_each(|place| to(&data.join(place)).refused(&among));
    to(&data).refused(&["it is that of the data", "--out, runs/train for example"]);
    #[cfg(unix)]
    {
        // A class may be a link, and so may a folder in one.
        let (linked, store) = (folder.join("linked"), folder.join("store"));
        [&linked, &store].iter().for_each(|folder| fs::create_dir(folder).unwrap());
        copy_folder(&data.join("dark"), &store.join("dark"));
        copy_folder(&data.join("light"), &linked.join("light"));
        fs::create_dir(store.join("more")).unwrap();
        fs::copy(data.join("light/1.png"), store.join("more/one.png")).unwrap();
        std::os::unix::fs::symlink(store.join("dark"), linked.join("dark")).unwrap();
        std::os::unix::fs::symlink(store.join("more"), linked.join("light/more")).unwrap();
        for place in ["dark", "dark/mine", "more/mine"] {
            let of = ["train", "--config", text(&config), "--data", text(&linked), "--epochs", "1"];
            biformer(&[&of[..], &["--out", text(&store.join(place))]].concat())
                .refused(&["its pictures would be taken"]);
        }
        assert!(!store.join("dark/mine").exists() && !store.join("more/mine").exists());
    }
    let run = beside.join("run");
    let said = to(&run).ok();
    let note = "note: there is neither val/ nor test/: 3 of 20 images are held out as the test\n";
    assert!(said.out.contains("17 training images of 2 classes, 3 test images.\n"), "{said:?}");
    assert!(said.err.contains(note), "{said:?}");
    // Of other pictures, some are skipped as well: they may be some of those that it learned from.
    let others = folder.join("others");
    for class in ["dark", "light"] {
        fs::create_dir_all(others.join(class)).unwrap();
        fs::copy(data.join(class).join("1.png"), others.join(class).join("1.png")).unwrap();
    }
    let eval = ["eval", "--checkpoint", text(&run), "--data", text(&others)];
    biformer(&eval).refused(&["has one image in", "to measure all images there are: --split all"]);
    biformer(&[&eval[..], &["--split", "all"]].concat()).ok();
    let measured = |more: &[&str]| {
        let said = biformer(&[&["eval", "--checkpoint", text(&run), "--json"], more].concat()).ok();
        let report = json(&said.out);
        (report["split"].as_str().unwrap().to_owned(), report["images"].as_u64().unwrap())
    };
    assert_eq!(measured(&[]), ("test".to_owned(), 3));
    assert_eq!(measured(&["--split", "train"]), ("train".to_owned(), 17));
    let said = biformer(&["train", "--resume", "--out", text(&run), "--epochs", "2"]).ok();
    assert!(said.err.contains("note: skipped 1 folder without an image of its own: mine\n"), "{said:?}");
    // A model that was trained on others is measured on all of them; one whose own test is gone is not.
    fs::remove_dir_all(beside).unwrap();
    let (divided, run) = (data.parent().unwrap(), folder.join("other"));
    let train = ["train", "--config", text(&config), "--data", text(divided), "--batch-size", "5", "--epochs", "1"];
    biformer(&[&train[..], &["--out", text(&divided.join("val/dark/run"))]].concat()).refused(&among[..1]);
    biformer(&[&train[..], &["--out", text(&run)]].concat()).ok();
    let eval = ["eval", "--checkpoint", text(&run)];
    let said = biformer(&[&eval[..], &["--data", text(&data)]].concat()).ok().out;
    assert!(said.starts_with("All images of ") && said.contains("\nall         20 "), "{said}");
    fs::remove_dir_all(divided.join("val")).unwrap();
    biformer(&eval).refused(&["it has neither val/ nor test/", "bring back", "--data"]);
    biformer(&[&eval[..], &["--data", text(divided)]].concat())
        .refused(&["it has neither val/ nor test/", "--split all"]);
    let resume = ["train", "--resume", "--out", text(&run), "--epochs", "2"];
    biformer(&resume).refused(&["bring back what the run was tested on"]);
    // A class of one picture can be measured, but not divided.
    fs::create_dir(data.join("single")).unwrap();
    samples::picture(&data.join("single/0.png"), 8, 8, [0; 3]);
    biformer(&[&eval[..], &["--data", text(&data)]].concat()).refused(&["the class \"single\" is none of the 2"]);
    biformer(&["check", "--data", text(&data)]).refused(&[
        "class \"single\" has one image",
        "one to be tested on",
        "add images",
    ]);
}

/// With others, accuracies would not compare, nor would the best epoch be the best.
#[test]
fn a_run_goes_on_with_the_images_that_it_began_with() {
    let folder = fresh("broken-other-images");
    let data = samples::image_folder(&folder.join("data"));
    // Those that cannot be read are images, too.
    fs::write(data.join("val/dark/0.png"), "no picture").unwrap();
    let (config, run) = (samples::config(&folder, "image_size = 32"), folder.join("run"));
    let train = ["train", "--config", text(&config), "--data", text(&data), "--out", text(&run), "--batch-size", "5"];
    biformer(&[&train[..], &["--epochs", "1", "--set", "max_bad_images=1", "schedule.warmup_epochs=0"]].concat()).ok();
    let resume = ["train", "--resume", "--out", text(&run), "--epochs", "2"];
    let rename = |from: &str, to: &str| fs::rename(data.join(from), data.join(to)).unwrap();
    for (from, to, others) in [
        ("train/dark/3.png", "train/dark/99.png", "other training images, by their names or classes"),
        ("train/dark/3.png", "../gone.png", "19 training images, the run began with 20"),
        ("val/dark/3.png", "val/dark/9.png", "other validation images, by their names or classes"),
        ("val/dark/0.png", "../gone.png", "7 validation images, the run began with 8"),
        // Under the same names in another folder may be anything.
        ("val", "test", "on the images in test/, the run began with those in val/"),
    ] {
        rename(from, to);
        biformer(&resume).refused(&[others, "the run began with (--data)", "--weights RUN --data DATA --out NEW"]);
        if from == "val" {
            let said = biformer(&["eval", "--checkpoint", text(&run), "--max-bad-images", "1"]).ok().err;
            assert!(
                said.contains("note: these are not the images that the run was tested on, by their folder"),
                "{said}"
            );
        }
        rename(to, from);
    }
    // In another place they are the same.
    let moved = folder.join("moved");
    fs::rename(&data, &moved).unwrap();
    let said = biformer(&[&resume[..], &["--data", text(&moved)]].concat()).ok().err;
    // A run from its weights would be one on the built-in images, unless told otherwise.
    let anew = format!("for a few epochs at a low one: --weights {} --data {} --lr ", text(&run), text(&moved));
    assert!(said.contains("the learning rate goes on at") && said.contains(&anew), "{said}");
}

#[test]
fn a_single_class_is_nothing_to_learn() {
    let folder = fresh("broken-one-class");
    let data = samples::image_folder(&folder.join("data"));
    for split in ["train", "val"] {
        fs::remove_dir_all(data.join(split).join("light")).unwrap();
    }
    let said = biformer(&["train", "--data", text(&data), "--out", text(&folder.join("run"))]);
    said.refused(&["all training images are of one class, dark", "two classes to tell apart"]);
    let said = biformer(&["check", "--data", text(&data)]).ok().err;
    assert!(said.contains("note: all images are of one class, dark: training takes two"), "{said}");
}

#[test]
fn a_class_without_pictures_has_no_accuracy() {
    let folder = fresh("broken-class");
    let data = samples::image_folder(&folder.join("data"));
    let (config, run) = (samples::config(&folder, "image_size = 32"), folder.join("run"));
    let train = ["train", "--config", text(&config), "--data", text(&data), "--out", text(&run), "--batch-size", "5"];
    let said = biformer(&[&train[..], &["--epochs", "1"]].concat()).ok().out;
    assert!(said.contains("An epoch is 4 steps of 5 images: there are more with a smaller --batch-size.\n"), "{said}");
    (0..4).for_each(|n| fs::write(data.join(format!("val/dark/{n}.png")), "").unwrap());
    let eval = ["eval", "--checkpoint", text(&run), "--max-bad-images", "4"];
    let shown = biformer(&eval).ok().out;
    assert!(shown.contains("dark         0       -       -  "), "{shown}");
    assert!(shown.contains("%\n4 images could not be read, and are not counted.\n"), "{shown}");
    let report = json(&biformer(&[&eval[..], &["--json"]].concat()).ok().out);
    let [dark, light] = [0, 1].map(|class| &report["classes"][class]["top1"]);
    assert!(dark.is_null() && light.is_f64(), "{report}");
    assert_eq!(report["macro_top1"], *light);
}
