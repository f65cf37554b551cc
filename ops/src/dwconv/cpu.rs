//! CPU kernels of [`dwconv`](super::dwconv), also run by operations that hold its operands inside wider
//! tensors: every operand has its own distance from one pixel to the next.
//!
//! Channels are the vector lanes. The innermost loops run over them for a few neighbouring pixels and taps
//! at once, so that a pixel and a tap are loaded once for several products. What lies outside the image is
//! read from a line of zeros, so that no loop knows about borders.

use rayon::prelude::*;
use std::ops::Range;
use tensor::cpu::isa::Arch;
use tensor::cpu::parallel::{Out, items_per_task, put, sum_in_pieces};
use tensor::{Float, Tensor, simd};

/// The extents of x, y (N, H, W, C) and of the kernel (C, 1, K, K), K odd.
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

    fn is_empty(&self) -> bool {
        self.rows() * self.width * self.channels == 0
    }

    fn taps(&self) -> usize {
        self.kernel * self.kernel
    }

    /// How far a kernel reaches beyond its centre.
    fn reach(&self) -> usize {
        self.kernel / 2
    }

    /// The elements from the first of a map that is not empty to its last.
    fn span(&self, stride: usize) -> usize {
        (self.rows() * self.width - 1) * stride + self.channels
    }

    /// The rows of the kernel that lie on the image when its centre is at row `row` of all N·H.
    fn kernel_rows(&self, row: usize) -> Range<usize> {
        let row = row % self.height;
        self.reach().saturating_sub(row)..(self.height + self.reach() - row).min(self.kernel)
    }

    /// The channels in blocks of at most [`CHANNELS`].
    fn channel_blocks(&self) -> impl Iterator<Item = Range<usize>> {
        let channels = self.channels;
        (0..channels).step_by(CHANNELS).map(move |start| start..(start + CHANNELS).min(channels))
    }
}

/// Channels whose sums a kernel keeps, in the first-level cache, while pixels and taps pass.
const CHANNELS: usize = 128;
/// Neighbouring pixels that a loop over channels takes at once.
const PIXELS: usize = 4;

/// Calls `$kernel::<T, A, K, K + PIXELS - 1>` for a kernel of extent K.
macro_rules! of_extent {
    ($extent:expr, $kernel:ident::<$T:ident, $A:ident>($($argument:expr),* $(,)?)) => {
        match $extent {
            1 => $kernel::<$T, $A, 1, 4>($($argument),*),
            3 => $kernel::<$T, $A, 3, 6>($($argument),*),
            5 => $kernel::<$T, $A, 5, 8>($($argument),*),
            7 => $kernel::<$T, $A, 7, 10>($($argument),*),
            other => unreachable!("invariant: a kernel of extent {other} was refused"),
        }
    };
}

/// y = x ∗ weight + bias, or y += x ∗ weight + bias.
pub(crate) fn forward<T: Float>(e: Extents, x: Map<'_, T>, weight: &[T], bias: Option<&[T]>, y: MapMut<'_, T>) {
    let taps = packed(e, weight, |tap| tap);
    // invariant: `packed` returns a contiguous tensor of this type.
    correlate(e, x, taps.as_slice("dwconv").expect("packed weight"), bias, y);
}

/// dx = dy ∗ the kernel turned by half a turn, stored or added.
pub(crate) fn backward_input<T: Float>(e: Extents, dy: Map<'_, T>, weight: &[T], dx: MapMut<'_, T>) {
    let last = e.taps() - 1;
    let taps = packed(e, weight, |tap| last - tap);
    // invariant: as above.
    correlate(e, dy, taps.as_slice("dwconv").expect("packed weight"), None, dx);
}

