//! Inputs on which [`gather`](super::gather) is checked.

use crate::case::{Case, Definition, Draw, indices, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};
use tensor::Tensor;

struct Gather {
    axis: usize,
}

impl Definition for Gather {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::gather(&x[0], self.axis, x[1].value())
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::gather(&x[0], self.axis, &x[1])
    }
}

fn case(name: &str, x: &[usize], picks: &[usize]) -> Case {
    along(1, name, x, picks)
}

fn along(axis: usize, name: &str, x: &[usize], picks: &[usize]) -> Case {
    let picked = indices([&x[..axis], picks].concat(), x[axis], 2);
    Case::new(name, vec![uniform(x, 1), picked], Gather { axis })
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    let mut one = case("all pick the same row", &[2, 3, 5], &[7]);
    one.inputs[1] = Tensor::full([2, 7], 2u32);
    let mut each = case("each row picked once, in reverse", &[1, 5, 3], &[5]);
    each.inputs[1] = Tensor::from_slice(&[4u32, 3, 2, 1, 0], [1, 5]).expect("invariant: five indices");
    vec![
        case("keys and values of routed regions", &[2, 9, 4, 6], &[9, 2]),
        case("fewer picks than rows", &[3, 7], &[2]),
        case("one row per image", &[3, 2, 5], &[]),
        case("more than one thread", &[3, 11, 5, 13], &[31, 7]),
        along(0, "a table, along the first axis", &[6, 5], &[3, 4]),
        along(2, "along the last axis", &[2, 3, 7], &[4]),
        case("no images", &[0, 3, 2], &[4]),
        case("no picks", &[2, 3, 2], &[0]),
        case("empty rows", &[2, 3, 0], &[2]),
        one,
        each,
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let x = [draw.within(0, 1..=3), draw.within(1, 1..=5), draw.within(2, 1..=3)];
    along(draw.within(5, 0..=2), "drawn", &x, &[draw.within(3, 0..=4), draw.within(4, 0..=3)])
}
