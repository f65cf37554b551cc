//! What `biformer eval` measures and says of it.

use crate::common::program::{biformer, copy_folder, fresh, json, json_lines, make_first_best, text, with_slashes};
#[cfg(unix)]
use crate::common::program::{limited, limited_command, unread};
use crate::common::samples::{self, Trained, of_three_epochs};
use biformer::data::{imagenet_classes, load_image};
use biformer::model::TensorFile;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::sync::OnceLock;

/// A run on an image folder with all three splits: of both classes 10 training images, 4 to choose by and then 1 and 3
/// to test on.
fn of_folder() -> &'static Trained {
    static RUN: OnceLock<Trained> = OnceLock::new();
    RUN.get_or_init(|| {
        let folder = fresh("eval-folder");
        let (data, config) = (samples::image_folder(&folder.join("data")), folder.join("config-asked.toml"));
        for (class, count) in [("dark", 1), ("light", 3)] {
            let inside = data.join("test").join(class);
            fs::create_dir_all(&inside).unwrap();
            (0..count).for_each(|n| samples::picture(&inside.join(format!("{n}.png")), 40, 40, [120, 60 * n, 90]));
        }
        let said = samples::train(&folder, "image_size = 32", &data, &["--batch-size", "5", "--epochs", "2"]).ok();
        Trained { data, config, run: folder.join("run"), said }
    })
}

fn report(run: &Path, more: &[&str]) -> Value {
    json(&biformer(&[&["eval", "--json", "--checkpoint", text(run)][..], more].concat()).ok().out)
}

fn counts(matrix: &Value) -> Vec<Vec<u64>> {
    serde_json::from_value(matrix.clone()).unwrap()
}

#[test]
fn eval_measures_what_training_measured() {
    let Trained { run, data, .. } = of_three_epochs();
    let report = report(run, &["--batch-size", "16"]);
    let last = &json_lines(&run.join("metrics.jsonl"))[2];
    assert_eq!(report["images"], samples::TEST);
    assert_eq!(report["split"], "test");
    assert_eq!(report["top1"], last["test_accuracy"]);
    assert_eq!(report["top5"], last["test_top5"]);
    assert_eq!(report["loss"], last["test_loss"], "to the bit");
    let classes = report["classes"].as_array().unwrap();
    assert_eq!(classes.len(), 10);
    assert_eq!(classes.iter().map(|class| class["images"].as_u64().unwrap()).sum::<u64>(), samples::TEST as u64);

    let file = run.join("checkpoint.safetensors");
    let table = biformer(&["eval", "--checkpoint", text(&file), "--data", text(data), "--threads", "1"]).ok().out;
    assert!(table.starts_with(&format!("The test images of {}:\n", text(data))), "{table}");
    assert!(table.contains("seven") && table.contains("top-5") && table.contains("loss"), "{table}");
    let row = table.lines().nth(1 + 1 + 7).unwrap();
    let share = |name: &str| classes[7][name].as_f64().map_or("-".to_owned(), |x| format!("{:.1}%", 100.0 * x));
    let [top1, top5, precision] = ["top1", "top5", "precision"].map(share);
    let of_seven = ["seven", &classes[7]["images"].to_string(), &top1, &top5, &precision];
    assert_eq!(row.split_whitespace().collect::<Vec<_>>(), of_seven, "{table}");
    let mean = format!("mean top-1 of the classes {:.1}%\n", 100.0 * report["macro_top1"].as_f64().unwrap());
    let (_, mistakes) = table.split_once(&mean).unwrap_or_else(|| panic!("{mean}: {table}"));
    let confusion = counts(&report["confusion"]);
    let name = |class: usize| classes[class]["name"].as_str().unwrap();
    let pairs = (0..100).map(|pair| (pair / 10, pair % 10)).filter(|(of, taken)| of != taken);
    let mut pairs: Vec<_> = pairs.map(|(of, taken)| (confusion[of][taken], of, taken)).collect();
    pairs.sort_by_key(|&(count, ..)| std::cmp::Reverse(count));
    let shown = pairs.iter().take_while(|(count, ..)| *count > 0).take(5).map(|&(count, of, taken)| {
        let all = confusion[of].iter().sum::<u64>();
        format!("{count:>7} of {all} {} taken for {}\n", name(of), name(taken))
    });
    let shown: String = shown.collect();
    let expected = if shown.is_empty() { shown } else { format!("The most frequent mistakes:\n{shown}") };
    assert_eq!(mistakes, expected);
}

