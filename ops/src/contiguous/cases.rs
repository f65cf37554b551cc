//! Inputs on which [`contiguous`](super::contiguous) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};
use tensor::Tensor;

struct Contiguous;

impl Definition for Contiguous {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::contiguous(&x[0])
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::contiguous(&x[0])
    }
}

/// A case of a view of a tensor of this shape.
fn case(name: &str, shape: &[usize], view: impl Fn(Tensor) -> tensor::Result<Tensor>) -> Case {
    let view = view(uniform(shape, 1)).expect("invariant: a case names axes that exist");
    Case::new(name, vec![view], Contiguous)
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("heads after tokens again", &[2, 3, 5, 4], |x| x.permute(&[0, 2, 1, 3])),
        case("k out of qkv", &[5, 12], |x| x.slice(1, 4..8)),
        case("a row repeated", &[7], |x| x.broadcast_to([3, 7])),
        case("contiguous already", &[3, 5], Ok),
        case("one element", &[], Ok),
        case("no elements", &[4, 0], |x| x.permute(&[1, 0])),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let shape = [0, 1, 2].map(|number| draw.within(number, 0..=4));
    let end = draw.within(3, 0..=shape[1]);
    case("drawn", &shape, |x| x.slice(1, draw.within(4, 0..=end)..end)?.permute(&[2, 0, 1]))
}
