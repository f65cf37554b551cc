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
            Some(w) => super::drop_path_residual(&x[0], self.p, self.rng, self.first, |x| crate::mul(x, w)),
            None => super::drop_path(&x[0], self.p, self.rng, self.first),
        }
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        let dropped = |x: &Array<S>| super::reference::drop_path(x, self.p, self.rng, self.first);
        let Some(w) = x.get(1) else { return dropped(&x[0]) };
        let product = |place: &[usize]| x[0].at(place) * w.at(&place[place.len() - 1..]);
        let branch = dropped(&Array::from_fn(&x[0].shape, product));
        Array::from_fn(&x[0].shape, |place| x[0].at(place) + branch.at(place))
    }
}

fn case(name: &str, shape: &[usize], p: f64) -> Case {
    Case::new(name, vec![uniform(shape, 1)], dropping(shape, p))
}

/// A branch that multiplies by w (C).
fn branch(name: &str, shape: &[usize], p: f64) -> Case {
    let w = uniform([shape[shape.len() - 1]], 2);
    Case::new(name, vec![uniform(shape, 1), w], dropping(shape, p))
}

fn dropping(shape: &[usize], p: f64) -> DropPath {
    DropPath { p, rng: Philox::keyed(6, &[shape.len() as u64]), first: 0 }
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    let later = DropPath { p: 0.5, rng: Philox::keyed(6, &[7]), first: 1_000_003 };
    vec![
        Case::new("a part of a batch", vec![uniform([9, 2, 2], 1)], later),
        case("a map, (N, H, W, C)", &[8, 2, 2, 3], 0.4),
        branch("a branch, (N, H, W, C)", &[8, 2, 2, 3], 0.4),
        branch("a branch, primes", &[13, 5], 0.5),
        branch("a branch, all survive", &[5, 3], 0.0),
        branch("a branch, no samples", &[0, 3], 0.2),
        branch("a branch, more than one thread", &[5, 17_001], 0.3),
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
    let of = if draw.within(4, 0..=1) == 1 { branch } else { case };
    of("drawn", &shape, draw.within(3, 0..=9) as f64 / 10.0)
}
