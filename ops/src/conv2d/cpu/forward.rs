//! The result of a convolution.

use super::super::geometry::Geometry;
use super::band::InputBand;
use super::{PIXELS, reorder, rows_per_block};
use rayon::prelude::*;
use tensor::cpu::factor::Factor;
use tensor::cpu::gemm::{Mat, Patches, gemm_patches};
use tensor::cpu::packed::Packed;
use tensor::cpu::parallel::Out;

/// A weight (O, I, KH, KW), packed as the right operand of products.
pub fn pack<F: Factor>(weight: &[F], [outputs, inputs, down, across]: [usize; 4]) -> Packed<F> {
    let reordered = reorder(weight, [inputs, down * across]);
    Packed::new(Mat::new(&reordered, outputs, inputs * down * across).t())
}

/// y (N, HO, WO, O) = patches·W + bias.
pub fn forward<F: Factor>(g: Geometry, x: &[F::Sum], weight: &Packed<F>, bias: Option<&[F::Sum]>, y: &mut [F::Sum]) {
    if y.is_empty() {
        return;
    }
    assert_eq!(weight.extents(), (g.patch(), g.outputs), "a packed weight");
    let size = g.output[1] * g.outputs;
    let rows = rows_per_block([g.images * g.output[0], g.output[1]], PIXELS);
    let places: Vec<usize> = (0..rows * g.output[1]).map(|pixel| pixel * g.outputs).collect();
    y.par_chunks_mut(rows * size).enumerate().for_each(|(block, y)| {
        let first = block * rows;
        let input = InputBand::new(&g, first..first + y.len() / size);
        // The products add to a result that starts as the bias.
        if let Some(bias) = bias {
            y.chunks_exact_mut(g.outputs).for_each(|y| y.copy_from_slice(bias));
        }
        let band = input.cut(&g, x);
        let patches = Patches { data: &band, starts: &input.starts, runs: &input.runs, len: g.run(), step: 1 };
        gemm_patches(patches, weight, Out { data: y, accumulate: bias.is_some() }, &places[..input.starts.len()]);
    });
}
