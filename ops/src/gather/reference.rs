//! The definition of [`gather`](super::gather).

use autograd::exact::{Array, Scalar};

/// y[n, q, ...] = x[n, indices[n, q], ...], with as many positions n as axes before the chosen one.
pub fn gather<S: Scalar>(x: &Array<S>, axis: usize, indices: &Array<S>) -> Array<S> {
    let picks = indices.shape.len();
    let shape = [&indices.shape[..], &x.shape[axis + 1..]].concat();
    Array::from_fn(&shape, |position| {
        let row = indices.at(&position[..picks]).value() as usize;
        x.at(&[&position[..axis], &[row], &position[picks..]].concat())
    })
}
