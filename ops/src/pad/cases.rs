//! Inputs on which [`pad`](super::pad) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};

struct Pad {
    axis: usize,
    before: usize,
    after: usize,
}

impl Definition for Pad {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::pad(&x[0], self.axis, self.before, self.after)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::pad(&x[0], self.axis, self.before, self.after)
    }
}

fn case(name: &str, shape: &[usize], axis: usize, before: usize, after: usize) -> Case {
    Case::new(name, vec![uniform(shape, 1)], Pad { axis, before, after })
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("a map at the right, (N, H, W, C)", &[2, 3, 5, 4], 2, 0, 2),
        case("a map at the bottom, (N, H, W, C)", &[2, 3, 5, 4], 1, 0, 4),
        case("on both sides", &[3, 7], 1, 2, 3),
        case("before the first axis", &[5], 0, 1, 0),
        case("nothing", &[2, 3], 1, 0, 0),
        case("zeros alone", &[2, 0, 3], 1, 1, 1),
        case("no elements", &[0, 3], 1, 1, 2),
        case("more than one thread", &[37, 43, 13], 1, 3, 5),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let shape = [0, 1, 2].map(|number| draw.within(number, 0..=4));
    case("drawn", &shape, draw.within(3, 0..=2), draw.within(4, 0..=3), draw.within(5, 0..=3))
}
