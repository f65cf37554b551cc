//! Inputs on which [`softmax`](super::softmax) is checked.

use crate::case::{Case, Definition, Draw, from_fn, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};
use tensor::Tensor;

struct Softmax;

impl Definition for Softmax {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::softmax(&x[0])
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::softmax(&x[0])
    }
}

fn case(name: &str, x: Tensor) -> Case {
    Case::new(name, vec![x], Softmax)
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("attention scores, (N, heads, queries, keys)", uniform([2, 2, 4, 36], 1)),
        case("primes", uniform([7, 13], 1)),
        case("scores far from zero", from_fn([3, 5], |i| 500.0 + (i as f64 * 0.7).sin())),
        case("one key outweighs the rest", from_fn([3, 6], |i| if i % 6 == 4 { 9.0 } else { (i as f64).cos() })),
        case("equal scores", from_fn([2, 4], |_| 0.25)),
        case("a vector", uniform([17], 1)),
        case("one key", uniform([4, 1], 1)),
        case("no rows", uniform([0, 3], 1)),
        case("no keys", uniform([3, 0], 1)),
        case("more than one thread", uniform([401, 51], 1)),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let shape = [draw.within(0, 0..=4), draw.within(1, 0..=4), draw.within(2, 1..=40)];
    case("drawn", uniform(shape, 1 + draw.within(3, 0..=7) as u64))
}
