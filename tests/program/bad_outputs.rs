//! What stands in the way of files that the program is to write: full disks, results, pipes. Nothing on disk is harmed.

use crate::common::program::{biformer, contents, fresh, text};
use crate::common::samples::{self, copied_run, of_one_epoch, train};
use biformer::model::TensorFile;
use biformer::tensor::Tensor;
use biformer::tensor::cuda::Gpu;
use std::fs;

/// A limit on the size of files stands for a disk that fills up: the small ones fit, the checkpoint does not.
#[cfg(unix)]
#[test]
fn a_disk_that_fills_up_harms_no_checkpoint() {
    use crate::common::program::limited;
    let run = copied_run("full disk");
    let before = contents(&run);
    let config = text(&of_one_epoch().config);
    limited("ulimit -f 32", &["train", "--resume", "--config", config, "--out", text(&run), "--epochs", "2"]).refused(
        &[
            "saving failed, the checkpoint before it is unharmed",
            "allow larger files (ulimit -f)",
            &format!("--resume --out '{}'", text(&run)),
            "checkpoint.safetensors",
        ],
    );
    let after = contents(&run);
    assert!(before["checkpoint.safetensors"] == after["checkpoint.safetensors"], "the checkpoint before");
    assert!(after.keys().eq(before.keys()), "and nothing half-written: {:?}", after.keys());
    // With room again, it goes on.
    biformer(&["train", "--resume", "--out", text(&run), "--epochs", "2"]).ok();
    let new = fresh("full-disk-new").join("run");
    let data = text(&of_one_epoch().data);
    let train = ["train", "--config", config, "--data", data, "--out", text(&new), "--epochs", "1"];
    limited("ulimit -f 32", &train).refused(&["saving failed; allow larger files"]);
    // What did not begin is not in the way.
    assert!(contents(&new).keys().eq([".lock"]));
    // Nor is what a killed one left.
    fs::write(new.join(".biformer-killed.tmp"), "half").unwrap();
    biformer(&train).ok();
    assert!(!new.join(".biformer-killed.tmp").exists());
}

#[cfg(unix)]
#[test]
fn data_that_end_a_run_are_named_even_if_it_cannot_be_saved() {
    use crate::common::program::limited;
    let folder = fresh("full-disk-bad-data");
    let data = samples::image_folder(&folder.join("data"));
    fs::write(data.join("val/dark/0.png"), "no picture").unwrap();
    train(&folder, "image_size = 32", &data, &["--batch-size", "5"])
        .refused(&["val/dark/0.png", "what was done is saved"]);
    let run = folder.join("run");
    let resume = ["train", "--resume", "--out", text(&run)];
    limited("ulimit -f 32", &resume).refused(&[
        "val/dark/0.png",
        "; and what was done since the last checkpoint could not be saved: ",
        "allow larger files (ulimit -f)",
    ]);
}

/// What was found or measured is printed, and JSON is whole, where the picture of it cannot be written.
#[cfg(unix)]
#[test]
fn no_results_are_lost_with_their_picture() {
    use crate::common::program::{json, limited};
    let folder = fresh("full-disk-pictures");
    let (run, picture, file) = (copied_run("pictures"), folder.join("a.png"), folder.join("drawn.png"));
    samples::picture(&picture, 40, 60, [9, 100, 50]);
    let predict = ["predict", "--checkpoint", text(&run), text(&picture), "--attention", text(&file), "--json"];
    let sweep = ["bench", "--op", "bra", "--largest", "56", "--plot", text(&file), "--json"];
    for (asked, field) in [(&predict[..], "/0/classes"), (&sweep, "/curves/1/points")] {
        let said = limited("ulimit -f 0", asked);
        assert_eq!(said.status, Some(2), "{said:?}");
        assert!(said.err.contains("drawn.png") && json(&said.out).pointer(field).is_some(), "{said:?}");
        assert!(!file.exists());
    }
}

/// No operation is to blame for it.
#[cfg(unix)]
#[test]
fn kernels_that_cannot_be_cached_are_no_failed_checks() {
    use crate::common::program::{Ran, command};
    if Gpu::for_tests(1).is_none() {
        return;
    }
    let taken = fresh("no-cache").join("file");
    fs::write(&taken, "").unwrap();
    let mut check = command(&["gradcheck", "--device", "emulated", "--op", "scale"]);
    let said = Ran::from(check.env("BIFORMER_CACHE", &taken).output().unwrap());
    said.refused(&["emulated", "another folder in BIFORMER_CACHE"]);
}

