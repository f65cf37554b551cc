//! The gradient of a convolution's weight.

use super::super::geometry::Geometry;
use super::PIXELS;
use super::band::InputBand;
use rayon::prelude::*;
use std::ops::Range;
use tensor::cpu::factor::Factor;
use tensor::cpu::gemm::{Mat, Patches, gemm_on_this_thread, gemm_patches};
use tensor::cpu::packed::Packed;
use tensor::cpu::parallel::{GRAIN, Out, sum_stored_pieces};
use tensor::cpu::registers::copy_run;
use tensor::{Float, Scratch, simd};

/// The part of the weight's gradient that one task computes: about this many elements of a patch, for at most this many
/// outputs.
const COLUMNS: usize = 288;
const OUTPUTS: usize = 128;
/// The number of tasks into which the weight's gradient is cut, about, and the minimum number of pixels per task, which
/// may allow only fewer tasks.
const TASKS: usize = 16;
const LEAST: usize = 1024;
/// How many outputs' weight gradients are written out at a time: as many elements as fill a cache line.
const TOGETHER: usize = 16;

/// dweight (O, I, KH, KW) = dyᵀ·patches, reordered. For types whose right operand need not be packed ahead as a whole,
/// it is computed as its transpose, patchesᵀ·dy: then the patches, which are larger than dy, are read in place.
pub fn backward_weight<F: Factor>(g: Geometry, dy: &[F::Sum], x: &[F::Sum], dweight: Out<'_, F::Sum>) {
    let elements = g.patch() * g.outputs;
    if elements == 0 {
        return;
    }
    let transposed = !F::PACKED_AHEAD;
    let mut sums = Scratch::<F::Sum>::new(elements);
    // Split the gradient into sections and, if those are few, the pixels into pieces with partial sums: a power of two
    // of them, with equally many blocks each, so that no thread waits for another.
    let (sections, all_rows) = (sections(&g), g.images * g.output[0]);
    let pieces = 1 << (TASKS / sections.len()).min(g.pixels() / LEAST).max(1).ilog2();
    let rows = all_rows.div_ceil(pieces * g.pixels().div_ceil(pieces * PIXELS).max(1)).max(1);
    let blocks = all_rows.div_ceil(rows);
    let per_piece = blocks.div_ceil(pieces).max(1);
    let of_blocks = |blocks: Range<usize>, sums: &mut [F::Sum]| {
        let mut sums = split(sums, &sections);
        for block in blocks.clone() {
            let rows = block * rows..((block + 1) * rows).min(all_rows);
            add_block::<F>(&g, dy, x, rows, &sections, &mut sums, block > blocks.start);
        }
    };
    if blocks > 0 && blocks <= per_piece {
        of_blocks(0..blocks, &mut sums);
    } else {
        sum_stored_pieces(blocks.div_ceil(per_piece), GRAIN, elements, Out::store(&mut sums), |pieces, sums| {
            of_blocks(pieces.start * per_piece..(pieces.end * per_piece).min(blocks), sums);
        });
    }
    put_in_order(&g, &sections, &sums, transposed, dweight);
}

/// Puts each section's sums, (outputs, elements) or transposed, where they belong in the weight's gradient (O, I, KH,
/// KW).
fn put_in_order<T: Float>(g: &Geometry, sections: &[Section], sums: &[T], transposed: bool, dweight: Out<'_, T>) {
    let accumulate = dweight.accumulate;
    dweight.data.par_chunks_mut(TOGETHER * g.patch()).enumerate().for_each(|(block, dweight)| {
        let block = block * TOGETHER..block * TOGETHER + dweight.len() / g.patch();
        let mut sums = sums;
        for Section { elements, outputs } in sections {
            let (section, rest) = sums.split_at(outputs.len() * elements.len());
            sums = rest;
            for (row, element) in elements.clone().enumerate() {
                let place = element % g.inputs * g.taps() + element / g.inputs;
                for output in block.start.max(outputs.start)..block.end.min(outputs.end) {
                    let column = output - outputs.start;
                    let sum =
                        section[if transposed { row * outputs.len() + column } else { column * elements.len() + row }];
                    let dweight = &mut dweight[(output - block.start) * g.patch() + place];
                    *dweight = if accumulate { *dweight + sum } else { sum };
                }
            }
        }
    });
}

