//! What one thread does of a matrix product: some rows of the left operand times some panels of the right one.

use super::packed::Panels;
use super::parallel::Interleaved;
use super::registers::{Registers, Vector};
pub use super::tile::{Begin, Runs};
use super::tile::{Part, tiles};
use crate::{Float, Scratch};
use std::ops::Range;

/// Rows of B that are multiplied before the next: as many as keep a panel in the first-level cache.
pub(super) const DEPTH: usize = 256;

/// Where the rows of an operand start.
#[derive(Clone, Copy)]
pub enum Rows<'a> {
    /// One after the other, so far apart.
    Every(usize),
    At(&'a [usize]),
}

impl Rows<'_> {
    #[inline(always)]
    pub fn start(self, row: usize) -> usize {
        match self {
            Rows::Every(stride) => row * stride,
            Rows::At(starts) => starts[row],
        }
    }
}

/// The left operand of a product.
#[derive(Clone, Copy)]
pub struct Left<'a, T> {
    pub data: &'a [T],
    pub rows: Rows<'a>,
    pub runs: Runs<'a>,
}

impl<'a, T> Left<'a, T> {
    /// The inner axis in parts of at most [`DEPTH`] elements, several whole runs or a part of one: how many rows of B lie
    /// above a part's, where in its runs it begins, and its runs. At least one part, so that an empty axis gives zeros.
    #[inline(always)]
    fn parts(self) -> impl Iterator<Item = (usize, usize, Runs<'a>)> {
        let Runs { starts, len, step } = self.runs;
        let together = (DEPTH / len.max(1)).max(1);
        starts.chunks(together).enumerate().flat_map(move |(chunk, starts)| {
            (0..len.max(1)).step_by(DEPTH).map(move |first| {
                let above = chunk * together * len + first;
                (above, first, Runs { starts, len: DEPTH.min(len - first), step })
            })
        })
    }
}

/// Some rows and panels of C.
///
/// # Safety
/// The operands must lie inside their slices, no other task may write these rows and panels at the same time, and the
/// machine must have the instruction set `A`.
#[inline(always)]
pub(super) unsafe fn block<T: Float, A: Registers>(
    a: Left<'_, T>,
    b: Panels<'_, T>,
    begin: Begin<'_, T>,
    (c, c_rows): (Interleaved<'_, T>, Rows<'_>),
    rows: Range<usize>,
    panels: Range<usize>,
) {
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
            let (of_b, next) = unsafe { b.rows::<A>(panel, above..above + depth, panels.end, room) };
            let part = Part { rows: (of_b, b.width), next, column, width };
            let mut rows = rows.clone();
            macro_rules! tiles {
                ($count:literal, $($height:literal)*) => {$(
                    if rows.len() >= $height {
                        rows.start = A::run(
                            #[inline(always)]
                            || {
                                // SAFETY: this task's rows and columns; the rows of A lie inside it, by the caller's word;
                                // `A::run` makes sure of the instruction set.
                                unsafe {
                                    tiles::<T, A::Vector<T>, $height, $count>(a, part, begin, (c, c_rows), rows.clone())
                                }
                            },
                        );
                    }
                )*};
            }
            match (A::WIDE, width.div_ceil(lanes)) {
                (true, 3) => {
                    tiles!(3, 8 4 1);
                }
                (true, 2) => {
                    tiles!(2, 8 4 1);
                }
                (true, _) => {
                    tiles!(1, 8 4 1);
                }
                (false, 3) => {
                    tiles!(3, 4 1);
                }
                (false, 2) => {
                    tiles!(2, 4 1);
                }
                (false, _) => {
                    tiles!(1, 4 1);
                }
            }
        }
    }
}
