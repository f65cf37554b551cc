//! Runs beside each other: `biformer compare`.

use crate::common::program::{biformer, change_epochs, fresh, json, text};
use crate::common::samples::{changes, cifar10_of, copied_run, of_three_epochs, trained};
use biformer::data::load_image;
use biformer::trainer::Trainer;
use biformer::trainer::checkpoint::Checkpoint;
use std::fs;
use std::path::Path;

#[test]
fn runs_are_listed_the_best_first_with_what_sets_them_apart() {
    let (one, three) = (copied_run("compare-one"), &of_three_epochs().run);
    change_epochs(&one, |epochs| (epochs[0].test_accuracy, epochs[0].test_loss) = (1.0, 0.25));
    let listed = biformer(&["compare", text(three), text(&one)]).ok();
    assert_eq!(listed.err, "", "tested on the same images, though in other folders");
    let lines: Vec<&str> = listed.out.lines().collect();
    assert_eq!(lines.len(), 3, "{}", listed.out);
    assert!(lines[0].starts_with("run ") && lines[0].ends_with("set apart by"), "{}", lines[0]);
    for (line, parts) in [
        (lines[1], [text(&one), " 1/1 ", " 100.0% ", " 100.0% (1) ", " 0.250 ", " epochs=1"]),
        (lines[2], [text(three), " 3/3 ", " data=\"", "three-epochs/data\"", "% (", " epochs=3"]),
    ] {
        assert!(parts.iter().all(|part| line.contains(part)) && !line.contains(" out="), "{line}, expected {parts:?}");
    }

    let runs = json(&biformer(&["compare", "--json", text(three), text(&one)]).ok().out);
    assert_eq!([&runs[0]["run"], &runs[1]["run"]], [text(&one), text(three)]);
    assert_eq!(runs[1]["epochs"].as_array().unwrap().len(), 3);
    assert_eq!(runs[1]["last"], runs[1]["epochs"][2]);
    assert_eq!(runs[0]["set_apart_by"]["epochs"], 1);
    assert_eq!(runs[0]["tested_on"], "test");
    assert_eq!(runs[0]["set_apart_by"].as_object().unwrap().len(), 2, "data and epochs: {}", runs[0]["set_apart_by"]);
    let timings = fs::read_to_string(three.join("timings.jsonl")).unwrap();
    let seconds: f64 = timings.lines().map(|line| json(line)["seconds"].as_f64().unwrap()).sum();
    assert_eq!(runs[1]["seconds"], seconds);
    assert_eq!(runs[1]["config"]["clip_norm"], 5.0);
}

/// As of a run of a later version.
#[test]
fn a_run_of_an_unknown_model_is_listed_as_well() {
    let [run, other] = ["compare-known", "compare-unknown"].map(copied_run);
    let path = other.join("checkpoint.safetensors");
    let mut checkpoint = Checkpoint::read(&path).unwrap();
    checkpoint.described.config.model = "later".into();
    checkpoint.write(&path).unwrap();
    let listed = biformer(&["compare", text(&run), text(&other)]).ok().out;
    assert!(
        listed.lines().count() == 3 && listed.contains(" model=\"later\"") && listed.contains(" model=\"nano\""),
        "{listed}"
    );
}

/// By the mean of the classes' accuracies, if all runs are to be compared by it.
#[test]
fn the_best_of_runs_is_by_their_measure() {
    let runs = ["compare-more-images", "compare-more-classes"].map(copied_run);
    let [of_images, of_classes] = [(0.9, 0.2), (0.6, 0.7)];
    for (run, (accuracy, of_class)) in runs.iter().zip([of_images, of_classes]) {
        change_epochs(run, |epochs| {
            (epochs[0].test_accuracy, epochs[0].test_macro_accuracy) = (accuracy, Some(of_class));
        });
    }
    let [images, classes] = &runs;
    let listed = |expected: [&Path; 2], parts: [&str; 3]| {
        let listed = biformer(&["compare", text(images), text(classes)]).ok().out;
        let lines: Vec<&str> = listed.lines().collect();
        assert!(expected.iter().zip(&lines[1..]).all(|(run, line)| line.starts_with(text(run))), "{listed}");
        assert!(parts.iter().zip(&lines).all(|(part, line)| line.contains(part)), "{listed}");
    };
    listed([images, classes], ["  accuracy  ", "  90.0% (1)  ", "  60.0% (1)  "]);
    let by_class = |run: &Path| {
        biformer(&["train", "--resume", "--out", text(run), "--set", "best_by=macro_accuracy"]).ok();
    };
    by_class(classes);
    listed([images, classes], ["  accuracy  ", "best_by=\"accuracy\"", "best_by=\"macro_accuracy\""]);
    by_class(images);
    listed([classes, images], ["  macro  ", "  70.0% (1)  ", "  20.0% (1)  "]);
    let drawn = fresh("compare-by-class").join("runs.png");
    biformer(&["compare", text(images), text(classes), "--picture", text(&drawn)]).ok();
}

