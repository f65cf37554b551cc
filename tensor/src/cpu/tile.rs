//! Small matrix products whose operands already lie in the cache: the tiles of attention.
//!
//! `matrixmultiply` packs both operands on each call, which costs more than the product itself when the
//! inner extent is a head's 32 channels. Here the result's rows stay in registers, B is read in rows as
//! it lies, and A element by element with any strides.

use super::gemm::last_place;
use super::registers::{Each, Registers, Vector};
use crate::{Float, simd, unrolled};

/// A matrix by its strides: element (i, p) at `data[i * row_stride + p * col_stride]`.
#[derive(Clone, Copy, Debug)]
pub struct Left<'a, T> {
    /// The elements.
    pub data: &'a [T],
    /// From one row to the next.
    pub row_stride: usize,
    /// From one column to the next.
    pub col_stride: usize,
}

/// A row-major matrix: element (p, j) at `data[p * stride + j]`.
#[derive(Clone, Copy, Debug)]
pub struct Right<'a, T> {
    /// The elements.
    pub data: &'a [T],
    /// From one row to the next.
    pub stride: usize,
}

/// C (m×n) = A (m×k) · B (k×n), or C += A·B; C's rows lie `c_stride` apart. Panics when an operand is
/// too short for its extents.
pub fn product<T: Float>(
    [m, k, n]: [usize; 3],
    a: Left<'_, T>,
    b: Right<'_, T>,
    c: &mut [T],
    c_stride: usize,
    accumulate: bool,
) {
    if m == 0 || n == 0 {
        return;
    }
    let inside = |extents, strides, len| last_place(extents, strides).is_some_and(|last| last < len);
    assert!(inside((m, n), (c_stride, 1), c.len()), "C of a {m}x{k}x{n} product");
    if k > 0 {
        assert!(inside((m, k), (a.row_stride, a.col_stride), a.data.len()), "A of a {m}x{k}x{n} product");
        assert!(inside((k, n), (b.stride, 1), b.data.len()), "B of a {m}x{k}x{n} product");
    }
    // SAFETY: the extents lie inside the operands, as just checked.
    simd!(A => unsafe { blocks::<T, A>([m, k, n], a, b, c, c_stride, accumulate) });
}

/// # Safety
/// All three operands must contain their extents, and the machine must have the instruction set `A`.
#[inline(always)]
unsafe fn blocks<T: Float, A: Registers>(
    [m, k, n]: [usize; 3],
    a: Left<'_, T>,
    b: Right<'_, T>,
    c: &mut [T],
    c_stride: usize,
    accumulate: bool,
) {
    let mut column = 0;
    macro_rules! columns {
        ($vector:ty, $count:literal, $heights:tt) => {
            while n - column >= <$vector>::LANES * $count {
                let mut row = 0;
                columns!(@ $vector, $count, row, $heights);
                column += <$vector>::LANES * $count;
            }
        };
        (@ $vector:ty, $count:literal, $row:ident, [$($height:literal)*]) => {
            $(while m - $row >= $height {
                // SAFETY: the tile lies inside the extents, and the instruction set is there, both by the
                // caller's word.
                unsafe {
                    tile::<T, $vector, $height, $count>(
                        k,
                        (a.data.as_ptr().add($row * a.row_stride), a.row_stride, a.col_stride),
                        (b.data.get(column..).unwrap_or_default(), b.stride),
                        (c.as_mut_ptr().add($row * c_stride + column), c_stride),
                        if accumulate { Begin::Kept } else { Begin::Zero },
                    );
                }
                $row += $height;
            })*
        };
    }
    // 8·2 sums of 32 registers, or 4·2 of 16.
    if A::WIDE {
        columns!(A::Vector<T>, 2, [8 4 1]);
    } else {
        columns!(A::Vector<T>, 2, [4 1]);
    }
    columns!(A::Vector<T>, 1, [4 1]);
    columns!(A::Half<T>, 1, [4 1]);
    columns!(Each<T, A, 1>, 1, [4 1]);
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::gemm::{Mat, gemm_on_this_thread};
    use crate::cpu::isa::{Isa, limit};
    use crate::cpu::parallel::Out;
    use crate::rng::Philox;

    #[test]
    fn agrees_with_gemm_on_every_instruction_set() {
        let random = |count, stream| -> Vec<f32> { (0..count).map(|i| Philox::new(5, stream).uniform(i)).collect() };
        for isa in [Isa::Portable, Isa::Avx2, Isa::Avx512] {
            let _limited = limit(isa);
            for [m, k, n] in [[1, 1, 1], [8, 32, 64], [16, 0, 5], [9, 7, 51], [49, 64, 49], [3, 5, 33]] {
                let (a, b, start) = (
                    random(1 + m as u64 * k as u64, 1),
                    random(1 + k as u64 * n as u64, 2),
                    random(m as u64 * n as u64, 3),
                );
                for accumulate in [false, true] {
                    let (mut expected, mut c) = (start.clone(), start.clone());
                    let left = Mat::strided(&a, (m, k), (1, m));
                    gemm_on_this_thread(left, Mat::new(&b, k, n), Out { data: &mut expected, accumulate });
                    let left = Left { data: &a, row_stride: 1, col_stride: m };
                    product([m, k, n], left, Right { data: &b, stride: n }, &mut c, n, accumulate);
                    for (got, want) in c.iter().zip(&expected) {
                        assert!((got - want).abs() <= 1e-5 * k as f32, "{isa:?} {m}x{k}x{n}: {got} is not {want}");
                    }
                }
            }
        }
    }
}
