//! The layout of operands in pairs. A pair is two bf16s in the 32 bits of an f32, the one with the smaller index in the
//! lower half; its type here is f32, though it is never read as a number.
//!
//! The right operand: panels, each row of which holds two rows of the matrix, one pair per column. The left operand:
//! tiles of 16 rows by 16 pairs, each contiguous; tiles of the same rows follow each other. Both are padded with zeros.

use super::{STEP, WIDTH};
use crate::bf16;
use crate::cpu::block::{Left, Rows, Runs};
use crate::cpu::gemm::Mat;
use crate::cpu::isa::Arch;
use crate::cpu::registers::copy_run;
use crate::cpu::transpose::transpose;
use std::arch::x86_64::*;
use std::ops::Range;

/// Rows of a tile, and columns.
pub const TILE: usize = 16;
/// Pairs in a row of a tile: one cache line.
pub const LINE: usize = 16;

#[inline(always)]
fn pair(first: bf16, second: bf16) -> f32 {
    f32::from_bits(u32::from(first.to_bits()) | u32::from(second.to_bits()) << 16)
}

/// Combines two rows into one row of pairs; a missing second row counts as zeros.
#[inline(always)]
fn join(first: &[bf16], second: Option<&[bf16]>, to: &mut [f32]) {
    match second {
        Some(second) => {
            to.iter_mut().zip(first).zip(second).for_each(|((to, &first), &second)| *to = pair(first, second));
        }
        None => to.iter_mut().zip(first).for_each(|(to, &first)| *to = pair(first, bf16::ZERO)),
    }
}

/// Packs some columns of B, at most [`WIDTH`], as a panel.
///
/// # Safety
/// The machine must have the instruction set `A`.
#[inline(always)]
pub unsafe fn pack_panel<A: Arch>(b: Mat<'_, bf16>, to: &mut [f32]) {
    if b.col_stride == 1 {
        let row = |p: usize| &b.data[p * b.row_stride..][..b.cols];
        for (pairs, to) in to.chunks_exact_mut(WIDTH).enumerate() {
            let (to, beyond) = to.split_at_mut(b.cols);
            beyond.fill(0.0);
            match 2 * pairs {
                p if p + 1 < b.rows => join(row(p), Some(row(p + 1)), to),
                p if p < b.rows => join(row(p), None, to),
                _ => to.fill(0.0),
            }
        }
        return;
    }
    // B is column-major: the pairs of a column are contiguous already, and need only be transposed.
    let whole = b.rows / 2;
    let start = match bytemuck::try_cast_slice::<bf16, f32>(&b.data[..b.data.len() / 2 * 2]) {
        Ok(pairs) if b.row_stride == 1 && b.col_stride.is_multiple_of(2) && whole > 0 && b.cols > 0 => {
            if b.cols < WIDTH {
                to[..whole * WIDTH].fill(0.0);
            }
            // SAFETY: guaranteed by the caller.
            unsafe { transpose::<f32, A::Vector<f32>>([b.cols, whole], (pairs, b.col_stride / 2), (to, WIDTH)) };
            whole
        }
        _ => 0,
    };
    let at = |p: usize, j: usize| {
        if p < b.rows { b.data[p * b.row_stride + j * b.col_stride] } else { bf16::ZERO }
    };
    for (pairs, to) in to.chunks_exact_mut(WIDTH).enumerate().skip(start) {
        to.fill(0.0);
        to[..b.cols].iter_mut().enumerate().for_each(|(j, to)| *to = pair(at(2 * pairs, j), at(2 * pairs + 1, j)));
    }
}

/// Packs some rows of A, of each a part of its elements, rounded to bf16, as tiles.
///
/// # Safety
/// The machine must have the instruction set `A`, and the conversion to bf16.
#[inline(always)]
pub unsafe fn pack_left<A: Arch>(a: Left<'_, f32, impl Rows>, rows: Range<usize>, part: Range<usize>, to: &mut [f32]) {
    let steps = part.len().div_ceil(STEP);
    match a.runs.step {
        _ if steps == 0 => {}
        // SAFETY: guaranteed by the caller.
        1 => unsafe { pack_rows(a, rows, part, steps, to) },
        // SAFETY: as above.
        _ => unsafe { pack_columns::<A>(a, rows, part, steps, to) },
    }
}

/// The elements of two registers, rounded to bf16, those of the first in the lower half.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn rounded(first: __m512, second: __m512) -> __m512i {
    // SAFETY: both are 64 bytes, of any value.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(second, first)) }
}

