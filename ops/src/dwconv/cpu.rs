//! CPU kernels of [`dwconv`](super::dwconv), also run by operations that hold its operands inside wider
//! tensors: every operand has its own distance from one pixel to the next.
//!
//! Channels are the vector lanes. Forward, the sums of a few neighbouring pixels stay in registers while the
//! kernel passes, and each pixel of x is loaded once for all taps of a kernel row; for the weight's gradient
//! the sums of all taps stay while rows of pixels pass, or of as many kernel rows as the registers hold. Pixels
//! outside the image are skipped.

use rayon::prelude::*;
use std::ops::Range;
use tensor::cpu::parallel::{Out, items_per_task, sum_in_pieces};
use tensor::cpu::registers::{self, Each, Registers, Vector};
use tensor::{Float, Tensor, simd, unrolled};

/// The extents of x, y (N, H, W, C) and of the kernel (C, 1, K, K), K one of [`KERNELS`](super::KERNELS).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extents {
    pub images: usize,
    pub height: usize,
    pub width: usize,
    pub channels: usize,
    pub kernel: usize,
}

/// An operand (N, H, W, C) that is read: pixel p, counted in (N, H, W) order, is `data[p * stride..][..C]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Map<'a, T> {
    pub data: &'a [T],
    pub stride: usize,
}

/// An operand (N, H, W, C) that is written, or added to; what lies between its pixels is left alone.
#[derive(Debug)]
pub(crate) struct MapMut<'a, T> {
    pub out: Out<'a, T>,
    pub stride: usize,
}

impl Extents {
    fn rows(&self) -> usize {
        self.images * self.height
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows() * self.width * self.channels == 0
    }

    pub(super) fn taps(&self) -> usize {
        self.kernel * self.kernel
    }

    /// How far a kernel reaches beyond its centre.
    fn reach(&self) -> usize {
        self.kernel / 2
    }

    /// The elements from the first of a map that is not empty to its last.
    pub(super) fn span(&self, stride: usize) -> usize {
        (self.rows() * self.width - 1) * stride + self.channels
    }

    /// The rows of the kernel that lie on the image when its centre is at row `row` of all N·H.
    fn kernel_rows(&self, row: usize) -> Range<usize> {
        let row = row % self.height;
        self.reach().saturating_sub(row)..(self.height + self.reach() - row).min(self.kernel)
    }
}

/// Calls `$kernel::<T, A, K>` for a kernel of extent K.
macro_rules! of_extent {
    ($extent:expr, $kernel:ident::<$T:ident, $A:ident>($($argument:expr),* $(,)?)) => {
        match $extent {
            3 => $kernel::<$T, $A, 3>($($argument),*),
            5 => $kernel::<$T, $A, 5>($($argument),*),
            7 => $kernel::<$T, $A, 7>($($argument),*),
            other => unreachable!("invariant: a kernel of extent {other} was refused"),
        }
    };
}

/// What x is convolved with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel<'a, T> {
    /// (C, 1, K, K)
    pub weight: &'a [T],
    /// Whether x itself is added to the result: as if the centre of the weight were greater by one.
    pub residual: bool,
}

/// y = x ∗ kernel + bias, or y += x ∗ kernel + bias.
pub(crate) fn forward<T: Float>(
    e: Extents,
    x: Map<'_, T>,
    kernel: Kernel<'_, T>,
    bias: Option<&[T]>,
    y: MapMut<'_, T>,
) {
    let taps = packed(e, kernel, |tap| tap);
    // invariant: `packed` returns a contiguous tensor of this type.
    correlate(e, x, taps.as_slice("dwconv").expect("packed weight"), bias, y);
}

/// dx = dy ∗ the kernel turned by half a turn, stored or added.
pub(crate) fn backward_input<T: Float>(e: Extents, dy: Map<'_, T>, kernel: Kernel<'_, T>, dx: MapMut<'_, T>) {
    let last = e.taps() - 1;
    let taps = packed(e, kernel, |tap| last - tap);
    // invariant: as above.
    correlate(e, dy, taps.as_slice("dwconv").expect("packed weight"), None, dx);
}

