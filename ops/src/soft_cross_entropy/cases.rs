//! Inputs on which [`soft_cross_entropy`](super::soft_cross_entropy) is checked.

use crate::case::{Case, Definition, Draw, array, from_fn, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};
use tensor::Tensor;

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
        super::reference::soft_cross_entropy(&x[0], &array(&self.targets))
    }
}

fn case(name: &str, shape: [usize; 2], target: impl Fn(usize) -> f64) -> Case {
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
    let mut offset = case("logits far from zero", [3, 5], mixed(5));
    offset.inputs[0] = from_fn([3, 5], |i| 700.0 + (i as f64 * 0.7).sin());
    vec![
        case("a small batch of mixed images", [4, 10], mixed(10)),
        case("targets that do not add up to one", [7, 13], |i| (i as f64 * 0.37).sin()),
        case("one row", [1, 6], |i| i as f64 / 15.0),
        case("one class", [3, 1], |_| 1.0),
        offset,
        case("more than one thread", [401, 53], mixed(53)),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let classes = draw.within(1, 2..=40);
    case("drawn", [draw.within(0, 1..=6), classes], mixed(classes))
}
