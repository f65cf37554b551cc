//! Inputs on which [`dropout`](super::dropout) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};
use tensor::rng::Philox;

struct Dropout {
    p: f64,
    rng: Philox,
}

impl Definition for Dropout {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::dropout(&x[0], self.p, self.rng)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::dropout(&x[0], self.p, self.rng)
    }
}

fn case(name: &str, shape: &[usize], p: f64) -> Case {
    Case::new(name, vec![uniform(shape, 1)], Dropout { p, rng: Philox::keyed(5, &[shape.len() as u64]) })
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("a hidden layer, (N, H, W, C)", &[2, 3, 3, 12], 0.1),
        case("primes", &[13, 17], 0.5),
        case("few survive", &[7, 11], 0.9),
        case("all survive", &[5, 3], 0.0),
        case("one element", &[1], 0.2),
        case("no elements", &[0, 3], 0.2),
        case("more than one thread", &[131, 257], 0.3),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let shape = [draw.within(0, 0..=4), draw.within(1, 0..=5), draw.within(2, 0..=40)];
    case("drawn", &shape, draw.within(3, 0..=9) as f64 / 10.0)
}
