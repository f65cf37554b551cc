//! What `biformer info` foretells is what a process takes, as the system (Linux) counts it.

#![cfg(target_os = "linux")]

mod common;

use biformer::model::TensorFile;
use common::program::{biformer, command, fresh, json, limited, text};
use common::samples::{self, Trained, trained};
use std::mem::MaybeUninit;
use std::process::Stdio;

/// Resident bytes at the peak of a benchmark, and the forecast, both for these arguments.
fn taken_and_foretold(mode: &str, arguments: &[&str]) -> (f64, f64) {
    let number = |command: &[&str], field: &str| {
        let said = biformer(&[command, arguments, &["--threads", "2", "--json"]].concat()).ok().out;
        let said = json(&said);
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
        ("train", &["--batch-size", "128"][..]),
        ("train", &["--batch-size", "128", "--recompute", "block"]),
        ("train", &["--model", "tiny", "--batch-size", "8"]),
        ("train", large),
        // Which takes the most where no image skips a branch.
        ("train", &[large, &["drop_path=0.2"]].concat()),
        // Few of which are measured.
        ("train", &["--model", "tiny", "--batch-size", "7", "--set", "depth=1,1,1,1"]),
        ("infer", &["--batch-size", "128"]),
        ("infer", large),
        ("infer", &["--model", "tiny", "--batch-size", "40"]), // more than the model takes at once
        ("infer", &["--model", "tiny", "--image-size", "896", "--batch-size", "1", "--set", "auto_pad=true"]),
    ] {
        let (taken, foretold) = taken_and_foretold(mode, arguments);
        println!("{mode} {arguments:?}: {:.1} MB, foretold {:.1} MB", taken / 1e6, foretold / 1e6);
        assert!((0.9..1.1).contains(&(foretold / taken)), "{mode} {arguments:?}: {taken}, foretold {foretold}");
    }
}

/// The most resident bytes of a process with these arguments.
fn peak(arguments: &[&str]) -> f64 {
    #[expect(clippy::zombie_processes, reason = "waited for by the system's own call, which counts what it took")]
    let child = command(arguments).stdout(Stdio::null()).spawn().unwrap();
    let (mut status, mut usage) = (0, MaybeUninit::<libc::rusage>::zeroed());
    // SAFETY: both places are there to be written, and an all-zero `rusage` is one.
    let usage = unsafe {
        assert_eq!(
            libc::wait4(child.id() as libc::pid_t, &mut status, 0, usage.as_mut_ptr()),
            child.id() as libc::pid_t
        );
        usage.assume_init()
    };
    assert_eq!(status, 0, "{arguments:?}");
    1024.0 * usage.ru_maxrss as f64
}

/// Of a checkpoint only what is wanted is in memory, and only once: a run goes on wherever it began, and can be used
/// there.
#[test]
fn a_checkpoint_takes_no_more_memory_than_its_run() {
    let folder = fresh("checkpoint-memory");
    let (data, run) = (samples::cifar10_of(&folder.join("data"), 2), folder.join("run"));
    let wide = ["--set", "depth=1,1,1", "embed_dim=512,512,1024", "head_dim=32", "full_attention_heads=8"];
    let train = ["train", "--data", text(&data), "--out", text(&run), "--batch-size", "2", "--threads", "2"];
    let begun = peak(&[&train[..], &["--epochs", "1"], &wide].concat());
    let gone_on = peak(&["train", "--resume", "--out", text(&run), "--epochs", "2"]);
    let used = peak(&["eval", "--checkpoint", text(&run), "--batch-size", "2", "--threads", "2"]);
    let of_file = run.join("checkpoint.safetensors").metadata().unwrap().len() as f64;
    let info = ["info", "--json", "--checkpoint", text(&run), "--batch-size", "2", "--threads", "2"];
    let said = json(&biformer(&info).ok().out);
    let foretold = said["training_bytes"].as_f64().unwrap();
    println!("begun {begun:.2e}, foretold {foretold:.2e}, gone on {gone_on:.2e}, used {used:.2e}, file {of_file:.2e}");
    assert!((0.9..1.1).contains(&(foretold / begun)), "{begun}, foretold {foretold}");
    assert!(of_file > 200e6 && begun > of_file, "so large that nothing else counts");
    assert!(
        gone_on < 1.05 * begun && used < 1.4 * of_file,
        "{gone_on} and {used}, after {begun}, with a file of {of_file}"
    );
}

