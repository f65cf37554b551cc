//! The right operand of a matrix product, packed into panels so that the rows that a tile reads are contiguous: as a
//! whole in advance, or during the product, some rows of a panel at a time.

use super::factor::Factor;
use super::gemm::{Mat, last_place};
use super::isa::{Arch, Isa};
use super::parallel::{GRAIN, items_per_task};
use super::registers::{MAX_LANES, Vector, copy_run, load, store};
use super::tile::MAX_REGISTERS;
use super::transpose::transpose;
use crate::{Buffer, Float, simd};
use rayon::prelude::*;
use std::marker::PhantomData;
use std::ops::Range;

/// The right operand of a product: packed, or a matrix that the product packs.
pub enum Right<'a, F: Factor> {
    /// For products that take it again and again.
    Packed(&'a Packed<F>),
    /// For one product.
    Matrix(Mat<'a, F>),
}

impl<F: Factor> Clone for Right<'_, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: Factor> Copy for Right<'_, F> {}

impl<'a, F: Factor> From<&'a Packed<F>> for Right<'a, F> {
    fn from(packed: &'a Packed<F>) -> Self {
        Self::Packed(packed)
    }
}

impl<'a, F: Factor> From<Mat<'a, F>> for Right<'a, F> {
    fn from(matrix: Mat<'a, F>) -> Self {
        Self::Matrix(matrix)
    }
}

impl<'a, F: Factor> Right<'a, F> {
    /// Rows and columns.
    pub(super) fn extents(self) -> (usize, usize) {
        match self {
            Self::Packed(packed) => packed.extents,
            Self::Matrix(matrix) => (matrix.rows, matrix.cols),
        }
    }

    /// The instruction set that it was packed for, or the one in use.
    pub(super) fn isa(self) -> Isa {
        match self {
            Self::Packed(packed) => packed.isa,
            Self::Matrix(_) => Isa::current(),
        }
    }

    /// How wide its panels are.
    #[inline(always)]
    pub(super) fn width<A: Arch>(self, isa: Isa) -> usize {
        match self {
            Self::Packed(packed) => packed.width,
            Self::Matrix(matrix) => F::panel_width::<A>(isa, matrix.cols),
        }
    }

    /// The operand as [`Factor::block`] takes it: packed into `room`, if the factor type requires that.
    #[inline(always)]
    pub(super) fn packed_ahead<A: Arch>(self, isa: Isa, threads: bool, room: &'a mut Option<Packed<F>>) -> Self {
        match self {
            Self::Matrix(matrix) if F::PACKED_AHEAD => {
                Self::Packed(room.insert(Packed::with::<A>(matrix, isa, threads)))
            }
            other => other,
        }
    }
}

/// The right operand of a product in panels of `width` columns, each panel's rows one after another; the last panel is
/// padded with zeros. The element order within a row depends on the factor type, but a row always takes the space of
/// `width` sums.
pub struct Packed<F: Factor> {
    /// Not scratch memory, which goes back to a thread that keeps it: a model may hold its packed weights for long.
    memory: Buffer,
    factors: PhantomData<F>,
    pub(super) extents: (usize, usize),
    pub(super) width: usize,
    /// The instruction set that it was packed for.
    pub(super) isa: Isa,
}

impl<F: Factor> Packed<F> {
    /// Its rows and columns.
    pub fn extents(&self) -> (usize, usize) {
        self.extents
    }

    /// Packs a matrix, with other threads' help.
    pub fn new(b: Mat<'_, F>) -> Self {
        let isa = Isa::current();
        simd!(isa, A => Self::with::<A>(b, isa, true))
    }

