//! The definition of [`permute`](super::permute).

use autograd::exact::{Array, Scalar};

/// y at (i₀, i₁, ..) is x at the position whose axis `order[j]` is iⱼ
pub fn permute<S: Scalar>(x: &Array<S>, order: &[usize]) -> Array<S> {
    let shape: Vec<usize> = order.iter().map(|&axis| x.shape[axis]).collect();
    Array::from_fn(&shape, |position| {
        let mut source = vec![0; position.len()];
        for (&axis, &i) in order.iter().zip(position) {
            source[axis] = i;
        }
        x.at(&source)
    })
}
