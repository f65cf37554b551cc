//! The definition of [`drop_path`](super::drop_path).

use autograd::exact::{Array, Scalar};
use tensor::rng::Philox;

/// x\[n\]/(1 − p) where the uniform number `first + n` is p or more, 0 elsewhere.
pub fn drop_path<S: Scalar>(x: &Array<S>, p: f64, rng: Philox, first: usize) -> Array<S> {
    let sample: usize = x.shape[1..].iter().product();
    let kept = |n: usize| f64::from(rng.uniform((first + n) as u64)) >= p;
    let scaled = |(i, &x): (usize, &S)| if kept(i / sample) { x / S::of(1.0 - p) } else { S::of(0.0) };
    Array { shape: x.shape.clone(), data: x.data.iter().enumerate().map(scaled).collect() }
}
