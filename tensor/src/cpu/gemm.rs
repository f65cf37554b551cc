//! Matrix products on all threads: `matrixmultiply` on each piece, and pieces cut by shape alone, so
//! that the result has the same bits with any number of threads.

use super::parallel::{Interleaved, Out, sum_in_pieces};
use crate::Float;
use rayon::prelude::*;
use std::ops::Range;

/// A matrix that is read: element (i, j) lies at `i * row_stride + j * col_stride` of a slice.
#[derive(Clone, Copy, Debug)]
pub struct Mat<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T: Float> Mat<'a, T> {
    /// A row-major matrix that fills the start of `data`. Panics when `data` is too short.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        Self::strided(data, (rows, cols), (cols, 1))
    }

    /// A matrix with any strides. Panics when it does not lie inside `data`.
    pub fn strided(data: &'a [T], (rows, cols): (usize, usize), (row_stride, col_stride): (usize, usize)) -> Self {
        let end = if rows == 0 || cols == 0 { 0 } else { (rows - 1) * row_stride + (cols - 1) * col_stride + 1 };
        assert!(end <= data.len(), "a {rows}x{cols} matrix needs {end} elements, there are {}", data.len());
        Self { data, rows, cols, row_stride, col_stride }
    }

    /// The transpose, without moving anything.
    pub fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    fn rows(self, range: Range<usize>) -> Self {
        Self { data: &self.data[(range.start * self.row_stride).min(self.data.len())..], rows: range.len(), ..self }
    }

    fn cols(self, range: Range<usize>) -> Self {
        self.t().rows(range).t()
    }
}

/// Products larger than this many multiply-adds are cut into pieces of about this many (some 20 µs).
const PIECE: usize = 1 << 21;
/// No piece is thinner than this: each packs the whole other operand again.
const MIN_EXTENT: usize = 64;
/// The largest result for which partial sums over the inner axis are worth their memory.
const MAX_PARTIAL: usize = 1 << 16;

/// C = A·B, or C += A·B when `c` accumulates; C is row-major and fills `c`. Panics when the inner
/// extents or the size of `c` do not fit.
pub fn gemm<T: Float>(a: Mat<'_, T>, b: Mat<'_, T>, c: Out<'_, T>) {
    let (m, k, n) = (a.rows, a.cols, b.cols);
    assert_eq!(k, b.rows, "inner extents of a matrix product");
    assert_eq!(c.data.len(), m * n, "size of a matrix product");
    if m * n * k <= PIECE {
        return gemm_on_this_thread(a, b, c);
    }
    // A weight gradient: small result, one long inner axis over all tokens.
    if m * n <= MAX_PARTIAL && k >= 4 * m.max(n) {
        return sum_in_pieces(k, m * n, m * n, c, |range, sum| {
            gemm_on_this_thread(a.cols(range.clone()), b.rows(range), Out::store(sum));
        });
    }
    let by_rows = m >= n;
    let (extent, work) = if by_rows { (m, n * k) } else { (n, m * k) };
    let step = (PIECE / work.max(1)).max(MIN_EXTENT).next_multiple_of(16);
    let accumulate = c.accumulate;
    let shared = Interleaved::new(c.data);
    (0..extent.div_ceil(step)).into_par_iter().for_each(|piece| {
        let range = piece * step..((piece + 1) * step).min(extent);
        if by_rows {
            // SAFETY: each piece has its own rows.
            let data = unsafe { shared.part(range.start * n..range.end * n) };
            gemm_on_this_thread(a.rows(range), b, Out { data, accumulate });
        } else {
            let beta = if accumulate { T::one() } else { T::zero() };
            // SAFETY: each piece writes only its own columns, and reads through no other reference.
            let first = unsafe { shared.part(range.start..m * n) }.as_mut_ptr();
            // SAFETY: columns `range` of the m×n matrix lie inside `shared`, whose first one `first` is.
            unsafe { raw(a, b.cols(range), beta, first, n) }
        }
    });
}

/// As [`gemm`], without other threads: for batches that are already spread over them.
pub fn gemm_on_this_thread<T: Float>(a: Mat<'_, T>, b: Mat<'_, T>, c: Out<'_, T>) {
    assert_eq!(a.cols, b.rows, "inner extents of a matrix product");
    assert_eq!(c.data.len(), a.rows * b.cols, "size of a matrix product");
    // SAFETY: c is a row-major a.rows × b.cols matrix.
    unsafe { raw(a, b, c.beta(), c.data.as_mut_ptr(), b.cols) }
}

/// # Safety
/// `c` must point to a.rows rows of b.cols elements, `c_row_stride` apart, that nobody else uses.
unsafe fn raw<T: Float>(a: Mat<'_, T>, b: Mat<'_, T>, beta: T, c: *mut T, c_row_stride: usize) {
    let strides = |m: Mat<'_, T>| (m.row_stride, m.col_stride);
    // SAFETY: `Mat::strided` checked that both operands lie inside their slices; c by our own contract.
    unsafe {
        T::gemm_raw(
            a.rows,
            a.cols,
            b.cols,
            a.data.as_ptr(),
            strides(a),
            b.data.as_ptr(),
            strides(b),
            beta,
            c,
            (c_row_stride, 1),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Philox;

    fn random(count: usize, stream: u64) -> Vec<f64> {
        let mut sequence = Philox::new(1, stream).sequence();
        (0..count).map(|_| sequence.uniform() - 0.5).collect()
    }

    fn check(m: usize, k: usize, n: usize, accumulate: bool) {
        let (a, b) = (random(m * k, 1), random(k * n, 2));
        let start = random(m * n, 3);
        let mut expected = if accumulate { start.clone() } else { vec![0.0; m * n] };
        for i in 0..m {
            for p in 0..k {
                for j in 0..n {
                    expected[i * n + j] += a[i * k + p] * b[p * n + j];
                }
            }
        }
        let bt: Vec<f64> = (0..n * k).map(|i| b[i % k * n + i / k]).collect();
        for b in [Mat::new(&b, k, n), Mat::new(&bt, n, k).t()] {
            let mut c = start.clone();
            gemm(Mat::new(&a, m, k), b, Out { data: &mut c, accumulate });
            for (got, want) in c.iter().zip(&expected) {
                assert!((got - want).abs() <= 1e-11 * k as f64, "{m}x{k}x{n}: {got} is not {want}");
            }
        }
    }

    #[test]
    fn every_way_to_split_agrees_with_the_definition() {
        for (m, k, n) in [(0, 3, 2), (3, 0, 2), (1, 1, 1), (7, 5, 3), (700, 64, 65), (49, 300, 777), (31, 9000, 17)] {
            check(m, k, n, false);
            check(m, k, n, true);
        }
    }

    #[test]
    fn the_bits_do_not_depend_on_the_threads() {
        for (m, k, n) in [(700, 64, 65), (49, 300, 777), (31, 9000, 17)] {
            let (a, b) = (random(m * k, 1), random(k * n, 2));
            let run = |threads| {
                let mut c = vec![0.0; m * n];
                let pool = crate::cpu::parallel::thread_pool(threads).unwrap();
                pool.install(|| gemm(Mat::new(&a, m, k), Mat::new(&b, k, n), Out::store(&mut c)));
                c
            };
            assert_eq!(run(1), run(3));
        }
    }
}
