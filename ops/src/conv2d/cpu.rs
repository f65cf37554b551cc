//! CPU kernels of [`conv2d`](super::conv2d): matrix products that read patches where they lie.
//!
//! Each row of the kernel sees a run of neighbouring elements of the image. So there is no matrix of patches: the rows of
//! the image that a block of output pixels sees are copied into a *band*, with the zeros around them, and the product is
//! told where each patch starts in it and how far apart its runs lie.
//!
//! The gradient of x is made the same way. Of the pixels of x, those whose coordinates leave the same remainders by the
//! stride see the same taps; so it is stride² convolutions of dy, and each element is written once.

use super::geometry::Geometry;
use rayon::prelude::*;
use std::ops::Range;
use tensor::cpu::factor::Factor;
use tensor::cpu::gemm::{Mat, Patches, gemm_on_this_thread, gemm_patches};
use tensor::cpu::packed::Packed;
use tensor::cpu::parallel::{GRAIN, Out, add_rows, sum_in_pieces};
use tensor::cpu::registers::copy_run;
use tensor::{Element, Float, Tensor, simd};

/// Output pixels per block, about: whole rows.
const PIXELS: usize = 256;
/// Elements of a patch, about, and outputs, at most, whose weights' gradient a task computes.
const COLUMNS: usize = 288;
const OUTPUTS: usize = 128;
/// The weight's gradient is cut into at least so many tasks, unless a task had fewer pixels than that.
const TASKS: usize = 16;
const LEAST: usize = 1024;

/// A buffer of the pool, for the duration of a task.
fn scratch<T: Element>(count: usize) -> Tensor {
    Tensor::empty([count], T::DTYPE)
}

fn slice_of<T: Element>(scratch: &mut Tensor) -> &mut [T] {
    scratch.as_mut_slice("conv2d").expect("invariant: a new tensor is contiguous and unshared")
}

/// Rows of a map, each with zeros where a patch reaches over its ends.
struct Band {
    /// Columns of zeros before the first of the map.
    left: usize,
    /// Columns in all, each of so many channels.
    columns: usize,
    channels: usize,
}

impl Band {
    /// What x must be cut to for its patches, row by row of the output.
    fn of_input(g: &Geometry) -> Self {
        let columns = (g.output[1].max(1) - 1) * g.stride + g.kernel[1];
        Self { left: g.padding, columns, channels: g.inputs }
    }

    /// What dy must be cut to for the gradient of x, row by row of x.
    fn of_output(g: &Geometry) -> Self {
        let left = g.kernel[1].div_ceil(g.stride) - 1;
        Self { left, columns: left + (g.input[1].max(1) - 1 + g.padding) / g.stride + 1, channels: g.outputs }
    }

    /// Elements of a row.
    fn row(&self) -> usize {
        self.columns * self.channels
    }

    /// Rounds a row of a map's columns into a row of the band; zeros if there is none.
    fn copy<F: Factor>(&self, from: Option<&[F::Sum]>, to: &mut [F]) {
        let from = from.unwrap_or_default();
        let (before, rest) = to.split_at_mut((self.left * self.channels).min(to.len()));
        let (inside, after) = rest.split_at_mut(from.len().min(rest.len()));
        before.fill(F::default());
        F::round(&from[..inside.len()], inside);
        after.fill(F::default());
    }

    /// Cuts some rows of a map, which are counted through all images, out of it.
    fn cut<F: Factor>(&self, map: &[F::Sum], width: usize, rows: impl Iterator<Item = Option<usize>>, to: &mut [F]) {
        let size = width * self.channels;
        for (row, to) in rows.zip(to.chunks_exact_mut(self.row().max(1))) {
            self.copy(row.map(|row| &map[row * size..][..size]), to);
        }
    }
}

/// The patches of a block of output rows, as far as some rows of the kernel see them.
struct Seen {
    band: Band,
    /// Where each pixel's patch starts, and each of its runs from there.
    starts: Vec<usize>,
    runs: Vec<usize>,
}

impl Seen {
    /// Of so many rows of the output, by so many rows of the kernel.
    fn new(g: &Geometry, rows: usize, kernel_rows: usize) -> Self {
        let band = Band::of_input(g);
        let step = g.stride * g.inputs;
        let starts = (0..rows).flat_map(|row| {
            let first = row * kernel_rows * band.row();
            (0..g.output[1]).map(move |column| first + column * step)
        });
        let (starts, runs) = (starts.collect(), (0..kernel_rows).map(|row| row * band.row()).collect());
        Self { band, starts, runs }
    }

    /// Elements of the band of so many rows of the output.
    fn size(&self, rows: usize) -> usize {
        rows * self.runs.len() * self.band.row()
    }

