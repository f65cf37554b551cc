//! Inputs on which [`gelu`](super::gelu) is checked.

use crate::case::{Case, Definition, Draw, from_fn, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};
use tensor::Tensor;

struct Gelu;

impl Definition for Gelu {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::gelu(&x[0])
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::gelu(&x[0])
    }
}

fn case(name: &str, x: Tensor) -> Case {
    Case::new(name, vec![x], Gelu)
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("hidden layer of a 4x4 map, (N, H, W, C)", uniform([2, 4, 4, 12], 1)),
        case("the whole bend, both tails", from_fn([7, 11], |i| i as f64 / 5.0 - 7.6)),
        case("a scalar", uniform([], 1)),
        case("one element", uniform([1], 1)),
        case("no elements", uniform([0, 3], 1)),
        case("more than one thread", uniform([131, 257], 1)),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let shape = [draw.within(0, 0..=4), draw.within(1, 1..=5), draw.within(2, 0..=40)];
    let scale = draw.within(3, 1..=4) as f64;
    case("drawn", from_fn(shape, |i| scale * (0.37 * i as f64 + 0.2).sin()))
}
