//! What one thread does of a product of pairs.

use super::layout::{LINE, TILE};
use super::{STEP, WIDTH};
use crate::cpu::block::{Begin, Left, Rows};
use crate::cpu::isa::Arch;
use crate::cpu::packed::Packed;
use crate::cpu::parallel::Interleaved;
use crate::{Scratch, bf16};
use std::ops::Range;

/// How many elements of the inner axis are multiplied at a time, and how many rows of the left operand are packed
/// together: as many as keep these rows and a panel in an L1 cache of 48 KB. From L2, tiles load only half as fast as
/// they are multiplied.
const DEPTH: usize = 256;
const ROWS: usize = 64;

/// A way to multiply tiles.
pub trait Engine {
    /// How packed rows lie.
    type Lines: Copy;

    /// Prepares this thread to use the engine's instructions until the result is dropped.
    ///
    /// # Safety
    /// The machine must have them, and until the result is dropped this thread must prepare for no engine again, nor
    /// run other threads' tasks.
    unsafe fn begin() -> Self;

    /// Packs some rows of A, of each a part of its elements, rounded to bf16 and filled up with zeros to whole tiles of
    /// rows and whole steps.
    ///
    /// # Safety
    /// The machine must have the instruction set `A`, and the engine.
    unsafe fn pack<A: Arch>(
        a: Left<'_, f32, impl Rows>,
        rows: Range<usize>,
        part: Range<usize>,
        to: &mut [f32],
    ) -> Self::Lines;

    /// C = A·B, or C = A·B + `begin`, for one or two tiles of rows by one or two tiles of columns. A: `steps` of its
    /// rows, as [`pack`](Self::pack) packs them. B: for each step the pair rows of a panel, [`WIDTH`] pairs each. C and
    /// `begin`: rows of f32s at the given stride.
    ///
    /// # Safety
    /// The operands must have these extents, at one or two tiles in each direction, and nothing else may use C. `begin`
    /// may be C.
    unsafe fn multiply(
        &self,
        a: (*const f32, Self::Lines),
        b: *const f32,
        steps: usize,
        c: (*mut f32, usize),
        begin: Option<(*const f32, usize)>,
        tiles: [usize; 2],
    );
}

/// As [`block`](crate::cpu::block::block), in pairs.
///
/// # Safety
/// As of [`block`](crate::cpu::block::block), and the machine must have the engine.
#[inline(always)]
pub unsafe fn block<A: Arch, E: Engine, R: Rows>(
    a: Left<'_, f32, R>,
    b: &Packed<bf16>,
    begin: Begin<'_, f32>,
    (c, c_rows): (Interleaved<'_, f32>, R),
    rows: Range<usize>,
    panels: Range<usize>,
) {
    let depth = a.runs.starts.len() * a.runs.len;
    let height = ROWS.min(rows.len()).next_multiple_of(TILE);
    let tiles: &mut [f32] = &mut Scratch::new(height * DEPTH.min(depth).next_multiple_of(STEP) / 2);
    // SAFETY: the caller guarantees the engine, and nothing below runs another task.
    let engine = unsafe { E::begin() };
    for first_row in rows.clone().step_by(ROWS) {
        let chunk = first_row..(first_row + ROWS).min(rows.end);
        for first in (0..depth.max(1)).step_by(DEPTH) {
            let part = first..(first + DEPTH).min(depth);
            let steps = part.len().div_ceil(STEP);
            // SAFETY: guaranteed by the caller.
            let lines = unsafe { E::pack::<A>(a, chunk.clone(), part, tiles) };
            for panel in panels.clone() {
                let from = b.rows_from(panel, first / 2);
                assert!(steps * STEP / 2 * WIDTH <= from.len(), "rows of a panel");
                let column = panel * WIDTH;
                let width = WIDTH.min(b.extents.1 - column);
                let begin = match begin {
                    _ if first > 0 => Begin::Kept,
                    Begin::Row(row) => Begin::Row(&row[column..column + width.next_multiple_of(TILE)]),
                    begin => begin,
                };
                for row in chunk.clone().step_by(WIDTH) {
                    let left = (tiles[(row - chunk.start) / TILE * steps * TILE * LINE..].as_ptr(), lines);
                    let rows = row..(row + WIDTH).min(chunk.end);
                    let to = TilesOfC { c, rows: c_rows, range: rows, columns: column..column + width };
                    // SAFETY: the tiles are there, as just packed, and the panel, as just checked; these tiles of C are
                    // this task's.
                    unsafe { to.put(&engine, left, from.as_ptr(), steps, begin) };
                }
            }
        }
    }
}

/// Where the products of one or two tiles' rows and columns go: these rows and columns of C.
struct TilesOfC<'a, R> {
    c: Interleaved<'a, f32>,
    rows: R,
    range: Range<usize>,
    columns: Range<usize>,
}

