//! The definition of [`drop_path`](super::drop_path).

use autograd::exact::{Array, Scalar};
use tensor::rng::Philox;

/// x\[n\]/(1 − p) where the uniform number `first + n` is p or more, 0 elsewhere; plus a residual, if there is one.
pub fn drop_path<S: Scalar>(x: &Array<S>, residual: Option<&Array<S>>, p: f64, rng: Philox, first: usize) -> Array<S> {
    let sample: usize = x.shape[1..].iter().product();
    let kept = |n: usize| f64::from(rng.uniform((first + n) as u64)) >= p;
    let added = |i: usize| residual.map_or(S::of(0.0), |residual| residual.data[i]);
    let branch = |i: usize, x: S| if kept(i / sample) { x / S::of(1.0 - p) } else { S::of(0.0) };
    let y = x.data.iter().enumerate().map(|(i, &x)| added(i) + branch(i, x));
    Array { shape: x.shape.clone(), data: y.collect() }
}
