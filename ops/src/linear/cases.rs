//! Inputs on which [`linear`](super::linear) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};

struct Linear;

impl Definition for Linear {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::linear(&x[0], &x[1], x.get(2))
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::linear(&x[0], &x[1], x.get(2))
    }
    fn is_parameter(&self, input: usize) -> bool {
        input > 0
    }
}

fn case(name: &str, rows: &[usize], inputs: usize, outputs: usize, bias: bool) -> Case {
    let x = uniform([rows, &[inputs]].concat(), 1);
    let mut operands = vec![x, uniform([outputs, inputs], 2)];
    if bias {
        operands.push(uniform([outputs], 3));
    }
    Case::new(name, operands, Linear)
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("qkv of a 8x8 map, (N, H, W, C)", &[2, 8, 8], 16, 48, true),
        case("without bias", &[3, 5], 7, 4, false),
        case("primes", &[13], 11, 17, true),
        case("one element", &[1], 1, 1, true),
        case("no rows", &[0], 3, 2, true),
        case("no inputs", &[3], 0, 2, true),
        case("a vector", &[], 5, 3, true),
        case("more than one thread", &[5, 400], 33, 65, true),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let rows = [draw.within(0, 0..=4), draw.within(1, 0..=4)];
    case("drawn", &rows, draw.within(2, 0..=6), draw.within(3, 1..=6), draw.within(4, 0..=1) == 1)
}
