//! Backward kernel of routed attention.

use super::products::Quads;
use super::quads::{QUAD, row_width};
use super::scores::NUMBERS;
use super::{Block, Head, IN_ORDER, Part, parts, pixels};
use crate::bra::geometry::Geometry;
use rayon::prelude::*;
use tensor::cpu::parallel::{Interleaved, Out};
use tensor::cpu::registers::Registers;
use tensor::{Float, Scratch, simd};

/// dqkv (N, H, W, 2D + C) from the gradient of the result, dout (N, H, W, C). The scores are computed again
/// from `qkv`, and the probabilities from the scores and `lse` (N, heads, H·W).
pub fn backward<T: Float>(g: Geometry, qkv: &[T], routes: &[u32], scale: T, lse: &[T], dout: &[T], dqkv: Out<'_, T>) {
    let tokens = g.tokens();
    if tokens == 0 {
        return;
    }
    let pixels = pixels(g);
    let lists = [&*pixels, routes];
    let accumulate = dqkv.accumulate;
    let dqkv = Interleaved::new(dqkv.data);
    simd!(A => lse.par_chunks(tokens).enumerate().for_each(|(index, lse)| {
        let head = Head::new(g, qkv, lists, scale, index);
        // SAFETY: this task alone writes this head's channels of this image.
        unsafe { backward_head::<T, A>(head, Gradients { dout, lse, dqkv, accumulate }) };
    }));
}

/// What backward reads and writes apart from a head's operands.
#[derive(Clone, Copy)]
struct Gradients<'a, T> {
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
unsafe fn backward_head<T: Float, A: Registers>(head: Head<'_, T>, gradients: Gradients<'_, T>) {
    let Gradients { dout, lse, dqkv, accumulate } = gradients;
    let [queries, keys, values] = [Part::Query, Part::Key, Part::Value].map(|part| head.channels(part));
    let [d, dv] = head.geometry.head_dims();
    let [width, v_width] = [d, dv].map(row_width::<T, A>);
    // The columns of keys and values, the rows of keys, and the gradients of both, as far as they are needed.
    let sizes = [d, dv, width, width, v_width].map(|width| head.all().quads() * QUAD * width);
    let mut packed = Scratch::<T>::new(sizes.iter().sum());
    let [key_columns, value_columns, key_rows, dkeys, dvalues] = parts(&mut packed, sizes);
    let largest = head.largest_block();
    let [columns, rows, dout_rows] = [d.max(dv), width, v_width].map(|width| largest[0] * largest[1] * QUAD * width);
    let scores = head.scores(largest).blocks.len();
    let sizes = [columns, rows, dout_rows, rows, scores, scores];
    let mut scratch = Scratch::<T>::new(sizes.iter().sum());
    let [columns, rows, dout_rows, drows, p, ds] = parts(&mut scratch, sizes);
    let (mut routed, mut missing) = (vec![], head.all_missing());
    for Block { regions, pixels } in head.blocks(0..head.geometry.regions.count()) {
        head.route(regions.clone(), &mut routed);
        head.fetch_next(pixels);
        for group in head.find_missing(regions.clone(), &mut missing) {
            let pixels = head.pixels_of(group.clone());
            let to = [(d, &mut *key_columns), (width, &mut *key_rows), (dv, &mut *value_columns)];
            let [key_columns, key_rows, value_columns] = to.map(|(width, all)| head.part_of(group.clone(), width, all));
            keys.both::<T, A>(head.qkv, pixels, key_columns, key_rows);
            values.columns::<T, A>(head.qkv, pixels, value_columns);
            head.part_of(group.clone(), width, dkeys).fill(T::zero());
            head.part_of(group, v_width, dvalues).fill(T::zero());
        }
        let (routed, in_order) = (&routed[..], &IN_ORDER[..pixels.quads()]);
        let block = head.scores([regions.len(), pixels.quads() / regions.len()]);
        let (p, ds) = (&mut p[..block.blocks.len()], &mut ds[..block.blocks.len()]);
        // Zero where there is no query.
        let mut logs = [T::zero(); NUMBERS];
        for (place, pixel) in pixels.places() {
            logs[place * QUAD..][..QUAD].fill(lse[pixel as usize]);
        }
        // P = exp(s·q·kᵀ − lse); dP = dO·vᵀ; s·dS = s·P∘(dP − Σ P∘dP)
        queries.both::<T, A>(head.qkv, pixels, columns, rows);
        block.blocks.scores::<T, A>(d, columns, Quads { data: key_columns, quads: routed }, p);
        head.results().both::<T, A>(dout, pixels, columns, dout_rows);
        block.blocks.scores::<T, A>(dv, columns, Quads { data: value_columns, quads: routed }, ds);
        block.gradients::<T, A>(head.scale, p, ds, &mut logs);
        // dV += Pᵀ·dO; dK += s·dSᵀ·q; dQ = s·dS·k
        let (from, to) = (Quads { data: &*dout_rows, quads: in_order }, Quads { data: &mut *dvalues, quads: routed });
        block.blocks.by_key(p).times::<A>(v_width, from, to, true);
        let (from, to) = (Quads { data: &*rows, quads: in_order }, Quads { data: &mut *dkeys, quads: routed });
        block.blocks.by_key(ds).times::<A>(width, from, to, true);
        let (from, to) = (Quads { data: &*key_rows, quads: routed }, Quads { data: &mut *drows, quads: in_order });
        block.blocks.by_query(ds).times::<A>(width, from, to, false);
        // SAFETY: nobody else uses this head's channels, by the caller's word.
        unsafe { queries.write::<T, A>(drows, pixels, dqkv, accumulate) };
    }
    for (place, missing) in missing.chunks(head.group()).enumerate() {
        let first = place * head.group();
        let regions = first..first + missing.len();
        let gradients = [(width, &mut *dkeys), (v_width, &mut *dvalues)];
        let [dkeys, dvalues] = gradients.map(|(width, all)| head.part_of(regions.clone(), width, all));
        if missing[0] {
            dkeys.fill(T::zero());
            dvalues.fill(T::zero());
        }
        // SAFETY: as above.
        unsafe {
            keys.write::<T, A>(dkeys, head.pixels_of(regions.clone()), dqkv, accumulate);
            values.write::<T, A>(dvalues, head.pixels_of(regions), dqkv, accumulate);
        }
    }
}
