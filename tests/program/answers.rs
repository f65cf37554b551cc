//! What the program answers is what the library computes on the same pixels.

use crate::common::program::{biformer, fresh, json, text};
use crate::common::{generator, golden, samples};
use anyhow::Result;
use biformer::autograd::Tape;
use biformer::data::{self, Dataset, Split, Statistics, Transform};
use biformer::model::{BiFormer, Mode, TensorFile, preset};
use biformer::tensor::{DType, Tensor};
use biformer::trainer::checkpoint::Checkpoint;
use biformer::trainer::trained::TrainedModel;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

struct Shared {
    run: PathBuf,
    /// The images that the run was tested on.
    images: Arc<dyn Dataset>,
    /// The same as an image folder of the same classes, and its files.
    folder: PathBuf,
    files: Vec<PathBuf>,
}

fn shared() -> &'static Shared {
    static SHARED: OnceLock<Shared> = OnceLock::new();
    SHARED.get_or_init(|| {
        let root = fresh("answers");
        let data = samples::cifar10(&root.join("data"));
        // Sorted, as a folder's are.
        fs::write(data.join("cifar-10-batches-bin/batches.meta.txt"), "a\nb\nc\nd\ne\nf\ng\nh\ni\nj\n").unwrap();
        samples::train(&root, "", &data, &[]).ok();
        let (images, folder) = (data::open(text(&data), Split::Test).unwrap(), root.join("folder"));
        let files = (0..images.len()).map(|index| as_file(images.as_ref(), index, &folder)).collect();
        Shared { run: root.join("run"), images, folder, files }
    })
}

/// Writes a test image where an image folder has it.
fn as_file(images: &dyn Dataset, index: usize, folder: &Path) -> PathBuf {
    let sample = images.get(index).unwrap();
    let class = &images.classes()[sample.label as usize];
    let [train, val] = ["train", "val"].map(|split| folder.join(split).join(class));
    [&train, &val].into_iter().for_each(|folder| fs::create_dir_all(folder).unwrap());
    let file = val.join(format!("{index}.png"));
    samples::write_picture(&file, [32, 32], sample.image.pixels());
    file
}

/// The probabilities that a model gives the classes of an image.
fn probabilities(model: &BiFormer, pixels: &[f32]) -> Result<Vec<f64>> {
    let (tape, image) = (Tape::inference(), Tensor::from_slice(pixels, [1, 32, 32, 3])?);
    // Prepared, as the program does it: percentages are to be rounded alike.
    let logits = model.run(&model.pass_with(model.prepared()?, &tape, Mode::Evaluate), &image)?.swap_remove(0);
    let weights: Vec<f64> = logits.value().to_vec::<f32>()?.iter().map(|&x| f64::from(x).exp()).collect();
    let total: f64 = weights.iter().sum();
    Ok(weights.into_iter().map(|weight| weight / total).collect())
}

#[test]
fn predict_names_the_classes_that_the_model_gives() -> Result<()> {
    let Shared { run, images, files, .. } = shared();
    let checkpoint = Checkpoint::read(&run.join("checkpoint.safetensors"))?;
    let TrainedModel { model, .. } = checkpoint.described.into_model()?;
    let (mut expected, mut all, mut first) = (String::new(), vec![], vec![]);
    let transform = Transform::eval(32, Statistics::CIFAR10)?;
    for (index, file) in files.iter().enumerate() {
        let pixels = transform.pixels(&images.get(index)?.image);
        let mut classes: Vec<_> = probabilities(&model, &pixels)?.into_iter().zip(images.classes()).collect();
        classes.sort_by(|a, b| b.0.total_cmp(&a.0));
        first.push(classes[0].1.as_str());
        writeln!(expected, "{}", text(file))?;
        for (probability, class) in &classes[..5] {
            writeln!(expected, "  {:>5.1}%  {class}", 100.0 * probability)?;
        }
        all.push((text(file), classes));
    }
    let files: Vec<&str> = files.iter().map(|file| text(file)).collect();
    let said = biformer(&[&["predict", "--checkpoint", text(run)][..], &files].concat()).ok().out;
    assert_eq!(said, expected);
    let said = biformer(&[&["predict", "--json", "--checkpoint", text(run)][..], &files].concat()).ok().out;
    let said = json(&said);
    assert_eq!(said.as_array().unwrap().len(), all.len());
    for (prediction, (path, classes)) in said.as_array().unwrap().iter().zip(&all) {
        let said = prediction["classes"].as_array().unwrap();
        assert!(prediction["path"] == *path && said.len() == 10);
        for (said, (probability, class)) in said.iter().zip(classes) {
            assert_eq!(said["name"], **class);
            approx::assert_relative_eq!(said["probability"].as_f64().unwrap(), probability, max_relative = 1e-5);
        }
    }
    first.sort();
    first.dedup();
    assert!(first.len() > 1, "nothing but {first:?}");
    Ok(())
}

