//! The definition of [`dropout`](super::dropout).

use autograd::exact::{Array, Scalar};
use tensor::rng::Philox;

/// x\[i\]/(1 − p) where the i-th uniform number is p or more, 0 elsewhere.
pub fn dropout<S: Scalar>(x: &Array<S>, p: f64, rng: Philox) -> Array<S> {
    let kept = |i: usize| f64::from(rng.uniform(i as u64)) >= p;
    let y = x.data.iter().enumerate().map(|(i, &x)| if kept(i) { x / S::of(1.0 - p) } else { S::of(0.0) });
    Array { shape: x.shape.clone(), data: y.collect() }
}