    /// Cuts the band out of x for some rows of the output, counted through all images, and kernel rows from one on.
    fn cut<F: Factor>(&self, g: &Geometry, x: &[F::Sum], rows: Range<usize>, first: usize, to: &mut [F]) {
        let kernel_rows = first..first + self.runs.len();
        let seen = rows.flat_map(|row| kernel_rows.clone().map(move |below| g.input_row(row, below)));
        self.band.cut(x, g.input[1], seen, to);
    }
}

/// A weight (O, I, KH, KW) as products take it.
pub fn pack<F: Factor>(weight: &[F], [outputs, inputs, down, across]: [usize; 4]) -> Packed<F> {
    let mut reordered = Tensor::empty([weight.len()], F::DTYPE);
    let reordered = reorder(weight, [inputs, down * across], &mut reordered);
    Packed::new(Mat::new(reordered, outputs, inputs * down * across).t())
}

/// y (N, HO, WO, O) = patches·W + bias.
pub fn forward<F: Factor>(g: Geometry, x: &[F::Sum], weight: &Packed<F>, bias: Option<&[F::Sum]>, y: &mut [F::Sum]) {
    if y.is_empty() {
        return;
    }
    let (size, rows) = (g.output[1] * g.outputs, rows_of(PIXELS, g.output[1]));
    let seen = Seen::new(&g, rows, g.kernel[0]);
    let places: Vec<usize> = (0..rows * g.output[1]).map(|pixel| pixel * g.outputs).collect();
    y.par_chunks_mut(rows * size).enumerate().for_each(|(block, y)| {
        let (first, count) = (block * rows, y.len() / size);
        // The products add to a result that starts as the bias.
        if let Some(bias) = bias {
            y.chunks_exact_mut(g.outputs).for_each(|y| y.copy_from_slice(bias));
        }
        let mut band = scratch::<F::Sum>(seen.size(count));
        let data = slice_of::<F::Sum>(&mut band);
        seen.cut(&g, x, first..first + count, 0, data);
        let pixels = count * g.output[1];
        let patches = Patches { data, starts: &seen.starts[..pixels], runs: &seen.runs, len: g.run(), step: 1 };
        gemm_patches(patches, weight, Out { data: y, accumulate: bias.is_some() }, &places[..pixels]);
    });
}

/// dx (N, H, W, I) from dy.
pub fn backward_input<F: Factor>(g: Geometry, dy: &[F::Sum], weight: &[F], dx: Out<'_, F::Sum>) {
    if dx.data.is_empty() {
        return;
    }
    let band = Band::of_output(&g);
    let pairs = || g.remainders(0).flat_map(|down| g.remainders(1).map(move |across| [down, across]));
    let mut reordered = Tensor::empty([weight.len()], F::DTYPE);
    let weight = reorder(weight, [g.inputs, g.taps()], &mut reordered);
    let weights: Vec<Packed<F>> = pairs().map(|remainders| pack_taps(&g, weight, remainders)).collect();
    let (size, rows) = (g.input[1] * g.inputs, rows_of(PIXELS * weights.len(), g.input[1]));
    let accumulate = dx.accumulate;
    dx.data.par_chunks_mut(rows * size).enumerate().for_each(|(block, dx)| {
        let x_rows = block * rows..block * rows + dx.len() / size;
        let mut weights = weights.iter();
        for down in g.remainders(0) {
            let taps_down = g.taps_of(0, down).len();
            // The rows of x that these taps meet, and the row of dy that the first of them meets there.
            let met = x_rows.clone().enumerate().filter_map(|(place, row)| {
                let (image, row) = (row / g.input[0], row % g.input[0]);
                g.position(row, down).map(|position| (place, image, position))
            });
            let met: Vec<_> = met.collect();
            let mut buffer = scratch::<F::Sum>(met.len() * taps_down * band.row());
            let data = slice_of::<F::Sum>(&mut buffer);
            let dy_rows = met.iter().flat_map(|&(_, image, position)| {
                (0..taps_down).map(move |tap| {
                    let row = position.checked_sub(tap).filter(|&row| row < g.output[0])?;
                    Some(image * g.output[0] + row)
                })
            });
            band.cut(dy, g.output[1], dy_rows, data);
            let runs: Vec<usize> = (0..taps_down).map(|tap| tap * band.row()).collect();
            for across in g.remainders(1) {
                let taps_across = g.taps_of(1, across).len();
                let (mut starts, mut places) = (vec![], vec![]);
                for (of_band, &(place, ..)) in met.iter().enumerate() {
                    for column in 0..g.input[1] {
                        if let Some(position) = g.position(column, across) {
                            let first = band.left + position + 1 - taps_across.max(1);
                            starts.push(of_band * taps_down * band.row() + first * g.outputs);
                            places.push((place * g.input[1] + column) * g.inputs);
                        }
                    }
                }
                // Zeros, where no tap meets x.
                let taps =
                    Patches { data: &*data, starts: &starts, runs: &runs, len: taps_across * g.outputs, step: 1 };
                let weight = weights.next().expect("invariant: one for each pair of remainders");
                gemm_patches(taps, weight, Out { data: &mut *dx, accumulate }, &places);
            }
        }
    });
}

