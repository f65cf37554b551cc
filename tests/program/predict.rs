//! What `biformer predict` takes pictures for, and what it draws of that.

use crate::common::program::{biformer, command, fresh, json, text, unread};
use crate::common::samples;
use biformer::data::{Image, load_image};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// The run folder of a small model, trained on CIFAR-10's layout.
fn run() -> &'static Path {
    &samples::of_one_epoch().run
}

#[test]
fn predict_takes_pictures_of_any_size_and_needs_no_data() {
    let folder = fresh("predict");
    // As on another machine: nothing but the checkpoint.
    let checkpoint = folder.join("elsewhere.safetensors");
    fs::copy(run().join("checkpoint.safetensors"), &checkpoint).unwrap();
    let pictures = [("wide.png", 91, 37), ("high.jpg", 33, 210), ("dot.png", 1, 1), ("exact.jpeg", 32, 32)];
    let paths = pictures.map(|(name, width, height)| {
        let path = folder.join(name);
        samples::picture(&path, width, height, [200, 100, 50]);
        path
    });
    let mut arguments = vec!["predict", "--checkpoint", text(&checkpoint)];
    arguments.extend(paths.iter().map(|path| text(path)));
    let said = biformer(&arguments).ok().out;
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 4 * 6, "{said}");
    for (index, path) in paths.iter().enumerate() {
        assert_eq!(lines[6 * index], text(path));
        let shares =
            lines[6 * index + 1..][..5].iter().map(|line| line.trim().split('%').next().unwrap().parse::<f64>());
        let shares = shares.collect::<Result<Vec<_>, _>>().unwrap();
        assert!(shares.is_sorted_by(|a, b| a >= b) && shares.iter().sum::<f64>() < 100.3, "{said}");
    }
    // The same, shorter: two classes, or a line for each picture.
    let top = |count| biformer(&[&arguments[..], &["--top", count]].concat()).ok().out;
    assert_eq!(
        top("2").lines().collect::<Vec<_>>(),
        lines.chunks(6).flat_map(|of| &of[..3]).copied().collect::<Vec<_>>()
    );
    let first = lines.chunks(6).map(|of| format!("{}  {}\n", &of[1][2..], of[0]));
    assert_eq!(top("1"), first.collect::<String>());
    assert_eq!(top("1000"), top("10"), "no more than there are");
    let listed = |more: &[&str]| {
        let list = json(&biformer(&[&arguments[..], &["--json"], more].concat()).ok().out);
        list.as_array().unwrap().iter().map(|of| of["classes"].as_array().unwrap().clone()).collect::<Vec<_>>()
    };
    let (all, two) = (listed(&[]), listed(&["--top", "2"]));
    assert!(all.iter().zip(&two).all(|(all, two)| all.len() == 10 && all[..2] == two[..]), "{two:?}");
    for count in ["0", "1001", "1.5", "-1"] {
        let said = biformer(&[&arguments[..], &["--top", count]].concat());
        assert!(said.status == Some(2) && said.err.contains("expected a whole number from 1 to 1000"), "{said:?}");
    }
}

