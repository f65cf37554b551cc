//! The model against the published code, on vectors that were recorded from it.

mod common;

use biformer::autograd::{Gradients, Tape};
use biformer::model::{BiFormer, Mode, Routes, Trace, preset};
use biformer::optim::{AdamW, AdamWConfig};
use biformer::tensor::cuda::Gpu;
use biformer::tensor::{DType, Device, Tensor};
use common::generator;
use common::golden::{Vector, assert_close, assert_within, elements, extents, images, l2, nchw, numbers, vectors};
use serde_json::Value;
use std::collections::BTreeSet;

#[test]
fn the_generator_gives_its_known_first_values() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/golden/generator_check.json");
    let known: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let shape = |key: &str| match key {
        "input" => vec![2, 3, 224, 224],
        "downsample_layers.0.0.weight" => vec![32, 3, 3, 3],
        "stages.0.0.attn.qkv.qkv.weight" => vec![192, 64],
        "head.weight" => vec![1000, 512],
        _ => vec![32],
    };
    for (key, known) in known.as_object().unwrap() {
        let first: Vec<f64> = generator::values(key, &shape(key)).iter().take(4).map(|&x| f64::from(x)).collect();
        assert_eq!(first, numbers(&known["first4"]), "{key}");
    }
}

#[test]
fn state_dict_names_shapes_and_types_are_the_published_ones() {
    for name in ["tiny", "small", "base", "stl", "stl_nchw"] {
        let path = format!("{}/tests/fixtures/golden/keys_biformer_{name}.txt", env!("CARGO_MANIFEST_DIR"));
        let theirs: BTreeSet<String> = std::fs::read_to_string(path).unwrap().lines().map(str::to_owned).collect();
        let model = BiFormer::blank(&preset(name).unwrap().config(), DType::F32).unwrap();
        let kind = |dtype| if dtype == DType::Index { "int64" } else { "float32" };
        let ours = model.state_dict().unwrap().tensors;
        let ours: BTreeSet<String> =
            ours.iter().map(|(name, t)| format!("{name} {:?} {}", t.shape().to_vec(), kind(t.dtype()))).collect();
        assert_eq!(ours, theirs, "{name}");
    }
}

#[test]
fn forward_passes_in_f64() {
    for vector in vectors("forward") {
        let model = vector.model(DType::F64);
        let shape = extents(&vector.json["input"]["shape"]);
        let tape = Tape::inference();
        let pass = model.pass(&tape, Mode::Evaluate).unwrap().keep_maps();
        let values = model.run(&pass, &images("input", &shape, DType::F64)).unwrap();
        let trace = pass.into_trace();
        assert_eq!(trace.maps.len(), 2 * model.config().stages(), "a map before each stage, and one behind it");
        // The first map that differs is the first to be looked at.
        for (name, map) in &trace.maps {
            compare_statistics(&format!("{} {name}", vector.name()), &nchw(map), &vector.json["f64"][name]);
        }
        compare_routes(&vector, &trace.routes);
        let stored = vector.outputs();
        for (index, value) in values.iter().enumerate() {
            let (name, got) = named(index, value.value());
            let want = &stored.tensors[&name];
            let tolerance = if want.dtype() == DType::F64 { 1e-9 } else { 1e-6 };
            let want = elements(want);
            assert_close(&format!("{} {name}", vector.name()), &got, &want, tolerance);
        }
        println!("{}: as published", vector.name());
    }
}

#[test]
fn forward_passes_in_f32() {
    for vector in vectors("forward") {
        let model = vector.model(DType::F32);
        let shape = extents(&vector.json["input"]["shape"]);
        let tape = Tape::inference();
        let output = model.forward(&tape, &images("input", &shape, DType::F32), Mode::Evaluate).unwrap();
        let stored = vector.outputs();
        for (index, value) in output.values.iter().enumerate() {
            let (name, got) = named(index, value.value());
            let want = elements(&stored.tensors[&name]);
            assert_within(&format!("{} {name}", vector.name()), &got, &want, 1e-4);
        }
    }
}

/// The name and the elements of a model's output: a classifier's one, or one of a backbone's.
fn named(index: usize, value: &Tensor) -> (String, Vec<f64>) {
    match value.rank() {
        2 => ("logits".to_owned(), elements(value)),
        _ => (format!("out{index}"), nchw(value)),
    }
}

/// First values, sum, norm and largest value of a map.
fn compare_statistics(what: &str, got: &[f64], want: &Value) {
    const TOLERANCE: f64 = 1e-9;
    let norm = want["l2"].as_f64().unwrap();
    assert_within(&format!("{what} l2"), &[l2(got)], &[norm], TOLERANCE * norm);
    assert_within(&format!("{what} sum"), &[got.iter().sum()], &[want["sum"].as_f64().unwrap()], TOLERANCE * norm);
    assert_close(&format!("{what} first values"), &got[..8], &numbers(&want["first8"]), TOLERANCE);
    let largest = got.iter().fold(0.0_f64, |largest, x| largest.max(x.abs()));
    assert_close(&format!("{what} largest"), &[largest], &[want["amax"].as_f64().unwrap()], TOLERANCE);
}

