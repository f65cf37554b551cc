//! Backward kernel of routed attention.

use super::products::Quads;
use super::quads::{Pixels, QUAD, row_width};
use super::scores::BLOCK_SLOTS;
use super::{Head, IN_ORDER, QueryBlock, Role, parts, pixels};
use crate::bra::geometry::Geometry;
use rayon::prelude::*;
use std::ops::Range;
use tensor::cpu::isa::Arch;
use tensor::cpu::parallel::{Interleaved, Out};
use tensor::{Float, Scratch, simd};

/// dqkv (N, H, W, 2D + C) from the gradient of the result, dout (N, H, W, C). The scores are computed again
/// from `qkv`, and the weights from the scores and `lse` (N, heads, H·W).
pub fn backward<T: Float>(g: Geometry, qkv: &[T], routes: &[u32], scale: T, lse: &[T], dout: &[T], dqkv: Out<'_, T>) {
    let tokens = g.tokens();
    if tokens == 0 {
        return;
    }
    let pixels = pixels(g);
    let lists = (Pixels::new(&pixels, g.regions.tokens()), routes);
    let accumulate = dqkv.accumulate;
    let dqkv = Interleaved::new(dqkv.data);
    simd!(A => lse.par_chunks(tokens).enumerate().for_each(|(index, lse)| {
        let head = Head::new(g, qkv, lists, scale, index);
        // SAFETY: this task alone writes this head's channels of this image.
        unsafe { backward_head::<T, A>(head, BackwardTask { dout, lse, dqkv, accumulate }) };
    }));
}

/// What the backward task of a head reads and writes, apart from the head's operands.
#[derive(Clone, Copy)]
struct BackwardTask<'a, T> {
    /// (N, H, W, C)
    dout: &'a [T],
    /// The head's (H·W).
    lse: &'a [T],
    /// (N, H, W, 2D + C)
    dqkv: Interleaved<'a, T>,
    accumulate: bool,
}

/// Computes one head's gradients.
///
/// # Safety
/// Nobody else may use this head's channels of dqkv.
unsafe fn backward_head<T: Float, A: Arch>(head: Head<'_, T>, task: BackwardTask<'_, T>) {
    let BackwardTask { dout, lse, dqkv, accumulate } = task;
    let (queries, [d, dv]) = (head.channels(Role::Query), head.geometry.head_dims());
    let [width, v_width] = [d, dv].map(row_width::<T, A>);

    // For all regions: keys and values as columns, keys as rows, and the gradients of keys and values.
    let sizes = [d, dv, width, width, v_width].map(|width| head.pixels.quads() * QUAD * width);
    let mut packed = Scratch::<T>::new(sizes.iter().sum());
    let [key_columns, value_columns, key_rows, dkeys, dvalues] = parts(&mut packed, sizes);
    let mut attended = Attended { key_columns, value_columns, key_rows, dkeys, dvalues };

    // For a block of queries: the queries, and later dout, as columns; both of them and dq as rows; A; and dA, later
    // s·dS.
    let largest = head.largest_block();
    let [columns, rows, dout_rows] = [d.max(dv), width, v_width].map(|width| largest[0] * largest[1] * QUAD * width);
    let scores = head.score_layout(largest).len();
    let sizes = [columns, rows, dout_rows, rows, scores, scores];
    let mut scratch = Scratch::<T>::new(sizes.iter().sum());
    let [columns, rows, dout_rows, drows, weights, slopes] = parts(&mut scratch, sizes);

    let (mut routed, mut missing) = (vec![], head.all_missing());
    for QueryBlock { regions, pixels } in head.blocks(0..head.geometry.regions.count()) {
        head.route(regions.clone(), &mut routed);
        head.fetch_next(pixels);
        for group in head.take_missing(regions.clone(), &mut missing) {
            attended.lay_out::<A>(&head, group);
        }
        let Attended { key_columns, value_columns, key_rows, dkeys, dvalues } = &mut attended;
        let (routed, in_order) = (&routed[..], &IN_ORDER[..pixels.quads()]);
        let layout = head.score_layout([regions.len(), pixels.quads() / regions.len()]);
        let (weights, slopes) = (&mut weights[..layout.len()], &mut slopes[..layout.len()]);
        // Zero where there is no query.
        let mut logs = [T::zero(); BLOCK_SLOTS];
        for (place, region) in pixels.regions() {
            for (logs, &pixel) in logs[place * QUAD..].chunks_exact_mut(QUAD).zip(region) {
                logs.fill(lse[pixel as usize]);
            }
        }

        // A = exp(s·q·kᵀ − lse); dA = dO·vᵀ; s·dS = s·A∘(dA − Σ A∘dA)
        queries.both::<T, A>(head.qkv, pixels, columns, rows);
        layout.scores::<T, A>(d, columns, Quads { data: key_columns, quads: routed }, weights);
        head.results().both::<T, A>(dout, pixels, columns, dout_rows);
        layout.scores::<T, A>(dv, columns, Quads { data: value_columns, quads: routed }, slopes);
        layout.gradients::<T, A>(head.scale, weights, slopes, &logs);

        // dV += Aᵀ·dO; dK += s·dSᵀ·q; dQ = s·dS·k
        let (from, to) = (Quads { data: &*dout_rows, quads: in_order }, Quads { data: &mut **dvalues, quads: routed });
        layout.by_key(weights).times::<A>(v_width, from, to, true);
        let (from, to) = (Quads { data: &*rows, quads: in_order }, Quads { data: &mut **dkeys, quads: routed });
        layout.by_key(slopes).times::<A>(width, from, to, true);
        let (from, to) = (Quads { data: &**key_rows, quads: routed }, Quads { data: &mut *drows, quads: in_order });
        layout.by_query(slopes).times::<A>(width, from, to, false);
        // SAFETY: nobody else uses this head's channels, guaranteed by the caller.
        unsafe { queries.write::<T, A>(drows, pixels, dqkv, accumulate) };
    }
    // SAFETY: as above.
    unsafe { attended.write::<A>(&head, &missing, dqkv, accumulate) };
}