/// A folder's own statistics are ImageNet's.
#[test]
fn eval_normalises_as_the_model_was_trained_whatever_the_data() -> Result<()> {
    let Shared { run, folder, .. } = shared();
    let metrics = fs::read_to_string(run.join("metrics.jsonl"))?;
    let last = json(metrics.lines().last().unwrap());
    let said = biformer(&["eval", "--checkpoint", text(run), "--data", text(folder), "--json"]).ok().out;
    let report = json(&said);
    let (loss, tested) = (report["loss"].as_f64().unwrap(), last["test_loss"].as_f64().unwrap());
    approx::assert_relative_eq!(loss, tested, max_relative = 1e-6);
    assert_eq!(report["top1"], last["test_accuracy"]);
    Ok(())
}

#[test]
fn forward_writes_maps_channels_first_and_routes_as_the_library_computes_them() -> Result<()> {
    let folder = fresh("answers-forward");
    let fields = ["features=dense", "depth=1,1", "embed_dim=24,48", "topks=2,-2", "n_win=2", "stem_strides=2,2"];
    let model = BiFormer::new(&preset("nano")?.config().with_overrides(fields)?, 1, DType::F64)?;
    let [weights, input, output] =
        ["weights", "input", "output"].map(|name| folder.join(format!("{name}.safetensors")));
    model.state_dict()?.write(&weights)?;
    let shape = [2, 3, 32, 48];
    let mut file = TensorFile::default();
    file.tensors.insert("input".into(), generator::tensor("input", &shape));
    file.write(&input)?;
    let files = ["--weights", text(&weights), "--input", text(&input), "--output", text(&output), "--dtype", "f64"];
    // The second time over the results of the first.
    for _ in 0..2 {
        biformer(&[&["forward", "--routes"][..], &files, &["--set"], &fields].concat()).ok();
    }
    let written = TensorFile::read(&output)?.tensors;
    let tape = Tape::inference();
    let output = model.forward(&tape, &golden::images("input", &shape, DType::F64), Mode::Evaluate)?;
    let (maps, routes) = (output.values, output.trace.routes);
    assert_eq!((routes.len(), written.len()), (1, maps.len() + 1));
    let routed = &written["stages.0.0.attn.routes"];
    assert_eq!(
        (routed.shape(), routed.to_vec::<u32>()?),
        (routes[0].indices.shape(), routes[0].indices.to_vec::<u32>()?)
    );
    for (index, map) in maps.iter().enumerate() {
        let (name, [n, h, w, c]) = (format!("out{index}"), [0, 1, 2, 3].map(|axis| map.shape()[axis]));
        assert!(h != w && *written[&name].shape() == [n, c, h, w], "{name}: {}", written[&name].shape());
        golden::assert_close(&name, &written[&name].to_vec::<f64>()?, &golden::nchw(map.value()), 1e-12);
    }
    Ok(())
}

#[test]
fn answers_in_bf16_are_nearly_those_in_f32() {
    let Shared { run, files, .. } = shared();
    let answers = |precision: &str| {
        let asked = |command: &[&str]| {
            let options = ["--json", "--checkpoint", text(run), "--precision", precision];
            json(&biformer(&[command, &options].concat()).ok().out)
        };
        let (report, pictures) = (asked(&["eval"]), asked(&["predict", text(&files[0])]));
        let likeliest = &pictures[0]["classes"][0];
        let numbers = [&report["loss"], &likeliest["probability"]].map(|number| number.as_f64().unwrap());
        (numbers, likeliest["name"].clone())
    };
    let (exact, rounded) = (answers("f32"), answers("bf16"));
    assert_eq!(exact.1, rounded.1);
    for (exact, rounded) in exact.0.into_iter().zip(rounded.0) {
        assert!(exact != rounded, "{exact}");
        approx::assert_relative_eq!(exact, rounded, max_relative = 2e-2);
    }
}
