//! What `biformer info` foretells is what a process takes, as the system (Linux) counts it.

#![cfg(target_os = "linux")]

mod common;

use common::program::biformer;

/// Resident bytes at the peak of a benchmark, and the forecast, both for these arguments.
fn taken_and_foretold(mode: &str, arguments: &[&str]) -> (f64, f64) {
    let number = |command: &[&str], field: &str| {
        let said = biformer(&[command, arguments, &["--threads", "2", "--json"]].concat()).ok().out;
        let said: serde_json::Value = serde_json::from_str(&said).unwrap();
        said[field].as_f64().unwrap()
    };
    let taken = number(&["bench", "--mode", mode, "--steps", "1"], "peak_rss_bytes");
    let field = if mode == "train" { "training_bytes" } else { "inference_bytes" };
    (taken, number(&["info"], field))
}

#[test]
fn the_forecast_is_within_a_tenth() {
    let large: &[&str] = &["--batch-size", "256", "--set", "depth=1,1,1"]; // more than is measured at once
    for (mode, arguments) in [
        ("train", &["--batch-size", "64"][..]),
        ("train", &["--batch-size", "128"]),
        ("train", &["--batch-size", "128", "--recompute", "block"]),
        ("train", &["--model", "tiny", "--batch-size", "8"]),
        ("train", &["--model", "tiny", "--image-size", "112", "--batch-size", "24", "--set", "auto_pad=true"]),
        ("train", large),
        ("infer", &["--batch-size", "128"]),
        ("infer", large),
    ] {
        let (taken, foretold) = taken_and_foretold(mode, arguments);
        println!("{mode} {arguments:?}: {:.1} MB, foretold {:.1} MB", taken / 1e6, foretold / 1e6);
        assert!((0.9..1.1).contains(&(foretold / taken)), "{mode} {arguments:?}: {taken}, foretold {foretold}");
    }
}

/// No machine has memory for this; it must be said before a step is tried.
#[test]
fn what_cannot_fit_is_refused_at_once() {
    let arguments = ["bench", "--model", "base", "--image-size", "64", "--set", "auto_pad=true", "--threads", "2"];
    let bench = |more: &[&str]| biformer(&[&arguments[..], more].concat());
    let training = bench(&["--batch-size", "100000"]);
    training.refused(&["training takes about", "GB", "batch_size", "micro_batches", "recompute = \"block\""]);
    let inference = bench(&[
        "--batch-size",
        "160000",
        "--mode",
        "infer",
        "--set",
        "embed_dim=2048,512,512,512",
        "--set",
        "depth=1,1,1,1",
    ]);
    inference.refused(&["inference takes about", "GB", "batch_size"]);
}

/// Nor does it take long to say it where a single image is work for minutes, or the model is huge.
#[test]
fn a_forecast_is_little_work_however_large_the_images() {
    let number = |arguments: &[&str]| {
        let said = biformer(&[&["info", "--json", "--batch-size", "4"], arguments].concat()).ok().out;
        let said: serde_json::Value = serde_json::from_str(&said).unwrap();
        said["training_bytes"].as_f64().unwrap()
    };
    let (large, huge) = (number(&["--image-size", "2048"]), number(&["--image-size", "4096"]));
    assert!((3.0..5.0).contains(&(huge / large)), "{huge} of four times the pixels, {large}");
}
