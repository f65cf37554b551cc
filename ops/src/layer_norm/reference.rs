//! The definition of [`layer_norm`](super::layer_norm).

use autograd::exact::{Array, Scalar};

/// γ·(x − μ)/√(σ² + ε) + β over the last axis.
pub fn layer_norm<S: Scalar>(x: &Array<S>, weight: &Array<S>, bias: &Array<S>, epsilon: f64) -> Array<S> {
    let channels = weight.data.len();
    let count = S::of(channels as f64);
    let mut y = x.clone();
    for row in y.data.chunks_mut(channels.max(1)) {
        let mean = row.iter().copied().sum::<S>() / count;
        let variance = row.iter().map(|&x| (x - mean) * (x - mean)).sum::<S>() / count;
        let deviation = (variance + S::of(epsilon)).sqrt();
        for (channel, x) in row.iter_mut().enumerate() {
            *x = weight.data[channel] * (*x - mean) / deviation + bias.data[channel];
        }
    }
    y
}
