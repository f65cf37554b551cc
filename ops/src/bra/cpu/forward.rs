//! Forward kernel of routed attention.

use super::{Head, Part, QUERY_BLOCK, Scratch};
use crate::bra::geometry::Geometry;
use rayon::prelude::*;
use tensor::cpu::isa::Arch;
use tensor::cpu::lanes::{max, sum_map};
use tensor::cpu::math::Transcendental;
use tensor::cpu::parallel::Interleaved;
use tensor::cpu::tile::{Left, Right, product};
use tensor::{Float, simd};

/// out (N, H, W, C) = softmax(scale·q·kᵀ)·v over each query's routed regions, and the logarithm of each
/// softmax's denominator, lse (N, heads, H·W) in pixel order.
///
/// `qkv` is (N, H, W, 2D + C) and `routes` (N, P, k), with every route below P.
pub fn forward<T: Float>(g: Geometry, qkv: &[T], routes: &[u32], scale: T, out: &mut [T], lse: &mut [T]) {
    let tokens = g.tokens();
    let out = Interleaved::new(out);
    lse.par_chunks_mut(tokens.max(1)).enumerate().for_each(|(task, lse)| {
        let (image, head) = (task / g.heads, task % g.heads);
        let operands = Head::new(g, qkv, routes, scale, task);
        forward_head(operands, lse, |pixel, row, factor| {
            let start = (image * tokens + pixel) * g.v_dim + head * row.len();
            // SAFETY: this task alone writes this head's channels of this image.
            let out = unsafe { out.part(start..start + row.len()) };
            out.iter_mut().zip(row).for_each(|(out, &x)| *out = x * factor);
        });
    });
}

/// Computes one head, giving each query's pixel, unnormalised result and normalising factor to `write`.
fn forward_head<T: Float>(head: Head<'_, T>, lse: &mut [T], write: impl Fn(usize, &[T], T)) {
    let g = head.geometry;
    let ([d, dv], tokens, keys) = (g.head_dims(), g.region_tokens(), g.keys());
    let block = tokens.min(QUERY_BLOCK);
    let sizes = [
        g.tokens() * d,  // all queries
        g.tokens() * d,  // all keys, transposed
        g.tokens() * dv, // all values
        d * keys,        // routed keys, transposed
        keys * dv,       // routed values
        block * keys,    // scores
        block * dv,      // results
        2 * block,       // sums of exponentials and their logarithms
    ];
    let mut scratch = Scratch::new(sizes.iter().sum());
    let [all_queries, all_keys, all_values, keys_t, values, scores, result, stats] = scratch.parts(sizes);
    let (sums, logs) = stats.split_at_mut(block);
    head.regions(Part::Query, head.scale, all_queries);
    head.transposed_regions(Part::Key, all_keys);
    head.regions(Part::Value, T::one(), all_values);
    for region in 0..g.regions() {
        head.routed_columns(region, all_keys, keys_t);
        head.routed_rows(region, all_values, values);
        for start in (0..tokens).step_by(block.max(1)) {
            let rows = start..(start + block).min(tokens);
            let count = rows.len();
            let queries = &all_queries[(region * tokens + start) * d..];
            let left = Left { data: queries, row_stride: d, col_stride: 1 };
            product([count, d, keys], left, Right { data: keys_t, stride: keys }, scores, keys, false);
            simd!(A => exponentials::<T, A>(&mut scores[..count * keys], &mut sums[..count], &mut logs[..count]));
            let left = Left { data: scores, row_stride: keys, col_stride: 1 };
            product([count, keys, dv], left, Right { data: values, stride: dv }, result, dv, false);
            for (i, t) in rows.enumerate() {
                let pixel = g.pixel(region, t);
                lse[pixel] = logs[i];
                write(pixel, &result[i * dv..][..dv], T::one() / sums[i]);
            }
        }
    }
}

/// Replaces each row of scores by exp(score − max); also their sums, and max + ln(sum). Dividing by the sum
/// is left to the result, which is shorter than the row.
#[inline(always)]
fn exponentials<T: Float, A: Arch>(scores: &mut [T], sums: &mut [T], logs: &mut [T]) {
    let keys = scores.len() / sums.len().max(1);
    for ((row, sum), log) in scores.chunks_exact_mut(keys.max(1)).zip(sums).zip(logs) {
        let largest = max(row);
        row.iter_mut().for_each(|x| *x = Transcendental::exp::<A>(*x - largest));
        *sum = sum_map(row, |x| x);
        *log = largest + sum.ln();
    }
}