/// Names are taken from a file, and given to the classes in their order.
#[test]
fn predict_prints_the_names_that_it_is_given() {
    let run = run();
    let folder = fresh("predict-names");
    let (picture, file) = (folder.join("a.png"), folder.join("names.txt"));
    samples::picture(&picture, 40, 40, [9, 100, 50]);
    let predict = |more: &[&str]| {
        let asked = [&["predict", "--json", "--checkpoint", text(run), text(&picture)], more].concat();
        json(&biformer(&asked).ok().out)[0]["classes"].as_array().unwrap().clone()
    };
    let own = predict(&[]);
    let classes =
        json(&biformer(&["info", "--json", "--checkpoint", text(run)]).ok().out)["run"]["data"]["classes"].clone();
    let new = |class: &Value| format!("the {}", class.as_str().unwrap());
    let lines: Vec<String> = classes.as_array().unwrap().iter().map(new).collect();
    fs::write(&file, format!("\u{feff}{}\n\n", lines.join("\r\n"))).unwrap();
    let named = predict(&["--classes", text(&file)]);
    assert_eq!(named.len(), own.len());
    for (named, own) in named.iter().zip(&own) {
        assert_eq!((&named["name"], &named["probability"]), (&new(&own["name"]).into(), &own["probability"]));
    }
    fs::write(&file, "alike\n".repeat(10)).unwrap();
    assert!(predict(&["--classes", text(&file)]).iter().all(|class| class["name"] == "alike"), "each has its own line");
    fs::write(&file, "one\ntwo\n").unwrap();
    let asked = ["predict", "--checkpoint", text(run), text(&picture), "--classes", text(&file)];
    biformer(&asked).refused(&["--classes", "names.txt", "2 lines for 10 classes"]);
    // It is called by its name, also where that has two spaces, or one that does not break a line.
    let none = "no  names\u{202f}here.txt";
    biformer(&[&asked[..4], &["--classes", none]].concat()).refused(&[&format!("--classes {none}")]);
    fs::write(&file, lines.join("\n").replacen('\n', "\n \n", 1).rsplit_once('\n').unwrap().0).unwrap();
    biformer(&asked).refused(&["line 2 is empty"]);
}

/// The colour of the ring around a point.
const MARK: [u8; 3] = [0, 114, 178];

#[test]
fn predict_draws_what_a_point_attends_to() {
    let run = run();
    let folder = fresh("predict-attention");
    let (picture, broken, file) = (folder.join("a.png"), folder.join("b.png"), folder.join("looks.png"));
    samples::picture(&picture, 40, 60, [9, 100, 50]);
    let predict = |more: &[&str]| {
        biformer(&[&["predict", "--checkpoint", text(run), text(&picture), "--attention", text(&file)], more].concat())
    };
    let without = biformer(&["predict", "--checkpoint", text(run), text(&picture)]).ok().out;
    assert_eq!(predict(&[]).ok().out, without);
    let middle = fs::read(&file).unwrap();
    assert_eq!(load_image(&file).unwrap().width(), 2 * 28 + 3 * 192 + 2 * 16, "two attentions");
    predict(&["--at", "0.9,0.1", "--json"]).ok();
    assert!(fs::read(&file).unwrap() != middle, "from another point, in the place of the earlier one");
    // The point is marked where it is, across and down: in the upper right.
    let marked = |at: &str| {
        predict(&["--at", at]).ok();
        let page = load_image(&file).unwrap();
        (0..3600).filter(|i| page.pixel(158 + i / 60, 28 + 132 + i % 60) == Some(MARK)).count()
    };
    assert!(marked("0.9,0.1") > 0 && marked("0.1,0.9") == 0);
    predict(&[]).ok();
    fs::write(&broken, "no picture").unwrap();
    assert_eq!(predict(&[text(&broken)]).status, Some(2));
    assert!(fs::read(&file).unwrap() == middle, "the broken picture is left out");
    // Of large images a few are taken at once. All are drawn, each in its row, also where one of them is broken, and
    // where nobody reads what is printed.
    let other = folder.join("other.png");
    samples::picture(&other, 60, 40, [10, 20, 30]);
    let large = |pictures: &[&Path]| {
        let pictures: Vec<&str> = pictures.iter().map(|path| text(path)).collect();
        let asked = ["predict", "--checkpoint", text(run), "--image-size", "512", "--attention", text(&file)];
        unread(command(&[&asked[..], &pictures].concat()));
        load_image(&file).unwrap()
    };
    let [of_picture, of_other] = [&picture, &other].map(|picture| large(&[picture]));
    let six = large(&[&broken, &picture, &other, &other, &picture, &picture, &other]);
    let head = of_picture.height() - 192 - 28;
    assert_eq!(six.height(), head + 6 * 192 + 5 * 30 + 28);
    let row = |page: &Image, first: usize| page.pixels()[first * page.width() * 3..][..192 * page.width() * 3].to_vec();
    assert!(row(&of_picture, head) != row(&of_other, head));
    for (number, alone) in
        [&of_picture, &of_other, &of_other, &of_picture, &of_picture, &of_other].into_iter().enumerate()
    {
        assert!(row(&six, head + number * (192 + 30)) == row(alone, head), "row {number}");
    }
    predict(&["--blocks", "stages.1.0"]).ok();
    assert_eq!(load_image(&file).unwrap().width(), 2 * 28 + 2 * 192 + 16, "one attention");
    predict(&["--blocks", "stages.1.0,stages.1.1"]).refused(&["--blocks stages.1.1", "stages.0.0, stages.1.0"]);
    for at in ["2,0", "0.5", "a,b", "nan,0.5"] {
        let said = predict(&["--at", at]);
        assert!(said.status == Some(2) && said.err.contains("two numbers from 0 to 1"), "{said:?}");
    }
    let said = biformer(&["predict", "--checkpoint", text(run), text(&picture), "--at", "0,0"]);
    assert!(said.status == Some(2) && said.err.contains("--attention"), "{said:?}");
    let (checkpoint, picture) = (text(run), text(&picture));
    biformer(&["predict", "--checkpoint", checkpoint, picture, "--attention", "-"]).refused(&["--attention -", "./-"]);
    let jpeg = ["predict", "--checkpoint", checkpoint, picture, "--attention", "looks.jpg"];
    biformer(&jpeg).refused(&["--attention looks.jpg", "a PNG and no jpg"]);
    fs::write(&file, "a letter").unwrap();
    predict(&[]).refused(&["--attention", "no earlier result"]);
    fs::remove_file(&file).unwrap();
    let nothing = biformer(&["predict", "--checkpoint", text(run), text(&broken), "--attention", text(&file)]);
    assert!(nothing.status == Some(2) && !file.exists(), "{nothing:?}");
}

