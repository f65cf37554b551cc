//! Forward, and the gradient of x: the same with the kernel rotated by 180°.

use super::line::Line;
use super::{Geometry, Kernel, Map, MapMut, of_extent};
use rayon::prelude::*;
use tensor::cpu::isa::Arch;
use tensor::cpu::parallel::{Out, items_per_task};
use tensor::cpu::registers::Vector;
use tensor::{Float, Scratch, in_registers, simd, unrolled};

/// y = x ∗ kernel + bias, or y += x ∗ kernel + bias.
pub(crate) fn forward<T: Float>(
    g: Geometry,
    x: Map<'_, T>,
    kernel: Kernel<'_, T>,
    bias: Option<&[T]>,
    y: MapMut<'_, T>,
) {
    correlate(g, x, &packed(g, kernel, |tap| tap), bias, y);
}

/// dx = dy ∗ the kernel rotated by 180°, stored or accumulated.
pub(crate) fn backward_input<T: Float>(g: Geometry, dy: Map<'_, T>, kernel: Kernel<'_, T>, dx: MapMut<'_, T>) {
    let last = g.taps() - 1;
    correlate(g, dy, &packed(g, kernel, |tap| last - tap), None, dx);
}

/// The kernel as (K·K, C), with tap `order(t)` in place t: a tap's channels side by side.
fn packed<T: Float>(g: Geometry, kernel: Kernel<'_, T>, order: impl Fn(usize) -> usize) -> Scratch<T> {
    let mut packed = Scratch::new(g.taps() * g.channels);
    for (tap, row) in packed.chunks_exact_mut(g.channels.max(1)).enumerate() {
        let from = order(tap);
        let identity = if kernel.residual && from == g.taps() / 2 { T::one() } else { T::zero() };
        let weights = kernel.weight.iter().skip(from).step_by(g.taps());
        row.iter_mut().zip(weights).for_each(|(tap, &weight)| *tap = weight + identity);
    }
    packed
}

/// y = x ∗ taps + bias, with taps (K·K, C).
fn correlate<T: Float>(g: Geometry, x: Map<'_, T>, taps: &[T], bias: Option<&[T]>, y: MapMut<'_, T>) {
    if g.is_empty() {
        return;
    }
    let MapMut { out, stride } = y;
    let rows_per_task = items_per_task(g.width * g.channels);
    let row_stride = g.width * stride;
    out.data[..g.span(stride)].par_chunks_mut(rows_per_task * row_stride).enumerate().for_each(|(task, data)| {
        for (row, data) in data.chunks_mut(row_stride).enumerate() {
            let y = MapMut { out: Out { data, accumulate: out.accumulate }, stride };
            let row = task * rows_per_task + row;
            // SAFETY: `simd!` chooses an instruction set that the machine has.
            simd!(A => unsafe { of_extent!(g.kernel, correlate_row::<T, A>(g, x, taps, bias, row, y)) });
        }
    });
}

/// One row of y, which is row `row` of all N·H.
///
/// # Safety
/// The machine must have the instruction set `A`.
#[inline(always)]
unsafe fn correlate_row<T: Float, A: Arch, const K: usize>(
    g: Geometry,
    x: Map<'_, T>,
    taps: &[T],
    bias: Option<&[T]>,
    row: usize,
    mut y: MapMut<'_, T>,
) {
    in_registers!(T, A, g.channels, [2 if A::MANY_REGISTERS, 1], (channels, V, COUNT) => {
        for channel in channels.step_by(COUNT * V::<T, A>::LANES) {
            let mut column = 0;
            while column < g.width {
                // SAFETY: the caller vouches for the instruction set.
                unsafe {
                    if g.width - column > 4 {
                        correlate_block::<T, V<T, A>, K, COUNT, 8>(g, x, taps, bias, [row, column, channel], &mut y);
                        column += 8;
                    } else {
                        correlate_block::<T, V<T, A>, K, COUNT, 4>(g, x, taps, bias, [row, column, channel], &mut y);
                        column += 4;
                    }
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
    g: Geometry,
    x: Map<'_, T>,
    taps: &[T],
    bias: Option<&[T]>,
    [row, column, channel]: [usize; 3],
    y: &mut MapMut<'_, T>,
) {
    // SAFETY: the caller vouches for the instruction set, here and below.
    let start: [V; COUNT] = unsafe { bias.map_or([V::zero(); COUNT], |bias| load(&bias[channel..])) };
    let mut sums = [start; PIXELS];
    for ky in g.kernel_rows(row) {
        let taps = &taps[ky * K * g.channels + channel..];
        // SAFETY: as above.
        let taps: [[V; COUNT]; K] = std::array::from_fn(|kx| unsafe { load(&taps[kx * g.channels..]) });
        let line = Line::new(x, row + ky - K / 2, g.width, channel, COUNT * V::LANES);
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
        if column + pixel < g.width {
            let y_of_pixel = &mut y.out.data[(column + pixel) * y.stride + channel..][..COUNT * V::LANES];
            for (sum, to) in sums.iter().zip(y_of_pixel.chunks_exact_mut(V::LANES)) {
                // SAFETY: as above.
                let sum = if y.out.accumulate { unsafe { V::load(to) }.add(*sum) } else { *sum };
                sum.store(to);
            }
        }
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
