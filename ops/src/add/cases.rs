//! Inputs on which [`add`](super::add) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};

struct Add;

impl Definition for Add {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::add(&x[0], &x[1])
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::add(&x[0], &x[1])
    }
}

fn case(name: &str, a: &[usize], b: &[usize]) -> Case {
    Case::new(name, vec![uniform(a, 1), uniform(b, 2)], Add)
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("residual, (N, H, W, C)", &[2, 4, 4, 24], &[2, 4, 4, 24]),
        case("bias", &[3, 5, 7], &[7]),
        case("inner axis repeated", &[3, 1, 7], &[3, 5, 1]),
        case("both repeated", &[4, 1], &[1, 3]),
        case("a scalar", &[], &[2, 3]),
        case("one element", &[1], &[1]),
        case("more than one task", &[5, 4001], &[5, 4001]),
        case("no elements", &[0, 3], &[3]),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let shape: Vec<usize> = (0..3).map(|axis| draw.within(axis, 0..=5)).collect();
    let repeated: Vec<usize> = shape
        .iter()
        .enumerate()
        .map(|(axis, &extent)| if draw.within(3 + axis, 0..=1) == 1 { 1 } else { extent })
        .collect();
    case("drawn", &shape, &repeated[draw.within(6, 0..=3)..])
}
