//! Forward kernel of routed attention.

use super::scores::Layout;
use super::{Head, Part, Pixels, QUERY_BLOCK, parts};
use crate::bra::geometry::Geometry;
use rayon::prelude::*;
use std::ops::Range;
use tensor::cpu::parallel::Interleaved;
use tensor::cpu::registers::Registers;
use tensor::cpu::tile::{Listed, Target, product};
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
    let heads = g.images * g.heads;
    if heads == 0 || g.tokens() == 0 {
        return;
    }
    let pixels = Pixels::new(g, routes);
    let work = g.tokens() * g.keys() * g.head_dims().iter().sum::<usize>();
    let shares = (TASKS / heads).min(work / SHARE).clamp(1, g.regions());
    let share = g.regions().div_ceil(shares);
    let (out, lse) = (Interleaved::new(out), Interleaved::new(lse));
    (0..heads * shares).into_par_iter().for_each(|task| {
        let (index, first) = (task / shares, task % shares * share);
        let regions = first.min(g.regions())..(first + share).min(g.regions());
        let (image, head) = (index / g.heads, index % g.heads);
        let operands = Head::new(g, qkv, &pixels, scale, [image, head]);
        let places = [image * g.tokens() * g.v_dim + head * g.head_dims()[1], index * g.tokens()];
        // SAFETY: `simd!` chooses an instruction set that the machine has; this task alone writes these regions
        // of this head.
        simd!(A => unsafe { forward_regions::<T, A>(operands, regions, out, lse, places) });
    });
}

/// Computes some regions of one head, whose results and logarithms start at `places`.
///
/// # Safety
/// The machine must have the instruction set `A`, and nobody else may use these regions' results and logarithms.
#[inline(always)]
unsafe fn forward_regions<T: Float, A: Registers>(
    head: Head<'_, T>,
    regions: Range<usize>,
    out: Interleaved<'_, T>,
    lse: Interleaved<'_, T>,
    places: [usize; 2],
) {
    let g = head.geometry;
    let ([d, dv], keys, block) = (g.head_dims(), g.keys(), g.region_tokens().min(QUERY_BLOCK));
    let layout = Layout::new(block, keys);
    let sizes = [layout.transposed_len(d), layout.len(), QUERY_BLOCK];
    let mut scratch = Tensor::scratch(sizes.iter().sum(), T::DTYPE);
    let [transposed, scores, logs] = parts(&mut scratch, sizes);
    for region in regions {
        let routed = head.routed(region);
        let [k, v] = [Part::Key, Part::Value].map(|part| head.tokens(part, routed));
        for own in head.own(region).chunks(block) {
            let (count, rows) = (own.len(), Listed::new(own, g.v_dim));
            let q = head.tokens(Part::Query, rows);
            let target = Target { data: out, offset: places[0], rows, accumulate: false };
            // SAFETY: both by the caller's word; a region's pixels are different ones.
            unsafe {
                layout.products::<T, A>([count, d], q, k, transposed, scores);
                layout.softmax::<T, A>(count, head.scale, scores, logs);
                product::<T, A>([count, keys, dv], layout.by_query(scores), v, target);
            }
            for (&pixel, &log) in own.iter().zip(&*logs) {
                // SAFETY: nobody else uses this region's logarithms, by the caller's word.
                unsafe { lse.at(places[1] + pixel as usize).write(log) };
            }
        }
    }
}
