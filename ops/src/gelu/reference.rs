//! The definition of [`gelu`](super::gelu).

use autograd::exact::{Array, Scalar};

/// x·(1 + erf(x/√2)) / 2
pub fn gelu<S: Scalar>(x: &Array<S>) -> Array<S> {
    let phi = |x: S| (S::of(1.0) + (x / S::of(2.0).sqrt()).erf()) / S::of(2.0);
    Array { shape: x.shape.clone(), data: x.data.iter().map(|&x| x * phi(x)).collect() }
}
