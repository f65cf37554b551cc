//! Views of tensors.

use super::Tensor;
use super::carried::Carried;
use crate::{Error, Result, Shape, shape::Strides};
use std::ops::Range;

/// Views: new shapes and strides over the same elements. None of them copies.
impl Tensor {
    fn view(&self, shape: Shape, strides: Strides, offset: usize) -> Tensor {
        Tensor { storage: self.storage.clone(), dtype: self.dtype, shape, strides, offset, carried: Carried::default() }
    }

    /// The same elements in order under another shape of as many elements. Errors: [`Error::Shape`] for another number
    /// of them, [`Error::NotContiguous`].
    pub fn reshape(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        if shape.checked_count() != Some(self.count()) {
            return Err(Error::shape("reshape", format!("{} elements, as in {}", self.count(), self.shape), &shape));
        }
        self.ensure_contiguous("reshape")?;
        let strides = shape.contiguous_strides();
        Ok(self.view(shape, strides, self.offset))
    }

    /// The last two axes exchanged, each matrix transposed. Errors: [`Error::Axis`] for a tensor without two.
    pub fn transposed(&self) -> Result<Tensor> {
        self.shape.ensure_axis("transposed", 1)?;
        let mut order: Vec<usize> = (0..self.rank()).collect();
        order[self.rank() - 2..].reverse();
        self.permute(&order)
    }

    /// The axes in another order: axis `i` of the result is axis `order[i]` of this tensor. Errors: [`Error::Axis`] for
    /// an axis that it does not have, [`Error::Argument`] unless each is named once.
    pub fn permute(&self, order: &[usize]) -> Result<Tensor> {
        let mut seen = vec![false; self.rank()];
        for &axis in order {
            self.shape.ensure_axis("permute", axis)?;
            seen[axis] = true;
        }
        if order.len() != self.rank() || seen.contains(&false) {
            let message = format!("{order:?} does not name each of {} axes once", self.rank());
            return Err(Error::argument("permute", message));
        }
        let shape = order.iter().map(|&axis| self.shape[axis]).collect();
        let strides = order.iter().map(|&axis| self.strides[axis]).collect();
        Ok(self.view(shape, strides, self.offset))
    }

    /// The positions `range` along an axis. Errors: [`Error::Axis`], [`Error::OutOfRange`], [`Error::Argument`] for a
    /// range that ends before it begins.
    pub fn slice(&self, axis: usize, range: Range<usize>) -> Result<Tensor> {
        self.shape.ensure_axis("slice", axis)?;
        if range.start > range.end {
            return Err(Error::argument("slice", format!("{range:?} ends before it begins")));
        }
        if range.end > self.shape[axis] {
            let bound = self.shape[axis] + 1;
            return Err(Error::OutOfRange { op: "slice", what: "end", index: range.end, bound });
        }
        let shape = self.shape.with(axis, range.len());
        // An empty view stays where it is, so that its offset never passes the end of the buffer.
        let offset = if shape.count() == 0 { self.offset } else { self.offset + range.start * self.strides[axis] };
        Ok(self.view(shape, self.strides.clone(), offset))
    }

    /// This tensor repeated, without copying, to a shape that it broadcasts to. Errors: [`Error::Broadcast`] for
    /// another shape, and those of [`Shape::broadcast`].
    pub fn broadcast_to(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        if self.shape.broadcast(&shape, "broadcast_to")? != shape {
            return Err(Error::Broadcast {
                op: "broadcast_to",
                left: self.shape.to_string(),
                right: shape.to_string(),
            });
        }
        let added = shape.len() - self.rank();
        let strides = (0..shape.len())
            .map(|axis| if axis < added || self.shape[axis - added] == 1 { 0 } else { self.strides[axis - added] })
            .collect();
        Ok(self.view(shape, strides, self.offset))
    }
}
