//! PyTorch's own files, which PyTorch wrote (`fixtures/pth/make.py`): read to the bit, and used as safetensors files
//! are. What is no such file, or was damaged, is refused.

use crate::common::generator;
use crate::common::program::{biformer, fresh, json, text};
use biformer::model::{BiFormer, TensorFile};
use biformer::tensor::DType;
use proptest::prelude::*;
use std::fs;
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/pth").join(name)
}

/// How the model of `training.pth` differs from `nano`, as `--set` takes it, and its logits, which PyTorch computed in
/// f64.
fn expected() -> (Vec<String>, Vec<f64>) {
    let vector = json(&fs::read_to_string(fixture("training.json")).unwrap());
    let fields = vector["config"].as_object().unwrap().iter().map(|(field, value)| format!("{field}={value}"));
    (fields.collect(), vector["logits"].as_array().unwrap().iter().map(|logit| logit.as_f64().unwrap()).collect())
}

#[test]
fn a_training_programs_file_has_the_models_weights_to_the_bit() {
    let (fields, logits) = expected();
    let set = Vec::from_iter(fields.iter().map(String::as_str));
    let config = biformer::model::preset("nano").unwrap().config().with_overrides(set.iter().copied()).unwrap();
    let read = TensorFile::read(&fixture("training.pth")).unwrap();
    let mut model = BiFormer::new(&config, 0, DType::F32).unwrap();
    let generated = generator::state_dict(&model.state_dict().unwrap());
    assert!(read.to_bytes().unwrap() == generated.to_bytes().unwrap());
    assert_eq!(model.load(&read, "training.pth").unwrap(), [""; 0]);

    // From one program to the other, with nothing between them.
    let folder = fresh("pth-forward");
    let [input, output] = ["input", "output"].map(|name| folder.join(format!("{name}.safetensors")));
    let mut images = TensorFile::default();
    images.tensors.insert("input".into(), generator::tensor("input", &[1, 3, 32, 32]).cast(DType::F32).unwrap());
    images.write(&input).unwrap();
    let weights = fixture("training.pth");
    let files = ["--weights", text(&weights), "--input", text(&input), "--output", text(&output), "--set"];
    biformer(&[&["forward", "--model", "nano"][..], &files, &set].concat()).ok();
    let computed = TensorFile::read(&output).unwrap().tensors["logits"].to_vec::<f32>().unwrap();
    assert_eq!(computed.len(), logits.len());
    for (ours, theirs) in computed.iter().zip(&logits) {
        assert!((f64::from(*ours) - theirs).abs() < 1e-5, "{computed:?} {logits:?}");
    }

    // Other commands take it, too, and export makes a safetensors file of it.
    let exported = folder.join("exported.safetensors");
    biformer(&["export", "--checkpoint", text(&weights), "--output", text(&exported)]).ok();
    for misnamed in ["exported.pth", "exported.pt"] {
        let output = folder.join(misnamed);
        biformer(&["export", "--checkpoint", text(&weights), "--output", text(&output)]).refused(&[
            misnamed,
            "safetensors.torch.load_file",
            "name it .safetensors",
        ]);
    }
    // In place of an empty file, too, as `mktemp` makes one.
    let empty = folder.join("empty.safetensors");
    fs::write(&empty, "").unwrap();
    biformer(&["export", "--checkpoint", text(&weights), "--output", text(&empty)]).ok();
    assert!(fs::read(&empty).unwrap() == fs::read(&exported).unwrap());
    let mut exported = TensorFile::read(&exported).unwrap();
    exported.metadata.clear();
    assert!(exported.to_bytes().unwrap() == generated.to_bytes().unwrap());
}

