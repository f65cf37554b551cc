//! Inputs on which [`mean_pool`](super::mean_pool) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};

struct MeanPool;

impl Definition for MeanPool {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::mean_pool(&x[0])
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::mean_pool(&x[0])
    }
}

fn case(name: &str, shape: [usize; 4]) -> Case {
    Case::new(name, vec![uniform(shape, 1)], MeanPool)
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("the last map, (N, H, W, C)", [2, 7, 7, 16]),
        case("primes", [3, 5, 11, 13]),
        case("one token", [2, 1, 1, 5]),
        case("one element", [1, 1, 1, 1]),
        case("no images", [0, 2, 2, 3]),
        case("no channels", [2, 2, 2, 0]),
        case("more than one thread", [5, 14, 14, 67]),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let map = [draw.within(1, 1..=5), draw.within(2, 1..=5)];
    case("drawn", [draw.within(0, 0..=3), map[0], map[1], draw.within(3, 0..=20)])
}
