//! Matrix products, large and tall: the linear layers.
//!
//! BiFormer's products have hundreds to thousands of rows (the tokens of a few images), and inner and outer extents of
//! 32 to 3,072; in weight gradients the inner axis runs over the tokens instead. On such shapes a library that packs
//! both operands spends as long on packing as on multiplying: `matrixmultiply` reaches 70 to 150 of 260 GFLOP/s per
//! core. Here only B is packed, into panels of two to four registers, so that a tile's rows of B are contiguous: in
//! advance, or by each thread just before it multiplies them, while they are in its cache. A is read in place, element
//! by element, with any strides, so the transposes in a backward pass cost nothing. If B is bf16, A is rounded to bf16,
//! and both are packed in the layout that the bf16 instructions need (`pairs/`).
//!
//! How work is split does not depend on the number of threads, and each sum is accumulated in the order of the inner
//! index, or of its parts: the results have the same bits with any number of threads. Tested against `matrixmultiply`.

use super::block::{At, Begin, DEPTH, Every, Left, Runs};
use super::factor::Factor;
use super::isa::{Arch, Isa};
use super::packed::{Right, WIDEST};
use super::parallel::{Interleaved, Out, sum_stored_pieces};
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
/// The same for panels, if each task packs its rows of A, which takes up to a quarter of the time of multiplying them
/// by a panel.
const MIN_PANELS_TO_PACK_ROWS: usize = 4;
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
            sum_stored_pieces(k.div_ceil(DEPTH), DEPTH * m * n, m * n, c, |blocks, sum| {
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

/// As [`gemm`], where A are patches, and row i of C begins at element `starts[i]` of `c`. Threads share the panels of a
/// packed B, where rows of C follow one another without overlapping. If they overlap, what is in both is unspecified,
/// but the same with any number of threads. Elements between them are left unchanged. Panics when a patch or a row of C
/// does not lie inside.
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
        let width = b.width::<A>(isa);
        let panels = n.div_ceil(width);
        let apart = || starts.windows(2).all(|pair| pair[1].checked_sub(pair[0]).is_some_and(|distance| distance >= n));
        let each = match b {
            // Where the left operand need not be packed anew for each.
            Right::Packed(_) if !F::PACKED_AHEAD && apart() => {
                (F::piece(isa) / (k * starts.len() * width).max(1)).clamp(1, panels)
            }
            _ => panels,
        };
        let run = |first: usize| A::run(
            #[inline(always)]
            || {
                // SAFETY: no two tasks share panels, and if there are several, rows of C do not overlap; the operands
                // lie inside, as just checked; `A::run` makes sure of the instruction set.
                unsafe { F::block::<A, _>(left, b, begin, c, 0..starts.len(), first..(first + each).min(panels)) }
            },
        );
        match each < panels {
            true => (0..panels).into_par_iter().step_by(each).for_each(run),
            false => run(0),
        }
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
fn multiply_with<F: Factor, A: Arch>(
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
    let least = if F::PACKED_AHEAD { MIN_PANELS_TO_PACK_ROWS.min(panels) } else { 1 };
    let panels_per_task = match threads {
        true => (piece / (k * m.min(rows) * width).max(1)).clamp(least, panels),
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
mod tests;
