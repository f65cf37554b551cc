//! Small matrix products whose operands already lie in the cache: the tiles of attention.
//!
//! `matrixmultiply` packs both operands on each call, which costs more than the product itself when the
//! inner extent is a head's 32 channels. Here the result's rows stay in registers, B is read in rows as
//! it lies, and A element by element with any strides.

use super::isa::Arch;
use crate::{Float, simd};

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
    let last = |rows: usize, row: usize, cols: usize, col: usize| (rows - 1) * row + (cols - 1) * col;
    assert!(last(m, c_stride, n, 1) < c.len(), "C of a {m}x{k}x{n} product");
    if k > 0 {
        assert!(last(m, a.row_stride, k, a.col_stride) < a.data.len(), "A of a {m}x{k}x{n} product");
        assert!(last(k, b.stride, n, 1) < b.data.len(), "B of a {m}x{k}x{n} product");
    }
    // SAFETY: the extents lie inside the operands, as just checked.
    simd!(A => unsafe { blocks::<T, A>([m, k, n], a, b, c, c_stride, accumulate) });
}

/// # Safety
/// All three operands must contain their extents.
#[inline(always)]
unsafe fn blocks<T: Float, A: Arch>(
    [m, k, n]: [usize; 3],
    a: Left<'_, T>,
    b: Right<'_, T>,
    c: &mut [T],
    c_stride: usize,
    accumulate: bool,
) {
    let mut column = 0;
    macro_rules! columns {
        ($rows:literal, $width:literal) => {
            while n - column >= $width {
                let mut row = 0;
                macro_rules! rows {
                    ($height:literal) => {
                        while m - row >= $height {
                            // SAFETY: the tile lies inside the extents, which the caller vouches for.
                            unsafe {
                                tile::<T, A, $height, $width>(
                                    k,
                                    (a.data.as_ptr().add(row * a.row_stride), a.row_stride, a.col_stride),
                                    (b.data.as_ptr().add(column), b.stride),
                                    (c.as_mut_ptr().add(row * c_stride + column), c_stride),
                                    accumulate,
                                );
                            }
                            row += $height;
                        }
                    };
                }
                rows!($rows);
                rows!(1);
                column += $width;
            }
        };
    }
    if A::WIDE {
        columns!(8, 32);
    }
    columns!(4, 16);
    columns!(4, 1);
}

/// One tile of the result, held in registers: HEIGHT·WIDTH of them divided by the vector width.
///
/// # Safety
/// The pointers must reach HEIGHT rows of A and C, k rows of B, and WIDTH columns of B and C.
#[inline(always)]
unsafe fn tile<T: Float, A: Arch, const HEIGHT: usize, const WIDTH: usize>(
    k: usize,
    (a, a_row, a_col): (*const T, usize, usize),
    (b, b_row): (*const T, usize),
    (c, c_row): (*mut T, usize),
    accumulate: bool,
) {
    let mut sums = [[T::zero(); WIDTH]; HEIGHT];
    for p in 0..k {
        // SAFETY: row p of B has WIDTH columns here.
        let b = unsafe { &*b.add(p * b_row).cast::<[T; WIDTH]>() };
        for (i, sum) in sums.iter_mut().enumerate() {
            // SAFETY: element (i, p) of A exists.
            let a = unsafe { *a.add(i * a_row + p * a_col) };
            for j in 0..WIDTH {
                sum[j] = A::mul_add(a, b[j], sum[j]);
            }
        }
    }
    for (i, sum) in sums.iter().enumerate() {
        // SAFETY: row i of C has WIDTH columns here, and `c` comes from a mutable slice.
        let c = unsafe { &mut *c.add(i * c_row).cast::<[T; WIDTH]>() };
        for j in 0..WIDTH {
            c[j] = if accumulate { c[j] + sum[j] } else { sum[j] };
        }
    }
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
            limit(isa);
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
        limit(Isa::Avx512);
    }
}
