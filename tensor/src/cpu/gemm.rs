//! Matrix products, large and tall: the linear layers.
//!
//! BiFormer's products have hundreds to thousands of rows (the tokens of a few images), and inner and outer extents of
//! 32 to 2,300; in weight gradients the inner axis runs over the tokens instead. On such shapes a library that packs
//! both operands spends as long on packing as on multiplying: `matrixmultiply` reaches 70 to 150 of 260 GFLOP/s per
//! core. Here only B is packed, into panels two or three registers wide, so that a tile's rows of B are contiguous: in
//! advance, or by each thread just before it multiplies them, while they are in its cache. A is read in place, element
//! by element, with any strides, so the transposes in a backward pass cost nothing. If B is bf16, A is rounded to bf16,
//! and both are packed in the layout that the bf16 instructions need (`pairs/`).
//!
//! How work is split does not depend on the number of threads, and each sum is accumulated in the order of the inner
//! index, or of its parts: the results have the same bits with any number of threads. Tested against `matrixmultiply`.

use super::block::{At, Begin, DEPTH, Every, Left, Runs};
use super::factor::Factor;
use super::isa::Isa;
use super::packed::{Right, WIDEST};
use super::parallel::{Interleaved, Out, sum_in_pieces};
use super::registers::Registers;
use crate::{Element, simd};
use num_traits::Zero;
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

impl<'a, T: Element> Mat<'a, T> {
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

    pub(super) fn rows(self, range: Range<usize>) -> Self {
        Self { data: &self.data[(range.start * self.row_stride).min(self.data.len())..], rows: range.len(), ..self }
    }

    pub(super) fn cols(self, range: Range<usize>) -> Self {
        self.t().rows(range).t()
    }
}

/// The position of the last element of a matrix; `None` if there is none, or it overflows a `usize`. The unsafe kernels
/// rely on this check for overflow.
pub(super) fn last_place((rows, cols): (usize, usize), (row_stride, col_stride): (usize, usize)) -> Option<usize> {
    let down = rows.checked_sub(1)?.checked_mul(row_stride)?;
    down.checked_add(cols.checked_sub(1)?.checked_mul(col_stride)?)
}

/// A task has at least this many rows, if there are as many: all of them use a panel of B before the next one replaces
/// it in the cache.
const MIN_ROWS: usize = 128;
/// The same if each task packs its panels, which takes as long as multiplying them by some ten rows.
const MIN_ROWS_TO_PACK: usize = 512;
/// The largest result for which partial sums over the inner axis are worth their memory.
const MAX_PARTIAL: usize = 1 << 18;

/// C = A·B, or C += A·B when `c` accumulates; C is row-major and fills `c`. How sums are split depends on all three
/// extents; use [`gemm_by_rows`] if the bits of a row must not depend on how many others there are. Panics when the
/// inner extents or the size of `c` do not fit.
pub fn gemm<'b, F: Factor>(a: Mat<'_, F::Sum>, b: impl Into<Right<'b, F>>, c: Out<'_, F::Sum>) {
    let b = b.into();
    let (m, (k, n)) = (a.rows, b.extents());
    assert_extents((a.cols, k), c.data.len(), [m, n]);
    match b {
        // A weight gradient: small result, one long inner axis over all tokens.
        Right::Matrix(b)
            if (1..=MAX_PARTIAL).contains(&(m * n))
                && k >= 4 * m.max(n)
                && m * n * k > 2 * F::piece(Isa::current())
                && k >= 8 * DEPTH =>
        {
            sum_in_pieces(k.div_ceil(DEPTH), DEPTH * m * n, m * n, c, |blocks, sum| {
                let range = blocks.start * DEPTH..(blocks.end * DEPTH).min(k);
                gemm_on_this_thread(a.cols(range.clone()), b.rows(range), Out::store(sum));
            });
        }
        b => multiply(a, b, begin(c.accumulate), c.data, true),
    }
}

/// As [`gemm`], but the bits of each row of C do not depend on the other rows.
pub fn gemm_by_rows<'b, F: Factor>(a: Mat<'_, F::Sum>, b: impl Into<Right<'b, F>>, c: Out<'_, F::Sum>) {
    multiply(a, b.into(), begin(c.accumulate), c.data, true);
}

