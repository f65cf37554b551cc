//! The definition of [`bra`](super::bra).

use super::Bra;
use super::geometry::Geometry;
use autograd::exact::{Array, Scalar};

/// Bi-level routing attention of qkv (N, H, W, 2D + C), without local context: (N, H, W, C).
pub fn attention<S: Scalar>(qkv: &Array<S>, attributes: &Bra) -> Array<S> {
    let [images, height, width, channels] = qkv.dims();
    let Bra { heads, qk_dim, topk, grid, .. } = *attributes;
    let v_dim = channels - 2 * qk_dim;
    let g = Geometry { images, map: [height, width], grid, heads, qk_dim, v_dim, topk };
    let ([d, dv], tokens) = (g.head_dims(), g.region_tokens());
    let scale = S::of(attributes.scale);
    let element = |n: usize, pixel: usize, channel: usize| qkv.data[(n * g.tokens() + pixel) * channels + channel];
    let mut out = Array::zeros(&[images, height, width, v_dim]);
    for n in 0..images {
        for (region, routes) in routes(qkv, n, &g, attributes).iter().enumerate() {
            let keys: Vec<usize> =
                routes.iter().flat_map(|&r| (0..tokens).map(move |t| (r, t))).map(|(r, t)| g.pixel(r, t)).collect();
            for query in (0..tokens).map(|t| g.pixel(region, t)) {
                for head in 0..heads {
                    let [q0, k0, v0] = g.channels(head);
                    let score = |key: usize| -> S {
                        (0..d).map(|c| element(n, query, q0 + c) * scale * element(n, key, k0 + c)).sum()
                    };
                    let weights: Vec<S> = keys.iter().map(|&key| score(key).exp()).collect();
                    let total: S = weights.iter().copied().sum();
                    for c in 0..dv {
                        let mixed: S = keys.iter().zip(&weights).map(|(&key, &w)| w * element(n, key, v0 + c)).sum();
                        out.data[(n * g.tokens() + query) * v_dim + head * dv + c] = mixed / total;
                    }
                }
            }
        }
    }
    out
}

/// For each region of image `n` the k regions with the largest product of mean query and mean key.
pub fn routes<S: Scalar>(qkv: &Array<S>, n: usize, g: &Geometry, attributes: &Bra) -> Vec<Vec<usize>> {
    let valid = attributes.valid.unwrap_or(g.map);
    let mean = |region: usize, channel: usize| {
        let inside = |pixel: &usize| pixel / g.map[1] < valid[0] && pixel % g.map[1] < valid[1];
        let pixels: Vec<usize> = (0..g.region_tokens()).map(|t| g.pixel(region, t)).filter(inside).collect();
        let sum: f64 = pixels.iter().map(|p| qkv.data[(n * g.tokens() + p) * g.row() + channel].value()).sum();
        sum / pixels.len() as f64
    };
    let affinity = |p: usize, r: usize| -> f64 { (0..g.qk_dim).map(|c| mean(p, c) * mean(r, g.qk_dim + c)).sum() };
    let best = |p: usize| {
        let scores: Vec<f64> = (0..g.regions()).map(|r| affinity(p, r)).collect();
        let mut order: Vec<usize> = (0..g.regions()).collect();
        // A stable sort: ties stay in the order of their indices.
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        order.truncate(g.topk);
        order
    };
    (0..g.regions()).map(best).collect()
}
