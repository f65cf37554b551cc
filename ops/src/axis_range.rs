//! The positions `start..end` along one axis, and all positions along the others.
//!
//! Seen from this axis on, a contiguous tensor is a list of rows of equal length, one per position along the axes
//! before it, and such a range is the same part of every row:
//!
//! ```text
//! |..####...|..####...|..####...|     # inside the range
//! ```
//!
//! Extracting a range and inserting it into zeros are adjoint to each other: the first is the backward pass of a
//! concatenation, the second that of a slice.

use rayon::prelude::*;
use std::ops::Range;
use tensor::cpu::parallel::{Out, items_per_task, put};
use tensor::cuda::{self, elements};
use tensor::{Float, Result, Shape, Tensor};

/// A range along an axis of a contiguous tensor, in elements.
pub struct AxisRange {
    /// The length of a row of the whole tensor.
    row: usize,
    /// Which part of each row lies in the range.
    part: Range<usize>,
}

impl AxisRange {
    /// The positions `range`, which must exist, along an axis of a tensor of this shape.
    pub fn new(shape: &Shape, axis: usize, range: Range<usize>) -> Self {
        let inner: usize = shape[axis + 1..].iter().product();
        AxisRange { row: shape[axis] * inner, part: range.start * inner..range.end * inner }
    }

    /// Writes `from` to the range of the whole tensor, and zeros elsewhere; with `accumulate`, adds `from` to the range
    /// and leaves the rest unchanged.
    pub fn insert<T: Float>(&self, from: &[T], Out { data, accumulate }: Out<'_, T>) {
        let (row, width) = (self.row.max(1), self.part.len());
        data.par_chunks_mut(row).with_min_len(items_per_task(row)).enumerate().for_each(|(place, data)| {
            if !accumulate {
                data[..self.part.start].fill(T::zero());
                data[self.part.end..].fill(T::zero());
            }
            put(&mut data[self.part.clone()], &from[place * width..][..width], accumulate);
        });
    }

    /// Copies the range's elements out of the whole tensor, or adds them to the output with `accumulate`.
    pub fn extract<T: Float>(&self, whole: &[T], Out { data, accumulate }: Out<'_, T>) {
        let width = self.part.len().max(1);
        data.par_chunks_mut(width).with_min_len(items_per_task(width)).enumerate().for_each(|(place, data)| {
            put(data, &whole[place * self.row + self.part.start..][..width], accumulate);
        });
    }

    /// [`AxisRange::insert`] on a GPU.
    pub fn insert_on_gpu(&self, from: &Tensor, mut out: cuda::Out<'_>) -> Result<()> {
        if !out.accumulate {
            out.clear()?;
        }
        self.fill_on_gpu(from, out)
    }

    /// Writes the range's elements into the whole tensor on a GPU, and leaves all other elements unchanged.
    pub fn fill_on_gpu(&self, from: &Tensor, out: cuda::Out<'_>) -> Result<()> {
        let Some(rows) = from.count().checked_div(self.part.len()) else { return Ok(()) };
        elements::put_within(out, self.part.start, &[self.row, 1], &from.reshape([rows, self.part.len()])?)
    }

    /// [`AxisRange::extract`] on a GPU.
    pub fn extract_on_gpu(&self, whole: &Tensor, out: cuda::Out<'_>) -> Result<()> {
        let Some(rows) = whole.count().checked_div(self.row) else { return Ok(()) };
        elements::put(out, &whole.reshape([rows, self.row])?.slice(1, self.part.clone())?)
    }
}
