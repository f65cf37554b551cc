//! The gradient of a convolution's input.

use super::super::geometry::Geometry;
use super::band::OutputBand;
use super::{PIXELS, reorder, rows_per_block};
use rayon::prelude::*;
use tensor::cpu::factor::Factor;
use tensor::cpu::gemm::{Patches, gemm_patches};
use tensor::cpu::packed::Packed;
use tensor::cpu::parallel::Out;

/// dx (N, H, W, I) from dy.
pub fn backward_input<F: Factor>(g: Geometry, dy: &[F::Sum], weight: &[F], dx: Out<'_, F::Sum>) {
    if dx.data.is_empty() {
        return;
    }
    let pairs = || g.remainders(0).flat_map(|down| g.remainders(1).map(move |across| [down, across]));
    let weight = reorder(weight, [g.inputs, g.taps()]);
    let weights: Vec<Packed<F>> = pairs().map(|remainders| pack_taps(&g, &weight, remainders)).collect();
    let size = g.input[1] * g.inputs;
    let rows = rows_per_block([g.images * g.input[0], g.input[1]], PIXELS * weights.len());
    let accumulate = dx.accumulate;
    dx.data.par_chunks_mut(rows * size).enumerate().for_each(|(block, dx)| {
        let first = block * rows;
        let mut weights = weights.iter();
        for down in g.remainders(0) {
            let output = OutputBand::new(&g, first..first + dx.len() / size, down);
            let band = output.cut(&g, dy);
            for across in g.remainders(1) {
                let weight = weights.next().expect("invariant: one for each pair of remainders");
                let (starts, places) = output.pixels(&g, across);
                let len = g.taps_of(1, across).len() * g.outputs;
                // If no tap meets x, the product is empty and gives zeros.
                let taps = Patches { data: &band, starts: &starts, runs: &output.runs, len, step: 1 };
                gemm_patches(taps, weight, Out { data: &mut *dx, accumulate }, &places);
            }
        }
    });
}

/// From the reordered weight, the taps that meet pixels of x whose coordinates have these remainders, packed as
/// (taps·O, I): rows of taps from top to bottom, which meet rows of dy from bottom to top, and columns from right to
/// left, which meet columns of dy from left to right.
fn pack_taps<F: Factor>(g: &Geometry, weight: &[F], [down, across]: [usize; 2]) -> Packed<F> {
    let across = || g.taps_of(1, across).rev();
    let taps: Vec<usize> = g.taps_of(0, down).flat_map(|a| across().map(move |b| a * g.kernel[1] + b)).collect();
    Packed::filled((taps.len() * g.outputs, g.inputs), |inputs, to, width| {
        for (row, to) in to.chunks_exact_mut(width).enumerate() {
            let (tap, output) = (taps[row / g.outputs], row % g.outputs);
            let (to, beyond) = to.split_at_mut(inputs.len());
            to.copy_from_slice(&weight[(output * g.taps() + tap) * g.inputs..][inputs.clone()]);
            beyond.fill(F::default());
        }
    })
}
