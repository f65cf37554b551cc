//! How images are normalised, and what a test shows of them: as a run asks for it, wherever its model is used.

use crate::common::program::{biformer, contents, fresh, json, text};
use crate::common::samples;
use biformer::data::Statistics;
use biformer::trainer::checkpoint::Checkpoint;
use std::fs;
use std::path::Path;

fn eval(run: &Path, more: &[&str]) -> String {
    biformer(&[&["eval", "--json", "--checkpoint", text(run)], more].concat()).ok().out
}

fn statistics(run: &Path) -> Statistics {
    Checkpoint::read(&run.join("checkpoint.safetensors")).unwrap().described.data.statistics
}

#[test]
fn a_run_keeps_what_it_was_asked_for() {
    let folder = fresh("preprocessing");
    let data = samples::image_folder(&folder.join("data"));
    let train = |name: &str, set: &[&str]| {
        let (config, run) = (samples::config(&folder, "image_size = 32"), folder.join(name));
        let to = ["train", "--config", text(&config), "--data", text(&data), "--out", text(&run), "--epochs", "1"];
        biformer(&[&to[..], &["--batch-size", "5", "--set"], set].concat()).ok();
        run
    };
    let usual = train("usual", &["seed=1"]);
    assert_eq!(statistics(&usual), Statistics::IMAGENET);
    let asked = ["preprocessing.mean=[0.5, 0.25, 0.125]", "preprocessing.std=[0.5, 0.5, 1]"];
    let own = train("own", &asked);
    assert_eq!(statistics(&own), Statistics { mean: [0.5, 0.25, 0.125], std: [0.5, 0.5, 1.0] });

    // A test of a run that was asked for something is one of another run that is asked for it now.
    assert_ne!(eval(&usual, &[&["--set"], &asked[..]].concat()), eval(&usual, &[]));
    assert_eq!(eval(&own, &[&["--set"], &asked[..]].concat()), eval(&own, &[]));
    let whole = ["--set", "preprocessing.eval_crop=1"];
    assert_ne!(eval(&usual, &whole), eval(&usual, &[]));
    assert_eq!(eval(&usual, &["--set", "preprocessing.eval_crop=0.875"]), eval(&usual, &[]));
    // Weights that are trained further have their images normalised as before, unless something else is asked for.
    let further = format!("weights={}", text(&own));
    assert_eq!(statistics(&train("further", &[&further])), statistics(&own));
    let other = train("other", &[&further, "preprocessing.mean=[0, 0, 0]", "preprocessing.std=[1, 1, 1]"]);
    assert_eq!(statistics(&other), Statistics { mean: [0.0; 3], std: [1.0; 3] });
    let crop = |run: &Path| {
        Checkpoint::read(&run.join("checkpoint.safetensors")).unwrap().described.config.preprocessing.eval_crop
    };
    let cropped = train("cropped", &["preprocessing.eval_crop=0.5"]);
    assert_eq!(crop(&train("cropped-further", &[&format!("weights={}", text(&cropped))])), 0.5);
    // Where training shows all of an image, so does a test.
    let padded = train("padded", &["augmentation.crop=padded"]);
    assert_eq!(eval(&padded, &whole), eval(&padded, &[]));
    // In training as in a test by itself.
    for run in [&padded, &own] {
        let trained = json(&fs::read_to_string(run.join("metrics.jsonl")).unwrap());
        let measured = json(&eval(run, &[]));
        let losses = [&trained["test_loss"], &measured["loss"]].map(|loss| loss.as_f64().unwrap());
        approx::assert_relative_eq!(losses[0], losses[1], max_relative = 1e-6);
    }
    // What only training asks for does not keep a model from smaller images.
    eval(&train("wide", &["augmentation.padding=32"]), &["--image-size", "16"]);

    let picture = data.join("val/dark/1.png");
    let predict = |more: &[&str]| {
        biformer(&[&["predict", "--json", "--checkpoint", text(&usual), text(&picture)], more].concat()).ok().out
    };
    assert_ne!(predict(&whole), predict(&[]));

    let before = contents(&own);
    for (set, parts) in [
        ("preprocessing.mean=[0.5]", ["expected three numbers each", "or none for the data's own"]),
        ("preprocessing.std=[0.5, 0, 0.5]", ["preprocessing", "deviations above 0"]),
        ("preprocessing.std=[58, 58, 58]", ["preprocessing", "divide values on a scale up to 255 by 255"]),
        ("preprocessing.mean=[0.5, inf, 0.5]", ["preprocessing", "numbers from 0 to 1"]),
        ("preprocessing.mean=[123.7, 116.3, 103.5]", ["numbers from 0 to 1", "on a scale up to 255 by 255"]),
        ("preprocessing.eval_crop=1.5", ["eval_crop", "0.1..=1"]),
        ("preprocessing.eval_crop=much", ["preprocessing", "much"]),
        ("preprocessing.crop=1", ["no configuration key \"preprocessing.crop\"", "eval_crop"]),
    ] {
        biformer(&["eval", "--checkpoint", text(&own), "--set", set]).refused(&parts);
    }
    assert!(before == contents(&own));
}