#[test]
fn tensors_of_every_type_and_layout() {
    let read = TensorFile::read(&fixture("kinds.pth")).unwrap().unwrapped();
    let floats = |name: &str| {
        let tensor = &read.tensors[name];
        (tensor.shape().to_vec(), tensor.cast(DType::F64).unwrap().to_vec::<f64>().unwrap())
    };
    let values =
        |key: &str, shape: &[usize]| -> Vec<f64> { generator::values(key, shape).into_iter().map(f64::from).collect() };
    let f32s = values("f32", &[4, 6]);
    assert_eq!(floats("f32"), (vec![4, 6], f32s.clone()));
    assert_eq!(floats("f64"), (vec![5], values("f64", &[5])));
    assert_eq!(read.tensors["f64"].dtype(), DType::F64);
    for (name, shape) in [("bf16", vec![7]), ("f16", vec![3, 1])] {
        let exact = values(name, &shape);
        assert_eq!(floats(name).0, shape, "{name}");
        for (rounded, exact) in floats(name).1.iter().zip(&exact) {
            assert!((rounded - exact).abs() <= exact.abs() / 256.0, "{name}: {rounded} {exact}");
        }
    }
    assert_eq!(read.tensors["bf16"].dtype(), DType::Bf16);
    assert_eq!(read.tensors["i64"].to_vec::<u32>().unwrap(), [300, 301, 302, 303, 304, 305]);
    assert_eq!(read.tensors["i32"].item::<u32>().unwrap(), 70000);
    let transposed = (0..24).map(|i| f32s[i % 4 * 6 + i / 4]).collect();
    assert_eq!(floats("transposed"), (vec![6, 4], transposed));
    assert_eq!(floats("part"), (vec![2, 3], [&f32s[8..11], &f32s[14..17]].concat()));
    assert_eq!(floats("channels_last"), (vec![2, 3, 4, 5], values("channels_last", &[2, 3, 4, 5])));
    assert_eq!(floats("empty"), (vec![0, 3], vec![]));
    assert_eq!(floats("parameter"), (vec![2, 2], values("parameter", &[2, 2])));
    assert_eq!(floats("buffer"), (vec![3], values("buffer", &[3])));
    assert_eq!(read.tensors.len(), 12);
}

#[test]
fn what_holds_no_weights_is_refused_with_the_way_out() {
    for (name, parts) in [
        ("old.pth", &["before 1.6", "torch.save"][..]),
        ("module.pth", &["no tensors by name", "state_dict()"]),
        ("several.pth", &["teacher and in student", "save one of them"]),
        ("bool.pth", &["tensor mask", "BoolStorage", "leave it out"]),
        ("sparse.pth", &["tensor sparse", "_rebuild_sparse_tensor", "save dense tensors"]),
        ("negated.pth", &["tensor negated", "save a copy"]),
        ("expanded.pth", &["larger than the file", "contiguous()"]),
    ] {
        let said = biformer(&["eval", "--model", "nano", "--checkpoint", text(&fixture(name))]);
        said.refused(&[&[name][..], parts].concat());
    }
    let archive = fresh("pth-archive").join("pictures.zip");
    fs::write(&archive, b"PK\x03\x04 and then nothing of the kind").unwrap();
    biformer(&["predict", "--model", "nano", "--checkpoint", text(&archive), "x.png"])
        .refused(&["pictures.zip", "not a file of tensors, or a damaged one"]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    /// Neither a byte that is another nor an end that comes too early makes reading panic, or hang. The archive has
    /// checksums, so that a change is noticed, but for those in what nobody reads.
    #[test]
    fn damaged_files_are_refused_or_the_same(
        name in prop_oneof![Just("training.pth"), Just("kinds.pth")],
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
        cut in any::<bool>(),
    ) {
        let whole = fs::read(fixture(name)).unwrap();
        let mut bytes = whole.clone();
        let at = at.index(whole.len());
        if cut { bytes.truncate(at) } else { bytes[at] = byte }
        let damaged = fresh("pth-damaged").join(name);
        fs::write(&damaged, &bytes).unwrap();
        if let Ok(read) = TensorFile::read(&damaged) {
            prop_assert!(!cut);
            let right = TensorFile::read(&fixture(name)).unwrap();
            prop_assert!(read.to_bytes().unwrap() == right.to_bytes().unwrap(), "byte {at} as {byte}");
        }
    }
}
