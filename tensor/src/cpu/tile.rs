//! Tiles of a matrix product, held in registers.

use super::block::{Left, Rows};
use super::parallel::{Interleaved, put};
use super::registers::{MOST_LANES, Vector, fetch, load};
use crate::{Float, unrolled};
use std::hint::black_box;
use std::ops::Range;

/// What the sums of a tile start from, and whether they are added to C.
#[derive(Clone, Copy)]
pub enum Begin<'a, T> {
    /// C = A·B
    Zero,
    /// C += A·B
    Kept,
    /// C = A·B + row, with the row's part for this tile's columns.
    Row(&'a [T]),
}

/// The elements of a row of A, from where the row starts: in runs of `len` elements, `step` apart.
#[derive(Clone, Copy)]
pub struct Runs<'a> {
    pub starts: &'a [usize],
    pub len: usize,
    pub step: usize,
}

/// The most registers that a row of a tile has.
pub(super) const MOST_REGISTERS: usize = 3;

/// Some rows of a panel of B, and where their products go.
#[derive(Clone, Copy)]
pub(super) struct Part<'a, T> {
    /// The rows, as wide as whole registers, and how far apart they are.
    pub rows: (&'a [T], usize),
    /// What is needed next, and comes while this is multiplied.
    pub next: &'a [T],
    /// The columns of C: from which on, and how many.
    pub column: usize,
    pub width: usize,
}

/// As many of these rows of C as fill tiles of HEIGHT rows by COUNT registers: C = A·B, C += A·B or C = A·B + row, for a
/// part of B. A is read element by element, B and C in rows. Returns the first row that is left. Panics when B or the
/// row is too short.
///
/// # Safety
/// The rows of A must lie inside it, nobody else may use these rows and columns of C, and the machine must have the
/// registers.
#[inline(always)]
pub(super) unsafe fn tiles<T: Float, V: Vector<T>, const HEIGHT: usize, const COUNT: usize>(
    a: Left<'_, T>,
    part: Part<'_, T>,
    begin: Begin<'_, T>,
    (c, c_rows): (Interleaved<'_, T>, Rows<'_>),
    rows: Range<usize>,
) -> usize {
    let Runs { starts, len, step } = a.runs;
    let (depth, (b, b_row)) = (starts.len() * len, part.rows);
    assert!(depth == 0 || (depth - 1) * b_row + COUNT * V::LANES <= b.len(), "rows of B");
    let kept = matches!(begin, Begin::Kept);
    let count = rows.len() / HEIGHT;
    let mut shares = part.next.chunks(part.next.len().div_ceil(count.max(1)).max(1));
    for tile in 0..count {
        // As if nothing were known about it. Else the compiler, which sees what comes of it from tile to tile, carries some
        // fifty addresses along, nearly all of them in memory, and short rows of A take an eighth longer.
        let row = black_box(rows.start + tile * HEIGHT);
        shares.next().into_iter().for_each(fetch);
        // SAFETY: the caller vouches for the registers.
        let mut sums = match begin {
            Begin::Row(row) => [std::array::from_fn(|j| unsafe { V::load(&row[j * V::LANES..]) }); HEIGHT],
            _ => unsafe { [[V::zero(); COUNT]; HEIGHT] },
        };
        let start = a.rows.start(row);
        let mut apart = [0; HEIGHT];
        unrolled!(i in 0..HEIGHT => { apart[i] = a.rows.start(row + i).wrapping_sub(start); });
        let first = a.data.as_ptr().wrapping_add(start);
        let mut b = b.as_ptr();
        for &start in starts {
            // One pointer goes along all rows. With one for each, their additions would take turns with the
            // multiplications on processors where both share ports (Intel's). It must begin with a row: with distances
            // from the start of A the compiler makes a pointer for each row again.
            let mut a = first.wrapping_add(start);
            for _ in 0..len {
                // SAFETY: the caller vouches for the registers; B has this row, as just checked.
                let row: [V; COUNT] = std::array::from_fn(|j| unsafe { load(b.add(j * V::LANES)) });
                unrolled!(i in 0..HEIGHT => {
                    // SAFETY: the row has this element, and the registers are there.
                    let element = unsafe { V::splat(*a.wrapping_add(apart[i])) };
                    unrolled!(j in 0..COUNT => { sums[i][j] = element.mul_add(row[j], sums[i][j]); });
                });
                a = a.wrapping_add(step);
                b = b.wrapping_add(b_row);
            }
        }
        if part.width == COUNT * V::LANES {
            unrolled!(i in 0..HEIGHT => {
                let start = c_rows.start(row + i) + part.column;
                // SAFETY: this row of C has these columns, and nobody else uses them.
                let c = unsafe { c.part(start..start + COUNT * V::LANES) };
                unrolled!(j in 0..COUNT => {
                    let c = &mut c[j * V::LANES..];
                    // SAFETY: the caller vouches for the registers.
                    let sum = if kept { unsafe { V::load(c) }.add(sums[i][j]) } else { sums[i][j] };
                    sum.store(c);
                });
            });
        } else {
            // What is wider than is left of C goes there by way of a row aside.
            let mut aside = [T::zero(); MOST_REGISTERS * MOST_LANES];
            unrolled!(i in 0..HEIGHT => {
                unrolled!(j in 0..COUNT => { sums[i][j].store(&mut aside[j * V::LANES..]); });
                let start = c_rows.start(row + i) + part.column;
                // SAFETY: as above.
                put(unsafe { c.part(start..start + part.width) }, &aside[..part.width], kept);
            });
        }
    }
    rows.start + count * HEIGHT
}
