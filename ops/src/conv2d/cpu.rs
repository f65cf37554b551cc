//! CPU kernels of [`conv2d`](super::conv2d): matrix products over blocks of patches.
//!
//! A block is [`PIXELS`] output pixels by a group of kernel taps of about [`COLUMNS`] inputs: what the matrix
//! product keeps in the second-level cache anyway. So the buffer of a task stays small whatever the image
//! and the kernel, and the weight is packed once for many pixels.

use rayon::prelude::*;
use std::ops::Range;
use tensor::cpu::gemm::{Mat, gemm, gemm_on_this_thread};
use tensor::cpu::parallel::{GRAIN, MAX_PIECES, Out, add_rows, items_per_task, put, sum_in_pieces};
use tensor::cpu::registers::{Registers, copy_run};
use tensor::cpu::transpose::transpose;
use tensor::{Float, Tensor, simd};

/// Output pixels per block.
const PIXELS: usize = 256;
/// Inputs per block, about: whole taps of the kernel.
const COLUMNS: usize = 256;
/// The most elements of partial sums for the weight's gradient.
const MAX_PARTIAL: usize = 1 << 22;

/// All extents of a convolution.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    /// N.
    pub images: usize,
    /// H and W.
    pub input: [usize; 2],
    /// I.
    pub inputs: usize,
    /// KH and KW.
    pub kernel: [usize; 2],
    /// HO and WO.
    pub output: [usize; 2],
    /// O.
    pub outputs: usize,
    pub stride: usize,
    pub padding: usize,
}

impl Geometry {
    fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    /// Elements of a patch: KH·KW·I.
    fn patch(&self) -> usize {
        self.taps() * self.inputs
    }

    fn pixels_per_image(&self) -> usize {
        self.output[0] * self.output[1]
    }

    /// N·HO·WO.
    fn pixels(&self) -> usize {
        self.images * self.pixels_per_image()
    }

    /// How many taps make a group of about [`COLUMNS`] inputs, all groups alike but the last.
    fn taps_per_group(&self) -> usize {
        self.taps().div_ceil(self.patch().div_ceil(COLUMNS).max(1))
    }

    fn tap_groups(&self) -> usize {
        self.taps().div_ceil(self.taps_per_group())
    }

    fn tap_group(&self, group: usize) -> Range<usize> {
        let size = self.taps_per_group();
        group * size..((group + 1) * size).min(self.taps())
    }

    /// Where the inputs of some taps lie in W (KH·KW·I, O).
    fn rows_of(&self, taps: &Range<usize>) -> Range<usize> {
        taps.start * self.inputs * self.outputs..taps.end * self.inputs * self.outputs
    }

    /// Calls `visit(in_patch, in_x)` for each run of neighbouring elements that the patch of output pixel
    /// `pixel`, reduced to some taps, shares with x; in order. The rest of the patch is padding.
    #[inline(always)]
    fn for_each_run(&self, pixel: usize, taps: &Range<usize>, mut visit: impl FnMut(Range<usize>, Range<usize>)) {
        let ([height, width], [_, across]) = (self.input, self.kernel);
        let (image, place) = (pixel / self.pixels_per_image(), pixel % self.pixels_per_image());
        let (top, left) = (place / self.output[1] * self.stride, place % self.output[1] * self.stride);
        for a in taps.start / across..taps.end.div_ceil(across) {
            // Row and columns are counted in the padded image until they are known to be inside.
            let row = top + a;
            if row < self.padding || row >= height + self.padding {
                continue;
            }
            let first_tap = a * across;
            let columns = taps.start.saturating_sub(first_tap)..(taps.end - first_tap).min(across);
            let start = columns.start.max(self.padding.saturating_sub(left));
            let end = columns.end.min((width + self.padding).saturating_sub(left));
            if start < end {
                let in_patch = (first_tap + start - taps.start) * self.inputs;
                let pixel = (image * height + row - self.padding) * width + left + start - self.padding;
                let len = (end - start) * self.inputs;
                visit(in_patch..in_patch + len, pixel * self.inputs..pixel * self.inputs + len);
            }
        }
    }
}

/// A buffer of the pool, for the duration of a task.
fn scratch<T: Float>(count: usize) -> Tensor {
    Tensor::scratch(count, T::DTYPE)
}

fn slice_of<T: Float>(scratch: &mut Tensor) -> &mut [T] {
    scratch.as_mut_slice("conv2d").expect("invariant: a new tensor is contiguous and unshared")
}

