//! The definition of [`pad`](super::pad).

use autograd::exact::{Array, Scalar};

/// y[n, h, w] = x[n, h, w] for h < H and w < W, otherwise 0
pub fn pad<S: Scalar>(x: &Array<S>, [bottom, right]: [usize; 2]) -> Array<S> {
    let [n, height, width, c] = x.dims();
    Array::from_fn(&[n, height + bottom, width + right, c], |y| {
        if y[1] < height && y[2] < width { x.at(y) } else { S::of(0.0) }
    })
}
