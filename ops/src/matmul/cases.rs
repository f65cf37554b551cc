//! Inputs on which [`matmul`](super::matmul) is checked.

use crate::case::{Case, Definition, Draw, uniform};
use autograd::exact::{Array, Scalar};
use autograd::{Result, Var};
use tensor::Tensor;

struct Matmul;

impl Definition for Matmul {
    fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
        super::matmul(&x[0], &x[1])
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        super::reference::matmul(&x[0], &x[1])
    }
}

fn case(name: &str, a: &[usize], b: &[usize]) -> Case {
    views(name, uniform(a, 1), uniform(b, 2))
}

fn views(name: &str, a: Tensor, b: Tensor) -> Case {
    Case::new(name, vec![a, b], Matmul)
}

/// A tensor of shape `shape` whose axes lie in memory in another order: axis i of it is axis `order[i]`.
fn permuted(shape: &[usize], order: &[usize], stream: u64) -> Tensor {
    let mut stored = vec![0; shape.len()];
    order.iter().zip(shape).for_each(|(&axis, &extent)| stored[axis] = extent);
    uniform(stored, stream).permute(order).expect("invariant: an order of the axes")
}

/// The named cases.
pub fn cases() -> Vec<Case> {
    vec![
        case("scores times values, (N, heads, queries, keys)", &[2, 2, 4, 9], &[2, 2, 9, 5]),
        views(
            "queries times keys, heads among the channels",
            permuted(&[2, 3, 5, 4], &[0, 2, 1, 3], 1),
            permuted(&[2, 3, 4, 7], &[0, 2, 3, 1], 2),
        ),
        case("squares", &[3, 5, 5], &[3, 5, 5]),
        views("transposes", permuted(&[11, 13], &[1, 0], 1), permuted(&[13, 7], &[1, 0], 2)),
        case("one element", &[1, 1], &[1, 1]),
        case("no inner extent", &[2, 3, 0], &[2, 0, 2]),
        case("no rows", &[2, 0, 3], &[2, 3, 2]),
        case("no columns", &[2, 3, 4], &[2, 4, 0]),
        case("no matrices", &[0, 2, 3], &[0, 3, 2]),
        case("more than one thread", &[37, 17, 11], &[37, 11, 19]),
        views("more than one thread, a in pieces", permuted(&[37, 17, 11], &[1, 0, 2], 1), uniform([37, 11, 19], 2)),
    ]
}

/// A case from random numbers.
pub fn drawn(draw: &Draw) -> Case {
    let leading: Vec<usize> = (0..draw.within(0, 0..=2)).map(|axis| draw.within(1 + axis, 0..=3)).collect();
    let [rows, inner, cols] = [3, 4, 5].map(|number| draw.within(number, 0..=6));
    let transposed = |shape: &[usize], stream: u64| {
        let mut order: Vec<usize> = (0..shape.len()).collect();
        order.rotate_right(1);
        if draw.within(5 + stream as usize, 0..=1) == 1 {
            permuted(shape, &order, stream)
        } else {
            uniform(shape, stream)
        }
    };
    let [a, b] = [([rows, inner], 1), ([inner, cols], 2)]
        .map(|(matrix, stream)| transposed(&[&leading[..], &matrix].concat(), stream));
    views("drawn", a, b)
}
