//! The types of factors and sums of matrix products: f32 and f64 are accumulated in their own type, bf16 in f32.

use super::block::{Begin, Left, Rows, block};
use super::gemm::Mat;
use super::isa::{Arch, Isa};
use super::packed::{Panels, Right, pack_panel, width_of};
use super::parallel::Interleaved;
use crate::{Element, Float, Scratch};
use std::ops::Range;

/// A type that matrices are multiplied in.
pub trait Factor: Element {
    /// The type in which products are accumulated.
    type Sum: Float;

    /// About how many multiply-adds a task must have to be worth a thread of its own (some 10 µs).
    fn piece(isa: Isa) -> usize;

    /// Converts the element to the type of sums, exactly.
    fn widen(self) -> Self::Sum;

    /// Rounds values to factors, on this thread. Panics when the lengths differ.
    fn round(values: &[Self::Sum], to: &mut [Self]);

    /// The values as factors: the slice itself if the types are the same, otherwise rounded into scratch memory that is
    /// put into `room`.
    fn factors<'a>(values: &'a [Self::Sum], room: &'a mut Option<Scratch<Self>>) -> &'a [Self];

    /// Whether a right operand must be packed as a whole before the product, because blocks use its panels more than
    /// once.
    const PACKED_AHEAD: bool;

    /// The width of the panels, in columns, of a right operand with this many columns.
    #[doc(hidden)]
    fn panel_width<A: Arch>(isa: Isa, columns: usize) -> usize;

    /// How many rows of `Sum` elements a packed panel of this many rows occupies.
    #[doc(hidden)]
    fn packed_rows(isa: Isa, rows: usize) -> usize;

    /// Packs columns of a right operand, at most `width`.
    ///
    /// # Safety
    /// The machine must have the instruction set `A`.
    #[doc(hidden)]
    unsafe fn pack<A: Arch>(isa: Isa, b: Mat<'_, Self>, to: &mut [Self::Sum], width: usize);

    /// Packs a panel of these extents (rows, width), whose elements `fill` writes.
    ///
    /// # Safety
    /// The machine must have the instruction set `A`.
    #[doc(hidden)]
    unsafe fn fill<A: Arch>(isa: Isa, extents: [usize; 2], to: &mut [Self::Sum], fill: impl FnOnce(&mut [Self]));

    /// As [`block`]. Panics when `b` is a matrix and [`PACKED_AHEAD`](Self::PACKED_AHEAD) says that it may not be.
    ///
    /// # Safety
    /// As of [`block`].
    #[doc(hidden)]
    unsafe fn block<A: Arch, R: Rows>(
        a: Left<'_, Self::Sum, R>,
        b: Right<'_, Self>,
        begin: Begin<'_, Self::Sum>,
        c: (Interleaved<'_, Self::Sum>, R),
        rows: Range<usize>,
        panels: Range<usize>,
    );
}

impl<T: Float> Factor for T {
    type Sum = T;

    const PACKED_AHEAD: bool = false;

    fn piece(_isa: Isa) -> usize {
        1 << 20
    }

    #[inline(always)]
    fn widen(self) -> T {
        self
    }

    fn round(values: &[T], to: &mut [T]) {
        to.copy_from_slice(values);
    }

    fn factors<'a>(values: &'a [T], _room: &'a mut Option<Scratch<T>>) -> &'a [T] {
        values
    }

    #[inline(always)]
    fn panel_width<A: Arch>(_isa: Isa, columns: usize) -> usize {
        width_of::<T, A>(columns)
    }

    #[inline(always)]
    fn packed_rows(_isa: Isa, rows: usize) -> usize {
        rows
    }

    #[inline(always)]
    unsafe fn pack<A: Arch>(_isa: Isa, b: Mat<'_, T>, to: &mut [T], width: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { pack_panel::<T, A>(b, to, width) }
    }

    #[inline(always)]
    unsafe fn fill<A: Arch>(_isa: Isa, _extents: [usize; 2], to: &mut [T], fill: impl FnOnce(&mut [T])) {
        fill(to);
    }

    #[inline(always)]
    unsafe fn block<A: Arch, R: Rows>(
        a: Left<'_, T, R>,
        b: Right<'_, T>,
        begin: Begin<'_, T>,
        c: (Interleaved<'_, T>, R),
        rows: Range<usize>,
        panels: Range<usize>,
    ) {
        let b = match b {
            Right::Packed(packed) => packed.panels(),
            Right::Matrix(matrix) => Panels::of(matrix, width_of::<T, A>(matrix.cols)),
        };
        // SAFETY: guaranteed by the caller.
        unsafe { block::<T, A, R>(a, b, begin, c, rows, panels) }
    }
}
