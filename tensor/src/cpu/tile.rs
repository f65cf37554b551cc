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

/// The elements of a row of A, from where the row starts: in runs of `len` elements, `step` apart.
#[derive(Clone, Copy)]
pub(super) struct Runs<'a> {
    pub starts: &'a [usize],
    pub len: usize,
    pub step: usize,
}

/// One tile of C = A·B, C += A·B or C = A·B + row, held in HEIGHT·COUNT registers. A is read element by element,
/// B and C in rows. Panics when B or the row is too short.
///
/// # Safety
/// Each row of `a` must have the elements of `runs`, each of `c` as many as COUNT registers hold, which nobody else may
/// use; and the machine must have the registers.
#[inline(always)]
pub(super) unsafe fn tile<T: Float, V: Vector<T>, const HEIGHT: usize, const COUNT: usize>(
    a: [*const T; HEIGHT],
    runs: Runs<'_>,
    (b, b_row): (&[T], usize),
    c: [*mut T; HEIGHT],
    begin: Begin<'_, T>,
) {
    // SAFETY: the caller vouches for the registers.
    let mut sums = match begin {
        Begin::Row(row) => [std::array::from_fn(|j| unsafe { V::load(&row[j * V::LANES..]) }); HEIGHT],
        _ => unsafe { [[V::zero(); COUNT]; HEIGHT] },
    };
    let mut b = b;
    for &start in runs.starts {
        let mut a = a;
        unrolled!(i in 0..HEIGHT => { a[i] = a[i].wrapping_add(start); });
        for p in 0..runs.len {
            let row = &b[p * b_row..];
            // SAFETY: the caller vouches for the registers.
            let b: [V; COUNT] = std::array::from_fn(|j| unsafe { V::load(&row[j * V::LANES..]) });
            unrolled!(i in 0..HEIGHT => {
                // SAFETY: the row has this element, and the registers are there.
                let a = unsafe { V::splat(*a[i].add(p * runs.step)) };
                unrolled!(j in 0..COUNT => { sums[i][j] = a.mul_add(b[j], sums[i][j]); });
            });
        }
        b = &b[(runs.len * b_row).min(b.len())..];
    }
    unrolled!(i in 0..HEIGHT => {
        // SAFETY: this row of C has these columns, and nobody else uses them.
        let c = unsafe { std::slice::from_raw_parts_mut(c[i], COUNT * V::LANES) };
        unrolled!(j in 0..COUNT => {
            let c = &mut c[j * V::LANES..];
            // SAFETY: the caller vouches for the registers.
            let sum = if let Begin::Kept = begin { unsafe { V::load(c) }.add(sums[i][j]) } else { sums[i][j] };
            sum.store(c);
        });
    });
}