/// dweight (C, 1, K, K) from dy and x.
pub(crate) fn backward_weight<T: Float>(e: Extents, dy: Map<'_, T>, x: Map<'_, T>, dweight: Out<'_, T>) {
    let taps = e.taps();
    let mut packed = Tensor::empty([taps, e.channels], T::DTYPE);
    // invariant: a new tensor is contiguous and unshared.
    let packed = packed.as_mut_slice::<T>("dwconv").expect("a new tensor");
    let rows = if e.is_empty() { 0 } else { e.rows() };
    sum_in_pieces(rows, e.width * e.channels, taps * e.channels, Out::store(packed), |rows, sums| {
        simd!(A => of_extent!(e.kernel, weight_rows::<T, A>(e, dy, x, rows, sums)));
    });
    for (channel, dweight_of_channel) in dweight.data.chunks_exact_mut(taps).enumerate() {
        for (tap, dweight_of_tap) in dweight_of_channel.iter_mut().enumerate() {
            let sum = packed[tap * e.channels + channel];
            *dweight_of_tap = if dweight.accumulate { *dweight_of_tap + sum } else { sum };
        }
    }
}

/// dbias (C) from dy.
pub(crate) fn backward_bias<T: Float>(e: Extents, dy: Map<'_, T>, dbias: Out<'_, T>) {
    sum_in_pieces(e.rows() * e.width, e.channels, e.channels, dbias, |pixels, sum| {
        for pixel in pixels {
            put(sum, &dy.data[pixel * dy.stride..][..e.channels], true);
        }
    });
}

/// The weight (C, 1, K, K) as (K·K, C), with tap `order(t)` in place t: a tap's channels side by side.
fn packed<T: Float>(e: Extents, weight: &[T], order: impl Fn(usize) -> usize) -> Tensor {
    let mut packed = Tensor::empty([e.taps(), e.channels], T::DTYPE);
    // invariant: a new tensor is contiguous and unshared.
    let data = packed.as_mut_slice::<T>("dwconv").expect("a new tensor");
    for (tap, row) in data.chunks_exact_mut(e.channels.max(1)).enumerate() {
        let from = order(tap);
        row.iter_mut().enumerate().for_each(|(channel, w)| *w = weight[channel * e.taps() + from]);
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
            simd!(A => of_extent!(e.kernel, correlate_row::<T, A>(e, x, taps, bias, row, y)));
        }
    });
}

/// Some channels of one row of an operand.
#[derive(Clone, Copy)]
struct Line<'a, T> {
    map: Map<'a, T>,
    /// The number of the row's first pixel.
    first: usize,
    width: usize,
    channel: usize,
    /// What is read outside the image: zeros, as many as channels.
    outside: &'a [T],
}

impl<'a, T: Float> Line<'a, T> {
    /// The channels of `N` pixels from `column` on; columns left of the image have wrapped around.
    #[inline(always)]
    fn pixels<const N: usize>(&self, column: usize) -> [&'a [T]; N] {
        let mut pixels = [self.outside; N];
        for (i, pixel) in pixels.iter_mut().enumerate() {
            let column = column.wrapping_add(i);
            if column < self.width {
                let start = (self.first + column) * self.map.stride + self.channel;
                *pixel = &self.map.data[start..][..self.outside.len()];
            }
        }
        pixels
    }
}

/// One row of y, which is row `row` of all N·H.
#[inline(always)]
fn correlate_row<T: Float, A: Arch, const K: usize, const WINDOW: usize>(
    e: Extents,
    x: Map<'_, T>,
    taps: &[T],
    bias: Option<&[T]>,
    row: usize,
    mut y: MapMut<'_, T>,
) {
    let zeros = [T::zero(); CHANNELS];
    for channels in e.channel_blocks() {
        let outside = &zeros[..channels.len()];
        for column in (0..e.width).step_by(PIXELS) {
            let mut sums = [[T::zero(); CHANNELS]; PIXELS];
            if let Some(bias) = bias {
                sums.iter_mut().for_each(|sums| sums[..channels.len()].copy_from_slice(&bias[channels.clone()]));
            }
            for ky in e.kernel_rows(row) {
                let first = (row + ky - e.reach()) * e.width;
                let line = Line { map: x, first, width: e.width, channel: channels.start, outside };
                add_taps::<T, A, K, WINDOW>(
                    &taps[ky * K * e.channels + channels.start..],
                    e.channels,
                    line.pixels(column.wrapping_sub(e.reach())),
                    &mut sums,
                );
            }
            for (pixel, sums) in sums.iter().enumerate().take(e.width - column) {
                let y_of_pixel = &mut y.out.data[(column + pixel) * y.stride..][channels.clone()];
                put(y_of_pixel, &sums[..channels.len()], y.out.accumulate);
            }
        }
    }
}

