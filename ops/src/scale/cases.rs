//! Inputs on which [`scale`](super::scale) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};

struct Scale {
    factor: f64,
}

impl Definition for Scale {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::scale(&x[0], self.factor)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::scale(&x[0], self.factor)
    }
}

fn case(name: &str, shape: &[usize], factor: f64) -> Case {
    Case::new(name, vec![uniform(shape, 1)], Scale { factor })
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("attention scores by 1/√d", &[2, 3, 5, 7], 1.0 / 32f64.sqrt()),
        case("a negative factor", &[11], -2.5),
        case("by zero", &[3], 0.0),
        case("a scalar", &[], 3.0),
        case("no elements", &[4, 0], 2.0),
        case("more than one thread", &[17, 1031], 0.5),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let factor = draw.within(2, 0..=8) as f64 / 2.0 - 2.0;
    case("drawn", &[draw.within(0, 0..=5), draw.within(1, 0..=5)], factor)
}
