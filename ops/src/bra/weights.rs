//! Where a token looks: what the values of all tokens are multiplied by for it.
//!
//! Fused attention never has these weights of all tokens in memory at once. For one token of each image they are few,
//! and are computed here directly from their definition, in f64.

use super::{Bra, RouteKind};
use crate::bra::geometry::Geometry;
use tensor::{DType, Device, Error, Result, Tensor};

/// The weights with which a token (row, column) of each map attends to all of its map's tokens, in the attention of qkv
/// (N, H, W, 2D + C) along `routes` (N, P, k), as [`Routed`](super::Routed) and [`Routing`](super::Routing) have them:
/// (N, heads, H, W) in f64. They are 0 for tokens that are not attended to, and only for those; NaN where the attention
/// is. Each head's sum up to 1, except in soft routing, where they include the shares of the regions. For full
/// attention, the grid is [1, 1], k is 1, and all routes are 0.
///
/// Errors: [`Error::Argument`] for attributes that do not fit, or `valid` in soft routing, [`Error::OutOfRange`] for a
/// token or a route that does not exist, [`Error::Shape`], [`Error::DType`].
pub fn bra_weights(
    qkv: &Tensor,
    routes: &Tensor,
    kind: RouteKind,
    attributes: &Bra,
    token: [usize; 2],
) -> Result<Tensor> {
    let g = attributes.geometry(qkv)?;
    if kind == RouteKind::Soft && attributes.valid.is_some() {
        return Err(Error::argument("bra_weights", "soft routing does not support `valid`; set it to None"));
    }
    let ([height, width], regions) = (g.regions.map(), g.regions.count());
    for (what, index, bound) in [("the row", token[0], height), ("the column", token[1], width)] {
        if index >= bound {
            return Err(Error::OutOfRange { op: "bra_weights", what, index, bound });
        }
    }
    if routes.dims("bra_weights", "routes (N, P, k)")? != [g.images, regions, g.topk] {
        return Err(Error::shape(
            "bra_weights",
            format!("routes ({}, {regions}, {})", g.images, g.topk),
            routes.shape(),
        ));
    }
    let own = region_of(g, token);
    let routes = routes.slice(1, own..own + 1)?.to_vec::<u32>()?;
    if let Some(&route) = routes.iter().find(|&&route| route as usize >= regions) {
        return Err(Error::OutOfRange { op: "bra_weights", what: "a route", index: route as usize, bound: regions });
    }
    let ([d, _], dim, tokens) = (g.head_dims(), g.qk_dim, g.tokens());
    let query = qkv.slice(1, token[0]..token[0] + 1)?.slice(2, token[1]..token[1] + 1)?.slice(3, 0..dim)?;
    let (queries, keys) = (numbers(query)?, numbers(qkv.slice(3, dim..2 * dim)?)?); // (N, D) and (N, H, W, D)
    let mut weights = vec![0.0; g.images * g.heads * tokens];
    for (image, weights) in weights.chunks_exact_mut((g.heads * tokens).max(1)).enumerate() {
        let routed = &routes[image * g.topk..][..g.topk];
        let shares = match kind {
            RouteKind::Hard => vec![1.0; g.topk],
            RouteKind::Soft => shares(g, qkv, attributes.scale, image, own, routed)?,
        };
        // What the key and the value of each token are multiplied by that is attended to.
        let share_of = |token: usize| {
            let region = region_of(g, [token / width, token % width]) as u32;
            Some((token, shares[routed.iter().position(|&routed| routed == region)?]))
        };
        let read: Vec<(usize, f64)> = (0..tokens).filter_map(share_of).collect();
        for (head, weights) in weights.chunks_exact_mut(tokens.max(1)).enumerate() {
            let query = &queries[image * dim + head * d..][..d];
            let key = |token: usize| &keys[(image * tokens + token) * dim + head * d..][..d];
            let score = |&(token, share): &(usize, f64)| share * attributes.scale * dot(query, key(token));
            let of_scores = softmax(&read.iter().map(score).collect::<Vec<_>>());
            for (&(token, share), weight) in read.iter().zip(of_scores) {
                let weight = share * weight;
                weights[token] = if weight == 0.0 { f64::MIN_POSITIVE } else { weight };
            }
        }
    }
    Tensor::from_slice(&weights, [g.images, g.heads, height, width])
}