/// sums[p] += Σₜ taps[t]·x[p + t], channel by channel.
#[inline(always)]
fn add_taps<T: Float, A: Arch, const TAPS: usize, const WINDOW: usize>(
    taps: &[T],
    tap_stride: usize,
    x: [&[T]; WINDOW],
    sums: &mut [[T; CHANNELS]; PIXELS],
) {
    let channels = x[0].len();
    let x = x.map(|x| &x[..channels]);
    let sums = sums.each_mut().map(|sums| &mut sums[..channels]);
    let taps: [&[T]; TAPS] = std::array::from_fn(|tap| &taps[tap * tap_stride..][..channels]);
    for c in 0..channels {
        let mut totals: [T; PIXELS] = std::array::from_fn(|pixel| sums[pixel][c]);
        for tap in 0..TAPS {
            for pixel in 0..PIXELS {
                totals[pixel] = A::mul_add(taps[tap][c], x[pixel + tap][c], totals[pixel]);
            }
        }
        for pixel in 0..PIXELS {
            sums[pixel][c] = totals[pixel];
        }
    }
}

/// Adds up dweight (K·K, C) over some of the N·H rows.
#[inline(always)]
fn weight_rows<T: Float, A: Arch, const K: usize, const WINDOW: usize>(
    e: Extents,
    dy: Map<'_, T>,
    x: Map<'_, T>,
    rows: Range<usize>,
    sums: &mut [T],
) {
    let zeros = [T::zero(); CHANNELS];
    for row in rows {
        for channels in e.channel_blocks() {
            let (channel, outside) = (channels.start, &zeros[..channels.len()]);
            let line = |map, row| Line { map, first: row * e.width, width: e.width, channel, outside };
            let dy = line(dy, row);
            for ky in e.kernel_rows(row) {
                let x = line(x, row + ky - e.reach());
                add_row::<T, A, K, WINDOW>(
                    dy,
                    x,
                    0usize.wrapping_sub(e.reach()),
                    &mut sums[ky * K * e.channels + channel..],
                    e.channels,
                );
            }
        }
    }
}

/// sums[t] += Σⱼ dy[j]·x[j + shift + t] over one row, channel by channel.
#[inline(always)]
fn add_row<T: Float, A: Arch, const TAPS: usize, const WINDOW: usize>(
    dy: Line<'_, T>,
    x: Line<'_, T>,
    shift: usize,
    sums: &mut [T],
    tap_stride: usize,
) {
    let channels = dy.outside.len();
    let mut totals = [[T::zero(); CHANNELS]; TAPS];
    let totals = totals.each_mut().map(|totals| &mut totals[..channels]);
    for column in (0..dy.width).step_by(PIXELS) {
        let dy = dy.pixels::<PIXELS>(column).map(|dy| &dy[..channels]);
        let x = x.pixels::<WINDOW>(column.wrapping_add(shift)).map(|x| &x[..channels]);
        for c in 0..channels {
            let mut sums: [T; TAPS] = std::array::from_fn(|tap| totals[tap][c]);
            for pixel in 0..PIXELS {
                for tap in 0..TAPS {
                    sums[tap] = A::mul_add(dy[pixel][c], x[pixel + tap][c], sums[tap]);
                }
            }
            for tap in 0..TAPS {
                totals[tap][c] = sums[tap];
            }
        }
    }
    for (tap, totals) in totals.iter().enumerate() {
        put(&mut sums[tap * tap_stride..][..channels], totals, true);
    }
}