/// Keys and values with their gradients: buffers for all regions of a head, filled in when a query first attends to a
/// region.
struct Attended<'s, T> {
    key_columns: &'s mut [T],
    value_columns: &'s mut [T],
    key_rows: &'s mut [T],
    /// Rows.
    dkeys: &'s mut [T],
    dvalues: &'s mut [T],
}

impl<T: Float> Attended<'_, T> {
    /// Lays out the keys and values of a group of regions, and sets their gradients to zero.
    fn lay_out<A: Arch>(&mut self, head: &Head<'_, T>, group: Range<usize>) {
        let ([d, dv], pixels) = (head.geometry.head_dims(), head.pixels_of(group.clone()));
        let [width, v_width] = [d, dv].map(row_width::<T, A>);
        let columns = head.part_of(group.clone(), d, self.key_columns);
        let rows = head.part_of(group.clone(), width, self.key_rows);
        head.channels(Role::Key).both::<T, A>(head.qkv, pixels, columns, rows);
        let columns = head.part_of(group.clone(), dv, self.value_columns);
        head.channels(Role::Value).columns::<T, A>(head.qkv, pixels, columns);
        head.part_of(group.clone(), width, self.dkeys).fill(T::zero());
        head.part_of(group, v_width, self.dvalues).fill(T::zero());
    }

    /// Writes the gradients to dqkv, with zeros for regions that no query attended to.
    ///
    /// # Safety
    /// Nobody else may use this head's channels of dqkv.
    unsafe fn write<A: Arch>(self, head: &Head<'_, T>, missing: &[bool], dqkv: Interleaved<'_, T>, accumulate: bool) {
        let [width, v_width] = head.geometry.head_dims().map(row_width::<T, A>);
        for (place, missing) in missing.chunks(head.group()).enumerate() {
            let first = place * head.group();
            let group = first..first + missing.len();
            let pixels = head.pixels_of(group.clone());
            let dkeys = head.part_of(group.clone(), width, self.dkeys);
            let dvalues = head.part_of(group, v_width, self.dvalues);
            if missing[0] {
                dkeys.fill(T::zero());
                dvalues.fill(T::zero());
            }
            // SAFETY: guaranteed by the caller.
            unsafe {
                head.channels(Role::Key).write::<T, A>(dkeys, pixels, dqkv, accumulate);
                head.channels(Role::Value).write::<T, A>(dvalues, pixels, dqkv, accumulate);
            }
        }
    }
}
