//! Inputs on which [`mul`](super::mul) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};

struct Mul {
    /// Whether the second factor is a parameter.
    scale: bool,
}

impl Definition for Mul {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::mul(&x[0], &x[1])
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::mul(&x[0], &x[1])
    }
    fn is_parameter(&self, input: usize) -> bool {
        self.scale && input == 1
    }
}

fn case(name: &str, a: &[usize], b: &[usize]) -> Case {
    Case::new(name, vec![uniform(a, 1), uniform(b, 2)], Mul { scale: false })
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    let layer_scale = vec![uniform([2, 4, 4, 24], 1), uniform([24], 2)];
    vec![
        Case::new("layer scale of (N, H, W, C)", layer_scale, Mul { scale: true }),
        Case::new("a parameter of equal shape", vec![uniform([1, 48], 1), uniform([1, 48], 2)], Mul { scale: true }),
        case("a weight per routed region", &[2, 3, 2, 5, 7], &[2, 3, 2, 1, 1]),
        case("equal shapes", &[3, 5], &[3, 5]),
        case("three axes repeated, one kept", &[1, 5, 1], &[3, 5, 7]),
        case("both repeated", &[4, 1], &[1, 3]),
        case("a scalar", &[], &[2, 3]),
        case("one element", &[1], &[1]),
        case("no elements", &[0, 3], &[3]),
        case("no elements to add up", &[2, 0, 3], &[2, 1, 3]),
        case("more than one thread", &[3, 11, 641], &[11, 1]),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let extents: Vec<usize> = (0..3).map(|axis| draw.within(axis, 0..=4)).collect();
    let shape = |number: usize| -> Vec<usize> {
        let pattern = draw.within(number, 0..=7);
        extents.iter().enumerate().map(|(axis, &extent)| if pattern >> axis & 1 == 1 { 1 } else { extent }).collect()
    };
    case("drawn", &shape(3), &shape(4)[draw.within(5, 0..=3)..])
}
