//! Forward kernel of routed attention.

use super::products::Quads;
use super::quads::{Pixels, QUAD, row_width};
use super::scores::BLOCK_SLOTS;
use super::{Head, IN_ORDER, QueryBlock, Role, parts, pixels};
use crate::bra::geometry::Geometry;
use rayon::prelude::*;
use std::ops::Range;
use tensor::cpu::isa::Arch;
use tensor::cpu::parallel::Interleaved;
use tensor::{Float, Scratch, simd};

/// Each head is split into shares of its regions so that the heads of all images together make about this many tasks;
/// with more than half as many heads, none is split.
const TASKS: usize = 32;
/// The minimum multiply-adds of such a share, about 40 µs of work, because each share lays out its own keys.
const SHARE_WORK: usize = 1 << 22;

/// out (N, H, W, C) = softmax(scale·q·kᵀ)·v over each query's routed regions, and the log-sum-exp of each query's
/// scores, lse (N, heads, H·W) in pixel order.
///
/// `qkv` is (N, H, W, 2D + C) and `routes` (N, P, k), with every route below P.
pub fn forward<T: Float>(g: Geometry, qkv: &[T], routes: &[u32], scale: T, out: &mut [T], lse: &mut [T]) {
    if g.images == 0 || g.tokens() == 0 {
        return;
    }
    let pixels = pixels(g);
    let lists = (Pixels::new(&pixels, g.regions.tokens()), routes);
    let heads = g.images * g.heads;
    let work = g.tokens() * g.keys() * g.head_dims().iter().sum::<usize>();
    let shares = (TASKS / heads).min(work / SHARE_WORK).clamp(1, g.regions.count());
    let share = g.regions.count().div_ceil(shares);
    let (out, lse) = (Interleaved::new(out), Interleaved::new(lse));
    simd!(A => (0..heads * shares).into_par_iter().for_each(|task| {
        let (index, first) = (task / shares, task % shares * share);
        let regions = first.min(g.regions.count())..(first + share).min(g.regions.count());
        // SAFETY: this task alone writes these regions of this head, whose pixels are in no other region.
        unsafe { forward_regions::<T, A>(Head::new(g, qkv, lists, scale, index), regions, out, lse) };
    }));
}

/// Computes some regions of one head.
///
/// # Safety
/// Nobody else may use these regions' results and logarithms.
unsafe fn forward_regions<T: Float, A: Arch>(
    head: Head<'_, T>,
    regions: Range<usize>,
    out: Interleaved<'_, T>,
    lse: Interleaved<'_, T>,
) {
    let g = head.geometry;
    let [queries, keys, values] = [Role::Query, Role::Key, Role::Value].map(|role| head.channels(role));
    let (results, largest, v_width) = (head.results(), head.largest_block(), row_width::<T, A>(values.dim));

    // For all regions: keys as columns and values as rows, filled in when a query first attends to them.
    let sizes = [keys.dim, v_width].map(|width| head.pixels.quads() * QUAD * width);
    let mut packed = Scratch::<T>::new(sizes.iter().sum());
    let [key_columns, value_rows] = parts(&mut packed, sizes);

    // For a block of queries: the queries as columns; the scores, later A; and O as rows.
    let quads = largest[0] * largest[1] * QUAD;
    let sizes = [quads * queries.dim, head.score_layout(largest).len(), quads * v_width];
    let mut scratch = Scratch::<T>::new(sizes.iter().sum());
    let [columns, scores, rows] = parts(&mut scratch, sizes);

    let (mut logs, mut routed, mut missing) = ([T::zero(); BLOCK_SLOTS], vec![], head.all_missing());
    for QueryBlock { regions, pixels } in head.blocks(regions) {
        head.route(regions.clone(), &mut routed);
        for group in head.take_missing(regions.clone(), &mut missing) {
            let pixels = head.pixels_of(group.clone());
            keys.columns::<T, A>(head.qkv, pixels, head.part_of(group.clone(), keys.dim, key_columns));
            values.rows::<T, A>(head.qkv, pixels, head.part_of(group, v_width, value_rows));
        }
        let routed = &routed[..];
        let layout = head.score_layout([regions.len(), pixels.quads() / regions.len()]);
        let scores = &mut scores[..layout.len()];

        // A = softmax(s·q·kᵀ); O = A·v
        queries.columns::<T, A>(head.qkv, pixels, columns);
        layout.scores::<T, A>(queries.dim, columns, Quads { data: key_columns, quads: routed }, scores);
        layout.softmax::<T, A>(head.scale, scores, &mut logs);
        let from = Quads { data: &*value_rows, quads: routed };
        let to = Quads { data: &mut *rows, quads: &IN_ORDER[..pixels.quads()] };
        layout.by_query(scores).times::<A>(v_width, from, to, false);
        // SAFETY: nobody else uses these regions' results and logarithms, guaranteed by the caller.
        unsafe { results.write::<T, A>(rows, pixels, out, false) };
        let first = (head.image * g.heads + head.index) * g.tokens();
        for (place, region) in pixels.regions() {
            for (log, &pixel) in logs[place * QUAD..].iter().step_by(QUAD).zip(region) {
                // SAFETY: as above.
                unsafe { lse.at(first + pixel as usize).write(*log) };
            }
        }
    }
}