impl<R: Rows> TilesOfC<'_, R> {
    /// # Safety
    /// As of [`Engine::multiply`]; these rows and columns must be the caller's alone.
    #[inline(always)]
    unsafe fn put<E: Engine>(
        self,
        engine: &E,
        a: (*const f32, E::Lines),
        b: *const f32,
        steps: usize,
        begin: Begin<'_, f32>,
    ) {
        let (height, width) = (self.range.len(), self.columns.len());
        let tiles = [height.div_ceil(TILE), width.div_ceil(TILE)];
        let start = |row: usize| self.rows.start(self.range.start + row) + self.columns.start;
        let row_of = |begin| match begin {
            // A stride of zero: the same row is added to all.
            Begin::Row(row) => Some((row.as_ptr(), 0)),
            Begin::Zero | Begin::Kept => None,
        };
        let whole = tiles == [height, width].map(|extent| extent / TILE);
        if let Some(apart) = whole.then(|| self.rows.step(self.range.clone())).flatten() {
            let c = (self.c.at(start(0)), apart);
            // Checks that the last element is in bounds, too.
            self.c.at(start(height - 1) + width - 1);
            let begin = if let Begin::Kept = begin { Some((c.0.cast_const(), apart)) } else { row_of(begin) };
            // SAFETY: guaranteed by the caller.
            return unsafe { engine.multiply(a, b, steps, c, begin, tiles) };
        }
        // Partial tiles are computed in a buffer, which starts from C's values if those are kept: added afterwards,
        // they would be rounded differently, and the bits of a row would depend on how many rows there are.
        let mut aside = [0f32; WIDTH * WIDTH];
        // SAFETY: guaranteed by the caller, here and below.
        let row_of_c = |row: usize| unsafe { self.c.part(start(row)..start(row) + width) };
        let kept = matches!(begin, Begin::Kept);
        if kept {
            for (row, aside) in aside.chunks_exact_mut(WIDTH).take(height).enumerate() {
                aside[..width].copy_from_slice(row_of_c(row));
            }
        }
        let places = aside.as_mut_ptr();
        let begin = if kept { Some((places.cast_const(), WIDTH)) } else { row_of(begin) };
        // SAFETY: as above.
        unsafe { engine.multiply(a, b, steps, (places, WIDTH), begin, tiles) };
        for (row, aside) in aside.chunks_exact(WIDTH).take(height).enumerate() {
            row_of_c(row).copy_from_slice(&aside[..width]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::block::At;

    /// What the instructions do, one element after the other.
    struct ByHand;

    impl Engine for ByHand {
        type Lines = ();

        unsafe fn begin() -> Self {
            Self
        }

        unsafe fn pack<A: Arch>(_: Left<'_, f32, impl Rows>, _: Range<usize>, _: Range<usize>, _: &mut [f32]) {
            unreachable!("the test has packed rows")
        }

        unsafe fn multiply(
            &self,
            (a, ()): (*const f32, ()),
            b: *const f32,
            steps: usize,
            (c, c_apart): (*mut f32, usize),
            begin: Option<(*const f32, usize)>,
            [high, wide]: [usize; 2],
        ) {
            let halves = |pair: f32| [pair.to_bits() << 16, pair.to_bits() & 0xFFFF_0000].map(f32::from_bits);
            for (row, column) in (0..high * TILE).flat_map(|row| (0..wide * TILE).map(move |column| (row, column))) {
                // SAFETY: guaranteed by the caller.
                unsafe {
                    let mut sum = begin.map_or(0.0, |(begin, apart)| *begin.add(row * apart + column));
                    for step in 0..steps {
                        for p in 0..LINE {
                            let left = *a.add((row * steps + step) * LINE + p);
                            let ([a0, a1], [b0, b1]) =
                                (halves(left), halves(*b.add((step * LINE + p) * WIDTH + column)));
                            sum = a1.mul_add(b1, a0.mul_add(b0, sum));
                        }
                    }
                    *c.add(row * c_apart + column) = sum;
                }
            }
        }
    }

    /// Where a batch is cut depends on the number of threads, in inference.
    #[test]
    fn a_row_has_the_same_bits_however_many_there_are() {
        let steps = 2;
        let numbers = |count: usize, stream: u64| -> Vec<f32> {
            let mut sequence = crate::rng::Philox::new(1, stream).sequence();
            (0..count).map(|_| (sequence.uniform() - 0.5) as f32).collect()
        };
        let pairs = |count: usize, stream: u64| -> Vec<f32> {
            let halves: Vec<bf16> = numbers(2 * count, stream).into_iter().map(bf16::from_f32).collect();
            halves
                .chunks(2)
                .map(|pair| f32::from_bits(u32::from(pair[0].to_bits()) | u32::from(pair[1].to_bits()) << 16))
                .collect()
        };
        let (a, b) = (pairs(2 * steps * TILE * LINE, 1), pairs(steps * LINE * WIDTH, 2));
        let (held, row) = (numbers(WIDTH * WIDTH, 3), numbers(WIDTH, 4).into_iter().map(bf16::from_f32));
        let row: Vec<f32> = row.map(bf16::to_f32).collect();
        let starts: Vec<usize> = (0..WIDTH).map(|row| row * WIDTH).collect();
        for begin in [Begin::Zero, Begin::Row(&row), Begin::Kept] {
            let product = |height: usize, width: usize| {
                let mut c = held.clone();
                let to =
                    TilesOfC { c: Interleaved::new(&mut c), rows: At(&starts), range: 0..height, columns: 0..width };
                // SAFETY: there are as many tiles and rows of pairs.
                unsafe { to.put(&ByHand, (a.as_ptr(), ()), b.as_ptr(), steps, begin) };
                c
            };
            let whole = product(WIDTH, WIDTH);
            for (height, width) in [(17, WIDTH), (WIDTH, 31), (30, 17), (18, 20)] {
                let part = product(height, width);
                for (place, (&got, &held)) in part.iter().zip(&held).enumerate() {
                    let inside = place / WIDTH < height && place % WIDTH < width;
                    let expected = if inside { whole[place] } else { held };
                    assert_eq!(got.to_bits(), expected.to_bits(), "{height}x{width} at {place}");
                }
            }
        }
    }
}
