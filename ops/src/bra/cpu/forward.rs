//! Forward kernel of routed attention.

use super::products::Quads;
use super::quads::{QUAD, row_width};
use super::scores::NUMBERS;
use super::{Block, Head, IN_ORDER, Part, parts, pixels};
use crate::bra::geometry::Geometry;
use rayon::prelude::*;
use std::ops::Range;
use tensor::cpu::parallel::Interleaved;
use tensor::cpu::registers::Registers;
use tensor::{Float, Tensor, simd};

/// A head's regions are shared out when there are fewer heads than this, all images' together,
const TASKS: usize = 32;
/// in shares of at least so many multiply-adds (some 10 µs).
const SHARE: usize = 1 << 20;

/// out (N, H, W, C) = softmax(scale·q·kᵀ)·v over each query's routed regions, and the logarithm of each
/// softmax's denominator, lse (N, heads, H·W) in pixel order.
///
/// `qkv` is (N, H, W, 2D + C) and `routes` (N, P, k), with every route below P.
pub fn forward<T: Float>(g: Geometry, qkv: &[T], routes: &[u32], scale: T, out: &mut [T], lse: &mut [T]) {
    if g.images == 0 || g.tokens() == 0 {
        return;
    }
    let pixels = pixels(g);
    let lists = [pixels.as_slice("bra").expect("invariant: a new tensor is contiguous"), routes];
    let (out, lse) = (Interleaved::new(out), Interleaved::new(lse));
    simd!(A => {
        let heads = (0..g.images * g.heads).into_par_iter();
        heads.for_each(|index| forward_head::<T, A>(Head::new(g, qkv, lists, scale, index), out, lse))
    });
}

/// Computes one head.
fn forward_head<T: Float, A: Registers>(head: Head<'_, T>, out: Interleaved<'_, T>, lse: Interleaved<'_, T>) {
    let g = head.geometry;
    let ([d, dv], quads) = (g.head_dims(), head.all().quads());
    let sizes = [d, row_width::<T, A>(dv)].map(|width| quads * QUAD * width);
    let mut packed = Tensor::scratch(sizes.iter().sum(), T::DTYPE);
    let [keys, values] = parts(&mut packed, sizes);
    head.channels(Part::Key).columns::<T, A>(head.qkv, head.all(), keys);
    head.channels(Part::Value).rows::<T, A>(head.qkv, head.all(), values);
    let (keys, values) = (&*keys, &*values);
    let work = g.tokens() * g.keys() * (d + dv);
    let shares = (TASKS / (g.images * g.heads)).min(work / SHARE).clamp(1, g.regions());
    let share = g.regions().div_ceil(shares);
    (0..shares).into_par_iter().for_each(|task| {
        let regions = (task * share).min(g.regions())..((task + 1) * share).min(g.regions());
        // SAFETY: this task alone writes these regions of this head.
        unsafe { forward_regions::<T, A>(head, regions, [keys, values], out, lse) };
    });
}

/// Computes some regions of one head, from the columns of its keys and the rows of its values.
///
/// # Safety
/// Nobody else may use these regions' results and logarithms.
unsafe fn forward_regions<T: Float, A: Registers>(
    head: Head<'_, T>,
    regions: Range<usize>,
    [keys, values]: [&[T]; 2],
    out: Interleaved<'_, T>,
    lse: Interleaved<'_, T>,
) {
    let (g, queries, results, largest) =
        (head.geometry, head.channels(Part::Query), head.results(), head.largest_block());
    let quads = largest[0] * largest[1];
    let width = row_width::<T, A>(results.dim);
    let sizes = [quads * QUAD * queries.dim, head.scores(largest).blocks.len(), quads * QUAD * width];
    let mut scratch = Tensor::scratch(sizes.iter().sum(), T::DTYPE);
    let [columns, scores, rows] = parts(&mut scratch, sizes);
    let (mut logs, mut routed) = ([T::zero(); NUMBERS], vec![]);
    for Block { regions, pixels } in head.blocks(regions) {
        head.route(regions.clone(), &mut routed);
        let (keys, values) = (Quads { data: keys, quads: &routed }, Quads { data: values, quads: &routed });
        let block = head.scores([regions.len(), pixels.quads() / regions.len()]);
        let scores = &mut scores[..block.blocks.len()];
        queries.columns::<T, A>(head.qkv, pixels, columns);
        block.blocks.scores::<T, A>(queries.dim, columns, keys, scores);
        block.softmax::<T, A>(head.scale, scores, &mut logs);
        let to = Quads { data: &mut *rows, quads: &IN_ORDER[..pixels.quads()] };
        block.blocks.by_query(scores).times::<A>(width, values, to, false);
        // SAFETY: nobody else uses these regions' results and logarithms, by the caller's word.
        unsafe { results.write::<T, A>(rows, pixels, out, false) };
        let first = (head.image * g.heads + head.index) * g.tokens();
        for (place, pixel) in pixels.places() {
            // SAFETY: as above.
            unsafe { lse.at(first + pixel).write(logs[place * QUAD]) };
        }
    }
}
