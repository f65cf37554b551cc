//! Inputs on which [`top_k`](super::top_k) is checked. Elements lie apart, so that no difference quotient
//! changes their order; equal elements have no derivative and are tested in `mod.rs` and `cpu.rs`.

use crate::case::{Case, Definition, Draw, separated};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};

struct TopK {
    k: usize,
}

impl Definition for TopK {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        Ok(super::top_k(&x[0], self.k)?.0)
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::top_k(&x[0], self.k)
    }
}

fn case(name: &str, shape: &[usize], k: usize) -> Case {
    Case::new(name, vec![separated(shape, 1)], TopK { k })
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("routing among 7x7 regions", &[1, 49, 49], 4),
        case("a few rows", &[2, 3, 7], 2),
        case("the largest alone", &[5, 3], 1),
        case("all, sorted", &[2, 11], 11),
        case("a vector", &[13], 5),
        case("one element", &[1], 1),
        case("none", &[3, 4], 0),
        case("none of none", &[3, 0], 0),
        case("no rows", &[0, 4], 2),
        case("more than one thread", &[300, 61], 16),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let shape = [draw.within(0, 0..=3), draw.within(1, 0..=3), draw.within(2, 0..=9)];
    case("drawn", &shape, draw.within(3, 0..=shape[2]))
}
