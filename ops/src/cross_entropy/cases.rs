//! Inputs on which [`cross_entropy`](super::cross_entropy) and [`soft_cross_entropy`](super::soft_cross_entropy) are
//! checked.

use crate::case::{Case, Definition, Draw, array, from_fn, indices, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};
use tensor::Tensor;

struct CrossEntropy {
    smoothing: f64,
}

impl Definition for CrossEntropy {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::cross_entropy(&x[0], x[1].value(), self.smoothing)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::cross_entropy(&x[0], &x[1], self.smoothing)
    }
}

fn case(name: &str, [rows, classes]: [usize; 2], smoothing: f64) -> Case {
    let inputs = vec![uniform([rows, classes], 1), indices([rows], classes, 2)];
    Case::new(name, inputs, CrossEntropy { smoothing })
}

/// The targets are an attribute: no gradient flows to them.
struct SoftCrossEntropy {
    targets: Tensor,
}

impl Definition for SoftCrossEntropy {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        let targets = self.targets.cast(x[0].dtype().of_sums())?.to_device(&x[0].value().device())?;
        super::soft_cross_entropy(&x[0], &targets)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        let Array { shape, data } = array(&self.targets);
        super::reference::soft_cross_entropy(&x[0], &Array { shape, data: data.into_iter().map(S::of).collect() })
    }
}

fn soft(name: &str, shape: [usize; 2], target: impl Fn(usize) -> f64) -> Case {
    Case::new(name, vec![uniform(shape, 1)], SoftCrossEntropy { targets: from_fn(shape, target) })
}

/// Two classes of each row share its target, as when two images are mixed.
fn mixed(classes: usize) -> impl Fn(usize) -> f64 {
    move |i| match i % classes {
        k if k == i / classes % classes => 0.7,
        k if k == (i / classes + 1) % classes => 0.3,
        _ => 0.0,
    }
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    let mut offset = case("logits far from zero", [3, 5], 0.1);
    offset.inputs[0] = from_fn([3, 5], |i| 700.0 + (i as f64 * 0.7).sin());
    let mut sure = case("one class outweighs the rest", [3, 5], 0.0);
    sure.inputs[0] = from_fn([3, 5], |i| if i % 5 == 2 { 12.0 } else { (i as f64).cos() });
    let mut soft_offset = soft("shares, logits far from zero", [3, 5], mixed(5));
    soft_offset.inputs[0] = offset.inputs[0].clone();
    vec![
        case("a small batch", [4, 10], 0.1),
        case("without smoothing", [7, 13], 0.0),
        case("nothing but smoothing", [3, 4], 1.0),
        case("one row", [1, 6], 0.1),
        case("one class", [3, 1], 0.0),
        offset,
        sure,
        case("more than one thread", [401, 53], 0.1),
        soft("shares, as of mixed images", [4, 10], mixed(10)),
        soft("shares that do not add up to one", [7, 13], |i| (i as f64 * 0.37).sin()),
        soft("shares, one row", [1, 6], |i| i as f64 / 15.0),
        soft("shares, one class", [3, 1], |_| 1.0),
        soft_offset,
        soft("shares, more than one thread", [401, 53], mixed(53)),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let (rows, classes) = (draw.within(0, 1..=6), draw.within(1, 2..=40));
    match draw.within(3, 0..=1) {
        0 => case("drawn", [rows, classes], draw.within(2, 0..=4) as f64 / 5.0),
        _ => soft("drawn", [rows, classes], mixed(classes)),
    }
}
