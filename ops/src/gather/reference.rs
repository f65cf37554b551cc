//! The definition of [`gather`](super::gather).

use autograd::exact::{Array, Scalar};

/// y[n, q, ...] = x[n, indices[n, q], ...]
pub fn gather<S: Scalar>(x: &Array<S>, indices: &Array<S>) -> Array<S> {
    let picks = indices.shape.len();
    let shape = [&indices.shape[..], &x.shape[2..]].concat();
    Array::from_fn(&shape, |position| {
        let row = indices.at(&position[..picks]).value() as usize;
        x.at(&[&[position[0], row], &position[picks..]].concat())
    })
}
