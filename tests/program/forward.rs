//! `biformer forward`: a model on a tensor from a file.

use crate::common::program::{biformer, fresh, text};
use crate::common::{generator, golden, samples};
use biformer::model::{BiFormer, TensorFile, preset};
use biformer::tensor::{DType, Tensor};
use std::fs;
use std::path::Path;

#[test]
fn forward_gives_the_references_logits() {
    let folder = fresh("forward");
    let vector = golden::vectors("forward").into_iter().find(|vector| vector.name() == "tiny_224").unwrap();
    let [weights, input, output] =
        ["weights", "input", "output"].map(|name| folder.join(format!("{name}.safetensors")));
    let like = BiFormer::new(&vector.config(), 0, DType::F32).unwrap();
    generator::state_dict(&like.state_dict().unwrap()).write(&weights).unwrap();
    let shape = golden::extents(&vector.json["input"]["shape"]);
    let mut file = TensorFile::default();
    let values = Tensor::from_slice(&generator::values("input", &shape), shape).unwrap();
    file.tensors.insert("input".into(), values);
    file.write(&input).unwrap();
    let files = ["--weights", text(&weights), "--input", text(&input), "--output", text(&output)];
    let logits = |name: &str, file: &TensorFile| file.tensors[name].cast(DType::F64).unwrap().to_vec::<f64>().unwrap();
    let wanted = logits("logits", &vector.outputs());
    let in_type = |dtype: &str| {
        biformer(&[&["forward", "--model", "tiny", "--dtype", dtype][..], &files].concat()).ok();
        logits("logits", &TensorFile::read(&output).unwrap())
    };
    golden::assert_within("f64", &in_type("f64"), &wanted, 1e-9);
    let single = in_type("f32");
    golden::assert_within("f32", &single, &wanted, 1e-4);
    // Operands with 8 bits, in fourteen blocks one after the other.
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let rounded = in_type("bf16");
    let error = norm(&mut rounded.iter().zip(&single).map(|(a, b)| a - b)) / norm(&mut single.iter().copied());
    println!("bf16: {error:.1e}");
    assert!(error > 1e-4 && error < 3e-2, "{error}");
    // A dense backbone takes a classifier's weights; a field goes by the published code's name as well.
    let set = ["--set", "features=dense", "n_wins=7", "auto_pad=true"];
    let said = biformer(&[&["forward", "--model", "tiny"][..], &files, &set].concat()).ok().out;
    assert!(said.contains("out3 f32 (2, 512, 7, 7)"), "{said}");
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
    samples::grey(&input);
    let run = &samples::of_one_epoch().run;
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
    let of_run = |more: &[&str]| biformer(&[&["forward", "--checkpoint", text(run)][..], &files, more].concat());
    for named in [&[][..], &["--model", "nano"]] {
        of_run(named).ok();
        assert_eq!(TensorFile::read(&output).unwrap().tensors["logits"].to_vec::<f32>().unwrap(), with_fields);
    }
    of_run(&["--model", "micro"]).refused(&["--model: ", "knows its model, nano; leave it out"]);
    forward(Path::new("/nowhere.safetensors")).refused(&[
        "/nowhere.safetensors",
        "expected",
        "state_dict",
        "run folder",
    ]);
}

/// Of weights all over the model, by what the loss does when they move.
#[test]
fn forward_gives_gradients() {
    let folder = fresh("forward-gradients");
    let [weights, input, output] =
        ["weights", "input", "output"].map(|name| folder.join(format!("{name}.safetensors")));
    let fields = ["depth=1,1,1", "embed_dim=24,48,96", "layer_scale=0.5"];
    let config = preset("nano").unwrap().config().with_overrides(fields).unwrap();
    let mut model = generator::state_dict(&BiFormer::new(&config, 0, DType::F64).unwrap().state_dict().unwrap());
    let mut given = TensorFile::default();
    let shape = [3, 3, 32, 32];
    given.tensors.insert("input".into(), Tensor::from_slice(&generator::values("input", &shape), shape).unwrap());
    let forward = |given: &TensorFile, more: &[&str]| {
        given.write(&input).unwrap();
        let files = ["--weights", text(&weights), "--input", text(&input), "--output", text(&output)];
        biformer(&[&["forward", "--gradients", "--dtype", "f64"][..], &files, &["--set"], &fields, more].concat())
    };
    let numbers = |name: &str| TensorFile::read(&output).unwrap().tensors[name].to_vec::<f64>().unwrap();

    model.write(&weights).unwrap();
    forward(&given, &[]).refused(&["input.safetensors", "\"labels\", (N)"]);
    for (labels, said) in [
        (Tensor::from_slice(&[1u32, 10, 3], [3]).unwrap(), "label 10, where the model has 10 classes"),
        (Tensor::from_slice(&[1u32, 2], [2]).unwrap(), "labels are (2), expected (3), one for each image"),
        (Tensor::from_slice(&[1.0f32, 2.0, 3.0], [3]).unwrap(), "labels are f32, expected integers"),
    ] {
        given.tensors.insert("labels".into(), labels);
        forward(&given, &[]).refused(&[said]);
    }
    let labels = [7u32, 0, 9];
    given.tensors.insert("labels".into(), Tensor::from_slice(&labels, [3]).unwrap());
    forward(&given, &["features=dense"]).refused(&["--gradients", "only logits have a loss"]);

    let said = forward(&given, &[]).ok().out;
    assert!(
        ["logits f64 (3, 10)", "loss f64 ()", "NAME.grad for each of"].iter().all(|part| said.contains(part)),
        "{said}"
    );
    let (loss, logits) = (numbers("loss")[0], numbers("logits"));
    // No block is dropped, however likely that is in training.
    let whole = fs::read(&output).unwrap();
    forward(&given, &["drop_path=0.9"]).ok();
    assert!(fs::read(&output).unwrap() == whole);
    let of_image = |(row, &label): (&[f64], &u32)| row.iter().map(|x| x.exp()).sum::<f64>().ln() - row[label as usize];
    approx::assert_relative_eq!(loss, logits.chunks(10).zip(&labels).map(of_image).sum::<f64>() / 3.0, epsilon = 1e-12);
    for (name, place) in [
        ("downsample_layers.0.0.weight", 17),
        ("stages.0.0.pos_embed.weight", 5),
        ("stages.1.0.attn.qkv.qkv.weight", 1000),
        ("stages.2.0.gamma1", 3),
        ("head.bias", 7),
    ] {
        let (whole, mut moved) = (model.tensors[name].clone(), [0.0; 2]);
        let elements = whole.cast(DType::F64).unwrap().to_vec::<f64>().unwrap();
        forward(&given, &[]).ok();
        let gradient = numbers(&format!("{name}.grad"));
        assert_eq!(gradient.len(), elements.len());
        for (step, loss) in [1e-5, -1e-5].into_iter().zip(&mut moved) {
            let mut elements = elements.clone();
            elements[place] += step;
            model.tensors.insert(name.into(), Tensor::from_slice(&elements, whole.shape().clone()).unwrap());
            model.write(&weights).unwrap();
            forward(&given, &[]).ok();
            *loss = numbers("loss")[0];
        }
        approx::assert_relative_eq!((moved[0] - moved[1]) / 2e-5, gradient[place], epsilon = 1e-8, max_relative = 1e-6);
        assert!(gradient[place].abs() > 1e-6, "{name}: a gradient that tells something");
        model.tensors.insert(name.into(), whole);
        model.write(&weights).unwrap();
    }
}
