//! `biformer forward`: a model on a tensor from a file.

mod common;

use biformer::model::{BiFormer, TensorFile};
use biformer::tensor::{DType, Tensor};
use common::program::{biformer, fresh, text};
use common::{generator, golden, samples};
use std::path::Path;

#[test]
fn forward_gives_the_references_logits() {
    let folder = fresh("forward");
    let vector = golden::vectors("forward").into_iter().find(|vector| vector.name() == "tiny_224").unwrap();
    let [weights, input, output] =
        ["weights", "input", "output"].map(|name| folder.join(format!("{name}.safetensors")));
    let like = BiFormer::new(&vector.config(), 0, DType::F32).unwrap();
    generator::state_dict(&like.state_dict().unwrap()).write(&weights).unwrap();
    let shape: Vec<usize> = golden::numbers(&vector.json["input"]["shape"]).iter().map(|&x| x as usize).collect();
    let mut file = TensorFile::default();
    let values = Tensor::from_slice(&generator::values("input", &shape), shape).unwrap();
    file.tensors.insert("input".into(), values);
    file.write(&input).unwrap();
    let files = ["--weights", text(&weights), "--input", text(&input), "--output", text(&output)];
    let logits = |name: &str, file: &TensorFile| file.tensors[name].cast(DType::F64).unwrap().to_vec::<f64>().unwrap();
    let wanted = logits("logits", &vector.outputs("f64"));
    for (dtype, bound) in [("f64", 1e-9), ("f32", 1e-4)] {
        biformer(&[&["forward", "--model", "tiny", "--dtype", dtype][..], &files].concat()).ok();
        let written = TensorFile::read(&output).unwrap();
        golden::assert_within(dtype, &logits("logits", &written), &wanted, bound);
    }
    // A dense backbone takes a classifier's weights; a field goes by the published code's name as well.
    let set = ["--set", "features=dense", "n_wins=7", "auto_pad=true"];
    let said = biformer(&[&["forward", "--model", "tiny"][..], &files, &set].concat()).ok().out;
    assert!(said.contains("out3 f32 (1, 512, 7, 7)") || said.contains("out3 f32 (2, 512, 7, 7)"), "{said}");
    assert!(said.contains("lacks extra_norms.0.bias, extra_norms.0.weight"), "it says what the file lacks: {said}");
    // Its norms are those of a new model: every pixel of a map has the variance 1.
    let written = TensorFile::read(&output).unwrap();
    for (name, channels) in [("out0", 64), ("out3", 512)] {
        let pixels =
            written.tensors[name].permute(&[0, 2, 3, 1]).unwrap().contiguous().unwrap().to_vec::<f32>().unwrap();
        let squares: f64 = pixels[..channels].iter().map(|&x| f64::from(x).powi(2)).sum();
        approx::assert_relative_eq!(squares / channels as f64, 1.0, max_relative = 1e-3);
    }
}

#[test]
fn forward_takes_a_run_folder_and_says_what_weights_may_be() {
    let folder = fresh("forward-run");
    let [input, output] = ["input", "output"].map(|name| folder.join(format!("{name}.safetensors")));
    let mut file = TensorFile::default();
    file.tensors.insert("input".into(), Tensor::full([1, 3, 32, 32], 0.5f32));
    file.write(&input).unwrap();
    let run = &samples::trained("forward-trained").run;
    let forward = |weights: &Path| {
        let files = ["--weights", text(weights), "--input", text(&input), "--output", text(&output)];
        let fields = samples::CONFIG.split("[architecture]\n").nth(1).unwrap().replace([' ', '[', ']'], "");
        let set: Vec<&str> = ["--set"].into_iter().chain(fields.lines()).collect();
        biformer(&[&["forward"][..], &files, &set].concat())
    };
    let logits = |weights: &Path| {
        forward(weights).ok();
        TensorFile::read(&output).unwrap().tensors["logits"].to_vec::<f32>().unwrap()
    };
    assert_eq!(logits(run), logits(&run.join("checkpoint.safetensors")));
    // A run knows its model.
    let (with_fields, files) = (logits(run), ["--input", text(&input), "--output", text(&output)]);
    biformer(&[&["forward", "--weights", text(run)][..], &files].concat()).ok();
    assert_eq!(TensorFile::read(&output).unwrap().tensors["logits"].to_vec::<f32>().unwrap(), with_fields);
    forward(Path::new("/nowhere.safetensors")).refused(&[
        "/nowhere.safetensors",
        "expected",
        "state_dict",
        "run folder",
    ]);
}
