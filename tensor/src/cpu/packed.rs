//! The right operand of a matrix product, laid out so that a tile's rows of it are one run of memory.

use super::factor::Factor;
use super::gemm::{Mat, last_place};
use super::isa::Isa;
use super::parallel::{GRAIN, items_per_task};
use super::registers::{Registers, Vector, copy_run, load};
use super::transpose::transpose;
use crate::{Element, Float, Tensor, simd};
use rayon::prelude::*;
use std::marker::PhantomData;
use std::ops::Range;

/// The right operand of a product in panels of `width` columns, each panel's rows one after another; the last one is
/// filled up with zeros. How a row lies in memory is the factor's affair, but for its being as wide as sums.
pub struct Packed<F: Factor> {
    memory: Tensor,
    pub(super) extents: (usize, usize),
    pub(super) width: usize,
    /// Whose registers it was packed for.
    pub(super) isa: Isa,
    element: PhantomData<F>,
}

impl<F: Factor> Packed<F> {
    /// Packs a matrix, with other threads' help.
    pub fn new(b: Mat<'_, F>) -> Self {
        let isa = Isa::current();
        simd!(isa, A => Self::with::<A>(b, isa, true))
    }

    /// A matrix of these (rows, columns), of which `fill` writes a panel: some columns, in rows as long as is said. With
    /// other threads' help, or for the duration of a task.
    pub fn filled(
        (rows, cols): (usize, usize),
        threads: bool,
        fill: impl Fn(Range<usize>, &mut [F], usize) + Sync,
    ) -> Self {
        let isa = Isa::current();
        simd!(isa, A => Self::by_panel::<A>((rows, cols), isa, threads, |columns, to, width| {
            A::run(
                #[inline(always)]
                || {
                    // SAFETY: `A::run` makes sure of the instruction set.
                    unsafe { F::fill::<A>(isa, [rows, width], to, |to| fill(columns, to, width)) }
                },
            );
        }))
    }

    #[inline(always)]
    pub(super) fn with<A: Registers>(b: Mat<'_, F>, isa: Isa, threads: bool) -> Self {
        Self::by_panel::<A>((b.rows, b.cols), isa, threads, |columns, to, width| {
            A::run(
                #[inline(always)]
                || {
                    // SAFETY: `A::run` makes sure of the instruction set.
                    unsafe { F::pack::<A>(isa, b.cols(columns), to, width) }
                },
            );
        })
    }

    #[inline(always)]
    fn by_panel<A: Registers>(
        (rows, cols): (usize, usize),
        isa: Isa,
        threads: bool,
        fill: impl Fn(Range<usize>, &mut [F::Sum], usize) + Sync,
    ) -> Self {
        let width = F::panel_width::<A>(isa, cols);
        let size = width * F::packed_rows(isa, rows);
        let (count, dtype) = (cols.div_ceil(width) * size, F::Sum::DTYPE);
        let mut memory = Tensor::empty([count], dtype);
        let to = memory.as_mut_slice::<F::Sum>("gemm").expect("invariant: a new tensor is contiguous and unshared");
        let fill =
            |(panel, to): (usize, &mut [F::Sum])| fill(panel * width..((panel + 1) * width).min(cols), to, width);
        let size = size.max(1);
        if threads && count > GRAIN {
            to.par_chunks_exact_mut(size).enumerate().with_min_len(items_per_task(size)).for_each(fill);
        } else {
            to.chunks_exact_mut(size).enumerate().for_each(fill);
        }
        Self { memory, extents: (rows, cols), width, isa, element: PhantomData }
    }

    /// The panels as they lie in memory.
    #[inline(always)]
    pub(super) fn panels(&self) -> Panels<'_, F::Sum> {
        let data = self.memory.as_slice::<F::Sum>("gemm").expect("invariant: packed in this type");
        let rows = F::packed_rows(self.isa, self.extents.0);
        Panels { data, rows, width: self.width, columns: self.extents.1 }
    }
}

/// A packed operand's memory.
#[derive(Clone, Copy)]
pub struct Panels<'a, T> {
    data: &'a [T],
    rows: usize,
    /// Columns of a panel.
    pub width: usize,
    /// Columns of the operand.
    pub columns: usize,
}

impl<'a, T> Panels<'a, T> {
    /// Rows of a panel as they lie in memory, from one on.
    #[inline(always)]
    pub fn rows_from(self, panel: usize, row: usize) -> &'a [T] {
        &self.data[(panel * self.rows + row) * self.width..]
    }
}

/// Some columns of B in the rows of a panel.
///
/// # Safety
/// The machine must have the instruction set `A`.
#[inline(always)]
pub(super) unsafe fn pack_panel<T: Float, A: Registers>(b: Mat<'_, T>, to: &mut [T], width: usize) {
    if b.cols < width {
        to.fill(T::zero());
    }
    if b.col_stride == 1 && b.cols == width {
        match width / A::Vector::<T>::LANES {
            // SAFETY: the caller vouches for the instruction set; the panel is as wide as that.
            2 => unsafe { copy_rows::<T, A::Vector<T>, 2>(b, to) },
            // SAFETY: as above.
            _ => unsafe { copy_rows::<T, A::Vector<T>, 3>(b, to) },
        }
    } else if b.col_stride == 1 {
        for (p, to) in to.chunks_exact_mut(width).enumerate() {
            let from = &b.data[p * b.row_stride..][..b.cols];
            copy_run(&mut to[..from.len()], from);
        }
    } else if b.row_stride == 1 {
        // SAFETY: as above.
        unsafe { transpose::<T, A::Vector<T>>([b.cols, b.rows], (b.data, b.col_stride), (to, width)) };
    } else {
        for (p, to) in to.chunks_exact_mut(width).enumerate() {
            (0..b.cols).for_each(|j| to[j] = b.data[p * b.row_stride + j * b.col_stride]);
        }
    }
}

/// The rows of a matrix as wide as a panel of COUNT registers.
///
/// # Safety
/// The machine must have the register, and the matrix and its packed rows must be so wide.
#[inline(always)]
unsafe fn copy_rows<T: Float, V: Vector<T>, const COUNT: usize>(b: Mat<'_, T>, to: &mut [T]) {
    if b.rows == 0 {
        return;
    }
    let inside = last_place((b.rows, b.cols), (b.row_stride, 1)).is_some_and(|last| last < b.data.len());
    assert!(inside && b.cols == COUNT * V::LANES && to.len() >= b.rows * b.cols, "rows of a panel");
    let (from, to) = (b.data.as_ptr(), to.as_mut_ptr());
    for row in 0..b.rows {
        for register in 0..COUNT {
            let place = register * V::LANES;
            // SAFETY: inside both, as just checked; the caller vouches for the register.
            unsafe {
                let elements = load::<T, V>(from.add(row * b.row_stride + place));
                elements.store(std::slice::from_raw_parts_mut(to.add(row * b.cols + place), V::LANES));
            }
        }
    }
}

/// How many registers make a row of a panel, 2 or 3, when B is so many registers wide: 3 where that alone fills all
/// panels, as one that is not full keeps the multipliers less busy. 8·3 sums and a row of B just fit in 32 registers.
pub(super) fn registers_per_row(registers: usize) -> usize {
    if registers.is_multiple_of(3) && !registers.is_multiple_of(2) { 3 } else { 2 }
}

/// The most columns of a panel: three registers of 16 elements.
pub(super) const WIDEST: usize = 48;