/// Packs rows whose runs are contiguous.
///
/// # Safety
/// The machine must have the conversion.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn pack_rows(a: Left<'_, f32, impl Rows>, rows: Range<usize>, part: Range<usize>, steps: usize, to: &mut [f32]) {
    const HALF: usize = STEP / 2;
    let Runs { starts, len, .. } = a.runs;
    for (place, row) in rows.clone().enumerate() {
        let lines = &mut to[(place / TILE * steps * TILE + place % TILE) * LINE..];
        let start = a.rows.start(row);
        let (mut run, mut within) = (part.start / len, part.start % len);
        for (step, tile) in lines.chunks_mut(TILE * LINE).take(steps).enumerate() {
            let count = STEP.min(part.len() - step * STEP);
            let mut joined = [0f32; STEP];
            let elements = if count == STEP && len - within >= STEP {
                let elements = &a.data[start + starts[run] + within..][..STEP];
                within += STEP;
                elements
            } else {
                // Elements of several runs, or fewer at the end of the part: gathered and zero-padded first.
                let mut rest = &mut joined[..count];
                while !rest.is_empty() {
                    if within == len {
                        (run, within) = (run + 1, 0);
                    }
                    let (to, after) = rest.split_at_mut(rest.len().min(len - within));
                    copy_run(to, &a.data[start + starts[run] + within..][..to.len()]);
                    within += to.len();
                    rest = after;
                }
                &joined
            };
            if within == len {
                (run, within) = (run + 1, 0);
            }
            let line = &mut tile[..LINE];
            // SAFETY: as many elements as are loaded and stored; the caller vouches for the conversion.
            unsafe {
                let (first, second) = elements.split_at(HALF);
                let line_of = rounded(_mm512_loadu_ps(first.as_ptr()), _mm512_loadu_ps(second.as_ptr()));
                _mm512_storeu_si512(line.as_mut_ptr().cast(), line_of);
            }
        }
    }
    for place in rows.len()..rows.len().next_multiple_of(TILE) {
        let lines = to[(place / TILE * steps * TILE + place % TILE) * LINE..].chunks_mut(TILE * LINE);
        lines.take(steps).for_each(|tile| tile[..LINE].fill(0.0));
    }
}

/// Packs rows whose elements are strided: transposed matrices and patches. Fast if the rows of a tile start at
/// consecutive elements.
///
/// # Safety
/// The machine must have the instruction set `A`, and the conversion.
#[inline(always)]
unsafe fn pack_columns<A: Arch>(
    a: Left<'_, f32, impl Rows>,
    rows: Range<usize>,
    part: Range<usize>,
    steps: usize,
    to: &mut [f32],
) {
    let Runs { starts, len, step: apart } = a.runs;
    for (tile, row) in rows.clone().step_by(TILE).enumerate() {
        let count = TILE.min(rows.end - row);
        let start = a.rows.start(row);
        let neighbours = count == TILE && (1..count).all(|i| a.rows.start(row + i) == start + i);
        let (mut run, mut within) = (part.start / len, part.start % len);
        for step in 0..steps {
            // The offsets of the elements from the starts of their rows.
            let mut places = [0; STEP];
            let inside = STEP.min(part.end - (part.start + step * STEP));
            for place in &mut places[..inside] {
                *place = starts[run] + within * apart;
                within += 1;
                if within == len {
                    (run, within) = (run + 1, 0);
                }
            }
            let mut pairs = [0f32; LINE * TILE];
            for (place, pairs) in pairs.chunks_exact_mut(TILE).enumerate().take(inside.div_ceil(2)) {
                let both = [2 * place, 2 * place + 1];
                // SAFETY: guaranteed by the caller.
                unsafe {
                    if neighbours && both[1] < inside {
                        let [first, second] = both.map(|place| &a.data[start + places[place]..][..TILE]);
                        pair_up(first, second, pairs);
                    } else {
                        let [first, second] = both.map(|place| {
                            let is_there = |i: usize| place < inside && i < count;
                            let at = |i: usize| a.data[a.rows.start(row + i) + places[place]];
                            std::array::from_fn::<_, TILE, _>(|i| if is_there(i) { at(i) } else { 0.0 })
                        });
                        pair_up(&first, &second, pairs);
                    }
                }
            }
            let to = &mut to[(tile * steps + step) * TILE * LINE..][..TILE * LINE];
            // SAFETY: guaranteed by the caller.
            unsafe { transpose::<f32, A::Vector<f32>>([LINE, TILE], (&pairs, TILE), (to, LINE)) };
        }
    }
}

/// The elements of two rows of a tile, rounded, as one row of pairs.
///
/// # Safety
/// The machine must have the conversion.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn pair_up(first: &[f32], second: &[f32], to: &mut [f32]) {
    const TURNS: [u16; STEP] = {
        let mut turns = [0; STEP];
        let mut place = 0;
        while place < STEP {
            turns[place] = (place / 2 + place % 2 * TILE) as u16;
            place += 1;
        }
        turns
    };
    assert!([first.len(), second.len(), to.len()] == [TILE; 3], "rows of a tile");
    // SAFETY: each slice fills a register, as just checked; the caller vouches for the conversion.
    unsafe {
        let both = rounded(_mm512_loadu_ps(first.as_ptr()), _mm512_loadu_ps(second.as_ptr()));
        let turns = _mm512_loadu_si512(TURNS.as_ptr().cast());
        _mm512_storeu_si512(to.as_mut_ptr().cast(), _mm512_permutexvar_epi16(turns, both));
    }
}