/// dweight (C, 1, K, K) and dbias (C), where they are wanted, from dy and x in one pass.
pub(crate) fn backward_weight<T: Float>(
    e: Extents,
    dy: Map<'_, T>,
    x: Map<'_, T>,
    dweight: Option<Out<'_, T>>,
    dbias: Option<Out<'_, T>>,
) {
    if dweight.is_none() && dbias.is_none() {
        return;
    }
    let taps = e.taps();
    let mut packed = Tensor::empty([taps + 1, e.channels], T::DTYPE);
    // invariant: a new tensor is contiguous and unshared.
    let packed = packed.as_mut_slice::<T>("dwconv").expect("a new tensor");
    let rows = if e.is_empty() { 0 } else { e.rows() };
    sum_in_pieces(rows, e.width * e.channels, packed.len(), Out::store(packed), |rows, sums| {
        // SAFETY: `simd!` chooses an instruction set that the machine has.
        simd!(A => unsafe { of_extent!(e.kernel, weight_rows::<T, A>(e, dy, x, rows, sums)) });
    });
    let (dweight_sums, dbias_sums) = packed.split_at(taps * e.channels);
    if let Some(dweight) = dweight {
        for (channel, dweight_of_channel) in dweight.data.chunks_exact_mut(taps).enumerate() {
            for (tap, dweight_of_tap) in dweight_of_channel.iter_mut().enumerate() {
                let sum = dweight_sums[tap * e.channels + channel];
                *dweight_of_tap = if dweight.accumulate { *dweight_of_tap + sum } else { sum };
            }
        }
    }
    if let Some(mut dbias) = dbias {
        dbias.put(dbias_sums);
    }
}

/// The kernel as (K·K, C), with tap `order(t)` in place t: a tap's channels side by side.
fn packed<T: Float>(e: Extents, kernel: Kernel<'_, T>, order: impl Fn(usize) -> usize) -> Tensor {
    let mut packed = Tensor::empty([e.taps(), e.channels], T::DTYPE);
    // invariant: a new tensor is contiguous and unshared.
    let data = packed.as_mut_slice::<T>("dwconv").expect("a new tensor");
    for (tap, row) in data.chunks_exact_mut(e.channels.max(1)).enumerate() {
        let from = order(tap);
        let identity = if kernel.residual && from == e.taps() / 2 { T::one() } else { T::zero() };
        let weights = kernel.weight.iter().skip(from).step_by(e.taps());
        row.iter_mut().zip(weights).for_each(|(tap, &weight)| *tap = weight + identity);
    }
    packed
}

/// y = x ∗ taps + bias, with taps (K·K, C).
fn correlate<T: Float>(e: Extents, x: Map<'_, T>, taps: &[T], bias: Option<&[T]>, y: MapMut<'_, T>) {
    if e.is_empty() {
        return;
    }
    let MapMut { out, stride } = y;
    let rows_per_task = items_per_task(e.width * e.channels);
    let row_stride = e.width * stride;
    out.data[..e.span(stride)].par_chunks_mut(rows_per_task * row_stride).enumerate().for_each(|(task, data)| {
        for (row, data) in data.chunks_mut(row_stride).enumerate() {
            let y = MapMut { out: Out { data, accumulate: out.accumulate }, stride };
            let row = task * rows_per_task + row;
            // SAFETY: `simd!` chooses an instruction set that the machine has.
            simd!(A => unsafe { of_extent!(e.kernel, correlate_row::<T, A>(e, x, taps, bias, row, y)) });
        }
    });
}

/// Repeats a statement for blocks of channels from `$channel` on, `$COUNT` registers `$V` wide, one or up to so many where
/// there are enough registers, until all channels have had their turn.
macro_rules! channel_blocks {
    ($T:ident, $A:ident, $channels:expr, $(up to $most:literal, )?($channel:ident, $V:ident, $COUNT:ident) => $body:block) => {
        let mut $channel = 0;
        macro_rules! blocks {
            ($vector:ty, $count:literal) => {
                while $channels - $channel >= <$vector as Vector<$T>>::LANES * $count {
                    type $V<$T, $A> = $vector;
                    const $COUNT: usize = $count;
                    $body
                    $channel += <$vector as Vector<$T>>::LANES * $count;
                }
            };
        }
        $(if $A::WIDE {
            blocks!(<$A as Registers>::Vector<$T>, $most);
        })?
        blocks!(<$A as Registers>::Vector<$T>, 1);
        blocks!(Each<$T, $A, 1>, 1);
    };
}

/// One row of a map, from one of the channels on.
#[derive(Clone, Copy)]
struct Line<'a, T> {
    data: &'a [T],
    stride: usize,
    width: usize,
}

