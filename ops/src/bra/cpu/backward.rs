//! Backward kernel of routed attention.

use super::scores::Layout;
use super::{Head, Part, Pixels, QUERY_BLOCK, parts};
use crate::bra::geometry::Geometry;
use rayon::prelude::*;
use tensor::cpu::parallel::{Interleaved, Out};
use tensor::cpu::registers::Registers;
use tensor::cpu::tile::{Listed, Right, Target, product};
use tensor::{Float, Tensor, simd};

/// dqkv (N, H, W, 2D + C) from the gradient of the result, dout (N, H, W, C). The scores are computed again
/// from `qkv`, and the probabilities from the scores and `lse` (N, heads, H·W).
pub fn backward<T: Float>(g: Geometry, qkv: &[T], routes: &[u32], scale: T, lse: &[T], dout: &[T], dqkv: Out<'_, T>) {
    let tokens = g.tokens();
    if tokens == 0 {
        return;
    }
    let pixels = Pixels::new(g, routes);
    let accumulate = dqkv.accumulate;
    let dqkv = Interleaved::new(dqkv.data);
    lse.par_chunks(tokens).enumerate().for_each(|(task, lse)| {
        let (image, index) = (task / g.heads, task % g.heads);
        let head = Head::new(g, qkv, &pixels, scale, [image, index]);
        let gradients = Gradients {
            // Without a channel of values there is nothing after the last start.
            dout: &dout[(image * tokens * g.v_dim + index * g.head_dims()[1]).min(dout.len())..],
            lse,
            dqkv,
            offset: image * tokens * g.row(),
            accumulate,
        };
        // SAFETY: `simd!` chooses an instruction set that the machine has; this task alone writes this head's
        // channels of this image.
        simd!(A => unsafe { backward_head::<T, A>(head, gradients) });
    });
}

/// What backward reads and writes for one head, apart from its operands.
struct Gradients<'a, T> {
    /// (H·W, C), from the head's first channel on.
    dout: &'a [T],
    /// (H·W)
    lse: &'a [T],
    dqkv: Interleaved<'a, T>,
    /// Where the image starts in dqkv.
    offset: usize,
    accumulate: bool,
}

/// Computes one head's gradients.
///
/// # Safety
/// The machine must have the instruction set `A`, and nobody else may use this head's channels of dqkv.
#[inline(always)]
unsafe fn backward_head<T: Float, A: Registers>(head: Head<'_, T>, gradients: Gradients<'_, T>) {
    let g = head.geometry;
    let Gradients { dout, lse, dqkv, offset, accumulate } = gradients;
    let ([d, dv], keys, block) = (g.head_dims(), g.keys(), g.region_tokens().min(QUERY_BLOCK));
    let layout = Layout::new(block, keys);
    let sizes = [layout.transposed_len(d.max(dv)), layout.len(), layout.len(), QUERY_BLOCK];
    let mut scratch = Tensor::scratch(sizes.iter().sum(), T::DTYPE);
    let [transposed, p, ds, logs] = parts(&mut scratch, sizes);
    if !accumulate {
        for (part, dim) in [(Part::Key, d), (Part::Value, dv)] {
            for pixel in 0..g.tokens() {
                let start = offset + pixel * g.row() + head.channels[part as usize];
                // SAFETY: nobody else uses this head's channels, by the caller's word.
                unsafe { dqkv.part(start..start + dim) }.fill(T::zero());
            }
        }
    }
    for region in 0..g.regions() {
        let routed = head.routed(region);
        for own in head.own(region).chunks(block) {
            let count = own.len();
            for (log, &pixel) in logs.iter_mut().zip(own) {
                *log = lse[pixel as usize];
            }
            let own = Listed::new(own, g.row());
            let [q, k, v] = [(Part::Query, own), (Part::Key, routed), (Part::Value, routed)]
                .map(|(part, pixels)| head.tokens(part, pixels));
            let dout = Right { data: dout, rows: own.apart(g.v_dim) };
            let target = |part, rows, accumulate| Target {
                data: dqkv,
                offset: offset + head.channels[part as usize],
                rows,
                accumulate,
            };
            // SAFETY: both by the caller's word; the pixels of a region, and of several, are different ones.
            unsafe {
                // P = exp(s·q·kᵀ − lse); dP = dO·vᵀ; s·dS = s·P∘(dP − Σ P∘dP)
                layout.products::<T, A>([count, d], q, k, transposed, p);
                layout.products::<T, A>([count, dv], dout, v, transposed, ds);
                layout.gradients::<T, A>(count, head.scale, p, ds, logs);
                // dV += Pᵀ·dO; dK += s·dSᵀ·q; dQ = s·dS·k
                product::<T, A>([keys, count, dv], layout.by_key(p), dout, target(Part::Value, routed, true));
                product::<T, A>([keys, count, d], layout.by_key(ds), q, target(Part::Key, routed, true));
                product::<T, A>([count, keys, d], layout.by_query(ds), k, target(Part::Query, own, accumulate));
            }
        }
    }
}