/// As [`gemm_by_rows`], C = A·B + row, the row being added to every row of A·B. Panics as [`gemm`] does, and when the
/// row's length does not fit.
pub fn gemm_plus_row<'b, F: Factor>(a: Mat<'_, F::Sum>, b: impl Into<Right<'b, F>>, row: &[F], c: &mut [F::Sum]) {
    let b = b.into();
    assert_eq!(row.len(), b.extents().1, "length of the row that is added to a matrix product");
    // Padded to whole panels, so that the last panel can load its part in full.
    let mut padded = vec![F::Sum::zero(); row.len().next_multiple_of(WIDEST)];
    padded.iter_mut().zip(row).for_each(|(to, from)| *to = from.widen());
    multiply(a, b, Begin::Row(&padded), c, true);
}

/// As [`gemm`], on this thread alone: for batches that are already distributed over threads.
pub fn gemm_on_this_thread<'b, F: Factor>(a: Mat<'_, F::Sum>, b: impl Into<Right<'b, F>>, c: Out<'_, F::Sum>) {
    multiply(a, b.into(), begin(c.accumulate), c.data, false);
}

/// What the accumulators of a product start from, depending on whether it accumulates into C.
fn begin<'a, T>(accumulate: bool) -> Begin<'a, T> {
    if accumulate { Begin::Kept } else { Begin::Zero }
}

/// Patches of an image, read in place; they may overlap: element (i, p) is `data[starts[i] + runs[p / len] + p % len *
/// step]`.
#[derive(Clone, Copy, Debug)]
pub struct Patches<'a, T> {
    /// What contains them.
    pub data: &'a [T],
    /// Where each patch starts.
    pub starts: &'a [usize],
    /// Where each run of elements starts, from the start of a patch.
    pub runs: &'a [usize],
    /// How long a run is.
    pub len: usize,
    /// How far apart its elements are.
    pub step: usize,
}

/// As [`gemm_on_this_thread`], where A are patches, and row i of C begins at element `starts[i]` of `c`. The rows of C
/// should not overlap: the last of two is kept. Elements between them are left unchanged. Panics when a patch or a row of
/// C does not lie inside.
pub fn gemm_patches<'b, F: Factor>(
    a: Patches<'_, F::Sum>,
    b: impl Into<Right<'b, F>>,
    c: Out<'_, F::Sum>,
    starts: &[usize],
) {
    let b = b.into();
    let (k, n) = b.extents();
    let largest = |list: &[usize]| list.iter().fold(0, |largest, &start| largest.max(start));
    let inside = |starts: &[usize], rest: Option<usize>, len: usize| {
        rest.and_then(|rest| rest.checked_add(largest(starts))).is_some_and(|end| starts.is_empty() || end <= len)
    };
    assert_eq!(a.runs.len().checked_mul(a.len), Some(k), "inner extents of a matrix product");
    assert_eq!(a.starts.len(), starts.len(), "rows of a matrix product");
    let reach = last_place((1, a.len), (0, a.step)).and_then(|last| last.checked_add(largest(a.runs))?.checked_add(1));
    assert!(k == 0 || inside(a.starts, reach, a.data.len()), "patches of {} elements", a.data.len());
    assert!(inside(starts, Some(n), c.data.len()), "rows of a matrix product");
    if starts.is_empty() || n == 0 {
        return;
    }
    let runs = Runs { starts: a.runs, len: a.len, step: a.step };
    let left = Left { data: a.data, rows: At(a.starts), runs };
    let begin = begin(c.accumulate);
    let c = (Interleaved::new(c.data), At(starts));
    let isa = b.isa();
    simd!(isa, A => {
        let mut room = None;
        let b = b.packed_ahead::<A>(isa, false, &mut room);
        let panels = 0..n.div_ceil(b.width::<A>(isa));
        // SAFETY: `c` is this call's alone, the operands lie inside, as just checked, and `simd!` chooses an
        // instruction set that is there.
        unsafe { F::block::<A, _>(left, b, begin, c, 0..starts.len(), panels) }
    });
}

/// Panics unless the extents agree. Matrices with strides of zero may have a product with more elements than a `usize`
/// can count, and the unsafe kernels rely on C having all of them.
fn assert_extents((a_cols, b_rows): (usize, usize), c_len: usize, [m, n]: [usize; 2]) {
    assert_eq!(a_cols, b_rows, "inner extents of a matrix product");
    assert_eq!(Some(c_len), m.checked_mul(n), "size of a matrix product");
}

fn multiply<F: Factor>(a: Mat<'_, F::Sum>, b: Right<'_, F>, begin: Begin<'_, F::Sum>, c: &mut [F::Sum], threads: bool) {
    let (k, n) = b.extents();
    assert_extents((a.cols, k), c.len(), [a.rows, n]);
    if !c.is_empty() {
        let isa = b.isa();
        simd!(isa, A => multiply_with::<F, A>(a, b, isa, begin, c, threads));
    }
}

