//! Where a token looks: how much it attends to each of the others.
//!
//! Fused attention never has these weights of all tokens in memory at once. For one token of each image they are few,
//! and are computed here directly from their definition, in f64.

use crate::error::Result;
use ops::Regions;
use tensor::{DType, Device, Tensor};

/// The token of a map (H, W) that a point of the image lies in, given as parts of the image's height and width.
pub(crate) fn token_at(point: [f64; 2], map: [usize; 2]) -> [usize; 2] {
    std::array::from_fn(|axis| ((point[axis] * map[axis] as f64) as usize).min(map[axis].saturating_sub(1)))
}

/// Which tokens a token attends to.
pub(crate) enum Reads<'a> {
    All,
    /// Those of its region's routed regions.
    Routed {
        regions: Regions,
        /// (N, P, k)
        routes: &'a Tensor,
        /// Whether keys and values are multiplied by the softmax of their regions' affinities.
        soft: bool,
    },
}

/// An attention whose weights are asked for.
pub(crate) struct AttentionWeights<'a> {
    /// Queries, keys and values, (N, H, W, 3C).
    pub qkv: &'a Tensor,
    pub heads: usize,
    pub scale: f64,
    pub reads: Reads<'a>,
}

impl AttentionWeights<'_> {
    /// What the values of all tokens are multiplied by for a token of the map: (N, heads, H, W); 0 for tokens that are
    /// not read, and only for those. Each head's sum up to 1, except in soft routing.
    fn by_head(&self, [row, column]: [usize; 2]) -> Result<Tensor> {
        let [images, height, width, channels] = self.qkv.dims("attention_weights", "qkv (N, H, W, 3C)")?;
        let (dim, tokens) = (channels / 3, height * width);
        let head_dim = dim / self.heads;
        let query = self.qkv.slice(1, row..row + 1)?.slice(2, column..column + 1)?.slice(3, 0..dim)?;
        let (queries, keys) = (numbers(query)?, numbers(self.qkv.slice(3, dim..2 * dim)?)?); // (N, C) and (N, H, W, C)
        let mut weights = vec![0.0; images * self.heads * tokens];
        for (image, weights) in weights.chunks_exact_mut((self.heads * tokens).max(1)).enumerate() {
            let read = self.read(image, [row, column], [height, width])?;
            for (head, weights) in weights.chunks_exact_mut(tokens.max(1)).enumerate() {
                let query = &queries[image * dim + head * head_dim..][..head_dim];
                let key = |token: usize| &keys[(image * tokens + token) * dim + head * head_dim..][..head_dim];
                let score = |&(token, share): &(usize, f64)| share * self.scale * dot(query, key(token));
                let of_scores = softmax(&read.iter().map(score).collect::<Vec<_>>());
                for (&(token, share), weight) in read.iter().zip(of_scores) {
                    weights[token] = (share * weight).max(f64::MIN_POSITIVE);
                }
            }
        }
        Ok(Tensor::from_slice(&weights, [images, self.heads, height, width])?)
    }

    /// The tokens of an image that a token attends to, and what the key and the value of each are multiplied by.
    fn read(&self, image: usize, token: [usize; 2], map: [usize; 2]) -> Result<Vec<(usize, f64)>> {
        let tokens = 0..map[0] * map[1];
        let Reads::Routed { regions, routes, soft } = &self.reads else {
            return Ok(tokens.map(|token| (token, 1.0)).collect());
        };
        let region = |[row, column]: [usize; 2]| {
            let [height, width] = regions.size();
            (row / height * regions.grid()[1] + column / width) as u32
        };
        let own = region(token) as usize;
        let routed = routes.slice(0, image..image + 1)?.slice(1, own..own + 1)?;
        let routed = routed.to_device(&Device::Cpu)?.contiguous()?.to_vec::<u32>()?;
        let shares = if *soft { self.shares(image, own, &routed, regions)? } else { vec![1.0; routed.len()] };
        let share_of = |token: usize| {
            let place = routed.iter().position(|&routed| routed == region([token / map[1], token % map[1]]))?;
            Some((token, shares[place]))
        };
        Ok(tokens.filter_map(share_of).collect())
    }

    /// The softmax of the affinities of an image's region to those that it is routed to.
    fn shares(&self, image: usize, own: usize, routed: &[u32], regions: &Regions) -> Result<Vec<f64>> {
        let ([height, width], columns) = (regions.size(), regions.grid()[1]);
        let dim = self.qkv.shape()[3] / 3;
        // Of a region's queries or keys, which begin at this channel.
        let mean = |region: usize, channel: usize| -> Result<Vec<f64>> {
            let (top, left) = (region / columns * height, region % columns * width);
            let part =
                self.qkv.slice(0, image..image + 1)?.slice(1, top..top + height)?.slice(2, left..left + width)?;
            let part = numbers(part.slice(3, channel..channel + dim)?)?;
            let mean = |c| part.iter().skip(c).step_by(dim).sum::<f64>() / (height * width) as f64;
            Ok((0..dim).map(mean).collect())
        };
        let query = mean(own, 0)?;
        let affinity = |&region: &u32| Ok(self.scale * dot(&query, &mean(region as usize, dim)?));
        Ok(softmax(&routed.iter().map(affinity).collect::<Result<Vec<_>>>()?))
    }

    /// The mean of the heads' weights over the upper left part (H, W) of the map, which is not padding: (N, H, W) in
    /// f32.
    pub fn mean(&self, token: [usize; 2], [height, width]: [usize; 2]) -> Result<Tensor> {
        let weights = self.by_head(token)?;
        let [images, heads, rows, columns] = weights.dims("attention_weights", "weights (N, heads, H, W)")?;
        let weights = weights.to_vec::<f64>()?;
        let mean = |index: usize| {
            let (image, row, column) = (index / (height * width), index / width % height, index % width);
            let weight = |head| weights[((image * heads + head) * rows + row) * columns + column];
            let mean = (0..heads).map(weight).sum::<f64>() / heads as f64;
            // f32 would round the smallest doubles to 0.
            if mean > 0.0 { (mean as f32).max(f32::MIN_POSITIVE) } else { 0.0 }
        };
        let means: Vec<f32> = (0..images * height * width).map(mean).collect();
        Ok(Tensor::from_slice(&means, [images, height, width])?)
    }
}