#[test]
fn the_split_is_what_training_evaluates_on_or_what_is_asked_for() {
    let Trained { run, data, .. } = of_folder();
    let last = json_lines(&run.join("metrics.jsonl")).pop().unwrap();
    let [usual, val, test, train] =
        [&[][..], &["--split", "val"], &["--split", "test"], &["--split", "train"]].map(|split| report(run, split));
    assert_eq!(usual, val);
    assert_eq!([&val["split"], &test["split"], &train["split"]], ["val", "test", "train"]);
    assert_eq!([&val["images"], &test["images"], &train["images"]], [8, 4, 20]);
    assert_eq!(val["top1"], last["test_accuracy"]);
    let said = biformer(&["eval", "--checkpoint", text(run), "--split", "test"]).ok().out;
    assert!(said.starts_with(&format!("The test images of {}:\n", text(data))), "{said}");
    // The training images are those of an image folder that has them to evaluate on: in order, and not varied.
    let folder = fresh("eval-train-as-val");
    for split in ["train", "val"] {
        copy_folder(&data.join("train"), &folder.join(split));
    }
    let as_val = report(run, &["--data", text(&folder)]);
    assert_eq!((&as_val["loss"], &as_val["classes"]), (&train["loss"], &train["classes"]));

    let (folder, cifar) = (text(&folder), &of_three_epochs().run);
    biformer(&["eval", "--checkpoint", text(run), "--data", folder, "--split", "test"])
        .refused(&["lacks test/. It has val/."]);
    for data in ["embedded", text(&of_three_epochs().data)] {
        let val = ["eval", "--checkpoint", text(cifar), "--data", data, "--split", "val"];
        biformer(&val).refused(&["lacks a split val", "It has train and test images."]);
    }
    let own = biformer(&["eval", "--checkpoint", text(cifar), "--split", "val"]);
    assert!(own.err.contains("lacks a split val") && !own.err.contains("as the run had it"), "{}", own.err);
    assert_eq!(report(cifar, &["--split", "train"])["images"], samples::TRAIN);
    let said = biformer(&["eval", "--checkpoint", text(cifar), "--split", "dev"]);
    assert!(said.status == Some(2) && said.err.contains("there are train, val, test and all"), "{said:?}");
}

#[test]
fn classes_are_counted_by_what_they_were_taken_for() {
    let report = report(&of_three_epochs().run, &[]);
    let (confusion, classes) = (counts(&report["confusion"]), report["classes"].as_array().unwrap());
    assert_eq!((confusion.len(), classes.len()), (10, 10));
    let (mut accuracies, mut in_five) = (0.0, 0.0);
    for (index, (row, class)) in confusion.iter().zip(classes).enumerate() {
        let images: u64 = row.iter().sum();
        assert!(row.len() == 10 && class["images"] == images, "{report}");
        let right = row[index] as f64 / images as f64;
        assert_eq!(class["top1"].as_f64(), Some(right));
        let taken: u64 = confusion.iter().map(|row| row[index]).sum();
        let precision = (taken > 0).then(|| row[index] as f64 / taken as f64);
        assert_eq!(class["precision"].as_f64(), precision);
        accuracies += right / 10.0;
        in_five += images as f64 * class["top5"].as_f64().unwrap();
    }
    approx::assert_relative_eq!(report["macro_top1"].as_f64().unwrap(), accuracies, max_relative = 1e-12);
    assert_ne!(report["macro_top1"], report["top1"], "not all classes have as many images");
    let all = report["images"].as_f64().unwrap();
    approx::assert_relative_eq!(in_five, all * report["top5"].as_f64().unwrap(), max_relative = 1e-12);
    assert_ne!(report["top5"], report["top1"]);
    // Classes without images have no accuracy that could count.
    let folder = fresh("eval-one-class");
    let data = samples::cifar10(&folder).join("cifar-10-batches-bin/test_batch.bin");
    let seventh = fs::read(&data).unwrap()[3073..2 * 3073].to_vec();
    fs::write(&data, &seventh).unwrap();
    let one = self::report(&of_three_epochs().run, &["--data", text(&folder)]);
    assert_eq!((&one["images"], &one["macro_top1"]), (&1.into(), &one["top1"]));
    assert_eq!(counts(&one["confusion"])[7].iter().sum::<u64>(), 1);
}

