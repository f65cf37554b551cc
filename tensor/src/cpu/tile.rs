//! A tile of a matrix product, held in registers.

use super::registers::Vector;
use crate::{Float, unrolled};

/// What the sums of a tile start from, and whether they are added to C.
#[derive(Clone, Copy)]
pub(super) enum Begin<'a, T> {
    /// C = A·B
    Zero,
    /// C += A·B
    Kept,
    /// C = A·B + row, with the row's part for this tile's columns.
    Row(&'a [T]),
}

/// One tile of C = A·B, C += A·B or C = A·B + row, held in HEIGHT·COUNT registers. A is read element by element,
/// B and C in rows. Panics when B or the row is too short.
///
/// # Safety
/// `a` must reach HEIGHT rows of k columns, `c` HEIGHT rows of as many columns as COUNT registers hold, which
/// nobody else may use; and the machine must have the registers.
#[inline(always)]
pub(super) unsafe fn tile<T: Float, V: Vector<T>, const HEIGHT: usize, const COUNT: usize>(
    k: usize,
    (a, a_row, a_col): (*const T, usize, usize),
    (b, b_row): (&[T], usize),
    (c, c_row): (*mut T, usize),
    begin: Begin<'_, T>,
) {
    // SAFETY: the caller vouches for the registers.
    let mut sums = match begin {
        Begin::Row(row) => [std::array::from_fn(|j| unsafe { V::load(&row[j * V::LANES..]) }); HEIGHT],
        _ => unsafe { [[V::zero(); COUNT]; HEIGHT] },
    };
    for p in 0..k {
        let row = &b[p * b_row..];
        // SAFETY: the caller vouches for the registers.
        let b: [V; COUNT] = std::array::from_fn(|j| unsafe { V::load(&row[j * V::LANES..]) });
        unrolled!(i in 0..HEIGHT => {
            // SAFETY: element (i, p) of A exists, and the registers do.
            let a = unsafe { V::splat(*a.add(i * a_row + p * a_col)) };
            unrolled!(j in 0..COUNT => { sums[i][j] = a.mul_add(b[j], sums[i][j]); });
        });
    }
    unrolled!(i in 0..HEIGHT => {
        // SAFETY: row i of C has these columns, and nobody else uses them.
        let c = unsafe { std::slice::from_raw_parts_mut(c.add(i * c_row), COUNT * V::LANES) };
        unrolled!(j in 0..COUNT => {
            let c = &mut c[j * V::LANES..];
            // SAFETY: the caller vouches for the registers.
            let sum = if let Begin::Kept = begin { unsafe { V::load(c) }.add(sums[i][j]) } else { sums[i][j] };
            sum.store(c);
        });
    });
}
