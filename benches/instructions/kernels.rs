//! The kernels that are counted: each once, on fixed inputs, with one thread.

use autograd::{Gradients, ParametersBuilder, Result, Tape, Var};
use biformer::optim::{AdamW, AdamWConfig};
use ops::{Bra, Conv2d};
use std::hint::black_box;
use std::ops::Range;
use tensor::cpu::isa::Isa;
use tensor::cpu::parallel::thread_pool;
use tensor::{DType, Tensor};

type Apply = Box<dyn for<'t> Fn(&[Var<'t>]) -> Result<Var<'t>> + Send + Sync>;

/// An operation on f32 inputs of some shapes, and which of their gradients are counted together, under which name.
/// The shapes are small: valgrind computes a fused multiply-add number by number, in a function call each.
struct Kernel {
    name: String,
    shapes: Vec<Vec<usize>>,
    backward: Vec<(&'static str, Range<usize>)>,
    apply: Apply,
}

/// Runs all kernels. Prints the instruction set, and then the name of each kernel in the order in which
/// [`counted`] meets them.
pub fn run() {
    let pool = thread_pool(1).expect("one thread");
    pool.install(|| {
        println!("{}", Isa::current().name());
        for kernel in kernels() {
            count(&kernel).unwrap_or_else(|error| panic!("{}: {error}", kernel.name));
        }
        adamw();
    });
}

fn measured<R>(name: &str, work: impl FnOnce() -> R) -> R {
    println!("{name}");
    let mut work = Some(work);
    let mut result = None;
    counted(&mut || result = work.take().map(|work| work()));
    result.expect("invariant: counted calls it")
}

/// What happens in here is counted: callgrind knows this function by its name.
#[inline(never)]
pub fn counted(work: &mut dyn FnMut()) {
    work();
    // Prevents a tail call, from which the work would return past this function.
    black_box(());
}

/// A kernel's forward pass, and then its gradients.
fn count(kernel: &Kernel) -> Result<()> {
    let inputs = kernel.shapes.iter().zip(1..).map(|(shape, seed)| numbers(shape, seed));
    let inputs: Vec<Tensor> = inputs.collect::<tensor::Result<_>>()?;
    for (pass, (name, wanted)) in kernel.backward.iter().enumerate() {
        let tape = Tape::new();
        let place = |(index, input): (usize, &Tensor)| match wanted.contains(&index) {
            true => tape.input(input.clone()),
            false => tape.constant(input.clone()),
        };
        let inputs: Vec<Var<'_>> = inputs.iter().enumerate().map(place).collect();
        let forward = || (kernel.apply)(&inputs);
        let out = if pass == 0 { measured(&format!("{}, forward", kernel.name), forward) } else { forward() }?;
        let (upstream, mut gradients) = (numbers(out.shape(), 0)?, Gradients::default());
        measured(&format!("{}, {name}", kernel.name), || tape.backward_from(&out, upstream, &mut gradients))?;
    }
    Ok(())
}

/// Numbers in [-1, 1) that are quickly made: valgrind is slow, and random ones would take longer than the kernels.
fn numbers(shape: &[usize], seed: usize) -> tensor::Result<Tensor> {
    const MODULUS: usize = 1021;
    let number = |index: usize| (index * index + 37 * seed * index) % MODULUS;
    let values = (0..shape.iter().product()).map(|index| number(index) as f32 / (MODULUS / 2) as f32 - 1.0);
    Tensor::from_slice(&values.collect::<Vec<f32>>(), shape)
}

fn kernels() -> Vec<Kernel> {
    let mut kernels = vec![];
    let mut add = |name: String, shapes: &[&[usize]], apply: Apply| {
        let shapes: Vec<Vec<usize>> = shapes.iter().map(|shape| shape.to_vec()).collect();
        let backward = match name.starts_with("linear") {
            true => vec![("dx", 0..1), ("dw", 1..3)],
            false => vec![("backward", 0..shapes.len())],
        };
        kernels.push(Kernel { name, shapes, backward, apply });
    };
    // Queries, keys and values: of nano's first stage for an image, and of tiny's first and third stages for a quarter
    // of one.
    for [tokens, inputs, outputs] in [[256, 48, 144], [784, 64, 192], [49, 256, 768]] {
        add(
            format!("linear {tokens}x{inputs} to {outputs}"),
            &[&[tokens, inputs], &[outputs, inputs], &[outputs]],
            Box::new(|v| ops::linear(&v[0], &v[1], Some(&v[2]))),
        );
    }
    add("gelu 784x192".into(), &[&[784, 192]], Box::new(|v| ops::gelu(&v[0])));
    add(
        "layer_norm 784x64".into(),
        &[&[784, 64], &[64], &[64]],
        Box::new(|v| ops::layer_norm(&v[0], &v[1], &v[2], 1e-6)),
    );
    for kernel in [3, 5] {
        add(
            format!("dwconv {kernel}x{kernel} 28x28x64"),
            &[&[1, 28, 28, 64], &[64, 1, kernel, kernel], &[64]],
            Box::new(|v| ops::dwconv(&v[0], &v[1], Some(&v[2]))),
        );
    }
    // The second convolution of tiny's stem, and its first patch merging, for smaller images.
    for [side, inputs, outputs] in [[28, 32, 64], [14, 64, 128]] {
        add(
            format!("conv2d {side}x{side}x{inputs} to {outputs}"),
            &[&[1, side, side, inputs], &[outputs, inputs, 3, 3], &[outputs]],
            Box::new(|v| ops::conv2d(&v[0], &v[1], Some(&v[2]), Conv2d { stride: 2, padding: 1 })),
        );
    }
    // The routed stages of nano and of tiny.
    for (side, dim, heads, n_win, topk) in
        [(16, 48, 2, 4, 4), (8, 96, 4, 4, 8), (56, 64, 2, 7, 1), (28, 128, 4, 7, 4), (14, 256, 8, 7, 16)]
    {
        let scale = (dim as f64).powf(-0.5);
        let attributes = Bra { heads, qk_dim: dim, topk, grid: [n_win; 2], scale, valid: None };
        add(
            format!("bra {side}x{side}x{dim} k={topk}"),
            &[&[1, side, side, 3 * dim], &[dim, 1, 5, 5], &[dim]],
            Box::new(move |v| Ok(ops::bra(&v[0], Some([&v[1], &v[2]]), &attributes)?.out)),
        );
    }
    add("attention 7x7x512".into(), &[&[1, 7, 7, 1536]], Box::new(|v| ops::attention(&v[0], 8, 0.125)));
    kernels
}

fn adamw() {
    const COUNT: usize = 1 << 18;
    let mut builder = ParametersBuilder::default();
    let id = builder.add("weight", [COUNT], (0..COUNT).map(|i| (i as f64).sin()));
    let mut parameters = builder.build(DType::F32).expect("one parameter");
    let mut gradients = Gradients::new(&parameters).unwrap();
    let tape = Tape::new();
    let weight = tape.parameter(&parameters, id);
    let loss = ops::mul(&weight, &weight).and_then(|square| ops::sum(&square, &[0], false)).expect("a sum of squares");
    tape.backward(&loss, &mut gradients).expect("its gradient");
    drop((weight, loss));
    drop(tape);
    let mut optimizer = AdamW::new(&parameters, AdamWConfig::default()).expect("the default configuration");
    let step = || optimizer.step(&mut parameters, &mut gradients, 1e-3).expect("a step");
    measured(&format!("adamw {COUNT}"), step);
}
