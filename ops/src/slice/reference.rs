//! The definition of [`slice`](super::slice).

use autograd::exact::{Array, Scalar};
use std::ops::Range;

/// y[.., i, ..] = x[.., start + i, ..]
pub fn slice<S: Scalar>(x: &Array<S>, axis: usize, range: Range<usize>) -> Array<S> {
    let mut shape = x.shape.clone();
    shape[axis] = range.len();
    Array::from_fn(&shape, |position| {
        let mut source = position.to_vec();
        source[axis] += range.start;
        x.at(&source)
    })
}
