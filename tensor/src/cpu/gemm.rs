//! Matrix products, large and tall: the linear layers.
//!
//! BiFormer's products have tens of thousands of rows (tokens) and inner and outer extents of 32 to 1,000. A
//! library that packs both operands spends as long on packing as on multiplying there: `matrixmultiply`
//! reaches 70 to 150 of 260 GFLOP/s a core. Here only B, the small operand, is packed, once for all
//! threads: into panels two or three registers wide, so that a tile's rows of B are one run of memory. A is
//! read where it lies, element by element, with any strides; so the transposes in a backward pass cost
//! nothing.
//!
//! Work is cut by shape alone, and each sum runs in the order of the inner index: the same bits with any
//! number of threads. Tested against `matrixmultiply`.

use super::isa::Isa;
use super::packed::{Packed, WIDEST};
use super::parallel::{Interleaved, Out, put, sum_in_pieces};
use super::registers::{Registers, Vector};
use super::tile::{Begin, tile};
use crate::{Float, simd};
use rayon::prelude::*;
use std::ops::Range;

/// A matrix that is read: element (i, j) lies at `i * row_stride + j * col_stride` of a slice.
#[derive(Clone, Copy, Debug)]
pub struct Mat<'a, T> {
    pub(super) data: &'a [T],
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
}

impl<'a, T: Float> Mat<'a, T> {
    /// A row-major matrix that fills the start of `data`. Panics when `data` is too short.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        Self::strided(data, (rows, cols), (cols, 1))
    }

    /// A matrix with any strides. Panics when it does not lie inside `data`.
    pub fn strided(data: &'a [T], (rows, cols): (usize, usize), (row_stride, col_stride): (usize, usize)) -> Self {
        let fits = last_place((rows, cols), (row_stride, col_stride)).is_some_and(|last| last < data.len());
        assert!(rows == 0 || cols == 0 || fits, "a {rows}x{cols} matrix does not fit in {} elements", data.len());
        Self { data, rows, cols, row_stride, col_stride }
    }

    /// The transpose, without moving anything.
    pub fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    fn rows(self, range: Range<usize>) -> Self {
        Self { data: &self.data[(range.start * self.row_stride).min(self.data.len())..], rows: range.len(), ..self }
    }

    pub(super) fn cols(self, range: Range<usize>) -> Self {
        self.t().rows(range).t()
    }
}

/// Where the last element of a matrix lies, if a `usize` can say it. The unsafe kernels rely on this not
/// wrapping around.
pub(super) fn last_place((rows, cols): (usize, usize), (row_stride, col_stride): (usize, usize)) -> Option<usize> {
    let down = rows.checked_sub(1)?.checked_mul(row_stride)?;
    down.checked_add(cols.checked_sub(1)?.checked_mul(col_stride)?)
}

/// Products larger than this many multiply-adds are cut into pieces of about this many (some 10 µs).
const PIECE: usize = 1 << 20;
/// Rows of B that are multiplied before the next: as many as keep a panel in the first-level cache.
const DEPTH: usize = 256;
/// The largest result for which partial sums over the inner axis are worth their memory.
const MAX_PARTIAL: usize = 1 << 18;

/// C = A·B, or C += A·B when `c` accumulates; C is row-major and fills `c`. Panics when the inner
/// extents or the size of `c` do not fit.
pub fn gemm<T: Float>(a: Mat<'_, T>, b: Mat<'_, T>, c: Out<'_, T>) {
    let (m, k, n) = (a.rows, a.cols, b.cols);
    // A weight gradient: small result, one long inner axis over all tokens.
    if m * n <= MAX_PARTIAL && k >= 4 * m.max(n) && m * n * k > 2 * PIECE && k >= 8 * DEPTH {
        assert_eq!(k, b.rows, "inner extents of a matrix product");
        assert_eq!(c.data.len(), m * n, "size of a matrix product");
        return sum_in_pieces(k.div_ceil(DEPTH), DEPTH * m * n, m * n, c, |blocks, sum| {
            let range = blocks.start * DEPTH..(blocks.end * DEPTH).min(k);
            gemm_on_this_thread(a.cols(range.clone()), b.rows(range), Out::store(sum));
        });
    }
    let begin = if c.accumulate { Begin::Kept } else { Begin::Zero };
    multiply(a, b, begin, c.data, true);
}