#[test]
fn a_thousand_classes_without_names_are_imagenets() {
    let folder = fresh("predict-imagenet");
    let (picture, file) = (folder.join("a.png"), folder.join("w.safetensors"));
    samples::picture(&picture, 40, 40, [9, 100, 50]);
    samples::of_a_thousand(281).write(&file).unwrap();
    let asked = ["predict", "--model", "nano", "--checkpoint", text(&file), text(&picture), "--set"];
    let asked = [&asked[..], &samples::SMALL].concat();
    let said = biformer(&asked).ok();
    assert!(said.out.lines().nth(1).unwrap().ends_with("  tabby"), "{}", said.out);
    assert!(said.err.contains("taken to be ImageNet's (--classes names others)"), "{}", said.err);
    let names = folder.join("names.txt");
    fs::write(&names, (0..1000).map(|class| format!("my {class}\n")).collect::<String>()).unwrap();
    let said = biformer(&[&asked[..], &["--classes", text(&names)]].concat()).ok();
    assert!(said.out.contains("my 281") && !said.err.contains("ImageNet"), "{}{}", said.out, said.err);
}

#[test]
fn a_page_of_attention_is_no_longer_than_can_be_looked_at() {
    let folder = fresh("predict-many");
    let (pictures, file) = (folder.join("pictures"), folder.join("looks.png"));
    fs::create_dir(&pictures).unwrap();
    let predict = |count: usize| {
        for picture in 0..count {
            samples::picture(&pictures.join(format!("{picture}.png")), 8, 8, [200, 100, 50]);
        }
        let asked = ["predict", "--checkpoint", text(run()), text(&pictures), "--attention", text(&file)];
        (biformer(&asked).ok().err, load_image(&file).unwrap().height())
    };
    let [(one, low), (most, high), (more, as_high)] = [1, 32, 33].map(predict);
    assert_eq!((one.as_str(), most.as_str()), ("", ""));
    assert!(more.contains("shows the first 32 of the 33 pictures"), "{more}");
    assert!(low < high && high == as_high, "{low}, {high}, {as_high}");
}

