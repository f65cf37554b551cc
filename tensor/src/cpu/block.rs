//! What one thread does of a matrix product: some rows of the left operand times some panels of the right one.

use super::packed::{Panels, WIDEST};
use super::parallel::{Interleaved, put};
use super::registers::{Registers, Vector, fetch};
use super::tile::tile;
pub use super::tile::{Begin, Runs};
use crate::{Float, unrolled};
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
    /// The inner axis in parts of at most [`DEPTH`], or a single run's, and at least one, so that an empty axis gives
    /// zeros: how many rows of B lie above, where in its run each part begins, and which elements it has.
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
    let n = b.columns;
    let lanes = A::Vector::<T>::LANES;
    for (above, first, runs) in a.parts() {
        for panel in panels.clone() {
            let column = panel * b.width;
            let width = b.width.min(n - column);
            let rows_of = |panel| &b.rows_from(panel, above)[..runs.starts.len() * runs.len * b.width];
            let from = (rows_of(panel), b.width);
            // The next panel comes while this one is multiplied, a share of it with each tile.
            let next = if panel + 1 < panels.end { rows_of(panel + 1) } else { &[] };
            let mut shares = next.chunks(next.len().div_ceil((rows.len() / 8).max(1)).max(1));
            let begin = match begin {
                _ if above > 0 => Begin::Kept,
                Begin::Row(row) => Begin::Row(&row[column..]),
                begin => begin,
            };
            let mut row = rows.start;
            macro_rules! tiles {
                ($count:literal, $($height:literal)*) => {$(
                    while rows.end - row >= $height {
                        shares.next().into_iter().for_each(fetch);
                        let start = a.rows.start(row);
                        let mut apart = [0; $height];
                        unrolled!(i in 0..$height => { apart[i] = a.rows.start(row + i).wrapping_sub(start); });
                        let left = (a.data.as_ptr().wrapping_add(start + first * runs.step), apart);
                        if width == $count * lanes {
                            let mut to = [std::ptr::null_mut(); $height];
                            unrolled!(i in 0..$height => { to[i] = c.at(c_rows.start(row + i) + column); });
                            // SAFETY: this task's rows and columns; the rows of A lie inside it, by the caller's word.
                            unsafe { tile::<T, A::Vector<T>, $height, $count>(left, runs, from, to, begin) };
                        } else {
                            // A panel that is wider than what is left of C is computed aside.
                            let mut aside = [T::zero(); $height * WIDEST];
                            let mut to = [aside.as_mut_ptr(); $height];
                            unrolled!(i in 0..$height => { to[i] = to[i].wrapping_add(i * WIDEST); });
                            let (apart, accumulate) = match begin {
                                Begin::Kept => (Begin::Zero, true),
                                begin => (begin, false),
                            };
                            // SAFETY: as above; no panel is wider than WIDEST.
                            unsafe { tile::<T, A::Vector<T>, $height, $count>(left, runs, from, to, apart) };
                            for (i, aside) in aside.chunks_exact(WIDEST).enumerate() {
                                let start = c_rows.start(row + i) + column;
                                // SAFETY: this task's rows and columns.
                                put(unsafe { c.part(start..start + width) }, &aside[..width], accumulate);
                            }
                        }
                        row += $height;
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