/// C = A·B + row, where the row is added to every row of A·B.
pub fn gemm_plus_row<T: Float>(a: Mat<'_, T>, b: Mat<'_, T>, row: &[T], c: &mut [T]) {
    assert_eq!(row.len(), b.cols, "length of the row that is added to a matrix product");
    // As wide as whole panels, so that the last one has its part.
    let mut padded = vec![T::zero(); row.len().next_multiple_of(WIDEST)];
    padded[..row.len()].copy_from_slice(row);
    multiply(a, b, Begin::Row(&padded), c, true);
}

/// As [`gemm`], without other threads: for batches that are already spread over them.
pub fn gemm_on_this_thread<T: Float>(a: Mat<'_, T>, b: Mat<'_, T>, c: Out<'_, T>) {
    let begin = if c.accumulate { Begin::Kept } else { Begin::Zero };
    multiply(a, b, begin, c.data, false);
}

/// As [`gemm`], where B is some rows of a matrix that is packed already: for the products of many blocks with the same.
pub fn gemm_packed<T: Float>(a: Mat<'_, T>, b: &Packed<T>, rows: Range<usize>, c: Out<'_, T>) {
    let begin = if c.accumulate { Begin::Kept } else { Begin::Zero };
    simd!(b.isa, A => multiply_packed::<T, A>(a, b, rows, begin, c.data, true));
}

fn multiply<T: Float>(a: Mat<'_, T>, b: Mat<'_, T>, begin: Begin<'_, T>, c: &mut [T], threads: bool) {
    assert_eq!(a.cols, b.rows, "inner extents of a matrix product");
    assert_eq!(c.len(), a.rows * b.cols, "size of a matrix product");
    if !c.is_empty() {
        let isa = Isa::current();
        simd!(isa, A => {
            multiply_packed::<T, A>(a, &Packed::with::<A>(b, isa, threads), 0..b.rows, begin, c, threads)
        });
    }
}

#[inline(always)]
fn multiply_packed<T: Float, A: Registers>(
    a: Mat<'_, T>,
    packed: &Packed<T>,
    depth: Range<usize>,
    begin: Begin<'_, T>,
    c: &mut [T],
    threads: bool,
) {
    let (m, k, n) = (a.rows, depth.len(), packed.extents.1);
    assert_eq!(a.cols, k, "inner extents of a matrix product");
    assert!(depth.end <= packed.extents.0, "rows of a packed matrix");
    assert_eq!(c.len(), m * n, "size of a matrix product");
    if c.is_empty() {
        return;
    }
    // Tall products are cut by rows; flat ones, and those of few rows, by panels as well.
    let panels = n.div_ceil(packed.width);
    let rows = (PIECE / (k * n).max(1)).clamp(32, 1024).next_multiple_of(8);
    let panels_per_task = if m > 2 * rows { panels } else { (PIECE / (k * m * packed.width).max(1)).clamp(1, panels) };
    let across = panels.div_ceil(panels_per_task);
    let tasks = m.div_ceil(rows) * across;
    let c = Interleaved::new(c);
    let rows_of = |task: usize| task / across * rows..((task / across + 1) * rows).min(m);
    let panels_of = |task: usize| task % across * panels_per_task..((task % across + 1) * panels_per_task).min(panels);
    if threads && tasks > 1 {
        (0..tasks).into_par_iter().for_each(|task| {
            A::run(
                #[inline(always)]
                || {
                    // SAFETY: no two tasks share both rows and panels, and `A::run` makes sure of the instruction set.
                    unsafe { block::<T, A>(a, (packed, depth.start), begin, &c, rows_of(task), panels_of(task)) }
                },
            );
        });
    } else {
        for task in 0..tasks {
            // SAFETY: one block after another, and `simd!` chose an instruction set that is there.
            unsafe { block::<T, A>(a, (packed, depth.start), begin, &c, rows_of(task), panels_of(task)) };
        }
    }
}