/// The region that a token lies in.
fn region_of(g: Geometry, [row, column]: [usize; 2]) -> usize {
    let ([height, width], [_, columns]) = (g.regions.size(), g.regions.grid());
    row / height * columns + column / width
}

/// The softmax of the affinities of an image's region to those that it is routed to.
fn shares(g: Geometry, qkv: &Tensor, scale: f64, image: usize, own: usize, routed: &[u32]) -> Result<Vec<f64>> {
    let ([height, width], [_, columns], dim) = (g.regions.size(), g.regions.grid(), g.qk_dim);
    // Of a region's queries or keys, which begin at this channel.
    let mean = |region: usize, channel: usize| -> Result<Vec<f64>> {
        let (top, left) = (region / columns * height, region % columns * width);
        let part = qkv.slice(0, image..image + 1)?.slice(1, top..top + height)?.slice(2, left..left + width)?;
        let part = numbers(part.slice(3, channel..channel + dim)?)?;
        let mean = |c| part.iter().skip(c).step_by(dim).sum::<f64>() / (height * width) as f64;
        Ok((0..dim).map(mean).collect())
    };
    let query = mean(own, 0)?;
    let affinity = |&region: &u32| Ok(scale * dot(&query, &mean(region as usize, dim)?));
    Ok(softmax(&routed.iter().map(affinity).collect::<Result<Vec<_>>>()?))
}