/// A slip of the hand costs no file: results take the place of earlier results only.
#[test]
fn results_replace_results_alone() {
    let run = copied_run("results");
    let (checkpoint, config) = (run.join("checkpoint.safetensors"), run.join("config.toml"));
    let before = contents(&run);
    let input = run.join("input.safetensors");
    samples::grey(&input);
    let set = ["--set", "depth=1,1", "embed_dim=16,32", "topks=2,-2", "n_win=4,2", "head_dim=16"];
    for there in [&checkpoint, &config, &input] {
        let refused = ["what is there is no earlier result", "name another file"];
        biformer(&["gradcheck", "--op", "scale", "--report", text(there)]).refused(&refused);
        biformer(&["bench", "--op", "bra", "--largest", "56", "--plot", text(there)]).refused(&refused);
        let files = ["--weights", text(&checkpoint), "--input", text(&input), "--output", text(there)];
        let said = biformer(&[&["forward"][..], &files, &set].concat());
        assert!(said.status == Some(2) && !said.err.contains("panicked"), "{said:?}");
    }
    fs::remove_file(&input).unwrap();
    assert!(before == contents(&run), "nothing is harmed");
    // Others' files of the same kinds, and what keeps a second run out.
    let (list, picture, outputs) = (run.join("list.json"), run.join("picture.png"), run.join("outputs.safetensors"));
    fs::write(&list, "[1, 2, 3]").unwrap();
    samples::picture(&picture, 8, 8, [9, 9, 9]);
    let mut others = TensorFile::default();
    others.tensors.insert("outer.weight".into(), Tensor::full([2], 0.5f32));
    others.write(&outputs).unwrap();
    // Of the names of its own, but another's.
    others.tensors = [("logits".to_owned(), Tensor::full([1, 10], 0.5f32))].into();
    let reference = run.join("reference.safetensors");
    others.write(&reference).unwrap();
    samples::grey(&input);
    let exported = ["export", "--checkpoint", text(&checkpoint), "--output"];
    let with_others = contents(&run);
    let refused = |arguments: &[&str]| biformer(arguments).refused(&["no earlier result", "name another file"]);
    refused(&["gradcheck", "--op", "scale", "--report", text(&list)]);
    refused(&["bench", "--op", "bra", "--largest", "56", "--plot", text(&picture)]);
    let forward = ["forward", "--weights", text(&checkpoint), "--input", text(&input), "--output"];
    refused(&[&forward[..], &[text(&outputs)]].concat());
    refused(&[&forward[..], &[text(&reference)]].concat());
    let missing = run.join("missing").join("results.safetensors");
    biformer(&[&forward[..], &[text(&missing)]].concat()).refused(&["--output", "there is no folder", "make it first"]);
    refused(&[&exported[..], &[text(&run.join(".lock"))]].concat());
    // A picture, too, but the run's; and names that no file can have, before the work.
    let plot = ["bench", "--op", "bra", "--largest", "56", "--plot"];
    biformer(&[&plot[..], &[text(&run.join("curves.png"))]].concat()).refused(&["one of a run's own files"]);
    let predictions = ["eval", "--checkpoint", text(&run), "--predictions"];
    for name in ["new/".to_owned(), "x".repeat(256)] {
        let said = biformer(&[&predictions[..], &[&format!("{}/{name}", text(&run))]].concat());
        assert!(said.out.is_empty(), "{said:?}");
        said.refused(&[&name]);
    }
    assert!(with_others == contents(&run), "nothing is harmed");
    for _ in 0..2 {
        biformer(&["eval", "--checkpoint", text(&run), "--confusion", text(&run.join("plot.png"))]).ok();
        biformer(&[&exported[..], &[text(&run.join("weights.safetensors"))]].concat()).ok();
        biformer(&[&forward[..], &[text(&run.join("results.safetensors"))]].concat()).ok();
    }
    let report = run.join("report.json");
    for _ in 0..2 {
        biformer(&["gradcheck", "--op", "scale", "--report", text(&report)]).ok();
    }
}

/// To read from a pipe that nobody writes to would never end.
#[cfg(unix)]
#[test]
fn a_pipe_in_place_of_a_runs_file() {
    for name in ["timings.jsonl", "config.toml", ".lock"] {
        let run = copied_run("pipe-in-run");
        let path = run.join(name);
        let _ = fs::remove_file(&path);
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let resume = ["train", "--resume", "--out", text(&run), "--epochs", "2"];
        biformer(&resume).refused(&[name, "not as a regular file; remove it"]);
        fs::remove_file(&path).unwrap();
        biformer(&resume).ok();
    }
}