/// No machine has memory for this; it must be said before a step is tried.
#[test]
fn what_cannot_fit_is_refused_at_once() {
    let wide = ["embed_dim=2048,512,512,512", "depth=1,1,1,1", "auto_pad=true"];
    let arguments = ["bench", "--model", "base", "--image-size", "64", "--batch-size", "160000", "--threads", "2"];
    let bench = |more: &[&str]| biformer(&[&arguments[..], &["--set"], &wide, more].concat());
    let training = bench(&["--mode", "train"]);
    training.refused(&["training takes about", "GB", "a smaller --batch-size", "--recompute block"]);
    // Which keeps the maps of all images.
    let inference = bench(&["features=dense", "stem_strides=1,1", "--mode", "infer"]);
    inference.refused(&["inference takes about", "GB", "a smaller --batch-size"]);
}

/// Nor does it take long to say it where a single image is work for minutes, or the model is huge.
#[test]
fn a_forecast_is_little_work_however_large_the_images() {
    let numbers = |arguments: &[&str]| {
        let said =
            biformer(&[&["info", "--json", "--threads", "2", "--set", "depth=1,1,1"], arguments].concat()).ok().out;
        let said = json(&said);
        ["training_bytes", "inference_bytes"].map(|field| said[field].as_f64().unwrap())
    };
    let of = |size, batch| numbers(&["--image-size", size, "--batch-size", batch]);
    let [one, two, eight] = ["1", "2", "8"].map(|batch| of("2048", batch));
    for (huge, large) in of("4096", "1").into_iter().zip(one) {
        assert!((3.0..5.0).contains(&(huge / large)), "{huge} of four times the pixels, {large}");
    }
    // Inference takes two of these at once, and of others only keeps the pixels.
    let ratios = [two, eight].map(|more| more[1] / one[1]);
    assert!((1.4..2.3).contains(&ratios[0]) && (1.6..2.6).contains(&ratios[1]), "two and eight images: {ratios:?}");
}

/// Nor where images cannot be made smaller, or would not be less work for it.
#[test]
fn what_would_take_minutes_to_measure_is_not_foretold() {
    for size in ["8192x1", "128"] {
        let unending = ["--image-size", size, "--set", "n_win=64", "auto_pad=true", "topks=4096,4096,4096"];
        let said = biformer(&[&["info", "--json", "--threads", "2"], &unending[..]].concat()).ok();
        let numbers = json(&said.out);
        for field in ["activation_bytes_per_image", "training_bytes", "inference_bytes"] {
            assert!(numbers[field].is_null(), "{size}: {field}");
        }
        assert!(said.err.contains("would take minutes"), "{said:?}");
    }
}

/// Nor is a trained model used on images for which there is no room.
#[test]
fn a_trained_model_refuses_images_that_cannot_fit() {
    let Trained { data, run, .. } = trained("trained-for-huge-images", 1);
    let file = run.join("checkpoint.safetensors");
    let mut huge = TensorFile::read(&file).unwrap();
    let config = huge.metadata["config"].replace("image_size = 32", "image_size = 4096");
    huge.metadata.insert("config".into(), config);
    huge.write(&file).unwrap();
    let image = run.join("curves.png");
    let refused = |arguments: &[&str]| {
        let one_gigabyte = "ulimit -v 1000000";
        // Of address space, of which each thread takes some.
        let arguments = [arguments, &["--threads", "2"]].concat();
        limited(one_gigabyte, &arguments).refused(&["inference takes", "GB", "a smaller --", "--image-size"]);
    };
    refused(&["predict", "--checkpoint", text(&run), text(&image)]);
    refused(&["eval", "--checkpoint", text(&run), "--data", text(&data)]);
}

/// Soft routing gathers regions times regions, which one image may have no room for: it is not tried in order to
/// measure it.
#[test]
fn what_soft_routing_gathers_is_counted_before_it_is_measured() {
    let soft = ["--batch-size", "1", "--set", "n_win=64", "auto_pad=true", "topks=4096,4096,4096", "soft_routing=true"];
    for command in [&["info"][..], &["bench", "--mode", "infer"], &["bench"]] {
        let ten_gigabytes = "ulimit -v 10000000";
        limited(ten_gigabytes, &[command, &soft, &["--threads", "2"]].concat())
            .refused(&["takes at least", "GB of memory"]);
    }
}
