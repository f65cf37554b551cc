//! The definition of [`scale`](super::scale).

use autograd::exact::{Array, Scalar};

/// c·x
pub fn scale<S: Scalar>(x: &Array<S>, factor: f64) -> Array<S> {
    Array { shape: x.shape.clone(), data: x.data.iter().map(|&x| S::of(factor) * x).collect() }
}