/// The elements of a part of a tensor.
fn numbers(part: Tensor) -> Result<Vec<f64>> {
    Ok(part.contiguous()?.to_device(&Device::Cpu)?.cast(DType::F64)?.to_vec::<f64>()?)
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
    use autograd::Tape;
    use ops::{Bra, RouteKind};
    use tensor::rng::Philox;

    const SHAPE: [usize; 4] = [2, 4, 6, 24];

    fn qkv() -> Tensor {
        let mut random = Philox::new(3, 0).sequence();
        let values: Vec<f64> = (0..SHAPE.iter().product()).map(|_| 2.0 * random.normal()).collect();
        Tensor::from_slice(&values, SHAPE).unwrap()
    }

    /// The values, weighted and summed, are what attention gives the token.
    fn assert_weigh(of: &AttentionWeights, attended: &Tensor) {
        let [images, height, width, channels] = SHAPE;
        let (dim, head_dim) = (channels / 3, channels / 3 / of.heads);
        let (values, attended) = (of.qkv.to_vec::<f64>().unwrap(), attended.to_vec::<f64>().unwrap());
        for token in [[0, 0], [1, 4], [3, 5]] {
            let weights = of.by_head(token).unwrap().to_vec::<f64>().unwrap();
            for (image, channel) in (0..images).flat_map(|image| (0..dim).map(move |channel| (image, channel))) {
                let of_head = &weights[(image * of.heads + channel / head_dim) * height * width..];
                let value = |token: usize| values[(image * height * width + token) * channels + 2 * dim + channel];
                let sum: f64 = (0..height * width).map(|token| of_head[token] * value(token)).sum();
                let place = (image * height * width + token[0] * width + token[1]) * dim + channel;
                assert!((sum - attended[place]).abs() < 1e-12, "{token:?} {channel}: {sum} {}", attended[place]);
            }
        }
    }

    #[test]
    fn weights_are_those_of_routed_attention() {
        let (tape, qkv) = (Tape::inference(), qkv());
        for (topk, soft) in [(1, false), (3, false), (6, false), (1, true), (3, true), (6, true)] {
            let bra = Bra { heads: 2, qk_dim: 8, topk, grid: [2, 3], scale: 0.4, valid: None };
            let map = tape.constant(qkv.clone());
            let routed =
                if soft { ops::bra_composed(&map, None, &bra, RouteKind::Soft) } else { ops::bra(&map, None, &bra) };
            let routed = routed.unwrap();
            let regions = Regions::cut("test", [4, 6], bra.grid).unwrap();
            let reads = Reads::Routed { regions, routes: &routed.routes, soft };
            let of = AttentionWeights { qkv: &qkv, heads: 2, scale: 0.4, reads };
            assert_weigh(&of, routed.out.value());
            let read = of.mean([0, 0], [4, 6]).unwrap().to_vec::<f32>().unwrap();
            assert_eq!(read.iter().filter(|&&weight| weight > 0.0).count(), 2 * topk * 4, "of two images");
        }
    }

    #[test]
    fn weights_are_those_of_full_attention() {
        let (tape, qkv) = (Tape::inference(), qkv());
        let attended = ops::attention(&tape.constant(qkv.clone()), 4, 0.7).unwrap();
        assert_weigh(&AttentionWeights { qkv: &qkv, heads: 4, scale: 0.7, reads: Reads::All }, attended.value());
    }

    #[test]
    fn a_point_lies_in_a_token_of_any_map() {
        assert_eq!(token_at([0.5, 0.5], [4, 7]), [2, 3]);
        assert_eq!(token_at([0.0, 1.0], [4, 7]), [0, 6]);
        assert_eq!(token_at([0.999, 0.999], [1, 1]), [0, 0]);
    }
}
