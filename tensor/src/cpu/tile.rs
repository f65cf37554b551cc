//! A tile of a matrix product, held in registers.

use super::registers::{Vector, load};
use crate::{Float, unrolled};

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

/// One tile of C = A·B, C += A·B or C = A·B + row, held in HEIGHT·COUNT registers. A is read element by element, `a`
/// being where its first row starts and `apart` how far from there each row does (wrapped, where it lies before); B and
/// C are read in rows. Panics when B or the row is too short.
///
/// # Safety
/// Each row of A must have the elements of `runs`, each of `c` as many as COUNT registers hold, which nobody else may
/// use; and the machine must have the registers.
#[inline(always)]
pub(super) unsafe fn tile<T: Float, V: Vector<T>, const HEIGHT: usize, const COUNT: usize>(
    (a, apart): (*const T, [usize; HEIGHT]),
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
    let depth = runs.starts.len() * runs.len;
    assert!(depth == 0 || (depth - 1) * b_row + COUNT * V::LANES <= b.len(), "rows of B");
    let mut b = b.as_ptr();
    for &start in runs.starts {
        // One pointer goes along all rows. With one for each, their additions would take turns with the multiplications
        // on processors where both share ports (Intel's). It must begin with a row: with distances from the start of A
        // the compiler makes a pointer for each row again.
        let mut a = a.wrapping_add(start);
        for _ in 0..runs.len {
            // SAFETY: the caller vouches for the registers; B has this row, as just checked.
            let row: [V; COUNT] = std::array::from_fn(|j| unsafe { load(b.add(j * V::LANES)) });
            unrolled!(i in 0..HEIGHT => {
                // SAFETY: the row has this element, and the registers are there.
                let element = unsafe { V::splat(*a.wrapping_add(apart[i])) };
                unrolled!(j in 0..COUNT => { sums[i][j] = element.mul_add(row[j], sums[i][j]); });
            });
            a = a.wrapping_add(runs.step);
            b = b.wrapping_add(b_row);
        }
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
