//! Training a part of a model: what is frozen stays to the bit, through averages, a stop and a resume.

use crate::common::program::{assert_same_run, biformer, contents, fresh, text};
use crate::common::samples::{self, Trained};
use biformer::model::TensorFile;
use std::path::Path;

const FROZEN: [&str; 2] = ["downsample_layers.0.", "stages.0."];

fn is_frozen(name: &str) -> bool {
    FROZEN.iter().any(|part| name.starts_with(part))
}

/// Names of the tensors that differ between two files of weights.
fn moved(from: &TensorFile, to: &Path) -> Vec<String> {
    let to = TensorFile::read(to).unwrap();
    let bytes = |tensor: &biformer::tensor::Tensor| {
        let mut file = TensorFile::default();
        file.tensors.insert("it".into(), tensor.clone());
        file.to_bytes().unwrap()
    };
    let moved = from.tensors.iter().filter(|(name, tensor)| bytes(tensor) != bytes(&to.tensors[*name]));
    moved.map(|(name, _)| name.clone()).collect()
}

#[test]
fn a_frozen_part_stays_to_the_bit() {
    let Trained { data, run: source, .. } = samples::of_one_epoch();
    let folder = fresh("freeze");
    let fields = format!("weights = {:?}\nfreeze = [\"downsample_layers.0\", \"stages.0\"]", text(source));
    let config = samples::config(&folder, &fields);
    let exported = folder.join("source.safetensors");
    biformer(&["export", "--checkpoint", text(source), "--output", text(&exported)]).ok();
    let start = TensorFile::read(&exported).unwrap();
    let train = |name: &str, more: &[&str]| {
        let run = folder.join(name);
        let to = ["train", "--config", text(&config), "--data", text(data), "--out", text(&run)];
        let said = biformer(&[&to[..], more].concat()).ok().out;
        (run, said)
    };
    let averaged = ["--set", "ema.enabled=true"];
    let (whole, said) = train("whole", &averaged);
    assert!(said.contains("frozen"), "{said}");
    let checkpoint = whole.join("checkpoint.safetensors");
    let (frozen, others): (Vec<_>, Vec<_>) = start.tensors.keys().cloned().partition(|name| is_frozen(name));
    assert!(!frozen.is_empty());
    // Also the batches that the statistics have seen; all of the rest has moved.
    assert_eq!(moved(&start, &checkpoint), others);
    let averages = folder.join("averages.safetensors");
    biformer(&["export", "--checkpoint", text(&whole), "--output", text(&averages)]).ok();
    let moved_averages = moved(&start, &averages);
    assert!(!moved_averages.is_empty() && moved_averages.iter().all(|name| !is_frozen(name)), "{moved_averages:?}");

    let (parts, _) = train("parts", &[&averaged[..], &["--epochs", "1"]].concat());
    biformer(&["train", "--resume", "--out", text(&parts), "--epochs", "3"]).ok();
    let (again, _) = train("again", &[&averaged[..], &["--epochs", "1"]].concat());
    biformer(&["train", "--resume", "--out", text(&again), "--epochs", "3", "--threads", "1"]).ok();
    assert_same_run("resumed", &parts, &again);
    assert_eq!(moved(&start, &parts.join("checkpoint.safetensors")), others);

    let before = contents(&parts);
    let thaw = samples::config(&folder, "freeze = []");
    biformer(&["train", "--resume", "--config", text(&thaw), "--out", text(&parts), "--epochs", "4"])
        .refused(&["freeze = []", "as it began"]);
    assert!(before == contents(&parts));
    for (fields, said) in [
        ("freeze = [\"stage.0\"]", "there is no part \"stage.0\" (did you mean \"stages.0\"?)"),
        ("freeze = [\"stages\", \"downsample_layers\", \"norm\", \"head\"]", "all of the model"),
        ("freeze = \"head\"", "expected a list, as in"),
    ] {
        let (config, run) = (samples::config(&folder, fields), folder.join("refused"));
        biformer(&["train", "--config", text(&config), "--data", text(data), "--out", text(&run)]).refused(&[said]);
        assert!(!run.exists());
    }

    // What would stay random, though nobody may have meant it.
    let (two, out) = (samples::image_folder(&folder.join("two")), folder.join("random"));
    let fresh_head = ["train", "--weights", text(source), "--data", text(&two), "--out", text(&out)];
    let fresh_head = [&fresh_head[..], &["--batch-size", "5", "--set", "freeze=head"]].concat();
    biformer(&fresh_head).refused(&["freeze:", "2 of this model's 2 classes would stay random", "leave the head out"]);
    assert!(!out.exists());
    let plain = samples::config(&folder, "freeze = [\"stages\"]");
    let plain = ["train", "--config", text(&plain), "--data", text(data), "--out", text(&out), "--epochs", "1"];
    let said = biformer(&plain).ok();
    assert!(said.out.contains("of the parameters are frozen: stages.\n"), "{said:?}");
    assert!(said.err.contains("note: without --weights they are random"), "{said:?}");
}