impl<'a, T: Float> Line<'a, T> {
    /// Panics unless the map has `lanes` elements from there on of each of the row's pixels.
    #[inline(always)]
    fn new(map: Map<'a, T>, row: usize, width: usize, channel: usize, lanes: usize) -> Self {
        let data = &map.data[row * width * map.stride + channel..][..(width - 1) * map.stride + lanes];
        Line { data, stride: map.stride, width }
    }

    /// Some channels of a pixel, if it is on the image; columns left of it have wrapped around.
    ///
    /// # Safety
    /// As of [`Vector::zero`], and `COUNT` registers must hold no more lanes than the line was made for.
    #[inline(always)]
    unsafe fn load<V: Vector<T>, const COUNT: usize>(&self, column: usize) -> Option<[V; COUNT]> {
        (column < self.width).then(|| {
            // SAFETY: `new` has seen that the pixel has as many elements, and the caller vouches for the instruction set.
            std::array::from_fn(|i| unsafe {
                registers::load(self.data.as_ptr().add(column * self.stride + i * V::LANES))
            })
        })
    }
}

/// The first elements of a slice.
///
/// # Safety
/// As of [`Vector::zero`].
#[inline(always)]
unsafe fn load<T: Float, V: Vector<T>, const COUNT: usize>(from: &[T]) -> [V; COUNT] {
    let from = &from[..COUNT * V::LANES];
    // SAFETY: the caller vouches for the instruction set.
    std::array::from_fn(|i| unsafe { V::load(&from[i * V::LANES..]) })
}

/// One row of y, which is row `row` of all N·H.
///
/// # Safety
/// The machine must have the instruction set `A`.
#[inline(always)]
unsafe fn correlate_row<T: Float, A: Registers, const K: usize>(
    e: Extents,
    x: Map<'_, T>,
    taps: &[T],
    bias: Option<&[T]>,
    row: usize,
    mut y: MapMut<'_, T>,
) {
    channel_blocks!(T, A, e.channels, up to 2, (channel, V, COUNT) => {
        let mut column = 0;
        while column < e.width {
            // SAFETY: the caller vouches for the instruction set.
            unsafe {
                if e.width - column > 4 {
                    correlate_block::<T, V<T, A>, K, COUNT, 8>(e, x, taps, bias, [row, column, channel], &mut y);
                    column += 8;
                } else {
                    correlate_block::<T, V<T, A>, K, COUNT, 4>(e, x, taps, bias, [row, column, channel], &mut y);
                    column += 4;
                }
            }
        }
    });
}

/// `COUNT` registers of channels of `PIXELS` neighbouring pixels of y.
///
/// # Safety
/// As of [`Vector::zero`].
#[inline(always)]
unsafe fn correlate_block<T: Float, V: Vector<T>, const K: usize, const COUNT: usize, const PIXELS: usize>(
    e: Extents,
    x: Map<'_, T>,
    taps: &[T],
    bias: Option<&[T]>,
    [row, column, channel]: [usize; 3],
    y: &mut MapMut<'_, T>,
) {
    // SAFETY: the caller vouches for the instruction set, here and below.
    let start: [V; COUNT] = unsafe { bias.map_or([V::zero(); COUNT], |bias| load(&bias[channel..])) };
    let mut sums = [start; PIXELS];
    for ky in e.kernel_rows(row) {
        let taps = &taps[ky * K * e.channels + channel..];
        // SAFETY: as above.
        let taps: [[V; COUNT]; K] = std::array::from_fn(|kx| unsafe { load(&taps[kx * e.channels..]) });
        let line = Line::new(x, row + ky - K / 2, e.width, channel, COUNT * V::LANES);
        unrolled!(place in 0..PIXELS + K - 1 => {
            // SAFETY: as above.
            if let Some(x) = unsafe { line.load::<V, COUNT>((column + place).wrapping_sub(K / 2)) } {
                for kx in place.saturating_sub(PIXELS - 1)..K.min(place + 1) {
                    for i in 0..COUNT {
                        sums[place - kx][i] = x[i].mul_add(taps[kx][i], sums[place - kx][i]);
                    }
                }
            }
        });
    }
    for (pixel, sums) in sums.iter().enumerate() {
        if column + pixel < e.width {
            let y_of_pixel = &mut y.out.data[(column + pixel) * y.stride + channel..][..COUNT * V::LANES];
            for (sum, to) in sums.iter().zip(y_of_pixel.chunks_exact_mut(V::LANES)) {
                // SAFETY: as above.
                let sum = if y.out.accumulate { unsafe { V::load(to) }.add(*sum) } else { *sum };
                sum.store(to);
            }
        }
    }
}

