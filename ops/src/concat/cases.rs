//! Inputs on which [`concat`](super::concat) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};

struct Concat {
    axis: usize,
}

impl Definition for Concat {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::concat(&x.iter().collect::<Vec<_>>(), self.axis)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::concat(x, self.axis)
    }
}

/// Parts of the same shape except along the axis, where they have these extents.
fn case(name: &str, shape: &[usize], axis: usize, extents: &[usize]) -> Case {
    let part = |(stream, &extent): (usize, &usize)| {
        let mut shape = shape.to_vec();
        shape[axis] = extent;
        uniform(shape, stream as u64)
    };
    Case::new(name, extents.iter().enumerate().map(part).collect(), Concat { axis })
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("channels of two maps", &[2, 3, 3, 0], 3, &[5, 7]),
        case("three equal parts in the middle", &[3, 0, 2], 1, &[2, 2, 2]),
        case("along the first axis", &[0, 5], 0, &[1, 3]),
        case("one part", &[2, 0], 1, &[3]),
        case("an empty part among others", &[3, 0], 1, &[2, 0, 1]),
        case("no elements", &[0, 0], 1, &[2, 3]),
        case("more than one thread", &[61, 0, 3], 1, &[40, 53]),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let shape = [0, 1, 2].map(|number| draw.within(number, 0..=4));
    let extents: Vec<usize> = (0..draw.within(3, 1..=3)).map(|part| draw.within(4 + part, 0..=3)).collect();
    case("drawn", &shape, draw.within(7, 0..=2), &extents)
}
