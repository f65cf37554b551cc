//! Tiles of a matrix product, held in registers.

use super::block::{Left, Rows};
use super::parallel::{Interleaved, put};
use super::registers::{MAX_LANES, Vector, fetch, load, store};
use crate::{Float, unrolled};
use std::hint::black_box;
use std::ops::Range;

/// What the accumulators of a tile start from, and whether they are added to C.
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
pub(super) const MAX_REGISTERS: usize = 4;

/// Some rows of a panel of B, and where their products go.
#[derive(Clone, Copy)]
pub(super) struct PanelRows<'a, T> {
    /// The rows, each padded to whole registers, and their stride.
    pub rows: (&'a [T], usize),
    /// What is needed next: it is prefetched while these rows are multiplied.
    pub next: &'a [T],
    /// The first of the columns of C, and how many there are.
    pub column: usize,
    pub width: usize,
}

/// Computes as many of these rows of C as fill tiles of HEIGHT rows by COUNT registers: C = A·B, C += A·B or C = A·B +
/// row, for some rows of a panel of B. A is read element by element, B and C by registers. Returns the first row that
/// remains. Panics if B or the row is too short, or the inner axis is empty.
///
/// The code of a tile outside its inner loop is kept short: while some hundred instructions run between two loops the
/// multipliers are idle, which used to cost a twentieth of a tile's time.
///
/// # Safety
/// The rows of A and C must lie inside, nobody else may use these rows and columns of C, and the machine must have the
/// registers.
#[inline(always)]
pub(super) unsafe fn tiles<T: Float, V: Vector<T>, R: Rows, const HEIGHT: usize, const COUNT: usize>(
    a: Left<'_, T, R>,
    of_b: PanelRows<'_, T>,
    begin: Begin<'_, T>,
    (c, c_rows): (Interleaved<'_, T>, R),
    rows: Range<usize>,
) -> usize {
    let Runs { starts, len, .. } = a.runs;
    assert!(!starts.is_empty() && len > 0, "a product over nothing");
    let (depth, (b, b_row)) = (starts.len() * len, of_b.rows);
    assert!((depth - 1) * b_row + COUNT * V::LANES <= b.len(), "rows of B");
    let kept = matches!(begin, Begin::Kept);
    let first: [V; COUNT] = match begin {
        // SAFETY: the caller vouches for the registers, here and below.
        Begin::Row(row) => std::array::from_fn(|j| unsafe { V::load(&row[j * V::LANES..]) }),
        // SAFETY: as above.
        Begin::Zero | Begin::Kept => unsafe { [V::zero(); COUNT] },
    };
    let mut aside = [[T::zero(); MAX_REGISTERS * MAX_LANES]; HEIGHT];
    let count = rows.len() / HEIGHT;
    let mut shares = of_b.next.chunks(of_b.next.len().div_ceil(count.max(1)).max(1));
    for row in rows.clone().step_by(HEIGHT).take(count) {
        shares.next().into_iter().for_each(fetch);
        // SAFETY: the caller vouches for the rows of A and for the registers; B has these rows, as just checked.
        let sums: [[V; COUNT]; HEIGHT] = unsafe { add_products(first, a, row, (b, b_row)) };
        if of_b.width == COUNT * V::LANES {
            // SAFETY: these rows and columns of C are the caller's.
            unsafe { put_whole(sums, (c, c_rows), row, of_b.column, kept) };
        } else {
            unrolled!(i in 0..HEIGHT => {
                unrolled!(j in 0..COUNT => { sums[i][j].store(&mut aside[i][j * V::LANES..]); });
            });
            let columns = of_b.column..of_b.column + of_b.width;
            // SAFETY: as above.
            unsafe { put_part(&aside, (c, c_rows), row, columns, kept) };
        }
    }
    rows.start + count * HEIGHT
}

/// Accumulates the sums of a tile, which all start from `first`: for each index of the inner axis, an element of each
/// row of A times a row of B.
///
/// ```text
///                 one row of B:  | b[0]       | b[1]       | ..      COUNT registers
/// an element of row 0 of A   ->  | sums[0][0] | sums[0][1] | ..
/// an element of row 1 of A   ->  | sums[1][0] | sums[1][1] | ..      HEIGHT rows of sums
/// ```
///
/// # Safety
/// The machine must have the registers; A must have these rows, and B as many as they have elements.
#[inline(always)]
unsafe fn add_products<T: Float, V: Vector<T>, R: Rows, const HEIGHT: usize, const COUNT: usize>(
    first: [V; COUNT],
    a: Left<'_, T, R>,
    row: usize,
    (b, b_row): (&[T], usize),
) -> [[V; COUNT]; HEIGHT] {
    let mut sums = [first; HEIGHT];
    let (start, apart) = a.rows.tile::<HEIGHT>(row);
    // One pointer serves all rows. With a pointer for each row, their increments would compete with the multiplications
    // on processors where both share ports (Intel's). The compiler would create such pointers if it knew how the
    // offsets are related.
    let apart = black_box(apart);
    let data = a.data.as_ptr().wrapping_add(start);
    let mut b = b.as_ptr();
    for &start in a.runs.starts {
        let mut a_column = data.wrapping_add(start);
        for _ in 0..a.runs.len {
            // SAFETY: the caller vouches for the registers and for this row of B.
            let row: [V; COUNT] = std::array::from_fn(|j| unsafe { load(b.add(j * V::LANES)) });
            unrolled!(i in 0..HEIGHT => {
                // SAFETY: the row has this element, and the registers are there.
                let element = unsafe { V::splat(*a_column.wrapping_add(apart[i])) };
                unrolled!(j in 0..COUNT => { sums[i][j] = element.mul_add(row[j], sums[i][j]); });
            });
            a_column = a_column.wrapping_add(a.runs.step);
            b = b.wrapping_add(b_row);
        }
    }
    sums
}

/// Puts a tile into C, from row `first` and from this column on.
///
/// # Safety
/// The machine must have the registers, C these rows and columns, and nobody else may use them.
#[inline(always)]
unsafe fn put_whole<T: Float, V: Vector<T>, const HEIGHT: usize, const COUNT: usize>(
    sums: [[V; COUNT]; HEIGHT],
    (c, c_rows): (Interleaved<'_, T>, impl Rows),
    first: usize,
    column: usize,
    kept: bool,
) {
    let (start, apart) = c_rows.tile::<HEIGHT>(first);
    let c = c.as_mut_ptr().wrapping_add(start + column);
    unrolled!(i in 0..HEIGHT => {
        unrolled!(j in 0..COUNT => {
            let c = c.wrapping_add(apart[i] + j * V::LANES);
            // SAFETY: guaranteed by the caller.
            unsafe { store(if kept { load::<T, V>(c).add(sums[i][j]) } else { sums[i][j] }, c) };
        });
    });
}

/// Writes a tile of which fewer columns remain in C than it has. A separate function: inlined, the addresses and bounds
/// of its loops would be kept live from tile to tile.
///
/// # Safety
/// Nobody else may use these rows and columns of C.
#[inline(never)]
unsafe fn put_part<T: Float, const HEIGHT: usize>(
    tile: &[[T; MAX_REGISTERS * MAX_LANES]; HEIGHT],
    (c, c_rows): (Interleaved<'_, T>, impl Rows),
    first: usize,
    columns: Range<usize>,
    kept: bool,
) {
    for (row, sums) in tile.iter().enumerate() {
        let start = c_rows.start(first + row);
        // SAFETY: guaranteed by the caller.
        let to = unsafe { c.part(start + columns.start..start + columns.end) };
        put(to, &sums[..columns.len()], kept);
    }
}
