//! Backward kernel of routed attention.

use super::{Head, Part, QUERY_BLOCK, Scratch};
use crate::bra::geometry::Geometry;
use rayon::prelude::*;
use tensor::cpu::isa::Arch;
use tensor::cpu::lanes::sum_map2;
use tensor::cpu::math::Transcendental;
use tensor::cpu::parallel::{Interleaved, Out, put};
use tensor::cpu::tile::{Left, Right, product};
use tensor::{Float, simd};

/// dqkv (N, H, W, 2D + C) from the gradient of the result, dout (N, H, W, C). The scores are computed again
/// from `qkv`, and the probabilities from the scores and `lse` (N, heads, H·W).
pub fn backward<T: Float>(g: Geometry, qkv: &[T], routes: &[u32], scale: T, lse: &[T], dout: &[T], dqkv: Out<'_, T>) {
    let tokens = g.tokens();
    let accumulate = dqkv.accumulate;
    let dqkv = Interleaved::new(dqkv.data);
    lse.par_chunks(tokens.max(1)).enumerate().for_each(|(task, lse)| {
        let (image, head) = (task / g.heads, task % g.heads);
        let operands = Head::new(g, qkv, routes, scale, task);
        let dout = &dout[image * tokens * g.v_dim..][..tokens * g.v_dim];
        backward_head(operands, head, lse, dout, |pixel, part, row| {
            let start = (image * tokens + pixel) * g.row() + operands.channels[part as usize];
            // SAFETY: this task alone writes this head's channels of this image.
            put(unsafe { dqkv.part(start..start + row.len()) }, row, accumulate);
        });
    });
}

/// Computes one head's gradients, giving each pixel's parts to `write` once.
fn backward_head<T: Float>(head: Head<'_, T>, index: usize, lse: &[T], dout: &[T], write: impl Fn(usize, Part, &[T])) {
    let g = head.geometry;
    let ([d, dv], tokens, keys) = (g.head_dims(), g.region_tokens(), g.keys());
    let block = tokens.min(QUERY_BLOCK);
    let sizes = [
        g.tokens() * d,  // all queries
        g.tokens() * d,  // all keys
        g.tokens() * d,  // all keys, transposed
        g.tokens() * dv, // all values, transposed
        g.tokens() * d,  // gradients of all keys
        g.tokens() * dv, // gradients of all values
        keys * d,        // routed keys
        d * keys,        // routed keys, transposed
        dv * keys,       // routed values, transposed
        keys * d,        // gradients of routed keys
        keys * dv,       // gradients of routed values
        block * d,       // gradients of queries
        block * dv,      // gradients of results
        block * keys,    // probabilities
        block * keys,    // gradients of probabilities, then of scores
        block,           // log-sum-exps
    ];
    let mut scratch = Scratch::new(sizes.iter().sum());
    let [
        all_queries,
        all_keys,
        all_keys_t,
        all_values_t,
        all_dk,
        all_dv,
        key_rows,
        keys_t,
        values_t,
        dk,
        dv_rows,
        dq,
        dresult,
        p,
        ds,
        logs,
    ] = scratch.parts(sizes);
    head.regions(Part::Query, head.scale, all_queries);
    head.regions(Part::Key, T::one(), all_keys);
    head.transposed_regions(Part::Key, all_keys_t);
    head.transposed_regions(Part::Value, all_values_t);
    all_dk.fill(T::zero());
    all_dv.fill(T::zero());
    for region in 0..g.regions() {
        head.routed_rows(region, all_keys, key_rows);
        head.routed_columns(region, all_keys_t, keys_t);
        head.routed_columns(region, all_values_t, values_t);
        for start in (0..tokens).step_by(block.max(1)) {
            let rows = start..(start + block).min(tokens);
            let count = rows.len();
            let queries = &all_queries[(region * tokens + start) * d..];
            for (i, t) in rows.clone().enumerate() {
                let pixel = g.pixel(region, t);
                logs[i] = lse[pixel];
                dresult[i * dv..][..dv].copy_from_slice(&dout[pixel * g.v_dim + index * dv..][..dv]);
            }
            let by_row = |data, row_stride| Left { data, row_stride, col_stride: 1 };
            let by_column = |data, row_stride| Left { data, row_stride: 1, col_stride: row_stride };
            let right = |data, stride| Right { data, stride };
            // P = exp(q·kᵀ − lse); dP = dO·vᵀ; dS = P∘(dP − Σ P∘dP)
            product([count, d, keys], by_row(queries, d), right(keys_t, keys), p, keys, false);
            product([count, dv, keys], by_row(dresult, dv), right(values_t, keys), ds, keys, false);
            simd!(A => score_gradients::<T, A>(&mut p[..count * keys], &mut ds[..count * keys], &logs[..count]));
            // dv += Pᵀ·dO; dk += dSᵀ·q; dq = scale·dS·k
            product([keys, count, dv], by_column(p, keys), right(dresult, dv), dv_rows, dv, start > 0);
            product([keys, count, d], by_column(ds, keys), right(queries, d), dk, d, start > 0);
            product([count, keys, d], by_row(ds, keys), right(key_rows, d), dq, d, false);
            for (i, t) in rows.enumerate() {
                let dq = &mut dq[i * d..][..d];
                dq.iter_mut().for_each(|x| *x *= head.scale);
                write(g.pixel(region, t), Part::Query, dq);
            }
        }
        for (slot, &routed) in head.routes(region).iter().enumerate() {
            let routed = routed as usize * tokens;
            put(&mut all_dk[routed * d..][..tokens * d], &dk[slot * tokens * d..][..tokens * d], true);
            put(&mut all_dv[routed * dv..][..tokens * dv], &dv_rows[slot * tokens * dv..][..tokens * dv], true);
        }
    }
    for region in 0..g.regions() {
        for t in 0..tokens {
            let (pixel, place) = (g.pixel(region, t), region * tokens + t);
            write(pixel, Part::Key, &all_dk[place * d..][..d]);
            write(pixel, Part::Value, &all_dv[place * dv..][..dv]);
        }
    }
}

/// From scores and dP: the probabilities, and in place of dP the gradients of the scores.
#[inline(always)]
fn score_gradients<T: Float, A: Arch>(p: &mut [T], dp: &mut [T], logs: &[T]) {
    let keys = p.len() / logs.len().max(1);
    for ((p, dp), &log) in p.chunks_exact_mut(keys.max(1)).zip(dp.chunks_exact_mut(keys.max(1))).zip(logs) {
        p.iter_mut().for_each(|x| *x = Transcendental::exp::<A>(*x - log));
        let delta = sum_map2(p, dp, |p, dp| p * dp);
        dp.iter_mut().zip(p).for_each(|(dp, &mut p)| *dp = p * (*dp - delta));
    }
}
