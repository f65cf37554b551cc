//! The definition of [`softmax`](super::softmax).

use autograd::exact::{Array, Scalar};

/// exp(x − max) / Σ exp(x − max) over the last axis.
pub fn softmax<S: Scalar>(x: &Array<S>) -> Array<S> {
    let channels = x.shape[x.shape.len() - 1];
    let mut y = x.clone();
    for row in y.data.chunks_mut(channels.max(1)) {
        // Any constant would do, so no derivative flows through it.
        let max = S::of(row.iter().map(|x| x.value()).fold(f64::NEG_INFINITY, f64::max));
        row.iter_mut().for_each(|x| *x = (*x - max).exp());
        let sum = row.iter().copied().sum::<S>();
        row.iter_mut().for_each(|x| *x = *x / sum);
    }
    y
}