/// y (N, HO, WO, O) = patches·W + bias.
pub fn forward<T: Float>(g: Geometry, x: &[T], weight: &[T], bias: Option<&[T]>, y: &mut [T]) {
    if y.is_empty() {
        return;
    }
    let mut packed = scratch::<T>(g.patch() * g.outputs);
    let packed = slice_of::<T>(&mut packed);
    pack(g, weight, packed);
    y.par_chunks_mut(PIXELS * g.outputs).enumerate().for_each(|(block, y)| {
        let pixels = block * PIXELS..block * PIXELS + y.len() / g.outputs;
        // The products add to a result that starts as the bias.
        if let Some(bias) = bias {
            y.chunks_exact_mut(g.outputs).for_each(|y| y.copy_from_slice(bias));
        }
        let mut buffer = scratch::<T>(pixels.len() * g.taps_per_group() * g.inputs);
        for taps in (0..g.tap_groups()).map(|group| g.tap_group(group)) {
            let patches = gather(g, x, pixels.clone(), &taps, slice_of(&mut buffer));
            let weight = Mat::new(&packed[g.rows_of(&taps)], taps.len() * g.inputs, g.outputs);
            let accumulate = bias.is_some() || taps.start > 0;
            // Few blocks leave threads without work, which the products then share.
            let product = if g.pixels() > 8 * PIXELS { gemm_on_this_thread } else { gemm };
            product(patches, weight, Out { data: &mut *y, accumulate });
        }
    });
}

/// dx (N, H, W, I) from dy. Patches of one image overlap, so a task has whole images: as many as make a block.
pub fn backward_input<T: Float>(g: Geometry, dy: &[T], weight: &[T], dx: Out<'_, T>) {
    if dx.data.is_empty() {
        return;
    }
    let mut packed = scratch::<T>(g.patch() * g.outputs);
    let packed = slice_of::<T>(&mut packed);
    pack(g, weight, packed);
    let images = (PIXELS / g.pixels_per_image()).max(1);
    let image = g.input[0] * g.input[1] * g.inputs;
    dx.data.par_chunks_mut(images * image).enumerate().for_each(|(task, data)| {
        if !dx.accumulate {
            data.fill(T::zero());
        }
        let (first, offset) = (task * images * g.pixels_per_image(), task * images * image);
        let end = first + data.len() / image * g.pixels_per_image();
        let mut buffer = scratch::<T>(PIXELS.min(end - first) * g.taps_per_group() * g.inputs);
        for start in (first..end).step_by(PIXELS) {
            let pixels = start..(start + PIXELS).min(end);
            let dy = Mat::new(&dy[start * g.outputs..], pixels.len(), g.outputs);
            for taps in (0..g.tap_groups()).map(|group| g.tap_group(group)) {
                let columns = taps.len() * g.inputs;
                let weight = Mat::new(&packed[g.rows_of(&taps)], columns, g.outputs);
                let dpatches = &mut slice_of(&mut buffer)[..pixels.len() * columns];
                gemm_on_this_thread(dy, weight.t(), Out::store(dpatches));
                simd!(_A => scatter(g, dpatches, pixels.clone(), &taps, offset, data));
            }
        }
    });
}

/// dweight (O, I, KH, KW) = patchesᵀ·dy, reordered.
pub fn backward_weight<T: Float>(g: Geometry, dy: &[T], x: &[T], dweight: Out<'_, T>) {
    let elements = g.patch() * g.outputs;
    if elements == 0 {
        return;
    }
    let mut packed = scratch::<T>(elements);
    let packed = slice_of::<T>(&mut packed);
    // Pieces of pixels, as many as their partial sums are worth, times groups of taps.
    let pieces = (MAX_PARTIAL / elements).clamp(1, MAX_PIECES);
    let per_piece = g.pixels().div_ceil(pieces).next_multiple_of(PIXELS).max(PIXELS);
    sum_in_pieces(g.pixels().div_ceil(per_piece), GRAIN, elements, Out::store(&mut *packed), |pieces, sums| {
        let pixels = pieces.start * per_piece..(pieces.end * per_piece).min(g.pixels());
        let rows = g.taps_per_group() * g.inputs * g.outputs;
        sums.par_chunks_mut(rows).enumerate().for_each(|(group, sums)| {
            let taps = g.tap_group(group);
            let mut buffer = scratch::<T>(PIXELS * taps.len() * g.inputs);
            for start in pixels.clone().step_by(PIXELS) {
                let pixels = start..(start + PIXELS).min(pixels.end);
                let dy = Mat::new(&dy[start * g.outputs..], pixels.len(), g.outputs);
                let patches = gather(g, x, pixels, &taps, slice_of(&mut buffer));
                gemm_on_this_thread(patches.t(), dy, Out { data: &mut *sums, accumulate: true });
            }
        });
    });
    let accumulate = dweight.accumulate;
    dweight.data.par_chunks_mut(g.patch()).enumerate().for_each(|(output, dweight)| {
        for (input, dweight) in dweight.chunks_exact_mut(g.taps()).enumerate() {
            for (tap, dweight) in dweight.iter_mut().enumerate() {
                let sum = packed[(tap * g.inputs + input) * g.outputs + output];
                *dweight = if accumulate { *dweight + sum } else { sum };
            }
        }
    });
}