#[test]
fn runs_are_drawn() {
    let (run, picture) = (&of_three_epochs().run, fresh("compare-drawn").join("runs.png"));
    biformer(&["compare", text(run), text(run), "--picture", text(&picture)]).ok();
    assert_eq!(load_image(&picture).unwrap().width(), 1200);
    biformer(&["compare", text(run), "--picture", text(&picture)]).ok();
    biformer(&["compare", text(run), "--picture", text(&run.join("curves.png"))])
        .refused(&["one of a run's own files"]);
}

#[test]
fn a_checkpoint_stands_for_its_run() {
    let run = &of_three_epochs().run;
    let [folder, best] = [run.clone(), run.join("best.safetensors")]
        .map(|path| json(&biformer(&["compare", "--json", text(&path)]).ok().out)[0].clone());
    assert_eq!(best["last"], folder["best"], "up to the best epoch");
    assert!(best["seconds"].as_f64() <= folder["seconds"].as_f64() && best["seconds"].as_f64() > Some(0.0));
    let tip = biformer(&["compare", text(run), "--checkpoint", text(run)]);
    assert!(tip.status == Some(2) && tip.err.contains("runs are named without an option"), "{tip:?}");
}

/// Of two models, each as its preset describes it, the models' names say all; threads change nothing. A run that has no
/// epoch yet comes last, and accuracies on other images do not compare.
#[test]
fn what_says_nothing_is_left_out() {
    let folder = fresh("compare-models");
    let data = cifar10_of(&folder.join("data"), 8);
    let stopped = |model: &str, data: &Path, more: &[(&str, i64)]| {
        let (name, path) = (format!("{model}-{}", more.len()), folder.join("asked.toml"));
        fs::write(&path, format!("model = \"{model}\"\n")).unwrap();
        let run = folder.join(name);
        drop(Trainer::from_changes(&changes(&path, data, &run, more)).unwrap());
        run
    };
    let [nano, micro] = ["nano", "micro"].map(|model| stopped(model, &data, &[("batch_size", 16)]));
    let threads = stopped("nano", &data, &[("batch_size", 16), ("threads", 1)]);
    let listed = json(&biformer(&["compare", "--json", text(&nano), text(&micro), text(&threads)]).ok().out);
    for (run, model) in listed.as_array().unwrap().iter().zip(["nano", "micro", "nano"]) {
        assert_eq!(run["set_apart_by"].to_string(), format!("{{\"model\":\"{model}\"}}"));
        assert!(run["last"].is_null() && run["seconds"].is_null());
    }
    let trained = &of_three_epochs().run;
    let said = biformer(&["compare", text(&nano), text(trained)]).ok();
    assert!(said.err.starts_with("note: ") && said.err.contains("their accuracies do not compare"), "{said:?}");
    let lines: Vec<&str> = said.out.lines().collect();
    assert!(lines[1].starts_with(text(trained)) && lines[2].starts_with(text(&nano)), "{said:?}");
    assert!(lines[2].contains(" 0/24  ") && lines[2].contains("  - "), "{}", lines[2]);
}

/// As where `sweep/*` is asked for, and not all that is there can be read.
#[test]
fn what_is_no_run_is_named_and_the_others_are_listed() {
    let (begun, folder) = (trained("compare-begun", 1).run, fresh("compare-none"));
    let damaged = copied_run("compare-damaged");
    let file = damaged.join("checkpoint.safetensors");
    fs::write(&file, &fs::read(&file).unwrap()[..100]).unwrap();
    let said = biformer(&["compare", text(&folder), text(&begun), text(&damaged)]);
    assert_eq!((said.status, said.out.lines().count()), (Some(2), 2), "{said:?}");
    let errors: Vec<&str> = said.err.lines().collect();
    assert_eq!(errors.len(), 2, "{said:?}");
    assert!(errors[0].contains("expected a run folder") && errors[1].contains("compare-damaged"), "{said:?}");
    let none = biformer(&["compare", text(&folder)]);
    assert!(none.status == Some(2) && none.err.contains("there is no run to compare"), "{none:?}");
}