#[inline(always)]
fn multiply_with<F: Factor, A: Registers>(
    a: Mat<'_, F::Sum>,
    b: Right<'_, F>,
    isa: Isa,
    begin: Begin<'_, F::Sum>,
    c: &mut [F::Sum],
    threads: bool,
) {
    let mut room = None;
    let b = b.packed_ahead::<A>(isa, threads, &mut room);
    let (m, (k, n), width) = (a.rows, b.extents(), b.width::<A>(isa));
    // Tall products are split by rows; those with too few rows to amortise loading B into the cache are split by
    // panels, too.
    let (panels, piece) = (n.div_ceil(width), F::piece(isa));
    let least = if let Right::Packed(_) = b { MIN_ROWS } else { MIN_ROWS_TO_PACK };
    let rows = (piece / (k * n).max(1)).clamp(least, 1024).next_multiple_of(32);
    let panels_per_task = match threads {
        true => (piece / (k * m.min(rows) * width).max(1)).clamp(1, panels),
        false => panels,
    };
    let across = panels.div_ceil(panels_per_task);
    let tasks = m.div_ceil(rows) * across;
    let left =
        Left { data: a.data, rows: Every(a.row_stride), runs: Runs { starts: &[0], len: k, step: a.col_stride } };
    let c = (Interleaved::new(c), Every(n));
    let rows_of = |task: usize| task / across * rows..((task / across + 1) * rows).min(m);
    let panels_of = |task: usize| task % across * panels_per_task..((task % across + 1) * panels_per_task).min(panels);
    let run = |task: usize| {
        A::run(
            #[inline(always)]
            || {
                // SAFETY: no two tasks share both rows and panels, which lie inside, as `assert_extents` and
                // `Mat::strided` have made sure of; `A::run` makes sure of the instruction set.
                unsafe { F::block::<A, _>(left, b, begin, c, rows_of(task), panels_of(task)) }
            },
        );
    };
    if threads && tasks > 1 {
        (0..tasks).into_par_iter().for_each(run);
    } else {
        (0..tasks).for_each(run);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::{Isa, limits};
    use crate::cpu::packed::Packed;
    use crate::rng::Philox;
    use std::panic::{AssertUnwindSafe, catch_unwind};

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
            for right in [Right::Matrix(b), Right::Packed(&Packed::new(b))] {
                let mut c = start.clone();
                gemm(Mat::new(&a, m, k), right, Out { data: &mut c, accumulate });
                for (got, want) in c.iter().zip(&expected) {
                    assert!((got - want).abs() <= 1e-15 * k as f64, "{m}x{k}x{n}: {got} is not {want}");
                }
            }
        }
    }

    /// However many columns they would have.
    #[test]
    fn products_without_rows_are_done_at_once() {
        let b = Mat::strided(&[0.0], (1, usize::MAX), (0, 0));
        let patches = Patches { data: &[], starts: &[], runs: &[0], len: 1, step: 1 };
        gemm_patches(patches, b, Out::store(&mut []), &[]);
        gemm(Mat::new(&[], 0, 1), b, Out::store(&mut []));
        gemm(Mat::strided(&[1.0], (1 << 62, 1), (0, 1)), Mat::<f64>::new(&[], 1, 0), Out::store(&mut []));
    }

    #[test]
    fn every_way_to_split_agrees_with_the_definition() {
        for (m, k, n) in [(0, 3, 2), (3, 0, 2), (1, 1, 1), (7, 5, 3), (700, 64, 65), (49, 300, 777), (31, 9000, 17)] {
            check(m, k, n, false);
            check(m, k, n, true);
        }
    }

    #[test]
    fn patches_are_multiplied_where_they_lie() {
        let image = random(5000, 1);
        // Overlapping patches, in any order, of few long runs and of many short ones, of neighbouring elements and of
        // others; rows of C apart from each other.
        for (runs, len, n, step) in [
            (vec![0, 900], 300, 20, 1),
            (vec![7, 50, 3], 5, 33, 1),
            (vec![0, 400], 270, 32, 3),
            (vec![5, 1, 90, 4], 7, 50, 6),
            (vec![0], 0, 3, 1),
            (vec![], 4, 3, 2),
        ] {
            let starts: Vec<usize> = (0..13).map(|i| (i * 7 % 13) * 11).collect();
            let k = runs.len() * len;
            let place = |i: usize, p: usize| starts[i] + runs[p / len] + p % len * step;
            let copied: Vec<f64> = (0..13 * k).map(|at| image[place(at / k, at % k)]).collect();
            let b = random(k * n, 2);
            let mut expected = vec![0.0; 13 * n];
            gemm(Mat::new(&copied, 13, k), Mat::new(&b, k, n), Out::store(&mut expected));
            let c_starts: Vec<usize> = (0..13).map(|i| i * (n + 2) + 1).collect();
            let packed = Packed::new(Mat::new(&b, k, n));
            for right in [Right::Packed(&packed), Right::Matrix(Mat::new(&b, k, n))] {
                for accumulate in [false, true] {
                    let mut c = vec![0.5; 13 * (n + 2)];
                    let patches = Patches { data: &image, starts: &starts, runs: &runs, len, step };
                    gemm_patches(patches, right, Out { data: &mut c, accumulate }, &c_starts);
                    for (row, expected) in c.chunks_exact(n + 2).zip(expected.chunks_exact(n)) {
                        assert_eq!((row[0], row[n + 1]), (0.5, 0.5), "between the rows");
                        let start = if accumulate { 0.5 } else { 0.0 };
                        assert!(row[1..].iter().zip(expected).all(|(got, want)| (got - want - start).abs() < 1e-12));
                    }
                }
            }
        }
    }

    /// One element over and over makes rows without memory, so many that the number of C's elements wraps around to
    /// 100.
    #[test]
    #[should_panic(expected = "size of a matrix product")]
    fn a_product_with_more_elements_than_can_be_counted_is_refused() {
        let inverse = (0..6).fold(33usize, |x, _| x.wrapping_mul(2usize.wrapping_sub(x.wrapping_mul(33))));
        let rows = inverse.wrapping_mul(100);
        let mut c = [0.0; 100];
        assert_eq!(rows.wrapping_mul(33), c.len());
        gemm_on_this_thread(Mat::strided(&[1.0], (rows, 1), (0, 0)), Mat::new(&[1.0; 33], 1, 33), Out::store(&mut c));
    }

    /// Two runs of half of all elements that can be counted are none, if their number wraps around.
    #[test]
    #[should_panic(expected = "inner extents of a matrix product")]
    fn patches_with_more_elements_than_can_be_counted_are_refused() {
        let patches = Patches { data: &[1.0], starts: &[0], runs: &[0, 0], len: 1 << (usize::BITS - 1), step: 1 };
        gemm_patches(patches, Mat::new(&[0.0; 64], 0, 32), Out::store(&mut [0.0; 32]), &[0]);
    }

    /// With a long inner axis, whose partial sums could as well be added to a larger matrix.
    #[test]
    #[should_panic(expected = "size of a matrix product")]
    fn a_sum_of_partial_products_has_one_size() {
        let (a, b) = (Mat::strided(&[0.0; 1], (20, 20_000), (0, 0)), Mat::strided(&[0.0; 1], (20_000, 20), (0, 0)));
        gemm(a, b, Out::store(&mut [0.0; 401]));
    }

    #[test]
    fn what_lacks_one_element_is_refused() {
        let numbers = [0.0; 32];
        let refused = |act: &dyn Fn()| catch_unwind(AssertUnwindSafe(act)).is_err();
        let matrix = |len: usize| refused(&|| _ = Mat::strided(&numbers[..len], (3, 4), (8, 2)));
        assert_eq!([23, 22].map(matrix), [false, true]);
        let product = |len: usize, c_len: usize| {
            refused(&|| {
                let patches = Patches { data: &numbers[..len], starts: &[5, 0], runs: &[3, 0], len: 2, step: 2 };
                gemm_patches(patches, Mat::new(&numbers, 4, 2), Out::store(&mut [0.0; 9][..c_len]), &[4, 0]);
            })
        };
        assert_eq!([(11, 6), (10, 6), (11, 5)].map(|(len, c_len)| product(len, c_len)), [false, true, true]);
    }

    #[test]
    #[should_panic(expected = "a matrix that is to be packed")]
    fn a_matrix_with_more_elements_than_can_be_counted_is_not_packed() {
        Packed::<f32>::new(Mat::strided(&[1.0; 32], ((1 << 59) + 1, 32), (0, 1)));
    }

    #[test]
    fn agrees_with_matrixmultiply_in_f32_on_every_instruction_set() {
        for limited in limits(&[Isa::Portable, Isa::Avx2, Isa::Avx512]) {
            let isa = limited.isa();
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
