//! Inputs on which [`cross_entropy`](super::cross_entropy) is checked.

use crate::case::{Case, Definition, Draw, from_fn, indices, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};

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

/// The named cases.
pub fn cases() -> Vec<Case> {
    let mut offset = case("logits far from zero", [3, 5], 0.1);
    offset.inputs[0] = from_fn([3, 5], |i| 700.0 + (i as f64 * 0.7).sin());
    let mut sure = case("one class outweighs the rest", [3, 5], 0.0);
    sure.inputs[0] = from_fn([3, 5], |i| if i % 5 == 2 { 12.0 } else { (i as f64).cos() });
    vec![
        case("a small batch", [4, 10], 0.1),
        case("without smoothing", [7, 13], 0.0),
        case("nothing but smoothing", [3, 4], 1.0),
        case("one row", [1, 6], 0.1),
        case("one class", [3, 1], 0.0),
        offset,
        sure,
        case("more than one thread", [401, 53], 0.1),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    case("drawn", [draw.within(0, 1..=6), draw.within(1, 2..=40)], draw.within(2, 0..=4) as f64 / 5.0)
}
