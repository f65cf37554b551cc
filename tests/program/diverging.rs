//! Runs that diverge, and weights that no run can go on from: where it went wrong is said, and nothing unusable is
//! kept.

use crate::common::program::{biformer, copy_folder, fresh, text};
use crate::common::samples::{self, of_one_epoch, train};
use biformer::model::TensorFile;
use biformer::tensor::Tensor;
use std::fs;

/// What weights alone do not say, a field of the configuration that they are trained further with.
const NORMALISED: &str = "preprocessing = { mean = [0.5, 0.5, 0.5], std = [0.25, 0.25, 0.25] }";

#[test]
fn a_loss_that_is_not_finite() {
    let folder = fresh("diverged");
    let data = &of_one_epoch().data;
    let fields = "clip_norm = 0.0\ncheckpoint_every = 1";
    let said = train(&folder, fields, data, &["--lr", "1e30"]);
    let parts = ["step ", "epoch 1, batch", "learning rate", "training diverged", "a lower --lr"];
    let (status, err) = (said.status, said.err.clone());
    said.refused(&parts);
    assert!(
        status == Some(2) && (err.contains("operation to go wrong") || err.contains("norm of the gradients")),
        "{err}"
    );
    // What was saved before is whole, and of weights that are numbers.
    let saved = TensorFile::read(&folder.join("run/checkpoint.safetensors")).unwrap();
    assert!(saved.tensors["head.weight"].to_vec::<f32>().unwrap().iter().all(|weight| weight.is_finite()));
}

/// Nobody can go on from weights that are not finite, and so they are not saved.
#[test]
fn a_checkpoint_that_nobody_could_read_is_not_written() {
    let (folder, data) = (fresh("infinite-weights"), &of_one_epoch().data);
    // Steps and decay of 3.3e38, each of which is finite, while their sum is not.
    let rate =
        ["--lr", "3.3e38", "--set", "schedule.warmup_epochs=0", "optimizer.betas=0,0.999", "optimizer.weight_decay=1"];
    train(&folder, "checkpoint_every = 1", data, &rate).refused(&["training diverged", "after step 1 numbers of"]);
    biformer(&["eval", "--checkpoint", text(&folder.join("run"))]).ok();
    let folder = fresh("infinite-step");
    train(&folder, "", data, &["--lr", "3.3e38", "--set", "schedule.warmup_epochs=0"])
        .refused(&["step 1", "lr is 3.3e38"]);
}

/// They are finite themselves, but AdamW's second moments would not be, ever after.
#[test]
fn gradients_whose_squares_overflow() {
    let folder = fresh("huge-gradients");
    let shared = of_one_epoch();
    let mut huge = samples::weights(&shared.run);
    let head = &huge.tensors["head.weight"];
    let large: Vec<f32> = head.to_vec::<f32>().unwrap().iter().map(|weight| 1e24 * weight).collect();
    let large = Tensor::from_slice(&large, head.shape().clone()).unwrap();
    huge.tensors.insert("head.weight".into(), large);
    huge.write(&folder.join("huge.safetensors")).unwrap();
    let fields = format!("clip_norm = 0.0\nweights = '{}'\n{NORMALISED}", text(&folder.join("huge.safetensors")));
    train(&folder, &fields, &shared.data, &[]).refused(&[
        "step 1 (epoch 1, batch 1",
        "norm of the gradients is 2.",
        "e23",
    ]);
    biformer(&["eval", "--checkpoint", text(&folder.join("run"))]).ok();
}

/// Weights so large that one layer's results are no numbers, and a trained model whose weights are none.
#[test]
fn the_first_operation_to_go_wrong_is_named() {
    let folder = fresh("huge-weights");
    let shared = of_one_epoch();
    let mut huge = samples::weights(&shared.run);
    let weight = huge.tensors.get_mut("stages.1.0.mlp.0.weight").unwrap();
    *weight = Tensor::full(weight.shape().clone(), f32::MAX);
    let file = folder.join("huge.safetensors");
    huge.write(&file).unwrap();
    let parts = [
        "step 1 (epoch 1, batch 1 of 10)",
        "these weights, or the images, are of no use",
        "first operation to go wrong",
        "linear",
    ];
    train(&folder, NORMALISED, &shared.data, &["--weights", text(&file)]).refused(&parts);

    let weight = huge.tensors.get_mut("stages.1.0.mlp.0.weight").unwrap();
    *weight = Tensor::full(weight.shape().clone(), f32::NAN);
    huge.write(&file).unwrap();
    fs::remove_dir_all(folder.join("run")).unwrap();
    train(&folder, NORMALISED, &shared.data, &["--weights", text(&file)])
        .refused(&["huge.safetensors: tensor stages.1.0.mlp.0.weight holds NaN", "another run"]);

    let mut good = samples::weights(&shared.run);
    let (norm, _) = good.tensors.iter().find(|(name, _)| name.ends_with(".running_var")).expect("a normalisation");
    let norm = norm.clone();
    for (name, value) in [("stages.1.0.mlp.0.weight", 1e300), (norm.as_str(), -1.0)] {
        let wrong = Tensor::full(good.tensors[name].shape().clone(), value);
        let right = good.tensors.insert(name.into(), wrong).unwrap();
        good.write(&file).unwrap();
        train(&folder, NORMALISED, &shared.data, &["--weights", text(&file)]).refused(&[
            name,
            " holds ",
            "another run",
        ]);
        good.tensors.insert(name.into(), right);
    }

    let mut checkpoint = TensorFile::read(&shared.run.join("checkpoint.safetensors")).unwrap();
    let mut averaged = |number: f32| {
        let average = checkpoint.tensors.get_mut("average.parameters").unwrap();
        *average = Tensor::full(average.shape().clone(), number);
        checkpoint.write(&file).unwrap();
    };
    averaged(f32::NAN);
    let exported = folder.join("exported.safetensors");
    for command in [&["eval"][..], &["export", "--output", text(&exported)]] {
        let said = biformer(&[command, &["--checkpoint", text(&file)]].concat());
        said.refused(&["huge.safetensors", "averaged parameters hold NaN", "another run"]);
    }
    assert!(!exported.exists());
    let run = folder.join("resumed");
    copy_folder(&shared.run, &run);
    fs::copy(&file, run.join("checkpoint.safetensors")).unwrap();
    biformer(&["train", "--resume", "--epochs", "2", "--data", text(&shared.data), "--out", text(&run)]).refused(&[
        "checkpoint.safetensors",
        "averaged parameters hold NaN",
        "no step can go on",
    ]);
    averaged(f32::MAX);
    biformer(&["eval", "--checkpoint", text(&file)]).refused(&[
        "huge.safetensors",
        "the loss is NaN",
        "first operation to go wrong",
        "conv2d",
    ]);
    let picture = folder.join("picture.png");
    samples::picture(&picture, 32, 32, [9, 90, 200]);
    biformer(&["predict", "--checkpoint", text(&file), text(&picture)]).refused(&["not finite", "another run"]);
}
