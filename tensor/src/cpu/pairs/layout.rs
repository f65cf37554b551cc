//! The layout of operands in pairs. A pair is two bf16s in the 32 bits of an f32, the one with the smaller index in the
//! lower half; its type here is f32, though it is never read as a number.
//!
//! The right operand: panels, each row of which holds two rows of the matrix, one pair per column. The left operand: as
//! the instructions take it, in tiles or in lines. Both are padded with zeros.

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

/// Packs some rows of A, of each a part of its elements, rounded to bf16, as tiles of 16 rows by 16 pairs, each
/// contiguous; tiles of the same rows follow each other.
///
/// # Safety
/// The machine must have the instruction set `A`, and the conversion to bf16.
#[inline(always)]
pub unsafe fn pack_tiles<A: Arch>(a: Left<'_, f32, impl Rows>, rows: Range<usize>, part: Range<usize>, to: &mut [f32]) {
    if a.runs.step == 1 {
        // SAFETY: guaranteed by the caller.
        return unsafe { pack_rows::<TILE>(a, rows, part, to) };
    }
    by_steps(a.runs, rows, part, to, |rows, step, to| {
        let mut pairs = [0f32; LINE * TILE];
        // SAFETY: guaranteed by the caller.
        unsafe {
            pair_rows(a, rows, step, &mut pairs);
            transpose::<f32, A::Vector<f32>>([LINE, TILE], (&pairs, TILE), (to, LINE));
        }
    });
}

/// How the pairs of 16 packed rows lie; those of the next 16 follow.
#[derive(Clone, Copy)]
pub struct Lines {
    /// From one row to the next.
    pub row: usize,
    /// From one pair of a row to the next.
    pub pair: usize,
}

/// Packs them so that the pairs of a row are neighbours, or else the same pairs of 16 rows: whichever A's elements are.
///
/// # Safety
/// The machine must have the conversion to bf16.
#[inline(always)]
pub unsafe fn pack_lines(a: Left<'_, f32, impl Rows>, rows: Range<usize>, part: Range<usize>, to: &mut [f32]) -> Lines {
    if a.runs.step == 1 {
        let row = part.len().div_ceil(STEP) * LINE;
        // SAFETY: guaranteed by the caller.
        unsafe { pack_rows::<1>(a, rows, part, to) };
        return Lines { row, pair: 1 };
    }
    by_steps(a.runs, rows, part, to, |rows, step, to| {
        // SAFETY: guaranteed by the caller.
        unsafe { pair_rows(a, rows, step, to) };
    });
    Lines { row: 1, pair: TILE }
}

/// Calls `pack` for each step of a part and up to 16 rows at a time, with where these pairs go. All rows have their
/// turn before the next step, as their elements are neighbours in memory.
#[inline(always)]
fn by_steps(
    runs: Runs<'_>,
    rows: Range<usize>,
    part: Range<usize>,
    to: &mut [f32],
    pack: impl Fn(Range<usize>, &Step, &mut [f32]),
) {
    let steps = part.len().div_ceil(STEP);
    let mut places = Places::new(runs, part);
    for step in 0..steps {
        let places = places.next_step();
        for (tile, row) in rows.clone().step_by(TILE).enumerate() {
            let to = &mut to[(tile * steps + step) * TILE * LINE..][..TILE * LINE];
            pack(row..rows.end.min(row + TILE), &places, to);
        }
    }
}

/// The elements of two registers, rounded to bf16, those of the first in the lower half.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn rounded(first: __m512, second: __m512) -> __m512i {
    // SAFETY: both are 64 bytes, of any value.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(second, first)) }
}

