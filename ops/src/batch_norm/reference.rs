//! The definition of [`batch_norm_train`](super::batch_norm_train) and of
//! [`batch_norm_eval`](super::batch_norm_eval).

use autograd::exact::{Array, Scalar};

/// The mean and the biased variance of each channel of x (..., C).
pub fn statistics<S: Scalar>(x: &Array<S>) -> [Vec<S>; 2] {
    let channels = x.shape[x.shape.len() - 1];
    let rows = S::of((x.data.len() / channels.max(1)) as f64);
    let of = |channel: usize| x.data.iter().skip(channel).step_by(channels).copied();
    let mean: Vec<S> = (0..channels).map(|c| of(c).sum::<S>() / rows).collect();
    let variance = (0..channels).map(|c| of(c).map(|x| (x - mean[c]) * (x - mean[c])).sum::<S>() / rows).collect();
    [mean, variance]
}

/// γ·(x − μ)/√(σ² + ε) + β, each channel with its own.
pub fn batch_norm<S: Scalar>(
    x: &Array<S>,
    weight: &Array<S>,
    bias: &Array<S>,
    [mean, variance]: [Vec<S>; 2],
    epsilon: f64,
) -> Array<S> {
    let mut y = x.clone();
    for (place, x) in y.data.iter_mut().enumerate() {
        let c = place % mean.len();
        *x = weight.data[c] * (*x - mean[c]) / (variance[c] + S::of(epsilon)).sqrt() + bias.data[c];
    }
    y
}