/// dweight (O, I, KH, KW) = dyᵀ·patches, reordered. Made as its transpose, patchesᵀ·dy, where a right operand need not be
/// packed as a whole: patches, of which there is more than of dy, are read where they lie then.
pub fn backward_weight<F: Factor>(g: Geometry, dy: &[F::Sum], x: &[F::Sum], dweight: Out<'_, F::Sum>) {
    let elements = g.patch() * g.outputs;
    if elements == 0 {
        return;
    }
    let transposed = !F::PACKED_AHEAD;
    let mut sums = scratch::<F::Sum>(elements);
    let sums = slice_of::<F::Sum>(&mut sums);
    // Parts of the gradient, and where those are few, pieces of the pixels with partial sums.
    let parts = parts(&g);
    let rows = rows_of(PIXELS, g.output[1]);
    let blocks = if g.output[1] == 0 { 0 } else { (g.images * g.output[0]).div_ceil(rows) };
    let per_piece = blocks.div_ceil((TASKS / parts.len()).max(1)).max(LEAST / PIXELS);
    let of_blocks = |blocks: Range<usize>, sums: &mut [F::Sum]| {
        parts.par_iter().zip(split(sums, &parts)).for_each(|(part, sums)| {
            for block in blocks.clone() {
                let rows = block * rows..((block + 1) * rows).min(g.images * g.output[0]);
                let dy = &dy[rows.start * g.output[1] * g.outputs + part.outputs.start..];
                let dy = Mat::strided(dy, (rows.len() * g.output[1], part.outputs.len()), (g.outputs, 1));
                let sums = Out { data: &mut *sums, accumulate: block > blocks.start };
                if transposed {
                    multiply_transposed(&g, x, rows, &part.elements, dy, sums);
                } else {
                    gemm_on_this_thread(dy.t(), &pack_patches::<F>(&g, x, rows, &part.elements), sums);
                }
            }
        });
    };
    if blocks > 0 && blocks <= per_piece {
        of_blocks(0..blocks, sums);
    } else {
        sum_in_pieces(blocks.div_ceil(per_piece), GRAIN, elements, Out::store(&mut *sums), |pieces, sums| {
            of_blocks(pieces.start * per_piece..(pieces.end * per_piece).min(blocks), sums);
        });
    }
    let (sums, accumulate) = (&*sums, dweight.accumulate);
    dweight.data.par_chunks_mut(g.patch()).enumerate().for_each(|(output, dweight)| {
        let mut start = 0;
        for Part { elements, outputs } in &parts {
            if outputs.contains(&output) {
                let sums = &sums[start..][..outputs.len() * elements.len()];
                let output = output - outputs.start;
                let (first_sum, apart) = match transposed {
                    true => (output, outputs.len()),
                    false => (output * elements.len(), 1),
                };
                // Tap by tap, as far as the part reaches.
                for tap in elements.start / g.inputs..elements.end.div_ceil(g.inputs) {
                    let first = elements.start.max(tap * g.inputs);
                    let end = elements.end.min((tap + 1) * g.inputs);
                    let dweight = dweight[(first - tap * g.inputs) * g.taps() + tap..].iter_mut().step_by(g.taps());
                    let sums = sums[first_sum + (first - elements.start) * apart..].iter().step_by(apart);
                    for (dweight, &sum) in dweight.zip(sums).take(end - first) {
                        *dweight = if accumulate { *dweight + sum } else { sum };
                    }
                }
            }
            start += outputs.len() * elements.len();
        }
    });
}

/// dbias (O) = Σ dy over the pixels.
pub fn backward_bias<T: Float>(g: Geometry, dy: &[T], dbias: Out<'_, T>) {
    sum_in_pieces(g.pixels(), g.outputs, g.outputs, dbias, |pixels, sum| {
        simd!(_A => add_rows(&dy[pixels.start * g.outputs..pixels.end * g.outputs], sum));
    });
}

/// So many rows have about this many pixels.
fn rows_of(pixels: usize, width: usize) -> usize {
    (pixels / width.max(1)).max(1)
}

/// A part of the weight's gradient.
struct Part {
    /// Of a patch.
    elements: Range<usize>,
    outputs: Range<usize>,
}

/// The weight's gradient in parts of about [`COLUMNS`] elements of a patch, which are several whole runs or a part of
/// one, by [`OUTPUTS`].
fn parts(g: &Geometry) -> Vec<Part> {
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
            ranges(0, g.outputs, outputs).map(move |outputs| Part { elements: elements.clone(), outputs })
        })
        .collect()
}

