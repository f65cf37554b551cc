//! Inputs on which [`add`](super::add) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};

struct Add {
    /// Whether the second summand is a parameter.
    bias: bool,
}

impl Definition for Add {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::add(&x[0], &x[1])
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::add(&x[0], &x[1])
    }
    fn is_parameter(&self, input: usize) -> bool {
        self.bias && input == 1
    }
}

fn case(name: &str, a: &[usize], b: &[usize]) -> Case {
    Case::new(name, vec![uniform(a, 1), uniform(b, 2)], Add { bias: false })
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("residual, (N, H, W, C)", &[2, 4, 4, 24], &[2, 4, 4, 24]),
        Case::new("bias", vec![uniform([3, 5, 7], 1), uniform([7], 2)], Add { bias: true }),
        Case::new("a parameter of equal shape", vec![uniform([1, 48], 1), uniform([1, 48], 2)], Add { bias: true }),
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