/// Sets of routed regions, block by block. Regions that are pure padding have identical keys, so that which of
/// them is taken means nothing: they count as one and the same.
fn compare_routes(vector: &Vector, routes: &[Routes]) {
    let known = vector.json["routing"].as_array().unwrap();
    assert_eq!(known.len(), routes.len(), "{}: number of routed attentions", vector.name());
    for (known, Routes { name, indices: ours, regions: cut, map }) in known.iter().zip(routes) {
        let what = format!("{} {name}", vector.name());
        assert_eq!(known["block"].as_str().unwrap().trim_end_matches(".router"), name, "{what}");
        let padding = |region: usize| {
            let place = [region / cut.grid()[1], region % cut.grid()[1]];
            (0..2).any(|axis| place[axis] * cut.size()[axis] >= map[axis])
        };
        let [_, regions, topk] = ours.dims("routes", "(N, P, k)").unwrap();
        let ours: Vec<usize> = ours.to_vec::<u32>().unwrap().into_iter().map(|region| region as usize).collect();
        let set = |row: &[usize]| {
            let mut set: Vec<usize> = row.iter().map(|&r| if padding(r) { usize::MAX } else { r }).collect();
            set.sort_unstable();
            set
        };
        let row = |key: &str| -> Vec<usize> { numbers(&known[key]).iter().map(|&x| x as usize).collect() };
        assert_eq!(set(&ours[..topk]), set(&row("row0")), "{what}, first row");
        // Both rows are the first image's.
        let last = (regions - 1) * topk;
        assert_eq!(set(&ours[last..last + topk]), set(&row("row_last")), "{what}, last row");
        assert_eq!(regions, cut.count(), "{what}, regions");
        if !(0..regions).any(padding) {
            assert_eq!(ours.iter().sum::<usize>() as u64, known["idx_sum"].as_u64().unwrap(), "{what}, sum of indices");
        }
    }
}

#[test]
fn training_steps() {
    for vector in vectors("train") {
        train(&vector, &Device::Cpu);
        println!("{}: as published", vector.name());
    }
}

/// As users train: the loss, and every parameter's gradient.
#[test]
fn a_first_step_in_f32() {
    for vector in vectors("train") {
        let model = vector.model(DType::F32);
        step(&vector, &model, &mut Gradients::new(&model.parameters).unwrap(), 0, &IN_F32);
    }
}

/// The whole of it with the GPU's kernels: forward, backward and optimiser, in f64. The larger vector takes a GPU: the
/// emulated device would work on it for minutes.
#[test]
fn training_steps_on_a_gpu_in_f64() {
    let Some(gpu) = Gpu::for_tests(2) else { return };
    let device = Device::Cuda(gpu);
    let real = std::env::var_os("BIFORMER_TEST_GPU").is_some();
    let vectors = vectors("train");
    let small = vectors.iter().filter(|vector| real || vector.name().contains("64"));
    let names: Vec<&str> = small
        .map(|vector| {
            train(vector, &device);
            println!("{} on {device}: as published", vector.name());
            vector.name()
        })
        .collect();
    assert!(!names.is_empty(), "none of the vectors is small");
}

/// The numbers after a phrase in a description: "betas 0.9,0.999" gives [0.9, 0.999].
fn described<const N: usize>(vector: &Vector, field: &str, phrase: &str) -> [f64; N] {
    let text = vector.json[field].as_str().unwrap();
    let after = text.split(phrase).nth(1).unwrap_or_else(|| panic!("{}: no \"{phrase}\" in {text}", vector.name()));
    let mut numbers = after.trim().split([' ', ',', ';']).map(|number| number.parse().unwrap());
    std::array::from_fn(|_| numbers.next().unwrap())
}

/// How closely a step in a type follows the published code, which is run in f64.
struct Exactness {
    dtype: DType,
    /// Relative to the norm of what is compared.
    tolerance: f64,
    /// Relative to the norm of all gradients: what a gradient may have that is nothing but rounding. That of a bias
    /// before a BatchNorm is, in both.
    noise: f64,
}

const IN_F64: Exactness = Exactness { dtype: DType::F64, tolerance: 1e-7, noise: 1e-12 };
const IN_F32: Exactness = Exactness { dtype: DType::F32, tolerance: 2e-5, noise: 1e-6 };

