//! Products of bf16 matrices, summed in f32.
//!
//! Instructions for bf16 take *pairs*: two elements that are neighbours along the inner axis share a 32-bit lane, and
//! each multiplication adds both products to a sum. Both operands are packed into such pairs: the right one once, as
//! panels; the left one as much at a time as stays in the cache ([`layout`]). Then AMX multiplies tiles of 16x16 pairs
//! ([`amx`]), or AVX-512 rows of 16 pairs ([`dots`]). Without either, elements are widened to f32 and multiplied as
//! f32.
//!
//! The factors are the same everywhere, and their products exact in f32; sums differ in their order. (Only on threads
//! that do not [flush denormals](crate::cpu::parallel::thread_pool) can factors differ: pairs take denormals for zero.)

#[cfg(target_arch = "x86_64")]
pub mod amx;
#[cfg(target_arch = "x86_64")]
mod dots;
#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod emulated;
#[cfg(target_arch = "x86_64")]
mod layout;
#[cfg(target_arch = "x86_64")]
mod multiply;
pub mod rounding;
#[cfg(test)]
mod tests;

use super::block::{self, At, Begin, Left, Rows};
use super::factor::Factor;
use super::gemm::Mat;
use super::isa::{Arch, Isa};
use super::packed::{Panels, Right};
use super::parallel::Interleaved;
use crate::{Scratch, bf16};
use std::ops::Range;

/// Columns of a panel of pairs.
const WIDTH: usize = 32;
/// How many elements of the inner axis are multiplied at once: a panel is padded to a multiple of this many rows.
const STEP: usize = 32;
/// About how many elements of the left operand are widened at a time, in whole rows.
const WIDENED: usize = 1 << 16;

/// Whether an instruction set has products of pairs.
fn has_pairs(isa: Isa) -> bool {
    isa >= Isa::Avx512Bf16
}

impl Factor for bf16 {
    type Sum = f32;
    const PACKED_AHEAD: bool = true;

    fn piece(isa: Isa) -> usize {
        match isa {
            Isa::Amx => 1 << 25,
            Isa::Avx512Bf16 => 1 << 22,
            isa => f32::piece(isa),
        }
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    fn round(values: &[f32], to: &mut [bf16]) {
        rounding::round(values, to);
    }

    fn factors<'a>(values: &'a [f32], room: &'a mut Option<Scratch<bf16>>) -> &'a [bf16] {
        let to = room.insert(Scratch::new(values.len()));
        rounding::round_all(values, to);
        to
    }

    #[inline(always)]
    fn panel_width<A: Arch>(isa: Isa, columns: usize) -> usize {
        if has_pairs(isa) { WIDTH } else { f32::panel_width::<A>(isa, columns) }
    }

    #[inline(always)]
    fn packed_rows(isa: Isa, rows: usize) -> usize {
        if has_pairs(isa) { rows.next_multiple_of(STEP) / 2 } else { rows }
    }

    #[inline(always)]
    unsafe fn pack<A: Arch>(isa: Isa, b: Mat<'_, bf16>, to: &mut [f32], width: usize) {
        match isa {
            // SAFETY: guaranteed by the caller.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 | Isa::Amx => unsafe { layout::pack_panel::<A>(b, to) },
            _ => widen_panel(b, to, width),
        }
    }

    #[inline(always)]
    unsafe fn fill<A: Arch>(isa: Isa, [rows, width]: [usize; 2], to: &mut [f32], fill: impl FnOnce(&mut [bf16])) {
        let mut elements = Scratch::new(rows * width);
        fill(&mut elements);
        // SAFETY: guaranteed by the caller.
        unsafe { Self::pack::<A>(isa, Mat::new(&elements, rows, width), to, width) }
    }

    #[inline(always)]
    unsafe fn block<A: Arch, R: Rows>(
        a: Left<'_, f32, R>,
        b: Right<'_, bf16>,
        begin: Begin<'_, f32>,
        c: (Interleaved<'_, f32>, R),
        rows: Range<usize>,
        panels: Range<usize>,
    ) {
        let Right::Packed(b) = b else { unreachable!("invariant: packed ahead") };
        // SAFETY: guaranteed by the caller; the panels are in pairs where the instruction set has products of them.
        unsafe {
            match b.isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Amx => multiply::block::<A, amx::TileUnit, R>(a, b, begin, c, rows, panels),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Bf16 => multiply::block::<A, dots::Dots, R>(a, b, begin, c, rows, panels),
                _ => widened::<A, R>(a, b.panels(), begin, c, rows, panels),
            }
        }
    }
}

/// Widens some columns of B into the rows of a panel of f32s.
#[inline(always)]
fn widen_panel(b: Mat<'_, bf16>, to: &mut [f32], width: usize) {
    for (p, to) in to.chunks_exact_mut(width).enumerate() {
        let (to, beyond) = to.split_at_mut(b.cols);
        beyond.fill(0.0);
        let from = &b.data[p * b.row_stride..];
        match b.col_stride {
            1 => to.iter_mut().zip(from).for_each(|(to, from)| *to = from.widen()),
            stride => to.iter_mut().enumerate().for_each(|(j, to)| *to = from[j * stride].widen()),
        }
    }
}

/// As [`block`](block::block), by way of f32.
///
/// # Safety
/// As of [`block`](block::block).
#[inline(always)]
unsafe fn widened<A: Arch, R: Rows>(
    a: Left<'_, f32, R>,
    b: Panels<'_, f32>,
    begin: Begin<'_, f32>,
    (c, c_rows): (Interleaved<'_, f32>, R),
    rows: Range<usize>,
    panels: Range<usize>,
) {
    let depth = a.runs.starts.len() * a.runs.len;
    let together = (WIDENED / depth.max(1)).clamp(8, 256);
    let wide: &mut [f32] = &mut Scratch::new(together.min(rows.len()) * depth);
    for first in rows.clone().step_by(together) {
        let chunk = first..(first + together).min(rows.end);
        for (row, to) in chunk.clone().zip(wide.chunks_exact_mut(depth.max(1))) {
            let start = a.rows.start(row);
            for (run, to) in a.runs.starts.iter().zip(to.chunks_exact_mut(a.runs.len.max(1))) {
                let from = &a.data[start + run..];
                let rounded = |value: f32| rounding::nearest(value).widen();
                match a.runs.step {
                    1 => to.iter_mut().zip(from).for_each(|(to, &from)| *to = rounded(from)),
                    step => to.iter_mut().enumerate().for_each(|(p, to)| *to = rounded(from[p * step])),
                }
            }
        }
        let runs = block::Runs { starts: &[0], len: depth, step: 1 };
        let starts: Vec<usize> = (0..chunk.len()).map(|row| row * depth).collect();
        let left = Left { data: &*wide, rows: At(&starts), runs };
        let starts: Vec<usize> = chunk.clone().map(|row| c_rows.start(row)).collect();
        // SAFETY: guaranteed by the caller, among whose rows these are; `wide` has this many rows of `depth` elements.
        unsafe { block::block::<f32, A, _>(left, b, begin, (c, At(&starts)), 0..chunk.len(), panels.clone()) };
    }
}
