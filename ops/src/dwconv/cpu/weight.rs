//! The gradients of the kernel and the bias.

use super::line::Line;
use super::{Geometry, Map, of_extent};
use std::ops::Range;
use tensor::cpu::isa::Arch;
use tensor::cpu::parallel::{Out, sum_in_pieces};
use tensor::cpu::registers::Vector;
use tensor::{Float, Scratch, in_registers, simd, unrolled};

/// dweight (C, 1, K, K) and dbias (C), where they are wanted, from dy and x in one pass.
pub(crate) fn backward_weight<T: Float>(
    g: Geometry,
    dy: Map<'_, T>,
    x: Map<'_, T>,
    dweight: Option<Out<'_, T>>,
    dbias: Option<Out<'_, T>>,
) {
    if dweight.is_none() && dbias.is_none() {
        return;
    }
    let taps = g.taps();
    let mut packed = Scratch::<T>::new((taps + 1) * g.channels);
    let rows = if g.is_empty() { 0 } else { g.rows() };
    sum_in_pieces(rows, g.width * g.channels, packed.len(), Out::store(&mut packed), |rows, sums| {
        // SAFETY: `simd!` chooses an instruction set that the machine has.
        simd!(A => unsafe { of_extent!(g.kernel, weight_rows::<T, A>(g, dy, x, rows, sums)) });
    });
    let (dweight_sums, dbias_sums) = packed.split_at(taps * g.channels);
    if let Some(dweight) = dweight {
        for (channel, dweight_of_channel) in dweight.data.chunks_exact_mut(taps).enumerate() {
            for (tap, dweight_of_tap) in dweight_of_channel.iter_mut().enumerate() {
                let sum = dweight_sums[tap * g.channels + channel];
                *dweight_of_tap = if dweight.accumulate { *dweight_of_tap + sum } else { sum };
            }
        }
    }
    if let Some(mut dbias) = dbias {
        dbias.put(dbias_sums);
    }
}

/// How many rows of a map are processed together: their pixels stay in the L1 cache while the loop runs over the
/// kernel's rows.
const ROWS: usize = 8;

/// Pixels of dy that stay in registers while the loop runs over those of x.
const PIXELS: usize = 4;

/// How many rows of a kernel of extent `k` keep their sums in registers at once: as many as fit beside the pixels of
/// dy, one pixel of x, and the bias's sum.
const fn rows_together<A: Arch>(k: usize) -> usize {
    let registers = if A::MANY_REGISTERS { 32 } else { 16 };
    let rows = (registers - PIXELS - 2) / k;
    if rows < k { rows } else { k }
}

/// Adds up dweight (K·K, C), and dbias (C) after it, over some of the N·H rows.
///
/// # Safety
/// The machine must have the instruction set `A`.
#[inline(always)]
unsafe fn weight_rows<T: Float, A: Arch, const K: usize>(
    g: Geometry,
    dy: Map<'_, T>,
    x: Map<'_, T>,
    rows: Range<usize>,
    sums: &mut [T],
) {
    for start in rows.clone().step_by(ROWS) {
        let rows = start..(start + ROWS).min(rows.end);
        in_registers!(T, A, g.channels, [1], (channels, V, _COUNT) => {
            for channel in channels.step_by(V::<T, A>::LANES) {
                for first in (0..K).step_by(rows_together::<A>(K)) {
                    let of_kernel = first..(first + rows_together::<A>(K)).min(K);
                    // SAFETY: the caller vouches for the instruction set.
                    unsafe { weight_taps::<T, A, V<T, A>, K>(g, dy, x, rows.clone(), of_kernel, channel, sums) };
                }
            }
        });
    }
}

/// sums[ky, kx] += Σ dy[i, j]·x[i + ky − K/2, j + kx − K/2] over some rows of dy, for some rows of the kernel and a
/// register of channels; and, together with the kernel's first row, dbias, which is stored after dweight.
///
/// # Safety
/// As of [`Vector::zero`].
#[inline(always)]
unsafe fn weight_taps<T: Float, A: Arch, V: Vector<T>, const K: usize>(
    g: Geometry,
    dy: Map<'_, T>,
    x: Map<'_, T>,
    rows: Range<usize>,
    of_kernel: Range<usize>,
    channel: usize,
    sums: &mut [T],
) {
    // SAFETY: the caller vouches for the instruction set, here and below.
    let zero = unsafe { V::zero() };
    let mut totals = [[zero; K]; K];
    let mut total = zero;
    for row in rows {
        let on_image = g.kernel_rows(row);
        let dy = Line::new(dy, row, g.width, channel, V::LANES);
        let lines: [Option<Line<'_, T>>; K] = std::array::from_fn(|i| {
            let ky = of_kernel.start + i;
            let met = i < of_kernel.len() && on_image.contains(&ky);
            met.then(|| Line::new(x, row + ky - K / 2, g.width, channel, V::LANES))
        });
        // In a line, dy[j] meets x[j + kx − K/2]; of K = 3:
        //   dy:       | 0 1 2 3 |           PIXELS of them in registers
        //   x:      | 0 1 2 3 4 5 |         one after the other; at `place`, each kx meets dy's pixel place − kx
        for column in (0..g.width).step_by(PIXELS) {
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
            unrolled!(i in 0..rows_together::<A>(K) => {
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
        let sum = &mut sums[place * g.channels + channel..][..V::LANES];
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
