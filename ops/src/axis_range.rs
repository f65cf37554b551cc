//! The positions `start..end` along one axis, and all positions along the others.
//!
//! Seen from outside the axis, a contiguous tensor is a list of equal rows, one per position along the
//! axes before it, and such a range is the same piece of every row:
//!
//! ```text
//! |..####...|..####...|..####...|     # inside the range
//! ```
//!
//! Cutting a range out and laying it into zeros are each other's adjoints: the first puts the parts of a
//! concatenation apart, the second is what a slice does backward.

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

    /// Lays the range's elements into the whole tensor, among zeros.
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

    /// Cuts the range's elements out of the whole tensor.
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

    /// Lays the range's elements into the whole tensor on a GPU, and leaves the others as they are.
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
