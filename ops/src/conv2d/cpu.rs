//! CPU kernels of [`conv2d`](super::conv2d): matrix products over blocks of patches.
//!
//! A block is [`PIXELS`] output pixels by a group of kernel taps of about [`COLUMNS`] inputs: what the matrix
//! product keeps in the second-level cache anyway. So the buffer of a task stays small whatever the image
//! and the kernel, and the weight is packed once for many pixels.

use rayon::prelude::*;
use std::ops::Range;
use tensor::cpu::gemm::{Mat, gemm_on_this_thread, gemm_packed};
use tensor::cpu::packed::Packed;
use tensor::cpu::parallel::{GRAIN, Out, add_rows, put, sum_in_pieces};
use tensor::cpu::registers::{Registers, Vector, copy_run};
use tensor::cpu::transpose::transpose;
use tensor::{Float, Tensor, simd};

/// Output pixels per block.
const PIXELS: usize = 256;
/// Inputs per block, about: whole taps of the kernel.
const COLUMNS: usize = 256;
/// The weight's gradient is cut into at least so many tasks, where there are as many.
const TASKS: usize = 16;

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

    /// Calls `visit(pixel, in_patch, in_x)` for each run of neighbouring elements that the patch of one of these output
    /// pixels, counted from 0, shares with x, when the patch is reduced to some taps; in order. The rest of a patch is
    /// padding.
    #[inline(always)]
    fn for_each_run(
        &self,
        pixels: Range<usize>,
        taps: &Range<usize>,
        mut visit: impl FnMut(usize, Range<usize>, Range<usize>),
    ) {
        let ([height, width], [_, across]) = (self.input, self.kernel);
        let (mut image, place) = (pixels.start / self.pixels_per_image(), pixels.start % self.pixels_per_image());
        let (mut row, mut column) = (place / self.output[1], place % self.output[1]);
        let kernel_rows = taps.start / across..taps.end.div_ceil(across);
        for pixel in 0..pixels.len() {
            let (top, left) = (row * self.stride, column * self.stride);
            for a in kernel_rows.clone() {
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
                    let in_x =
                        ((image * height + row - self.padding) * width + left + start - self.padding) * self.inputs;
                    let len = (end - start) * self.inputs;
                    visit(pixel, in_patch..in_patch + len, in_x..in_x + len);
                }
            }
            column += 1;
            if column == self.output[1] {
                (row, column) = (row + 1, 0);
            }
            if row == self.output[0] {
                (image, row) = (image + 1, 0);
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
    let weight = Packed::filled((g.patch(), g.outputs), |outputs, to, width| pack(g, weight, outputs, to, width));
    y.par_chunks_mut(PIXELS * g.outputs).enumerate().for_each(|(block, y)| {
        let pixels = block * PIXELS..block * PIXELS + y.len() / g.outputs;
        // The products add to a result that starts as the bias.
        if let Some(bias) = bias {
            y.chunks_exact_mut(g.outputs).for_each(|y| y.copy_from_slice(bias));
        }
        let mut buffer = scratch::<T>(pixels.len() * g.taps_per_group() * g.inputs);
        for taps in (0..g.tap_groups()).map(|group| g.tap_group(group)) {
            let patches = gather(g, x, pixels.clone(), &taps, slice_of(&mut buffer));
            let rows = taps.start * g.inputs..taps.end * g.inputs;
            gemm_packed(patches, &weight, rows, Out { data: &mut *y, accumulate: bias.is_some() || taps.start > 0 });
        }
    });
}

/// dx (N, H, W, I) from dy. Patches of one image overlap, so a task has whole images: as many as make a block.
pub fn backward_input<T: Float>(g: Geometry, dy: &[T], weight: &[T], dx: Out<'_, T>) {
    if dx.data.is_empty() {
        return;
    }
    let groups = (0..g.tap_groups()).map(|group| {
        let taps = g.tap_group(group);
        let (first, count) = (taps.start * g.inputs, taps.len() * g.inputs);
        Packed::filled((g.outputs, count), |columns, to, width| {
            pack_transposed(g, weight, first + columns.start..first + columns.end, to, width);
        })
    });
    let groups: Vec<_> = groups.collect();
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
            for (group, weight) in groups.iter().enumerate() {
                let taps = g.tap_group(group);
                let dpatches = &mut slice_of(&mut buffer)[..pixels.len() * taps.len() * g.inputs];
                gemm_packed(dy, weight, 0..g.outputs, Out::store(dpatches));
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
    let mut sums = scratch::<T>(elements);
    let sums = slice_of::<T>(&mut sums);
    // Groups of taps, and where those are few, pieces of pixels with partial sums.
    let pieces = (TASKS / g.tap_groups()).max(1);
    let per_piece = g.pixels().div_ceil(pieces).next_multiple_of(PIXELS).max(PIXELS);
    sum_in_pieces(g.pixels().div_ceil(per_piece), GRAIN, elements, Out::store(&mut *sums), |pieces, sums| {
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
    let (sums, accumulate) = (&*sums, dweight.accumulate);
    // As many outputs at a time as a line of the cache holds.
    const OUTPUTS: usize = 16;
    dweight.data.par_chunks_mut(OUTPUTS * g.patch()).enumerate().for_each(|(block, dweight)| {
        for place in 0..g.patch() {
            let (input, tap) = (place / g.taps(), place % g.taps());
            let sums = &sums[(tap * g.inputs + input) * g.outputs + block * OUTPUTS..];
            for (dweight, &sum) in dweight[place..].iter_mut().step_by(g.patch()).zip(sums) {
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

/// Some columns of the weight (O, I, KH, KW) as W (KH·KW·I, O), in rows of `width` elements.
fn pack<T: Float>(g: Geometry, weight: &[T], outputs: Range<usize>, to: &mut [T], width: usize) {
    // As (I·KH·KW, outputs) first, which is a transpose; then its rows in their order.
    let count = outputs.len();
    let mut transposed = scratch::<T>(g.patch() * count);
    let transposed = slice_of::<T>(&mut transposed);
    let from = (&weight[outputs.start * g.patch()..], g.patch());
    // SAFETY: `simd!` chooses an instruction set that the machine has.
    simd!(A => unsafe { transpose::<T, <A as Registers>::Vector<T>>([count, g.patch()], from, (transposed, count)) });
    for (row, to) in to.chunks_exact_mut(width).enumerate() {
        let (tap, input) = (row / g.inputs, row % g.inputs);
        let (to, beyond) = to.split_at_mut(count);
        to.copy_from_slice(&transposed[(input * g.taps() + tap) * count..][..count]);
        beyond.fill(T::zero());
    }
}

/// Some columns of the weight (O, I, KH, KW) as Wᵀ (O, KH·KW·I), in rows of `width` elements.
fn pack_transposed<T: Float>(g: Geometry, weight: &[T], columns: Range<usize>, to: &mut [T], width: usize) {
    let places: Vec<usize> = columns.map(|column| column % g.inputs * g.taps() + column / g.inputs).collect();
    for (to, weight) in to.chunks_exact_mut(width).zip(weight.chunks_exact(g.patch())) {
        let (to, beyond) = to.split_at_mut(places.len());
        to.iter_mut().zip(&places).for_each(|(to, &place)| *to = weight[place]);
        beyond.fill(T::zero());
    }
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
    let columns = taps.len() * g.inputs;
    let mut end = 0;
    g.for_each_run(pixels, taps, |pixel, in_patch, in_x| {
        let run = pixel * columns + in_patch.start..pixel * columns + in_patch.end;
        if end < run.start {
            patches[end..run.start].fill(T::zero());
        }
        end = run.end;
        let lanes = A::Vector::<T>::LANES;
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            match (patches.get_mut(run.start..run.start + lanes), x.get(in_x.start..in_x.start + lanes)) {
                // A register's worth of a short run: what is too much is overwritten by what follows.
                (Some(to), Some(from)) if run.len() < lanes => A::Vector::load(from).store(to),
                _ => copy_run::<T, A::Vector<T>>(&mut patches[run], &x[in_x]),
            }
        }
    });
    patches[end..].fill(T::zero());
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
    let columns = taps.len() * g.inputs;
    g.for_each_run(pixels, taps, |pixel, in_patch, in_x| {
        let dpatch = &dpatches[pixel * columns..][in_patch];
        put(&mut dx[in_x.start - offset..in_x.end - offset], dpatch, true);
    });
}