/// Packs rows whose runs are contiguous, as tiles of HEIGHT rows; the last tile of 16 is filled up with rows of zeros.
///
/// # Safety
/// The machine must have the conversion.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn pack_rows<const HEIGHT: usize>(
    a: Left<'_, f32, impl Rows>,
    rows: Range<usize>,
    part: Range<usize>,
    to: &mut [f32],
) {
    let steps = part.len().div_ceil(STEP);
    if steps == 0 {
        return;
    }
    let Runs { starts, len, .. } = a.runs;
    let first = (part.start / len, part.start % len);
    for place in 0..rows.len().next_multiple_of(TILE) {
        let lines = &mut to[(place / HEIGHT * steps * HEIGHT + place % HEIGHT) * LINE..];
        let mut lines = lines.chunks_mut(HEIGHT * LINE).take(steps).filter_map(|tile| tile.first_chunk_mut::<LINE>());
        let row = rows.start + place;
        if row >= rows.end {
            lines.for_each(|line| line.fill(0.0));
            continue;
        }
        let (start, (mut run, mut within), mut left) = (a.rows.start(row), first, part.len());
        while left > 0 {
            let whole = left.min(len - within) / STEP;
            // Elements of several runs, or fewer at the end of the part, are gathered first, and followed by zeros.
            let mut joined = [0f32; STEP];
            let elements = match whole {
                0 => {
                    let mut rest = &mut joined[..STEP.min(left)];
                    left -= rest.len();
                    while !rest.is_empty() {
                        let (to, after) = rest.split_at_mut(rest.len().min(len - within));
                        copy_run(to, &a.data[start + starts[run] + within..][..to.len()]);
                        (run, within) = after_run(run, within + to.len(), len);
                        rest = after;
                    }
                    &joined
                }
                whole => {
                    let elements = &a.data[start + starts[run] + within..][..whole * STEP];
                    left -= elements.len();
                    (run, within) = after_run(run, within + elements.len(), len);
                    elements
                }
            };
            for (elements, line) in elements.as_chunks::<STEP>().0.iter().zip(&mut lines) {
                // SAFETY: the caller vouches for the conversion.
                unsafe { round_line(elements, line) };
            }
        }
    }
}

/// The run and the place in it that follow, if this may be a run's end.
#[inline(always)]
fn after_run(run: usize, within: usize, len: usize) -> (usize, usize) {
    if within == len { (run + 1, 0) } else { (run, within) }
}

/// Rounds the elements of a step of one row.
///
/// # Safety
/// The machine must have the conversion.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn round_line(elements: &[f32; STEP], line: &mut [f32; LINE]) {
    let (first, second) = elements.split_at(STEP / 2);
    // SAFETY: as many elements as are loaded and stored; the caller vouches for the conversion.
    unsafe {
        let pairs = rounded(_mm512_loadu_ps(first.as_ptr()), _mm512_loadu_ps(second.as_ptr()));
        _mm512_storeu_si512(line.as_mut_ptr().cast(), pairs);
    }
}

/// The elements of a part of the inner axis, step by step.
struct Places<'a> {
    runs: Runs<'a>,
    /// Which run the next element is in, and where in it.
    next: (usize, usize),
    left: usize,
}

/// Where the elements of a step lie, from where a row starts, and how many there are.
type Step = ([usize; STEP], usize);

impl<'a> Places<'a> {
    fn new(runs: Runs<'a>, part: Range<usize>) -> Self {
        let len = runs.len.max(1);
        Self { runs, next: (part.start / len, part.start % len), left: part.len() }
    }

    #[inline(always)]
    fn next_step(&mut self) -> Step {
        let Runs { starts, len, step } = self.runs;
        let (mut places, count) = ([0; STEP], STEP.min(self.left));
        let (run, within) = &mut self.next;
        for place in &mut places[..count] {
            *place = starts[*run] + *within * step;
            *within += 1;
            if *within == len {
                (*run, *within) = (*run + 1, 0);
            }
        }
        self.left -= count;
        (places, count)
    }
}

/// Rounds a step's elements of up to 16 rows, in pairs: the first pair of all rows, then the next one of all. What is
/// missing of 16 rows and 16 pairs is zero. Fast if the rows start at consecutive elements.
///
/// # Safety
/// The machine must have the conversion.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn pair_rows(a: Left<'_, f32, impl Rows>, rows: Range<usize>, (places, inside): &Step, to: &mut [f32]) {
    let start = a.rows.start(rows.start);
    let neighbours = rows.len() == TILE && a.rows.step(rows.clone()) == Some(1);
    let mut columns = [[0.0; TILE]; 2];
    for (pair, to) in to.as_chunks_mut().0.iter_mut().enumerate() {
        let mut both = [&[0.0; TILE]; 2];
        for ((of, column), place) in both.iter_mut().zip(&mut columns).zip(2 * pair..*inside) {
            if neighbours {
                *of = a.data[start + places[place]..].first_chunk().expect("invariant: rows lie inside");
            } else {
                for (row, to) in rows.clone().zip(&mut *column) {
                    *to = a.data[a.rows.start(row) + places[place]];
                }
                *of = column;
            }
        }
        // SAFETY: guaranteed by the caller.
        unsafe { pair_up(both[0], both[1], to) };
    }
}

