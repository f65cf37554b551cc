//! Inputs on which [`slice`](super::slice) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};
use std::ops::Range;

struct Slice {
    axis: usize,
    range: Range<usize>,
}

impl Definition for Slice {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::slice(&x[0], self.axis, self.range.clone())
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::slice(&x[0], self.axis, self.range.clone())
    }
}

fn case(name: &str, shape: &[usize], axis: usize, range: Range<usize>) -> Case {
    Case::new(name, vec![uniform(shape, 1)], Slice { axis, range })
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("k out of qkv", &[2, 5, 12], 2, 4..8),
        case("a map cropped at the bottom", &[2, 5, 3, 4], 1, 0..3),
        case("the end of the first axis", &[7, 3], 0, 4..7),
        case("one position", &[3, 11], 1, 6..7),
        case("all positions", &[3, 5], 1, 0..5),
        case("no positions", &[3, 5], 0, 2..2),
        case("no elements", &[0, 5], 1, 1..3),
        case("more than one thread", &[37, 50, 13], 1, 3..47),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let shape = [0, 1, 2].map(|number| draw.within(number, 0..=5));
    let axis = draw.within(3, 0..=2);
    let end = draw.within(4, 0..=shape[axis]);
    case("drawn", &shape, axis, draw.within(5, 0..=end)..end)
}
