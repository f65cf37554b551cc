//! Inputs on which [`drop_path`](super::drop_path) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};
use tensor::rng::Philox;

struct DropPath {
    p: f64,
    rng: Philox,
    first: usize,
}

impl Definition for DropPath {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        match x.get(1) {
            Some(residual) => super::drop_path_residual(&x[0], residual, self.p, self.rng, self.first),
            None => super::drop_path(&x[0], self.p, self.rng, self.first),
        }
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::drop_path(&x[0], x.get(1), self.p, self.rng, self.first)
    }
}

fn case(name: &str, shape: &[usize], p: f64) -> Case {
    Case::new(name, vec![uniform(shape, 1)], dropping(shape, p))
}

fn residual(name: &str, shape: &[usize], p: f64) -> Case {
    Case::new(name, vec![uniform(shape, 1), uniform(shape, 2)], dropping(shape, p))
}

fn dropping(shape: &[usize], p: f64) -> DropPath {
    DropPath { p, rng: Philox::keyed(6, &[shape.len() as u64]), first: 0 }
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    let later = DropPath { p: 0.5, rng: Philox::keyed(6, &[7]), first: 1_000_003 };
    vec![
        Case::new("a part of a batch", vec![uniform([9, 2, 2], 1)], later),
        case("a branch, (N, H, W, C)", &[8, 2, 2, 3], 0.4),
        residual("a residual branch, (N, H, W, C)", &[8, 2, 2, 3], 0.4),
        residual("a residual, primes", &[13, 5], 0.5),
        residual("a residual, all survive", &[5, 3], 0.0),
        residual("a residual, no samples", &[0, 3], 0.2),
        residual("a residual, more than one thread", &[5, 17_001], 0.3),
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
    let of = if draw.within(4, 0..=1) == 1 { residual } else { case };
    of("drawn", &shape, draw.within(3, 0..=9) as f64 / 10.0)
}