/// By name, in folders below, too. And a picture's classes do not depend on those beside it.
#[test]
fn predict_takes_the_pictures_in_a_folder() {
    let run = run();
    let folder = fresh("predict-pictures");
    fs::create_dir_all(folder.join("below.png")).unwrap();
    let predict = |pictures: &[&str]| biformer(&[&["predict", "--checkpoint", text(run)], pictures].concat());
    predict(&[text(&folder)]).refused(&["predict-pictures", "holds no image (.png, "]);
    let pictures = [&["below.png", "dot.png"][..], &["exact.jpeg"], &["high.jpg"], &["wide.png"]];
    let pictures = pictures.map(|names| folder.join(names.iter().collect::<PathBuf>()));
    for (path, [width, height]) in pictures.iter().zip([[1, 1], [32, 32], [33, 210], [91, 37]]) {
        samples::picture(path, width, height, [200, 100, 50]);
    }
    let one_by_one: String = pictures.iter().map(|path| predict(&[text(path)]).ok().out).collect();
    fs::write(folder.join("below.png/other.heic"), "").unwrap();
    let said = predict(&[text(&folder)]).ok();
    assert_eq!(said.out, one_by_one);
    assert!(
        said.err.contains("note: skipped 1 file in") && said.err.ends_with("no image by its name: 1 .heic\n"),
        "{said:?}"
    );
    // A folder without pictures keeps no other from being classified.
    let none = folder.join("none");
    fs::create_dir(&none).unwrap();
    let said = predict(&[text(&none), text(&pictures[1])]);
    assert_eq!((said.status, said.out), (Some(2), predict(&[text(&pictures[1])]).ok().out));
    assert!(said.err.contains("none: holds no image"), "{}", said.err);
    let list = json(&predict(&[text(&none), text(&pictures[1]), "--json"]).out);
    assert!(list[0]["error"].is_string() && list[1]["classes"].is_array(), "{list}");
    let other = folder.join("none of its own");
    fs::create_dir(&other).unwrap();
    let said = predict(&[text(&none), text(&other)]);
    assert_eq!((said.status, said.out.as_str()), (Some(2), ""));
    assert!(
        [&none, &other].iter().all(|folder| said.err.contains(&format!("{}: holds", folder.display()))),
        "{}",
        said.err
    );
    [none, other].iter().for_each(|folder| fs::remove_dir(folder).unwrap());
    // How it ended does not depend on who listens.
    let missing = folder.join("missing.png");
    let asked = ["predict", "--checkpoint", text(run), text(&missing), text(&pictures[1])];
    assert_eq!(unread(command(&asked)).status, Some(2));
    // One that cannot be read is named, in JSON in its place, and the others are none the worse for it.
    fs::write(folder.join("empty.png"), "").unwrap();
    let said = predict(&[text(&folder), "--json"]);
    assert_eq!((said.status, said.err.lines().count()), (Some(2), 2), "{said:?}");
    let list: Vec<Value> = serde_json::from_str(&said.out).unwrap();
    let read: Vec<bool> = list.iter().map(|picture| picture["classes"].is_array()).collect();
    assert_eq!(read, [true, false, true, true, true]);
    for picture in list.iter().filter(|picture| picture["classes"].is_array()) {
        let alone = json(&predict(&[picture["path"].as_str().unwrap(), "--json"]).ok().out);
        assert_eq!(*picture, alone[0], "what is said of it is of no other");
    }
    assert!(list[1]["error"].as_str().is_some_and(|error| error.contains("empty.png")), "{list:?}");
}
