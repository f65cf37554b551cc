//! Inputs on which [`sum`](super::sum) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};

struct Sum {
    axes: Vec<usize>,
    keep: bool,
}

impl Definition for Sum {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::sum(&x[0], &self.axes, self.keep)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::sum(&x[0], &self.axes, self.keep)
    }
}

fn case(name: &str, shape: &[usize], axes: &[usize], keep: bool) -> Case {
    Case::new(name, vec![uniform(shape, 1)], Sum { axes: axes.to_vec(), keep })
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("over a map, (N, H, W, C)", &[2, 4, 4, 5], &[1, 2], false),
        case("over the tokens of each region", &[2, 3, 7, 5], &[2], true),
        case("apart, in any order", &[3, 2, 5, 7], &[3, 0, 2], false),
        case("over all", &[3, 5, 7], &[0, 1, 2], false),
        case("over none", &[3, 5], &[], false),
        case("the last axis, named twice", &[5, 11], &[1, 1], true),
        case("a scalar", &[], &[], true),
        case("no terms", &[3, 0, 2], &[1], false),
        case("no sums", &[0, 3], &[1], true),
        case("sums longer than one thread's", &[2, 411, 41], &[1], false),
        case("one sum longer than one thread's", &[17, 1031], &[0, 1], false),
        case("more sums than one thread's", &[1201, 5, 3], &[1], false),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let shape = [0, 1, 2, 3].map(|number| draw.within(number, 0..=4));
    let chosen = draw.within(4, 0..=15);
    let axes: Vec<usize> = (0..4).filter(|axis| chosen >> axis & 1 == 1).collect();
    case("drawn", &shape, &axes, draw.within(5, 0..=1) == 1)
}
