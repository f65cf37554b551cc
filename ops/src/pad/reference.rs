//! The definition of [`pad`](super::pad).

use autograd::exact::{Array, Scalar};

/// y[.., i, ..] = x[.., i − before, ..] where that exists, otherwise 0
pub fn pad<S: Scalar>(x: &Array<S>, axis: usize, before: usize, after: usize) -> Array<S> {
    let mut shape = x.shape.clone();
    shape[axis] += before + after;
    Array::from_fn(&shape, |position| {
        let mut source = position.to_vec();
        match position[axis].checked_sub(before) {
            Some(i) if i < x.shape[axis] => {
                source[axis] = i;
                x.at(&source)
            }
            _ => S::of(0.0),
        }
    })
}
