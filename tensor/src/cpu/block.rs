//! What one thread does of a matrix product: some rows of the left operand times some panels of the right one.

use super::isa::Arch;
use super::packed::Panels;
use super::parallel::Interleaved;
use super::registers::Vector;
pub use super::tile::{Begin, Runs};
use super::tile::{PanelRows, tiles};
use crate::{Float, Scratch};
use std::ops::Range;

/// How many rows of B are multiplied at a time: as many as keep a panel of two or three registers in the L1 cache. One
/// of four, of 64 KB, streams from the L2 cache, which is no slower than fewer rows at a time.
pub(super) const DEPTH: usize = 256;

/// Where the rows of an operand start.
///
/// # Safety
/// All three functions must agree on where a row starts, at every call.
pub unsafe trait Rows: Copy + Sync {
    /// Where a row starts. Panics if a list has no such row.
    fn start(self, row: usize) -> usize;

    /// Where the first of HEIGHT consecutive rows starts, and the offset of each of them from there.
    fn tile<const HEIGHT: usize>(self, first: usize) -> (usize, [usize; HEIGHT]);

    /// The stride of these rows, of which there must be at least two; `None` if they are not evenly spaced.
    fn step(self, rows: Range<usize>) -> Option<usize>;
}

/// Rows at this stride, the first of them at the beginning.
#[derive(Clone, Copy)]
pub struct Every(pub usize);

// SAFETY: all three compute a row's start as the same product.
unsafe impl Rows for Every {
    #[inline(always)]
    fn start(self, row: usize) -> usize {
        row * self.0
    }

    #[inline(always)]
    fn tile<const HEIGHT: usize>(self, first: usize) -> (usize, [usize; HEIGHT]) {
        (first * self.0, std::array::from_fn(|i| i * self.0))
    }

    #[inline(always)]
    fn step(self, _rows: Range<usize>) -> Option<usize> {
        Some(self.0)
    }
}

/// Rows that start at these positions.
#[derive(Clone, Copy)]
pub struct At<'a>(pub &'a [usize]);

// SAFETY: all three take a row's start from the same list.
unsafe impl Rows for At<'_> {
    #[inline(always)]
    fn start(self, row: usize) -> usize {
        self.0[row]
    }

    #[inline(always)]
    fn tile<const HEIGHT: usize>(self, first: usize) -> (usize, [usize; HEIGHT]) {
        let starts = &self.0[first..first + HEIGHT];
        (starts[0], std::array::from_fn(|i| starts[i].wrapping_sub(starts[0])))
    }

    #[inline(always)]
    fn step(self, rows: Range<usize>) -> Option<usize> {
        let starts = &self.0[rows];
        let step = starts.get(1)?.checked_sub(starts[0])?;
        starts.windows(2).all(|pair| pair[1].wrapping_sub(pair[0]) == step).then_some(step)
    }
}

/// The left operand of a product.
#[derive(Clone, Copy)]
pub struct Left<'a, T, R> {
    pub data: &'a [T],
    pub rows: R,
    pub runs: Runs<'a>,
}

impl<'a, T, R: Rows> Left<'a, T, R> {
    /// Splits the inner axis into parts of at most [`DEPTH`] elements: several whole runs, or a piece of one. Yields
    /// how many rows of B precede a part, the part's offset within its runs, and its runs.
    #[inline(always)]
    fn parts(self) -> impl Iterator<Item = (usize, usize, Runs<'a>)> {
        let Runs { starts, len, step } = self.runs;
        let together = (DEPTH / len.max(1)).max(1);
        starts.chunks(together).enumerate().flat_map(move |(chunk, starts)| {
            (0..len).step_by(DEPTH).map(move |first| {
                let above = chunk * together * len + first;
                (above, first, Runs { starts, len: DEPTH.min(len - first), step })
            })
        })
    }
}

/// Computes some rows and panels of C.
///
/// # Safety
/// The operands and C must lie inside their slices, no other task may write these rows and panels at the same time, and
/// the machine must have the instruction set `A`.
#[inline(always)]
pub(super) unsafe fn block<T: Float, A: Arch, R: Rows>(
    a: Left<'_, T, R>,
    b: Panels<'_, T>,
    begin: Begin<'_, T>,
    (c, c_rows): (Interleaved<'_, T>, R),
    rows: Range<usize>,
    panels: Range<usize>,
) {
    if a.runs.starts.is_empty() || a.runs.len == 0 {
        let columns = panels.start * b.width..(panels.end * b.width).min(b.columns);
        // SAFETY: guaranteed by the caller.
        return unsafe { over_nothing(begin, (c, c_rows), rows, columns) };
    }
    let lanes = A::Vector::<T>::LANES;
    let room: &mut [T] = &mut Scratch::new(b.room(DEPTH));
    for (above, first, runs) in a.parts() {
        let a = Left { data: a.data.get(first * runs.step..).unwrap_or_default(), runs, ..a };
        let depth = runs.starts.len() * runs.len;
        for panel in panels.clone() {
            let column = panel * b.width;
            let width = b.width.min(b.columns - column);
            let begin = match begin {
                _ if above > 0 => Begin::Kept,
                Begin::Row(row) => Begin::Row(&row[column..]),
                begin => begin,
            };
            // SAFETY: the caller vouches for the instruction set.
            let (rows_of_b, next) = unsafe { b.rows::<A>(panel, above..above + depth, panels.end, room) };
            let of_b = PanelRows { rows: (rows_of_b, b.width), next, column, width };
            let mut rows = rows.clone();
            macro_rules! tiles {
                ($count:literal, $($height:literal)*) => {$(
                    if rows.len() >= $height {
                        rows.start = A::run(
                            #[inline(always)]
                            || {
                                // SAFETY: these rows and columns belong to this task; the caller guarantees that the
                                // rows of A and C lie inside; `A::run` checks the instruction set.
                                unsafe {
                                    tiles::<T, A::Vector<T>, R, $height, $count>(a, of_b, begin, (c, c_rows), rows.clone())
                                }
                            },
                        );
                    }
                )*};
            }
            match (A::MANY_REGISTERS, width.div_ceil(lanes)) {
                (true, 4) => {
                    tiles!(4, 6 4 2 1);
                }
                (true, 3) => {
                    tiles!(3, 8 4 1);
                }
                (true, 2) => {
                    tiles!(2, 8 4 1);
                }
                (true, _) => {
                    tiles!(1, 8 4 1);
                }
                // Two multiply-adds per cycle with a latency of four or five cycles need eight to ten independent
                // accumulators. Twelve, as 6·2, leave room for a row of B and an element of A in 16 registers; as 4·3
                // they would not.
                (false, 2) => {
                    tiles!(2, 6 4 2 1);
                }
                (false, _) => {
                    tiles!(1, 8 4 1);
                }
            }
        }
    }
}

/// A product over an empty inner axis: C is what the accumulators start from.
///
/// # Safety
/// No other task may write these rows and columns at the same time.
unsafe fn over_nothing<T: Float>(
    begin: Begin<'_, T>,
    (c, c_rows): (Interleaved<'_, T>, impl Rows),
    rows: Range<usize>,
    columns: Range<usize>,
) {
    for row in rows {
        let start = c_rows.start(row);
        // SAFETY: guaranteed by the caller.
        let to = unsafe { c.part(start + columns.start..start + columns.end) };
        match begin {
            Begin::Zero => to.fill(T::zero()),
            Begin::Row(added) => to.copy_from_slice(&added[columns.clone()]),
            Begin::Kept => {}
        }
    }
}