/// Computes the contribution of some rows of output pixels to each section's sums.
fn add_block<F: Factor>(
    g: &Geometry,
    dy: &[F::Sum],
    x: &[F::Sum],
    rows: Range<usize>,
    sections: &[Section],
    sums: &mut [&mut [F::Sum]],
    accumulate: bool,
) {
    let (dy, pixels) = (&dy[rows.start * g.output[1] * g.outputs..], rows.len() * g.output[1]);
    let input = InputBand::new(g, rows);
    let products = sections.par_iter().zip(sums).map(|(Section { elements, outputs }, sums)| {
        let dy = Mat::strided(&dy[outputs.start..], (pixels, outputs.len()), (g.outputs, 1));
        (elements, dy, Out { data: sums, accumulate })
    });
    if F::PACKED_AHEAD {
        let band = input.cut::<F>(g, x);
        products.for_each(|(elements, dy, sums)| {
            gemm_on_this_thread(dy.t(), &pack_patches(g, &input, &band, elements), sums);
        });
    } else {
        let band = input.cut::<F::Sum>(g, x);
        products.for_each(|(elements, dy, sums)| multiply_transposed(g, &input, &band, elements, dy, sums));
    }
}

/// A section of the weight's gradient, which a task computes: some elements of a patch, for some outputs.
struct Section {
    /// Of a patch.
    elements: Range<usize>,
    outputs: Range<usize>,
}

/// The weight's gradient in sections of about [`COLUMNS`] elements of a patch, which are several whole runs or a part
/// of one, by [`OUTPUTS`].
fn sections(g: &Geometry) -> Vec<Section> {
    let (patch, run) = (g.patch(), g.run());
    let whole = (COLUMNS / run).max(1) * run;
    let size = if run > COLUMNS { run.div_ceil(run.div_ceil(COLUMNS)) } else { whole };
    let ranges = |start: usize, end: usize, size: usize| {
        (start..end).step_by(size).map(move |start| start..(start + size).min(end))
    };
    let outputs = g.outputs.div_ceil(g.outputs.div_ceil(OUTPUTS));
    ranges(0, patch, whole)
        .flat_map(|runs| ranges(runs.start, runs.end, size))
        .flat_map(|elements| {
            ranges(0, g.outputs, outputs).map(move |outputs| Section { elements: elements.clone(), outputs })
        })
        .collect()
}

/// The sums of each section: (outputs, elements), or transposed.
fn split<'a, T>(mut sums: &'a mut [T], sections: &[Section]) -> Vec<&'a mut [T]> {
    let each = sections.iter().map(|Section { elements, outputs }| {
        let (section, rest) = std::mem::take(&mut sums).split_at_mut(outputs.len() * elements.len());
        sums = rest;
        section
    });
    each.collect()
}

/// patchesᵀ·dy, of some elements of the patches.
fn multiply_transposed<T: Float>(
    g: &Geometry,
    input: &InputBand,
    band: &[T],
    elements: &Range<usize>,
    dy: Mat<'_, T>,
    sums: Out<'_, T>,
) {
    // One row of the left operand for each element of a patch: its values at the pixels of a row of the output, one
    // after another.
    let starts: Vec<usize> =
        elements.clone().map(|element| input.runs[element / g.run()] + element % g.run()).collect();
    let runs: Vec<usize> = input.starts.iter().step_by(g.output[1]).copied().collect();
    let patches = Patches { data: band, starts: &starts, runs: &runs, len: g.output[1], step: g.stride * g.inputs };
    let places: Vec<usize> = (0..starts.len()).map(|row| row * (sums.data.len() / starts.len())).collect();
    gemm_patches(patches, dy, sums, &places);
}

/// Some elements of the patches as a matrix (pixels, elements).
fn pack_patches<F: Factor>(g: &Geometry, input: &InputBand, band: &[F], elements: &Range<usize>) -> Packed<F> {
    let run = g.run();
    Packed::filled((input.starts.len(), elements.len()), false, |columns, to, width| {
        let (start, end) = (elements.start + columns.start, elements.start + columns.end);
        // Where the columns lie from the start of a patch, run by run.
        let parts: Vec<(usize, usize)> = (start / run..end.div_ceil(run))
            .map(|row| {
                let (from, to) = (start.max(row * run), end.min((row + 1) * run));
                (input.runs[row] + from - row * run, to - from)
            })
            .collect();
        if columns.len() < width {
            to.fill(F::default());
        }
        simd!(_A => copy_parts(band, &input.starts, &parts, to, width));
    })
}

/// Copies some (start, length) of each patch into its row of a panel.
#[inline(always)]
fn copy_parts<T: Copy>(band: &[T], patches: &[usize], parts: &[(usize, usize)], to: &mut [T], width: usize) {
    const AT_ONCE: usize = 16;
    for (row, patch) in patches.iter().enumerate() {
        let mut place = row * width;
        for &(start, len) in parts {
            let from = patch + start;
            match (to.get_mut(place..place + AT_ONCE), band.get(from..from + AT_ONCE)) {
                // A short part is copied with this fixed length: the excess is overwritten by the next part, or lies in
                // columns that are never read.
                (Some(to), Some(from)) if len < AT_ONCE => to.copy_from_slice(from),
                _ => copy_run(&mut to[place..place + len], &band[from..from + len]),
            }
            place += len;
        }
    }
}
