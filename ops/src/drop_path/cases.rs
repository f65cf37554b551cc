//! Inputs on which [`drop_path`](super::drop_path) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};
use tensor::rng::Philox;

struct DropPath {
    p: f64,
    rng: Philox,
}

impl Definition for DropPath {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::drop_path(&x[0], self.p, self.rng)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::drop_path(&x[0], self.p, self.rng)
    }
}

fn case(name: &str, shape: &[usize], p: f64) -> Case {
    Case::new(name, vec![uniform(shape, 1)], DropPath { p, rng: Philox::keyed(6, &[shape.len() as u64]) })
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("a residual branch, (N, H, W, C)", &[8, 2, 2, 3], 0.4),
        case("primes", &[13, 5], 0.5),
        case("all survive", &[5, 3], 0.0),
        case("a sample is one element", &[31], 0.2),
        case("one element", &[1, 1], 0.2),
        case("no samples", &[0, 3], 0.2),
        case("empty samples", &[3, 0], 0.2),
        case("more than one thread", &[5, 17_001], 0.3),
        case("more than one thread, small samples", &[2003, 17], 0.3),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let shape = [draw.within(0, 0..=9), draw.within(1, 0..=3), draw.within(2, 0..=9)];
    case("drawn", &shape, draw.within(3, 0..=9) as f64 / 10.0)
}
