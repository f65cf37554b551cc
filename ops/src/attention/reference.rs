//! The definition of [`attention`](super::attention).

use autograd::exact::{Array, Scalar};

/// softmax(s·q·kᵀ)·v per image and head, from qkv (N, H, W, 3C).
pub fn attention<S: Scalar>(qkv: &Array<S>, heads: usize, scale: f64) -> Array<S> {
    let [images, height, width, channels] = qkv.dims();
    let (tokens, dim, head_dim) = (height * width, channels / 3, channels / 3 / heads);
    let at = |n: usize, token: usize, part: usize, c: usize| qkv.data[(n * tokens + token) * channels + part * dim + c];
    let mut out = Array::zeros(&[images, height, width, dim]);
    for n in 0..images {
        for query in 0..tokens {
            for channel in 0..dim {
                let head = channel / head_dim * head_dim..channel / head_dim * head_dim + head_dim;
                let score = |key: usize| -> S {
                    head.clone().map(|c| S::of(scale) * at(n, query, 0, c) * at(n, key, 1, c)).sum()
                };
                let weights: Vec<S> = (0..tokens).map(|key| score(key).exp()).collect();
                let mixed: S = weights.iter().enumerate().map(|(key, &w)| w * at(n, key, 2, channel)).sum();
                out.data[(n * tokens + query) * dim + channel] = mixed / weights.iter().copied().sum();
            }
        }
    }
    out
}