/// dbias (O) = Σ dy over the pixels.
pub fn backward_bias<T: Float>(g: Geometry, dy: &[T], dbias: Out<'_, T>) {
    sum_in_pieces(g.pixels(), g.outputs, g.outputs, dbias, |pixels, sum| {
        simd!(_A => add_rows(&dy[pixels.start * g.outputs..pixels.end * g.outputs], sum));
    });
}

/// The weight (O, I, KH, KW) as W (KH·KW·I, O).
fn pack<T: Float>(g: Geometry, weight: &[T], packed: &mut [T]) {
    // As (I·KH·KW, O) first, which is a transpose; then its rows in their order.
    const ROWS: usize = 64;
    let mut transposed = scratch::<T>(g.patch() * g.outputs);
    let transposed = slice_of::<T>(&mut transposed);
    transposed.par_chunks_mut((ROWS * g.outputs).max(1)).enumerate().for_each(|(block, to)| {
        let extents = [g.outputs, to.len() / g.outputs];
        let (from, to) = ((&weight[block * ROWS..], g.patch()), (to, g.outputs));
        // SAFETY: `simd!` chooses an instruction set that the machine has.
        simd!(A => unsafe { transpose::<T, <A as Registers>::Vector<T>>(extents, from, to) });
    });
    let rows = packed.par_chunks_mut(g.outputs.max(1)).enumerate().with_min_len(items_per_task(g.outputs));
    rows.for_each(|(row, packed)| {
        let (tap, input) = (row / g.inputs, row % g.inputs);
        packed.copy_from_slice(&transposed[(input * g.taps() + tap) * g.outputs..][..g.outputs]);
    });
}

/// Copies the patches of some output pixels, reduced to some taps, into the rows of a matrix.
fn gather<'a, T: Float>(
    g: Geometry,
    x: &[T],
    pixels: Range<usize>,
    taps: &Range<usize>,
    buffer: &'a mut [T],
) -> Mat<'a, T> {
    let columns = taps.len() * g.inputs;
    let patches = &mut buffer[..pixels.len() * columns];
    // SAFETY: `simd!` chooses an instruction set that the machine has.
    simd!(A => unsafe { gather_rows::<T, A>(g, x, pixels.clone(), taps, patches) });
    Mat::new(patches, pixels.len(), columns)
}

/// # Safety
/// The machine must have the instruction set `A`.
#[inline(always)]
unsafe fn gather_rows<T: Float, A: Registers>(
    g: Geometry,
    x: &[T],
    pixels: Range<usize>,
    taps: &Range<usize>,
    patches: &mut [T],
) {
    for (pixel, patch) in pixels.zip(patches.chunks_exact_mut((taps.len() * g.inputs).max(1))) {
        let mut end = 0;
        g.for_each_run(pixel, taps, |in_patch, in_x| {
            patch[end..in_patch.start].fill(T::zero());
            // SAFETY: the caller vouches for the instruction set.
            unsafe { copy_run::<T, A::Vector<T>>(&mut patch[in_patch.clone()], &x[in_x]) };
            end = in_patch.end;
        });
        patch[end..].fill(T::zero());
    }
}

/// Adds gradients of patches to those of x, of which `dx` has the elements from `offset` on.
#[inline(always)]
fn scatter<T: Float>(
    g: Geometry,
    dpatches: &[T],
    pixels: Range<usize>,
    taps: &Range<usize>,
    offset: usize,
    dx: &mut [T],
) {
    for (pixel, dpatch) in pixels.zip(dpatches.chunks_exact((taps.len() * g.inputs).max(1))) {
        g.for_each_run(pixel, taps, |in_patch, in_x| {
            put(&mut dx[in_x.start - offset..in_x.end - offset], &dpatch[in_patch], true);
        });
    }
}