/// Forward and backward of one step, compared.
fn step(vector: &Vector, model: &BiFormer, gradients: &mut Gradients, step: usize, exactness: &Exactness) -> Trace {
    let (json, shape) = (&vector.json, extents(&vector.json["shape"]));
    let &Exactness { dtype, tolerance, noise } = exactness;
    let classes = json["num_classes"].as_u64().unwrap() as usize;
    let [smoothing] = described(vector, "loss", "label smoothing");
    let labels: Vec<u32> = (0..shape[0]).map(|i| ((7 * i + 3 * step + 1) % classes) as u32).collect();
    let labels = Tensor::from_slice(&labels, [shape[0]]).unwrap().to_device(&model.device()).unwrap();
    let tape = Tape::new();
    gradients.begin_step();
    let mode = Mode::Train { seed: 0, step: step as u64 };
    let output = model.forward(&tape, &images(&format!("input.{step}"), &shape, dtype), mode).unwrap();
    let loss = biformer::ops::cross_entropy(output.logits().unwrap(), &labels, smoothing).unwrap();
    let compare = |what: String, got: f64, wanted: &Value| {
        assert_close(&format!("{} {what}", vector.name()), &[got], &[wanted.as_f64().unwrap()], tolerance);
    };
    compare(format!("loss {step}"), elements(loss.value())[0], &json["losses"][step]);
    tape.backward(&loss, gradients).unwrap();
    gradients.require_all().unwrap();

    let norm = l2(&elements(gradients.flat().unwrap()));
    compare(format!("gradient norm {step}"), norm, &json["grad_global_norm"][step]);
    if step == 0 {
        let wanted = json["grads_step0"].as_object().unwrap();
        let layout = model.parameters.layout();
        assert_eq!(wanted.len(), layout.ids().len(), "number of gradients");
        for id in layout.ids() {
            let (name, got) = (layout.name(id), elements(&gradients.parameter(id).unwrap()));
            let what = format!("{} gradient of {name}", vector.name());
            compare_summary(&what, &got, &wanted[name], tolerance, noise * norm);
        }
    }
    output.trace
}

/// A whole training, in f64: in f32 rounding grows from step to step, as AdamW makes whole steps of the smallest
/// gradients.
fn train(vector: &Vector, device: &Device) {
    let json = &vector.json;
    let mut model = vector.model(DType::F64);
    model.place(device, DType::F64).unwrap();
    let [lr] = described(vector, "optimizer", "lr");
    let ([eps], [weight_decay]) =
        (described(vector, "optimizer", "eps"), described(vector, "optimizer", "weight decay"));
    let settings = AdamWConfig { betas: described(vector, "optimizer", "betas"), eps, weight_decay };
    let mut optimizer = AdamW::new(&model.parameters, settings).unwrap();
    let mut gradients = Gradients::new(&model.parameters).unwrap();
    for number in 0..json["losses"].as_array().unwrap().len() {
        let trace = step(vector, &model, &mut gradients, number, &IN_F64);
        optimizer.step(&mut model.parameters, &mut gradients, lr).unwrap();
        model.update_statistics(&trace).unwrap();
    }
    let compare = |name: &str, got: &Tensor, wanted: &Value| {
        compare_summary(&format!("{} {name} after", vector.name()), &elements(got), wanted, IN_F64.tolerance, 0.0);
    };
    let layout = model.parameters.layout();
    for id in layout.ids() {
        let name = layout.name(id);
        compare(name, &model.parameters.get(id), &json["params_after"][name]);
    }
    for running in &model.statistics {
        for (field, values) in [("running_mean", &running.mean), ("running_var", &running.variance)] {
            let name = format!("{}.{field}", running.name);
            compare(&name, values, &json["buffers_after"][&name]);
        }
    }
    let tape = Tape::inference();
    let input = images("input.eval", &extents(&vector.json["shape"]), DType::F64);
    let output = model.forward(&tape, &input, Mode::Evaluate).unwrap();
    let wanted: Vec<f64> = json["eval_logits_after"].as_array().unwrap().iter().flat_map(numbers).collect();
    let what = format!("{} evaluation logits after", vector.name());
    assert_close(&what, &elements(output.logits().unwrap().value()), &wanted, IN_F64.tolerance);
}

/// Norm, sum and first values of a tensor, relative to its norm; differences below `noise` do not count.
fn compare_summary(what: &str, got: &[f64], want: &Value, tolerance: f64, noise: f64) {
    let norm = want["l2"].as_f64().unwrap_or_else(|| panic!("{what}: no vector"));
    let bound = tolerance * norm + noise;
    assert_within(&format!("{what}, l2"), &[l2(got)], &[norm], bound);
    let first = numbers(&want["first4"]);
    assert_within(&format!("{what}, first values"), &got[..first.len()], &first, bound);
    if let Some(sum) = want["sum"].as_f64() {
        assert_within(&format!("{what}, sum"), &[got.iter().sum()], &[sum], bound * (got.len() as f64).sqrt());
    }
}
