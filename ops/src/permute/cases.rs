//! Inputs on which [`permute`](super::permute) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};

struct Permute {
    order: Vec<usize>,
}

impl Definition for Permute {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::permute(&x[0], &self.order)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::permute(&x[0], &self.order)
    }
}

fn case(name: &str, shape: &[usize], order: &[usize]) -> Case {
    Case::new(name, vec![uniform(shape, 1)], Permute { order: order.to_vec() })
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("heads before tokens", &[2, 5, 3, 4], &[0, 2, 1, 3]),
        case("a cycle, which is not its own inverse", &[2, 3, 5], &[1, 2, 0]),
        case("a transposed matrix", &[7, 11], &[1, 0]),
        case("nothing moved", &[3, 4], &[0, 1]),
        case("one axis", &[5], &[0]),
        case("no axes", &[], &[]),
        case("no elements", &[2, 0, 3], &[2, 0, 1]),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    let shape = [0, 1, 2].map(|number| draw.within(number, 0..=4));
    case("drawn", &shape, &orders[draw.within(3, 0..=5)])
}
