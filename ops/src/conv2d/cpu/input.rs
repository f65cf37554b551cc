//! The gradient of what is convolved.

use super::super::geometry::Geometry;
use super::band::{Band, in_images};
use super::{PIXELS, reorder, rows_per_block};
use rayon::prelude::*;
use tensor::Scratch;
use tensor::cpu::factor::Factor;
use tensor::cpu::gemm::{Patches, gemm_patches};
use tensor::cpu::packed::Packed;
use tensor::cpu::parallel::Out;

/// dx (N, H, W, I) from dy.
pub fn backward_input<F: Factor>(g: Geometry, dy: &[F::Sum], weight: &[F], dx: Out<'_, F::Sum>) {
    if dx.data.is_empty() {
        return;
    }
    let band = Band::of_output(&g);
    let pairs = || g.remainders(0).flat_map(|down| g.remainders(1).map(move |across| [down, across]));
    let weight = reorder(weight, [g.inputs, g.taps()]);
    let weights: Vec<Packed<F>> = pairs().map(|remainders| pack_taps(&g, &weight, remainders)).collect();
    let size = g.input[1] * g.inputs;
    let rows = rows_per_block([g.images * g.input[0], g.input[1]], PIXELS * weights.len());
    let accumulate = dx.accumulate;
    dx.data.par_chunks_mut(rows * size).enumerate().for_each(|(block, dx)| {
        let x_rows = block * rows..block * rows + dx.len() / size;
        let mut weights = weights.iter();
        for down in g.remainders(0) {
            let taps_down = g.taps_of(0, down).len();
            // Each row of x that these taps meet, and where in the band the rows of dy begin that they meet there. The taps
            // go upwards, and so the band has the rows of dy from the last one up.
            let (mut met, mut rows) = (vec![], vec![]);
            for part in in_images(x_rows.clone(), g.input[0]) {
                let image = part.start / g.input[0];
                let positions = part.filter_map(|row| Some((row, g.position(row % g.input[0], down)?)));
                let positions: Vec<_> = positions.collect();
                let (Some(&(_, first)), Some(&(_, last))) = (positions.first(), positions.last()) else { continue };
                met.extend(positions.iter().map(|(row, position)| (row - x_rows.start, rows.len() + last - position)));
                rows.extend((0..last - first + taps_down).map(|above| {
                    let row = last.checked_sub(above).filter(|&row| row < g.output[0])?;
                    Some(image * g.output[0] + row)
                }));
            }
            let mut data = Scratch::new(rows.len() * band.row());
            band.cut::<F::Sum>(dy, g.output[1], &rows, &mut data);
            let runs: Vec<usize> = (0..taps_down).map(|tap| tap * band.row()).collect();
            for across in g.remainders(1) {
                let taps_across = g.taps_of(1, across).len();
                let (mut starts, mut places) = (vec![], vec![]);
                for &(place, of_band) in &met {
                    for column in 0..g.input[1] {
                        if let Some(position) = g.position(column, across) {
                            let first = band.left + position + 1 - taps_across.max(1);
                            starts.push(of_band * band.row() + first * g.outputs);
                            places.push((place * g.input[1] + column) * g.inputs);
                        }
                    }
                }
                // Zeros, where no tap meets x.
                let taps = Patches { data: &data, starts: &starts, runs: &runs, len: taps_across * g.outputs, step: 1 };
                let weight = weights.next().expect("invariant: one for each pair of remainders");
                gemm_patches(taps, weight, Out { data: &mut *dx, accumulate }, &places);
            }
        }
    });
}

/// Of the reordered weight the taps that x meets where its coordinates leave these remainders, as (taps·O, I): rows of
/// taps downwards, which meet dy upwards, and columns from right to left, so that they meet it from left to right.
fn pack_taps<F: Factor>(g: &Geometry, weight: &[F], [down, across]: [usize; 2]) -> Packed<F> {
    let across = || g.taps_of(1, across).rev();
    let taps: Vec<usize> = g.taps_of(0, down).flat_map(|a| across().map(move |b| a * g.kernel[1] + b)).collect();
    Packed::filled((taps.len() * g.outputs, g.inputs), true, |inputs, to, width| {
        for (row, to) in to.chunks_exact_mut(width).enumerate() {
            let (tap, output) = (taps[row / g.outputs], row % g.outputs);
            let (to, beyond) = to.split_at_mut(inputs.len());
            to.copy_from_slice(&weight[(output * g.taps() + tap) * g.inputs..][inputs.clone()]);
            beyond.fill(F::default());
        }
    })
}