/// Rows of a map whose pixels stay in the first-level cache while the kernel's rows have their turns.
const ROWS: usize = 8;

/// Pixels of dy that stay in registers while those of x pass.
const PIXELS: usize = 4;

/// Of how many rows of a kernel of extent `k` the sums stay in registers together: as many as there is room for beside the
/// pixels of dy, one of x, and the bias's sum.
const fn rows_together<A: Registers>(k: usize) -> usize {
    let registers = if A::WIDE { 32 } else { 16 };
    let rows = (registers - PIXELS - 2) / k;
    if rows < k { rows } else { k }
}

/// Adds up dweight (K·K, C), and dbias (C) after it, over some of the N·H rows.
///
/// # Safety
/// The machine must have the instruction set `A`.
#[inline(always)]
unsafe fn weight_rows<T: Float, A: Registers, const K: usize>(
    e: Extents,
    dy: Map<'_, T>,
    x: Map<'_, T>,
    rows: Range<usize>,
    sums: &mut [T],
) {
    for start in rows.clone().step_by(ROWS) {
        let rows = start..(start + ROWS).min(rows.end);
        channel_blocks!(T, A, e.channels, (channel, V, _COUNT) => {
            for first in (0..K).step_by(rows_together::<A>(K)) {
                let of_kernel = first..(first + rows_together::<A>(K)).min(K);
                // SAFETY: the caller vouches for the instruction set.
                unsafe { weight_taps::<T, A, V<T, A>, K>(e, dy, x, rows.clone(), of_kernel, channel, sums) };
            }
        });
    }
}

/// sums[ky, kx] += Σ dy[i, j]·x[i + ky − K/2, j + kx − K/2] over some rows of dy, for some rows of the kernel and a register
/// of channels; and with the kernel's first row dbias, which lies behind.
///
/// # Safety
/// As of [`Vector::zero`].
#[inline(always)]
unsafe fn weight_taps<T: Float, A: Registers, V: Vector<T>, const K: usize>(
    e: Extents,
    dy: Map<'_, T>,
    x: Map<'_, T>,
    rows: Range<usize>,
    of_kernel: Range<usize>,
    channel: usize,
    sums: &mut [T],
) {
    let together = const { rows_together::<A>(K) };
    // SAFETY: the caller vouches for the instruction set, here and below.
    let zero = unsafe { V::zero() };
    let mut totals = [[zero; K]; K];
    let mut total = zero;
    for row in rows {
        let on_image = e.kernel_rows(row);
        let dy = Line::new(dy, row, e.width, channel, V::LANES);
        let lines: [Option<Line<'_, T>>; K] = std::array::from_fn(|i| {
            let ky = of_kernel.start + i;
            let met = i < of_kernel.len() && on_image.contains(&ky);
            met.then(|| Line::new(x, row + ky - K / 2, e.width, channel, V::LANES))
        });
        for column in (0..e.width).step_by(PIXELS) {
            let mut dy_of_pixels = [zero; PIXELS];
            unrolled!(pixel in 0..PIXELS => {
                // SAFETY: as above.
                if let Some([dy]) = unsafe { dy.load(column + pixel) } {
                    dy_of_pixels[pixel] = dy;
                }
            });
            if of_kernel.start == 0 {
                unrolled!(pixel in 0..PIXELS => {
                    total = total.add(dy_of_pixels[pixel]);
                });
            }
            unrolled!(i in 0..together => {
                if let Some(x) = lines[i] {
                    unrolled!(place in 0..PIXELS + K - 1 => {
                        // SAFETY: as above.
                        if let Some([x]) = unsafe { x.load::<V, 1>((column + place).wrapping_sub(K / 2)) } {
                            for kx in place.saturating_sub(PIXELS - 1)..K.min(place + 1) {
                                totals[i][kx] = x.mul_add(dy_of_pixels[place - kx], totals[i][kx]);
                            }
                        }
                    });
                }
            });
        }
    }
    let mut add = |place: usize, total: V| {
        let sum = &mut sums[place * e.channels + channel..][..V::LANES];
        // SAFETY: as above.
        unsafe { V::load(sum) }.add(total).store(sum);
    };
    for (ky, totals) in of_kernel.clone().zip(totals) {
        for (kx, total) in totals.into_iter().enumerate() {
            add(ky * K + kx, total);
        }
    }
    if of_kernel.start == 0 {
        add(K * K, total);
    }
}
