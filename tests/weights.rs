//! Weights alone: out of a run for other programs, and from other programs to be measured and used.

mod common;

use biformer::model::TensorFile;
use biformer::trainer::checkpoint::read_weights;
use common::program::{biformer, contents, fresh, text};
use common::samples;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A run on an image folder, whose images are normalised as the published models take them; and its data.
fn shared() -> &'static [PathBuf; 2] {
    static SHARED: OnceLock<[PathBuf; 2]> = OnceLock::new();
    SHARED.get_or_init(|| {
        let folder = fresh("weights");
        let data = samples::image_folder(&folder.join("data"));
        samples::train(&folder, "image_size = 32", &data, &["--batch-size", "5", "--epochs", "1"]).ok();
        [folder.join("run"), data]
    })
}

fn export(run: &Path, to: &Path) -> common::program::Ran {
    biformer(&["export", "--checkpoint", text(run), "--output", text(to)])
}

/// The model of the small runs, as options.
fn model() -> Vec<String> {
    let fields = samples::CONFIG.split("[architecture]\n").nth(1).unwrap().replace([' ', '[', ']'], "");
    ["--model", "nano", "--set"].into_iter().chain(fields.lines()).map(str::to_owned).collect()
}

#[test]
fn exported_weights_are_the_ones_that_are_evaluated() {
    let [run, _] = shared();
    let folder = fresh("weights-export");
    let file = folder.join("w.safetensors");
    let said = export(run, &file).ok().out;
    let (mut written, averaged) = (TensorFile::read(&file).unwrap(), read_weights(run).unwrap());
    written.metadata.clear();
    assert!(said.contains(&format!("{} tensors", averaged.tensors.len())), "{said}");
    assert_eq!(written.to_bytes().unwrap(), averaged.to_bytes().unwrap(), "the averaged ones, and nothing beside them");
    let trained = TensorFile::read(&run.join("checkpoint.safetensors")).unwrap();
    let head = |file: &TensorFile| file.tensors["head.weight"].to_vec::<f32>().unwrap();
    assert_ne!(head(&written), head(&trained));
    export(run, &file).ok();
    export(run, &run.join("checkpoint.safetensors")).refused(&["--output", "no earlier result"]);
    // Nor weights that came from elsewhere.
    let published = folder.join("published.safetensors");
    written.write(&published).unwrap();
    export(run, &published).refused(&["--output", "no earlier result"]);
}

#[test]
fn a_state_dict_is_measured_and_used_like_a_run() {
    let [run, data] = shared();
    let folder = fresh("weights-alone");
    let file = folder.join("w.safetensors");
    export(run, &file).ok();
    let model = model();
    let with = |command: &[&str], more: &[&str]| {
        let all = [command, &["--checkpoint", text(&file)], &Vec::from_iter(model.iter().map(String::as_str)), more];
        biformer(&all.concat())
    };
    let of_run = biformer(&["eval", "--json", "--checkpoint", text(run)]).ok().out;
    assert_eq!(with(&["eval", "--json"], &["--data", text(data)]).ok().out, of_run);
    let picture = data.join("val/dark/1.png");
    let classes = |out: &str| out.replace("dark", "class 0").replace("light", "class 1");
    let of_run = biformer(&["predict", "--checkpoint", text(run), text(&picture)]).ok().out;
    let used = with(&["predict", text(&picture)], &[]).ok().out;
    let lines = |out: &str| out.lines().skip(1).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(lines(&used), lines(&classes(&of_run)));
    biformer(&["eval", "--checkpoint", text(&file)]).refused(&["w.safetensors", "name the model with --model", "tiny"]);
    biformer(&["eval", "--checkpoint", text(run), "--model", "tiny"]).refused(&["--model", "knows its model"]);
    with(&["eval"], &[]).refused(&["data embedded", "10 of them, not 2"]);
}

#[test]
fn a_model_is_measured_on_other_sizes_and_with_other_routes() {
    let [run, data] = shared();
    // Without training images, as ImageNet's validation images often come.
    let alone = fresh("weights-val");
    let copied = std::process::Command::new("cp").arg("-r").arg(data.join("val")).arg(&alone).status().unwrap();
    assert!(copied.success());
    let eval = |more: &[&str]| {
        let arguments = ["eval", "--json", "--checkpoint", text(run), "--data", text(&alone)];
        biformer(&[&arguments[..], more].concat())
    };
    let as_it_was = eval(&[]).ok().out;
    assert_eq!(as_it_was, biformer(&["eval", "--json", "--checkpoint", text(run)]).ok().out);
    assert_ne!(eval(&["--image-size", "64"]).ok().out, as_it_was);
    assert_ne!(eval(&["--set", "topks=4,-2"]).ok().out, as_it_was);
    assert_ne!(eval(&["--set", "n_win=4"]).ok().out, as_it_was);
    let before = contents(run);
    eval(&["--set", "mlp_ratio=2"]).refused(&["mlp.0.weight"]);
    eval(&["--image-size", "34"]).refused(&["34x34 image does not fit"]);
    assert!(before == contents(run));
    fs::remove_dir_all(alone.join("val")).unwrap();
    eval(&[]).refused(&["lacks"]);
}