    /// Packs a matrix of these extents (rows, columns) whose elements `fill` writes, a panel at a time: the given range
    /// of columns, in rows of the given length. With other threads' help.
    pub fn filled((rows, cols): (usize, usize), fill: impl Fn(Range<usize>, &mut [F], usize) + Sync) -> Self {
        let isa = Isa::current();
        simd!(isa, A => Self::by_panel::<A>((rows, cols), isa, true, |columns, to, width| {
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
    pub(super) fn with<A: Arch>(b: Mat<'_, F>, isa: Isa, threads: bool) -> Self {
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
    fn by_panel<A: Arch>(
        (rows, cols): (usize, usize),
        isa: Isa,
        threads: bool,
        fill: impl Fn(Range<usize>, &mut [F::Sum], usize) + Sync,
    ) -> Self {
        let width = F::panel_width::<A>(isa, cols);
        // A matrix with strides of zero may have more elements than can be counted.
        let size = width.checked_mul(F::packed_rows(isa, rows)).expect("a matrix that is to be packed");
        let count = cols.div_ceil(width).checked_mul(size).expect("a matrix that is to be packed");
        let bytes = count.checked_mul(size_of::<F::Sum>()).expect("a matrix that is to be packed");
        let mut memory = Buffer::new(bytes);
        let panels = memory.slice_mut::<F::Sum>();
        let fill =
            |(panel, to): (usize, &mut [F::Sum])| fill(panel * width..((panel + 1) * width).min(cols), to, width);
        let size = size.max(1);
        if threads && count > GRAIN {
            panels.par_chunks_exact_mut(size).enumerate().with_min_len(items_per_task(size)).for_each(fill);
        } else {
            panels.chunks_exact_mut(size).enumerate().for_each(fill);
        }
        Self { memory, factors: PhantomData, extents: (rows, cols), width, isa }
    }

    /// The packed elements, and how many rows each panel occupies.
    #[inline(always)]
    fn memory(&self) -> (&[F::Sum], usize) {
        (self.memory.slice(), F::packed_rows(self.isa, self.extents.0))
    }

    /// A panel as it lies in memory, from a row on.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn rows_from(&self, panel: usize, row: usize) -> &[F::Sum] {
        let (data, rows) = self.memory();
        &data[(panel * rows + row) * self.width..]
    }

    /// The panels, if they are stored as plain `Sum` elements and not in a layout of the factor type's own.
    #[inline(always)]
    pub(super) fn panels(&self) -> Panels<'_, F::Sum> {
        let (data, rows) = self.memory();
        Panels { source: Source::Packed(data, rows), width: self.width, columns: self.extents.1 }
    }
}

/// The panels of a right operand.
#[derive(Clone, Copy)]
pub struct Panels<'a, T> {
    source: Source<'a, T>,
    /// Columns of a panel.
    pub width: usize,
    /// Columns of the operand.
    pub columns: usize,
}

/// Where the elements of panels are.
#[derive(Clone, Copy)]
enum Source<'a, T> {
    /// In this slice, one panel after the other, each with this many rows.
    Packed(&'a [T], usize),
    /// In a matrix that is not packed yet.
    Matrix(Mat<'a, T>),
}

impl<'a, T: Float> Panels<'a, T> {
    /// The panels of a matrix, `width` columns each. A contiguous row-major matrix of exactly that width is a packed
    /// panel already.
    #[inline(always)]
    pub fn of(matrix: Mat<'a, T>, width: usize) -> Self {
        let source = match matrix {
            Mat { col_stride: 1, row_stride, cols, .. } if [row_stride, cols] == [width; 2] => {
                Source::Packed(matrix.data, matrix.rows)
            }
            matrix => Source::Matrix(matrix),
        };
        Self { source, width, columns: matrix.cols }
    }

    /// How many elements of workspace it takes to pack this many rows of a panel.
    pub fn room(self, rows: usize) -> usize {
        match self.source {
            Source::Packed(..) => 0,
            Source::Matrix(matrix) => self.width * rows.min(matrix.rows),
        }
    }

    /// Some rows of a panel, packed into `room` if they are not packed yet. And, if they are, what to prefetch: the
    /// same rows of the next panel, if that is before `end`.
    ///
    /// # Safety
    /// The machine must have the instruction set `A`.
    #[inline(always)]
    pub unsafe fn rows<'r, A: Arch>(
        self,
        panel: usize,
        rows: Range<usize>,
        end: usize,
        room: &'r mut [T],
    ) -> (&'r [T], &'r [T])
    where
        'a: 'r,
    {
        match self.source {
            Source::Packed(data, all) => {
                let of = |panel| &data[(panel * all + rows.start) * self.width..][..rows.len() * self.width];
                (of(panel), if panel + 1 < end { of(panel + 1) } else { &[] })
            }
            Source::Matrix(matrix) => {
                let columns = panel * self.width..((panel + 1) * self.width).min(self.columns);
                let room = &mut room[..rows.len() * self.width];
                // SAFETY: the caller vouches for the instruction set.
                unsafe { pack_panel::<T, A>(matrix.rows(rows).cols(columns), room, self.width) };
                (room, &[])
            }
        }
    }
}

/// Packs some columns of B into the rows of a panel.
///
/// # Safety
/// The machine must have the instruction set `A`.
#[inline(always)]
pub(super) unsafe fn pack_panel<T: Float, A: Arch>(b: Mat<'_, T>, to: &mut [T], width: usize) {
    if b.cols < width {
        to.fill(T::zero());
    }
    if b.col_stride == 1 && b.cols == width {
        match width / A::Vector::<T>::LANES {
            // SAFETY: the caller vouches for the instruction set; the panel is as wide as that.
            2 => unsafe { copy_rows::<T, A::Vector<T>, 2>(b, to) },
            // SAFETY: as above.
            3 => unsafe { copy_rows::<T, A::Vector<T>, 3>(b, to) },
            // SAFETY: as above.
            _ => unsafe { copy_rows::<T, A::Vector<T>, 4>(b, to) },
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

/// Copies the rows of a matrix that is exactly as wide as a panel of COUNT registers.
///
/// # Safety
/// The machine must have the register, and the matrix and its packed rows must be so wide.
#[inline(always)]
unsafe fn copy_rows<T: Float, V: Vector<T>, const COUNT: usize>(b: Mat<'_, T>, to: &mut [T]) {
    if b.rows == 0 {
        return;
    }
    let inside = last_place((b.rows, b.cols), (b.row_stride, 1)).is_some_and(|last| last < b.data.len());
    let room = b.rows.checked_mul(b.cols).is_some_and(|count| count <= to.len());
    assert!(inside && room && b.cols == COUNT * V::LANES, "rows of a panel");
    let (from, to) = (b.data.as_ptr(), to.as_mut_ptr());
    for row in 0..b.rows {
        for register in 0..COUNT {
            let place = register * V::LANES;
            // SAFETY: inside both, as just checked; the caller vouches for the register.
            unsafe {
                let elements = load::<T, V>(from.add(row * b.row_stride + place));
                store(elements, to.add(row * b.cols + place));
            }
        }
    }
}

/// The width of a panel in columns, for a B of floats that is this many columns wide: the registers alone decide it.
#[inline(always)]
pub(super) fn width_of<T: Float, A: Arch>(columns: usize) -> usize {
    let lanes = A::Vector::<T>::LANES;
    lanes * registers_per_row::<A>(columns.div_ceil(lanes))
}

/// The width of a panel in registers, for a B that is this many registers wide. With 32 registers it is 4, or 3 where
/// that fills all panels and 4 does not, or where 4 would leave a single register to the last one. 6·4 or 8·3
/// accumulators leave room for a row of B and an element of A, need fewer loads for each multiply-add than 8·2, read A
/// less often and write longer runs of C. With 16 registers the width is 2.
fn registers_per_row<A: Arch>(registers: usize) -> usize {
    let widest = match registers % 4 {
        _ if !A::MANY_REGISTERS => 2,
        0 => 4,
        1 => 3,
        _ if registers.is_multiple_of(3) => 3,
        _ => 4,
    };
    registers.clamp(2, widest)
}

/// The most columns of a panel.
pub(super) const WIDEST: usize = MAX_REGISTERS * MAX_LANES;