/// By their names, wherever they stand in the model's order.
#[test]
fn other_images_may_be_of_some_of_the_classes() {
    let Trained { run, .. } = of_folder();
    let three = fresh("eval-three");
    let data = samples::image_folder(&three.join("data"));
    for split in ["train", "val"] {
        let of_split = data.join(split);
        fs::rename(of_split.join("light"), of_split.join("bright")).unwrap();
        fs::rename(of_split.join("dark"), of_split.join("night")).unwrap();
        copy_folder(&of_split.join("night"), &of_split.join("dusk"));
    }
    samples::train(&three, "image_size = 32", &data, &["--batch-size", "5", "--epochs", "1"]).ok();
    // Without the first class.
    let some = three.join("some");
    for (class, count) in [("dusk", 3), ("night", 4)] {
        fs::create_dir_all(some.join(class)).unwrap();
        (0..count).for_each(|n| samples::picture(&some.join(class).join(format!("{n}.png")), 40, 40, [20, 60 * n, 90]));
    }
    let found = report(&three.join("run"), &["--data", text(&some), "--split", "all"]);
    let images: Vec<(&str, u64, bool)> = found["classes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|class| (class["name"].as_str().unwrap(), class["images"].as_u64().unwrap(), class["top1"].is_null()))
        .collect();
    assert_eq!(images, [("bright", 0, true), ("dusk", 3, false), ("night", 4, false)]);
    assert_eq!(counts(&found["confusion"]).iter().map(|row| row.iter().sum()).collect::<Vec<u64>>(), [0, 3, 4]);
    // And of no others.
    biformer(&["eval", "--checkpoint", text(run), "--data", text(&some), "--split", "all"])
        .refused(&["some: the 2 classes dusk, night are none of the 2", "dark, light"]);
}

/// A state_dict does not say what its classes are. Of a thousand they are ImageNet's, which may go by their folders'
/// names; others go by the order of theirs.
#[test]
fn classes_without_names_are_imagenets_or_the_datas() {
    let folder = fresh("eval-imagenet");
    let file = folder.join("w.safetensors");
    samples::of_a_thousand(281).write(&file).unwrap();
    let eval = |data: &Path, more: &[&str]| {
        let all =
            ["eval", "--model", "nano", "--checkpoint", text(&file), "--data", text(data), "--split", "all", "--set"];
        biformer(&[&all[..], &samples::SMALL, more].concat())
    };
    let picture = folder.join("a.png");
    samples::picture(&picture, 8, 8, [90; 3]);
    let images = |data: &str, classes: &[String]| {
        let data = folder.join(data);
        for class in classes {
            fs::create_dir_all(data.join(class)).unwrap();
            fs::copy(&picture, data.join(class).join("a.png")).unwrap();
        }
        data
    };
    let as_said = |report: &str| {
        let json = json(report);
        let classes = json["classes"].as_array().unwrap().iter().filter(|class| class["images"] != 0);
        classes.map(|class| (class["name"].as_str().unwrap().to_owned(), class["top1"].as_f64().unwrap())).collect()
    };
    let found = |data: &Path| -> Vec<(String, f64)> { as_said(&eval(data, &["--json"]).ok().out) };
    let two = images("two", &["n01440764", "n02123045"].map(str::to_owned));
    assert_eq!(found(&two), [("tench".to_owned(), 0.0), ("tabby".to_owned(), 1.0)]);
    let table = eval(&two, &[]).ok().out;
    assert!(table.contains("There are no images of 998 other classes that the model knows."), "{table}");
    let drawn = folder.join("confusion.png");
    eval(&two, &["--confusion", text(&drawn)]).refused(&["--confusion: of 1000 classes", "--json has the counts"]);
    // All of them, which stand in another order.
    let all = found(&images("all", &imagenet_classes()));
    assert_eq!(all.iter().filter(|class| class.1 == 1.0).collect::<Vec<_>>(), [&("tabby".to_owned(), 1.0)]);

    // ImageNet-V2's folders are numbers, whose order as texts is another.
    let numbers: Vec<String> = (0..1000).map(|class| class.to_string()).collect();
    let numbered = images("numbers", &numbers);
    let said = eval(&numbered, &["--json"]).ok();
    assert_eq!(as_said(&said.out)[281], ("281".to_owned(), 1.0));
    assert!(said.err.contains("taken to be ImageNet's, by their places"), "{}", said.err);

    let mine: Vec<String> = (1000..2000).map(|number| format!("mine {number}")).collect();
    let said = eval(&images("mine", &mine), &["--json"]).ok();
    assert_eq!(as_said(&said.out)[281], ("mine 1281".to_owned(), 1.0));
    assert!(said.err.contains("taken to be those of the data, in the order of their names"), "{}", said.err);
    let some = images("some", &mine[280..282]);
    eval(&some, &[]).refused(&["mine 1280, mine 1281 are none of the 1000", "give them with --classes FILE"]);
    let names = folder.join("names.txt");
    let asked = ["--classes", text(&names)];
    // Of two classes that are called the same, the second would never be right.
    fs::write(&names, mine.join("\n").replace("mine 1281", "mine 1280")).unwrap();
    eval(&some, &asked).refused(&["names.txt: lines 281 and 282 are both \"mine 1280\"", "a name of its own"]);
    // Unless the data have none of them.
    fs::write(&names, mine.join("\n").replace("mine 1291", "mine 1290")).unwrap();
    eval(&some, &asked).ok();
    fs::write(&names, mine.join("\n")).unwrap();
    let said = eval(&some, &["--json", "--classes", text(&names)]).ok();
    assert_eq!(as_said(&said.out), [("mine 1280".to_owned(), 0.0), ("mine 1281".to_owned(), 1.0)]);
}

#[test]
fn predictions_are_a_line_for_each_image() {
    let Trained { run, data, .. } = of_folder();
    let file = fresh("eval-predictions").join("test.jsonl");
    let asked = ["--split", "test", "--predictions", text(&file)];
    let (report, predictions) = (report(run, &asked), json_lines(&file));
    let names = ["dark", "light"];
    let mut confusion = vec![vec![0; 2]; 2];
    for (number, line) in predictions.iter().enumerate() {
        assert_eq!(line["image"], number);
        let picture = line["path"].as_str().unwrap();
        assert!(Path::new(picture).starts_with(data.join("test").join(line["class"].as_str().unwrap())), "{line}");
        let alone = json(&biformer(&["predict", "--json", "--checkpoint", text(run), picture]).ok().out);
        let likeliest = &alone[0]["classes"][0];
        assert_eq!(line["predicted"], likeliest["name"]);
        assert_eq!(line["probability"], likeliest["probability"]);
        for class in alone[0]["classes"].as_array().unwrap() {
            let place = names.iter().position(|name| class["name"] == *name).unwrap();
            assert_eq!(line["probabilities"][place], class["probability"], "in the model's order");
        }
        let [class, predicted] = ["class", "predicted"].map(|key| names.iter().position(|name| line[key] == *name));
        confusion[class.unwrap()][predicted.unwrap()] += 1;
    }
    assert_eq!((predictions.len(), confusion), (4, counts(&report["confusion"])));

    // Without one that cannot be read, the others have the same lines.
    let copy = file.with_file_name("copy");
    copy_folder(data, &copy);
    fs::write(copy.join("test/light/0.png"), "").unwrap();
    self::report(run, &[&asked[..], &["--data", text(&copy), "--max-bad-images", "1"]].concat());
    let mut expected = predictions.clone();
    expected.retain(|line| !with_slashes(line["path"].as_str().unwrap()).ends_with("test/light/0.png"));
    let moved = |path: &Value| path.as_str().unwrap().replace(text(data), text(&copy));
    expected.iter_mut().for_each(|line| line["path"] = moved(&line["path"]).into());
    assert_eq!(json_lines(&file), expected);

    let same = file.parent().unwrap().join(".").join("test.jsonl");
    let both = ["--predictions", text(&file), "--confusion", text(&same)];
    biformer(&[&["eval", "--checkpoint", text(run)], &both[..]].concat()).refused(&["are both", "name two files"]);

    // In place of an earlier result, and of nothing else.
    let cifar = of_three_epochs();
    self::report(&cifar.run, &["--predictions", text(&file)]);
    let of_cifar = json_lines(&file);
    assert!(of_cifar.len() == samples::TEST && of_cifar.iter().all(|line| line.get("path").is_none()), "{of_cifar:?}");
    let anothers = [("pictures.jsonl", "{\"image\": 1}"), ("answers.jsonl", "{\"predicted\": \"cat\"}\n")];
    let anothers = anothers.map(|(name, line)| {
        let path = file.with_file_name(name);
        fs::write(&path, line).unwrap();
        path
    });
    for other in [&run.join("metrics.jsonl"), &anothers[0], &anothers[1]] {
        let before = fs::read(other).unwrap();
        biformer(&["eval", "--checkpoint", text(run), "--predictions", text(other)]).refused(&[
            "--predictions",
            ".jsonl",
            "no earlier result",
            "name another file",
        ]);
        assert!(fs::read(other).unwrap() == before);
    }
}

/// What may have taken hours to measure is told, though there is no room for what was to stand beside it.
#[test]
#[cfg(unix)]
fn a_report_is_not_lost_with_a_file_that_cannot_be_written() {
    let Trained { run, .. } = of_three_epochs();
    let file = fresh("eval-full").join("test.jsonl");
    let no_room = "ulimit -f 0";
    let said = limited(no_room, &["eval", "--checkpoint", text(run), "--predictions", text(&file)]);
    assert_eq!(said.status, Some(2), "{said:?}");
    assert!(said.out.contains("mean top-1 of the classes") && said.err.contains("test.jsonl"), "{said:?}");
    assert!(!file.exists());
    // It is an error also where nobody reads the report.
    for json in [&[][..], &["--json"]] {
        let asked = ["eval", "--checkpoint", text(run), "--predictions", text(&file)];
        unread(limited_command(no_room, &[&asked[..], json].concat())).refused(&["test.jsonl"]);
    }
}

#[test]
fn the_surest_mistakes_are_named() {
    let Trained { run, .. } = of_three_epochs();
    let file = fresh("eval-mistakes").join("test.jsonl");
    let asked = ["--mistakes", "3", "--predictions", text(&file)];
    let found = report(run, &asked);
    let mut wrong = json_lines(&file);
    wrong.retain(|line| line["class"] != line["predicted"]);
    wrong.iter_mut().for_each(|line| _ = line.as_object_mut().unwrap().remove("probabilities"));
    assert!(wrong.len() > 3, "a small model makes mistakes: {wrong:?}");
    let probability = |line: &Value| line["probability"].as_f64().unwrap();
    wrong.sort_by(|a, b| probability(b).total_cmp(&probability(a)));
    assert_eq!(found["surest_mistakes"].as_array().unwrap()[..], wrong[..3]);
    let said = biformer(&[&["eval", "--checkpoint", text(run)][..], &asked].concat()).ok().out;
    let shown: Vec<&str> = said.split_once("The surest mistakes:\n").unwrap().1.lines().collect();
    let name = |line: &Value, field: &str| line[field].as_str().unwrap().to_owned();
    let expected = wrong[..3].iter().map(|line| {
        let (class, predicted) = (name(line, "class"), name(line, "predicted"));
        format!("{:>6.1}%  image {}: {class} taken for {predicted}", 100.0 * probability(line), line["image"])
    });
    assert_eq!(shown, expected.collect::<Vec<_>>());
    // Who asks for mistakes is told that there are none.
    let Trained { run, data, .. } = of_folder();
    let (picture, right) = (data.join("val/dark/1.png"), fresh("eval-right"));
    let seen = json(&biformer(&["predict", "--json", "--checkpoint", text(run), text(&picture)]).ok().out);
    let inside = right.join("val").join(seen[0]["classes"][0]["name"].as_str().unwrap());
    fs::create_dir_all(&inside).unwrap();
    fs::copy(&picture, inside.join("0.png")).unwrap();
    let none = |more: &[&str]| report(run, &[&["--data", text(&right)], more].concat()).get("surest_mistakes").cloned();
    assert_eq!([none(&["--mistakes", "3"]), none(&[])], [Some(Value::Array(vec![])), None]);
}

/// A run folder stands for the last epoch, which need not be the best.
#[test]
fn better_weights_are_spoken_of() {
    let copy = fresh("eval-best");
    copy_folder(&of_three_epochs().run, &copy);
    let best = make_first_best(&copy);
    let notes =
        |err: &str| err.contains("the best, after epoch 1 (100.0%): --checkpoint ") && err.contains(text(&best));
    let said = |checkpoint: &Path| biformer(&["eval", "--checkpoint", text(checkpoint)]).ok().err;
    assert!(notes(&said(&copy)) && !said(&best).contains("note:"), "{}", said(&copy));
    let folder = fresh("eval-best-written");
    let [exported, input, output] = ["w", "x", "y"].map(|name| folder.join(format!("{name}.safetensors")));
    let export = biformer(&["export", "--checkpoint", text(&copy), "--output", text(&exported)]).ok();
    assert!(notes(&export.err), "{export:?}");
    samples::grey(&input);
    let files = ["--input", text(&input), "--output", text(&output)];
    let forward = biformer(&[&["forward", "--checkpoint", text(&copy)][..], &files].concat()).ok();
    assert!(notes(&forward.err), "{forward:?}");
}

/// A run's data may have changed, or another folder may have their name.
#[test]
fn images_that_are_not_the_runs_are_spoken_of() {
    let folder = fresh("eval-others");
    let data = samples::image_folder(&folder.join("data"));
    samples::train(&folder, "image_size = 32", &data, &["--batch-size", "5", "--epochs", "1"]).ok();
    let run = folder.join("run");
    let eval = |more: &[&str]| biformer(&[&["eval", "--checkpoint", text(&run)], more].concat()).ok();
    let notes = |more: &[&str]| eval(more).err.contains("not the images that the run was tested on");
    assert!(!notes(&[]));
    samples::picture(&data.join("val/dark/9.png"), 40, 40, [9, 100, 50]);
    assert!(notes(&[]) && !notes(&["--split", "train"]));
    // Whoever names the folder again may not know of the change; other data are other images.
    assert!(notes(&["--data", text(&data.join("../data"))]));
    let others = samples::image_folder(&folder.join("others"));
    assert!(!notes(&["--data", text(&others)]));
    // Of those that cannot be read a program is told, too.
    fs::write(data.join("val/dark/9.png"), "no picture").unwrap();
    let report = json(&eval(&["--json", "--max-bad-images", "1"]).out);
    assert_eq!([&report["images"], &report["skipped"]].map(|count| count.as_u64()), [Some(8), Some(1)]);
}

#[test]
fn the_confusion_is_drawn() {
    let Trained { run, .. } = of_three_epochs();
    let file = fresh("eval-confusion").join("taken.png");
    let eval = |to: &Path| biformer(&["eval", "--checkpoint", text(run), "--confusion", text(to)]);
    eval(&file).ok();
    let page = load_image(&file).unwrap();
    assert!(page.width() > 10 * 44 && page.height() > 10 * 44, "{}x{}", page.width(), page.height());
    eval(&file).ok();
    eval(&run.join("metrics.jsonl")).refused(&["--confusion", "no earlier result"]);
}

#[test]
fn info_says_how_far_a_run_has_come() {
    let Trained { run, .. } = of_folder();
    let said = biformer(&["info", "--checkpoint", text(run)]).ok().out;
    for part in [
        "nano, trained on 20 images of",
        "(2 classes)",
        "Done: epoch 2 of 2; seed 1.",
        "Validation accuracy",
        "after epoch 2",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let exported = fresh("info-exported").join("w.safetensors");
    biformer(&["export", "--checkpoint", text(run), "--output", text(&exported)]).ok();
    let [whole, alone] =
        [run, &exported].map(|path| json(&biformer(&["info", "--json", "--checkpoint", text(path)]).ok().out));
    let last = json_lines(&run.join("metrics.jsonl")).pop().unwrap();
    assert_eq!((&whole["run"]["last"], &whole["run"]["progress"]["epochs"][1]), (&last, &last));
    assert!(alone["run"]["last"].is_null() && alone["run"]["progress"].is_null());
    assert_eq!(whole["parameters"], alone["parameters"]);
    assert_eq!((&whole["batch_size"], &whole["run"]["config"]["epochs"]), (&5.into(), &2.into()));
    assert!(json(&biformer(&["info", "--json"]).ok().out)["run"].is_null());
    // Also where it was trained in a precision that this machine does not have.
    let elsewhere = fresh("info-elsewhere").join("checkpoint.safetensors");
    let mut file = TensorFile::read(&run.join("checkpoint.safetensors")).unwrap();
    let config = file.metadata["config"].replace("precision = \"f32\"", "precision = \"tf32\"");
    file.metadata.insert("config".into(), config.replace("device = \"cpu\"", "device = \"cuda\""));
    file.write(&elsewhere).unwrap();
    let said = json(&biformer(&["info", "--json", "--checkpoint", text(&elsewhere)]).ok().out);
    assert_eq!((&said["run"]["config"]["precision"], &said["parameters"]), (&"tf32".into(), &whole["parameters"]));
    biformer(&["info", "--checkpoint", "nowhere"]).refused(&["nowhere", "no checkpoint"]);
}