/// The elements of two rows of a tile, rounded, as one row of pairs.
///
/// # Safety
/// The machine must have the conversion.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn pair_up(first: &[f32; TILE], second: &[f32; TILE], to: &mut [f32; TILE]) {
    const TURNS: [u16; STEP] = {
        let mut turns = [0; STEP];
        let mut place = 0;
        while place < STEP {
            turns[place] = (place / 2 + place % 2 * TILE) as u16;
            place += 1;
        }
        turns
    };
    // SAFETY: each array fills a register; the caller vouches for the conversion.
    unsafe {
        let both = rounded(_mm512_loadu_ps(first.as_ptr()), _mm512_loadu_ps(second.as_ptr()));
        let turns = _mm512_loadu_si512(TURNS.as_ptr().cast());
        _mm512_storeu_si512(to.as_mut_ptr().cast(), _mm512_permutexvar_epi16(turns, both));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::block::{At, Every};
    use crate::cpu::isa::{Isa, limits};
    use crate::simd;

    /// Packs rows of a matrix in both ways, and looks for each pair where it should be.
    fn check(a: Left<'_, f32, impl Rows>, rows: Range<usize>, part: Range<usize>) {
        let steps = part.len().div_ceil(STEP);
        let height = rows.len().next_multiple_of(TILE);
        let size = height * steps * LINE;
        let (mut tiles, mut lines) = (vec![f32::NAN; size], vec![f32::NAN; size]);
        // SAFETY: the machine has what the caller limits it to.
        simd!(A => unsafe { pack_tiles::<A>(a, rows.clone(), part.clone(), &mut tiles) });
        // SAFETY: as above.
        let Lines { row, pair: apart } = unsafe { pack_lines(a, rows.clone(), part.clone(), &mut lines) };
        let element = |i: usize, p: usize| {
            let place = part.start + p;
            let Runs { starts, len, step } = a.runs;
            let inside = i < rows.len() && p < part.len();
            let at = || a.data[a.rows.start(rows.start + i) + starts[place / len] + place % len * step];
            if inside { bf16::from_f32(at()) } else { bf16::ZERO }
        };
        for (i, q) in (0..height).flat_map(|i| (0..steps * LINE).map(move |q| (i, q))) {
            let expected = pair(element(i, 2 * q), element(i, 2 * q + 1)).to_bits();
            let in_tiles = ((i / TILE * steps + q / LINE) * TILE + i % TILE) * LINE + q % LINE;
            let in_lines = i / TILE * TILE * steps * LINE + i % TILE * row + q * apart;
            assert_eq!(tiles[in_tiles].to_bits(), expected, "pair {q} of row {i}, in tiles");
            assert_eq!(lines[in_lines].to_bits(), expected, "pair {q} of row {i}, in lines");
        }
    }

    #[test]
    fn rows_are_packed_in_tiles_and_in_lines() {
        // Tiles are packed by the same instructions wherever there is the conversion.
        for _limited in limits(&[Isa::Avx512Bf16, Isa::Amx]) {
            let data: Vec<f32> = (0..20_000).map(|i| (0.37 * i as f32).sin()).collect();
            let scattered: Vec<usize> = (0..70).map(|i| i * 31 % 70 * 13).collect();
            for (starts, len, step) in
                [(&[0][..], 200, 1), (&[0], 200, 90), (&[5, 90, 0, 300], 50, 1), (&[7, 1], 100, 3)]
            {
                let runs = Runs { starts, len, step };
                for (rows, part) in [(0..16, 0..200), (3..40, 64..129), (17..18, 199..200), (0..64, 10..10)] {
                    for apart in [1, 2] {
                        let every = Every(if step == 1 { 210 * apart } else { apart });
                        check(Left { data: &data, rows: every, runs }, rows.clone(), part.clone());
                    }
                    check(Left { data: &data, rows: At(&scattered), runs }, rows, part);
                }
            }
        }
    }
}
