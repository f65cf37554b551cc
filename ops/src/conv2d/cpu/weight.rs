//! The gradient of a convolution's weight.

use super::super::geometry::Geometry;
use super::PIXELS;
use super::band::InputBand;
use rayon::prelude::*;
use std::ops::Range;
use tensor::cpu::factor::Factor;
use tensor::cpu::gemm::{Mat, Patches, gemm_patches};
use tensor::cpu::parallel::{GRAIN, Out, sum_stored_pieces};
use tensor::{Float, Scratch};

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

/// dweight (O, I, KH, KW) = dyᵀ·patches, reordered. It is computed as its transpose, patchesᵀ·dy: then it is dy that is
/// packed as the right operand, and not the patches, which are larger.
pub fn backward_weight<F: Factor>(g: Geometry, dy: &[F::Sum], x: &[F::Sum], dweight: Out<'_, F::Sum>) {
    let elements = g.patch() * g.outputs;
    if elements == 0 {
        return;
    }
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
    put_in_order(&g, &sections, &sums, dweight);
}

/// Puts each section's sums, (elements, outputs), where they belong in the weight's gradient (O, I, KH, KW).
fn put_in_order<T: Float>(g: &Geometry, sections: &[Section], sums: &[T], dweight: Out<'_, T>) {
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
                    let sum = section[row * outputs.len() + output - outputs.start];
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
    let row = g.output[1] * g.outputs;
    let (dy, pixels) = (&dy[rows.start * row..rows.end * row], rows.len() * g.output[1]);
    let input = InputBand::new(g, rows);
    let (band, mut room) = (input.cut(g, x), None);
    let dy = F::factors(dy, &mut room);
    sections.par_iter().zip(sums).for_each(|(Section { elements, outputs }, sums)| {
        let dy = Mat::strided(&dy[outputs.start..], (pixels, outputs.len()), (g.outputs, 1));
        multiply(g, &input, &band, elements, dy, Out { data: sums, accumulate });
    });
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

/// The sums of each section: (elements, outputs).
fn split<'a, T>(mut sums: &'a mut [T], sections: &[Section]) -> Vec<&'a mut [T]> {
    let each = sections.iter().map(|Section { elements, outputs }| {
        let (section, rest) = std::mem::take(&mut sums).split_at_mut(outputs.len() * elements.len());
        sums = rest;
        section
    });
    each.collect()
}

/// patchesᵀ·dy, of some elements of the patches.
fn multiply<F: Factor>(
    g: &Geometry,
    input: &InputBand,
    band: &[F::Sum],
    elements: &Range<usize>,
    dy: Mat<'_, F>,
    sums: Out<'_, F::Sum>,
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