/// Some rows and panels of C; A meets the rows of B below `above`.
///
/// # Safety
/// No other task may write these at the same time, and the machine must have the instruction set `A`.
#[inline(always)]
unsafe fn block<T: Float, A: Registers>(
    a: Mat<'_, T>,
    (b, above): (&Packed<T>, usize),
    begin: Begin<'_, T>,
    c: &Interleaved<'_, T>,
    rows: Range<usize>,
    panels: Range<usize>,
) {
    let (k, n) = (a.cols, b.extents.1);
    let lanes = A::Vector::<T>::LANES;
    let mut first = 0;
    // At least once, so that an empty inner axis gives zeros.
    while first == 0 || first < k {
        let depth = DEPTH.min(k - first);
        for panel in panels.clone() {
            let column = panel * b.width;
            let width = b.width.min(n - column);
            let from = b.panel(panel, above + first);
            let begin = match begin {
                _ if first > 0 => Begin::Kept,
                Begin::Row(row) => Begin::Row(&row[column..]),
                begin => begin,
            };
            let mut row = rows.start;
            macro_rules! tiles {
                ($count:literal, $($height:literal)*) => {$(
                    while rows.end - row >= $height {
                        let left = a.data.as_ptr().wrapping_add(row * a.row_stride + first * a.col_stride);
                        let left = (left, a.row_stride, a.col_stride);
                        if width == $count * lanes {
                            let c = (c.at(row * n + column), n);
                            // SAFETY: this task's rows and columns; the rows of A are inside it, as `Mat::strided`
                            // checked.
                            unsafe { tile::<T, A::Vector<T>, $height, $count>(depth, left, (from, b.width), c, begin) };
                        } else {
                            // A panel that is wider than what is left of C is computed aside.
                            let mut aside = [T::zero(); $height * WIDEST];
                            let c_aside = (aside.as_mut_ptr(), b.width);
                            let (apart, accumulate) = match begin {
                                Begin::Kept => (Begin::Zero, true),
                                begin => (begin, false),
                            };
                            // SAFETY: as above; no panel is wider than WIDEST.
                            unsafe { tile::<T, A::Vector<T>, $height, $count>(depth, left, (from, b.width), c_aside, apart) };
                            for (i, aside) in aside.chunks_exact(b.width).take($height).enumerate() {
                                let start = (row + i) * n + column;
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
        first += DEPTH;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::{Isa, limit};
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
    fn agrees_with_matrixmultiply_in_f32_on_every_instruction_set() {
        for isa in [Isa::Portable, Isa::Avx2, Isa::Avx512] {
            let _limited = limit(isa);
            for (m, k, n) in [(8, 32, 64), (49, 300, 50), (257, 64, 48), (3, 700, 1), (100, 27, 33)] {
                let narrow = |x: Vec<f64>| x.into_iter().map(|x| x as f32).collect::<Vec<_>>();
                let (a, b, mut c) = (narrow(random(m * k, 1)), narrow(random(k * n, 2)), vec![0.0; m * n]);
                let mut expected = c.clone();
                // SAFETY: row-major matrices of these extents.
                unsafe {
                    let (k_step, n_step) = (k as isize, n as isize);
                    let out = expected.as_mut_ptr();
                    matrixmultiply::sgemm(
                        m,
                        k,
                        n,
                        1.0,
                        a.as_ptr(),
                        k_step,
                        1,
                        b.as_ptr(),
                        n_step,
                        1,
                        0.0,
                        out,
                        n_step,
                        1,
                    );
                }
                gemm(Mat::new(&a, m, k), Mat::new(&b, k, n), Out::store(&mut c));
                for (got, want) in c.iter().zip(&expected) {
                    assert!((got - want).abs() <= 1e-5, "{isa:?} {m}x{k}x{n}: {got} is not {want}");
                }
            }
        }
    }
}