/// The sums of each part: (outputs, elements), or transposed.
fn split<'a, T>(mut sums: &'a mut [T], parts: &[Part]) -> Vec<&'a mut [T]> {
    let parts = parts.iter().map(|Part { elements, outputs }| {
        let (part, rest) = std::mem::take(&mut sums).split_at_mut(outputs.len() * elements.len());
        sums = rest;
        part
    });
    parts.collect()
}

/// What some rows of output pixels see, as far as some elements of their patches need it; which element of that is the first
/// of those; and the band, cut out of x.
fn cut_for<'r, F: Factor>(
    g: &Geometry,
    x: &[F::Sum],
    rows: Range<usize>,
    elements: &Range<usize>,
    room: &'r mut Option<Tensor>,
) -> (Seen, usize, &'r [F]) {
    let run = g.run();
    let kernel_rows = elements.start / run..elements.end.div_ceil(run);
    let seen = Seen::new(g, rows.len(), kernel_rows.len());
    let band = slice_of::<F>(room.insert(scratch::<F>(seen.size(rows.len()))));
    seen.cut(g, x, rows, kernel_rows.start, band);
    (seen, elements.start - kernel_rows.start * run, band)
}

/// patchesᵀ·dy, of the patches of some rows of output pixels, reduced to some of their elements.
fn multiply_transposed<T: Float>(
    g: &Geometry,
    x: &[T],
    rows: Range<usize>,
    elements: &Range<usize>,
    dy: Mat<'_, T>,
    sums: Out<'_, T>,
) {
    let (mut room, run) = (None, g.run());
    let (seen, first, band) = cut_for::<T>(g, x, rows, elements, &mut room);
    // A row for each element, which meets the pixels of a row of the output one after the other.
    let starts: Vec<usize> =
        (first..first + elements.len()).map(|element| seen.runs[element / run] + element % run).collect();
    let runs: Vec<usize> = seen.starts.iter().step_by(g.output[1]).copied().collect();
    let patches = Patches { data: band, starts: &starts, runs: &runs, len: g.output[1], step: g.stride * g.inputs };
    let places: Vec<usize> = (0..starts.len()).map(|row| row * (sums.data.len() / starts.len())).collect();
    gemm_patches(patches, dy, sums, &places);
}

/// The patches of some rows of output pixels, reduced to some of their elements, as a matrix (pixels, elements).
fn pack_patches<F: Factor>(g: &Geometry, x: &[F::Sum], rows: Range<usize>, elements: &Range<usize>) -> Packed<F> {
    let (mut room, run) = (None, g.run());
    let (seen, first, band) = cut_for::<F>(g, x, rows, elements, &mut room);
    Packed::filled((seen.starts.len(), elements.len()), false, |columns, to, width| {
        let (start, end) = (first + columns.start, first + columns.end);
        // Where the columns lie from the start of a patch, run by run.
        let parts: Vec<(usize, usize)> = (start / run..end.div_ceil(run))
            .map(|row| {
                let (from, to) = (start.max(row * run), end.min((row + 1) * run));
                (seen.runs[row] + from - row * run, to - from)
            })
            .collect();
        if columns.len() < width {
            to.fill(F::default());
        }
        simd!(_A => copy_parts(band, &seen.starts, &parts, to, width));
    })
}

/// Copies some (start, length) of each patch into its row of a panel.
#[inline(always)]
fn copy_parts<T: Copy>(band: &[T], patches: &[usize], parts: &[(usize, usize)], to: &mut [T], width: usize) {
    const BLOCK: usize = 16;
    for (row, patch) in patches.iter().enumerate() {
        let mut place = row * width;
        for &(start, len) in parts {
            let from = patch + start;
            match (to.get_mut(place..place + BLOCK), band.get(from..from + BLOCK)) {
                // A block for a short part: what is too much is overwritten by what follows.
                (Some(to), Some(from)) if len < BLOCK => to.copy_from_slice(from),
                _ => copy_run(&mut to[place..place + len], &band[from..from + len]),
            }
            place += len;
        }
    }
}

/// The weight (O, I, KH, KW) as (O, KH·KW, I), so that the inputs of a tap are neighbours.
fn reorder<'a, F: Element>(weight: &[F], [inputs, taps]: [usize; 2], buffer: &'a mut Tensor) -> &'a [F] {
    let (to, patch) = (slice_of::<F>(buffer), (inputs * taps).max(1));
    to.par_chunks_mut(patch).zip(weight.par_chunks(patch)).for_each(|(to, weight)| {
        for (tap, to) in to.chunks_exact_mut(inputs).enumerate() {
            to.iter_mut().zip(weight[tap..].iter().step_by(taps)).for_each(|(to, &weight)| *to = weight);
        }
    });
    to
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
