//! The definition of [`bra`](super::bra) without its local context, which is [`dwconv`](mod@crate::dwconv)'s. It shares
//! nothing with the kernels, not even the index arithmetic.

use super::{Bra, RouteKind};
use autograd::exact::{Array, Scalar};

/// Bi-level routing attention of qkv (N, H, W, 2D + C), without local context: (N, H, W, C).
pub fn attention<S: Scalar>(qkv: &Array<S>, attributes: &Bra, kind: RouteKind) -> Array<S> {
    let [images, height, width, channels] = qkv.dims();
    let Bra { heads, qk_dim, .. } = *attributes;
    let v_dim = channels - 2 * qk_dim;
    let scale = S::of(attributes.scale);
    let at = |n: usize, pixel: usize, channel: usize| qkv.at(&[n, pixel / width, pixel % width, channel]);
    let mut out = Array::zeros(&[images, height, width, v_dim]);
    for n in 0..images {
        let routes = routes(qkv, n, attributes, kind);
        for query in 0..height * width {
            let routed = &routes[region(query, qkv, attributes)];
            let share_of = |key: usize| routed.iter().find(|(chosen, _)| *chosen == region(key, qkv, attributes));
            let keys: Vec<(usize, S)> =
                (0..height * width).filter_map(|key| share_of(key).map(|&(_, share)| (key, share))).collect();
            for channel in 0..v_dim {
                // Heads are equal, consecutive shares of the channels.
                let head = channel / (v_dim / heads);
                let channels = head * (qk_dim / heads)..(head + 1) * (qk_dim / heads);
                let score = |&(key, share): &(usize, S)| -> S {
                    channels.clone().map(|c| at(n, query, c) * scale * (at(n, key, qk_dim + c) * share)).sum()
                };
                let weights: Vec<S> = keys.iter().map(|key| score(key).exp()).collect();
                let values = keys.iter().map(|&(key, share)| at(n, key, 2 * qk_dim + channel) * share);
                let mixed: S = values.zip(&weights).map(|(value, &weight)| weight * value).sum();
                *out.at_mut(&[n, query / width, query % width, channel]) = mixed / weights.into_iter().sum();
            }
        }
    }
    out
}

/// The region of a pixel: the map is cut into a grid of equal parts, which are counted row by row.
fn region<S: Scalar>(pixel: usize, qkv: &Array<S>, attributes: &Bra) -> usize {
    let [_, height, width, _] = qkv.dims();
    let [rows, cols] = attributes.grid;
    (pixel / width) / (height / rows) * cols + (pixel % width) / (width / cols)
}

/// For each region of image `n`, the k regions with the largest product of mean query and mean key, and the share of
/// each, a factor on its keys and values: the softmax of the affinities if routing is soft, otherwise 1.
pub fn routes<S: Scalar>(qkv: &Array<S>, n: usize, attributes: &Bra, kind: RouteKind) -> Vec<Vec<(usize, S)>> {
    let [_, height, width, _] = qkv.dims();
    let (regions, dim) = (attributes.grid[0] * attributes.grid[1], attributes.qk_dim);
    let [valid_rows, valid_cols] = attributes.valid.unwrap_or([height, width]);
    let valid = |pixel: &usize| pixel / width < valid_rows && pixel % width < valid_cols;
    let mean = |of: usize, channel: usize| -> S {
        let pixels: Vec<usize> =
            (0..height * width).filter(valid).filter(|&pixel| region(pixel, qkv, attributes) == of).collect();
        let values = pixels.iter().map(|pixel| qkv.at(&[n, pixel / width, pixel % width, channel]));
        values.sum::<S>() / S::of(pixels.len() as f64)
    };
    let means = |first: usize| -> Vec<Vec<S>> {
        (0..regions).map(|region| (first..first + dim).map(|channel| mean(region, channel)).collect()).collect()
    };
    let (queries, keys) = (means(0), means(dim));
    let scale = S::of(attributes.scale);
    let score = |p: usize, r: usize| -> S { queries[p].iter().zip(&keys[r]).map(|(&q, &k)| scale * q * k).sum() };
    let best = |p: usize| {
        let mut best: Vec<(usize, S)> = (0..regions).map(|r| (r, score(p, r))).collect();
        // A stable sort: ties stay in the order of their indices.
        best.sort_by(|(_, a), (_, b)| b.value().total_cmp(&a.value()));
        best.truncate(attributes.topk);
        let sum: S = best.iter().map(|(_, score)| score.exp()).sum();
        let share = |score: S| if kind == RouteKind::Soft { score.exp() / sum } else { S::of(1.0) };
        best.into_iter().map(|(r, score)| (r, share(score))).collect()
    };
    (0..regions).map(best).collect()
}