/// The elements of a part of a tensor.
fn numbers(part: Tensor) -> Result<Vec<f64>> {
    part.to_device(&Device::Cpu)?.cast(DType::F64)?.to_vec()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|score| libm::exp(score - highest)).sum();
    scores.iter().map(|score| libm::exp(score - highest) / sum).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::uniform;
    use crate::{attention, bra, bra_composed};
    use autograd::Tape;

    /// Two images, 16 channels of queries and of keys, 8 of values.
    const SHAPE: [usize; 4] = [2, 4, 6, 40];

    /// The values, weighted and summed, are what attention gives the token.
    fn assert_weigh(qkv: &Tensor, routes: &Tensor, kind: RouteKind, attributes: &Bra, attended: &Tensor) {
        let [images, height, width, channels] = SHAPE;
        let (dim, tokens) = (channels - 2 * attributes.qk_dim, height * width);
        let (values, attended) = (qkv.to_vec::<f64>().unwrap(), attended.to_vec::<f64>().unwrap());
        for token in [[0, 0], [1, 4], [3, 5]] {
            let weights = bra_weights(qkv, routes, kind, attributes, token).unwrap();
            assert_eq!(weights.shape()[..], [images, attributes.heads, height, width]);
            let weights = weights.to_vec::<f64>().unwrap();
            for (image, channel) in (0..images).flat_map(|image| (0..dim).map(move |channel| (image, channel))) {
                let head = channel / (dim / attributes.heads);
                let of_head = &weights[(image * attributes.heads + head) * tokens..][..tokens];
                let value = |token: usize| values[(image * tokens + token + 1) * channels - dim + channel];
                let sum: f64 = (0..tokens).map(|token| of_head[token] * value(token)).sum();
                let place = (image * tokens + token[0] * width + token[1]) * dim + channel;
                assert!((sum - attended[place]).abs() < 1e-12, "{token:?} {channel}: {sum} {}", attended[place]);
                let read = of_head.iter().filter(|&&weight| weight > 0.0).count();
                assert_eq!(read, attributes.topk * tokens / (attributes.grid[0] * attributes.grid[1]));
            }
        }
    }

    #[test]
    fn weights_are_those_of_routed_attention() {
        let (tape, qkv) = (Tape::inference(), uniform(SHAPE, 3));
        for topk in [1, 3, 6] {
            let attributes = Bra { heads: 2, qk_dim: 16, topk, grid: [2, 3], scale: 0.4, valid: None };
            let map = tape.constant(qkv.clone());
            let hard = bra(&map, None, &attributes).unwrap();
            assert_weigh(&qkv, &hard.routes, RouteKind::Hard, &attributes, hard.out.value());
            let soft = bra_composed(&map, None, &attributes, RouteKind::Soft).unwrap();
            assert_weigh(&qkv, &soft.routes, RouteKind::Soft, &attributes, soft.out.value());
        }
    }

    #[test]
    fn weights_are_those_of_full_attention() {
        let (tape, qkv) = (Tape::inference(), uniform([2, 4, 6, 24], 4));
        let attributes = Bra { heads: 4, qk_dim: 8, topk: 1, grid: [1, 1], scale: 0.7, valid: None };
        let routes = Tensor::zeros([2, 1, 1], DType::Index);
        let attended = attention(&tape.constant(qkv.clone()), 4, 0.7).unwrap().into_value();
        let weights =
            bra_weights(&qkv, &routes, RouteKind::Hard, &attributes, [2, 5]).unwrap().to_vec::<f64>().unwrap();
        let (values, attended) = (qkv.to_vec::<f64>().unwrap(), attended.to_vec::<f64>().unwrap());
        for (image, channel) in (0..2).flat_map(|image| (0..8).map(move |channel| (image, channel))) {
            let of_head = &weights[(image * 4 + channel / 2) * 24..][..24];
            let sum: f64 = (0..24).map(|token| of_head[token] * values[(image * 24 + token) * 24 + 16 + channel]).sum();
            assert!((sum - attended[(image * 24 + 17) * 8 + channel]).abs() < 1e-12);
        }
    }

    #[test]
    fn tokens_and_routes_that_do_not_exist_are_refused() {
        let attributes = Bra { heads: 2, qk_dim: 16, topk: 1, grid: [2, 3], scale: 0.4, valid: None };
        let weights = |routes: &[u32], shape: [usize; 3], token| {
            let routes = Tensor::from_slice(routes, shape).unwrap();
            bra_weights(&uniform(SHAPE, 3), &routes, RouteKind::Hard, &attributes, token).map(|_| ()).unwrap_err()
        };
        for token in [[4, 0], [0, 6]] {
            assert!(matches!(weights(&[0; 12], [2, 6, 1], token), Error::OutOfRange { .. }));
        }
        assert!(matches!(weights(&[6; 12], [2, 6, 1], [0, 0]), Error::OutOfRange { what: "a route", .. }));
        assert!(matches!(weights(&[0; 12], [2, 3, 2], [0, 0]), Error::Shape { .. }));
        let padded = Bra { valid: Some([3, 6]), ..attributes };
        let routes = Tensor::zeros([2, 6, 1], DType::Index);
        let refused = bra_weights(&uniform(SHAPE, 3), &routes, RouteKind::Soft, &padded, [0, 0]).unwrap_err();
        assert!(matches!(refused, Error::Argument { .. }));
    }

    #[test]
    fn weights_that_are_nan_are_shown_as_nan() {
        let attributes = Bra { heads: 2, qk_dim: 16, topk: 1, grid: [2, 3], scale: 0.4, valid: None };
        let (qkv, routes) = (Tensor::full(SHAPE, f64::NAN), Tensor::zeros([2, 6, 1], DType::Index));
        let weights = bra_weights(&qkv, &routes, RouteKind::Hard, &attributes, [0, 0]).unwrap();
        let weights = weights.to_vec::<f64>().unwrap();
        let attended = weights.iter().filter(|weight| weight.is_nan()).count();
        assert_eq!((attended, weights.iter().filter(|&&weight| weight == 0.0).count()), (2 * 2 * 4, 2 * 2 * 20));
    }
}
