//! Inputs on which [`pad`](super::pad) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};

struct Pad {
    margins: [usize; 2],
}

impl Definition for Pad {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::pad(&x[0], self.margins)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::pad(&x[0], self.margins)
    }
}

fn case(name: &str, shape: [usize; 4], margins: [usize; 2]) -> Case {
    Case::new(name, vec![uniform(shape, 1)], Pad { margins })
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("5x6 to 7x7, for a grid of 7x7 regions", [2, 5, 6, 3], [2, 1]),
        case("at the bottom alone", [2, 3, 5, 4], [4, 0]),
        case("at the right alone", [2, 3, 5, 4], [0, 2]),
        case("nothing", [1, 2, 3, 5], [0, 0]),
        case("one element", [1, 1, 1, 1], [1, 1]),
        case("zeros alone, no rows", [2, 0, 3, 2], [1, 1]),
        case("zeros alone, no columns", [2, 3, 0, 2], [1, 1]),
        case("no images", [0, 3, 3, 2], [1, 2]),
        case("more than one thread", [3, 23, 37, 7], [5, 3]),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let shape = [0, 1, 2, 3].map(|number| draw.within(number, 0..=4));
    case("drawn", shape, [draw.within(4, 0..=3), draw.within(5, 0..=3)])
}
