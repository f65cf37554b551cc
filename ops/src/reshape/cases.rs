//! Inputs on which [`reshape`](super::reshape) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};

struct Reshape {
    shape: Vec<usize>,
}

impl Definition for Reshape {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::reshape(&x[0], self.shape.clone())
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::reshape(&x[0], &self.shape)
    }
}

fn case(name: &str, from: &[usize], to: &[usize]) -> Case {
    Case::new(name, vec![uniform(from, 1)], Reshape { shape: to.to_vec() })
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("heads apart, (N, L, C) to (N, L, M, D)", &[2, 5, 12], &[2, 5, 3, 4]),
        case("a map as one list of tokens", &[2, 3, 7, 5], &[42, 5]),
        case("one element without axes", &[1, 1], &[]),
        case("no elements", &[3, 0], &[0, 5, 2]),
        case("the same shape", &[13], &[13]),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let [a, b, c] = [0, 1, 2].map(|number| draw.within(number, 0..=5));
    let shapes: [&[usize]; 4] = [&[a * b, c], &[c, b, a], &[a, b * c], &[a * b * c]];
    case("drawn", &[a, b, c], shapes[draw.within(3, 0..=3)])
}
