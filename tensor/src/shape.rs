//! Shapes and strides.

use crate::buffer::MAX_BYTES;
use crate::{Error, Result};
use smallvec::SmallVec;
use std::{fmt, ops::Deref};

/// The extents of a tensor's axes, outermost first. Reads like a slice of `usize`.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct Shape(SmallVec<[usize; 6]>);

impl Shape {
    /// How many elements a tensor of this shape has. Panics when that is more than a `usize` can count; shapes
    /// that a user can ask for are checked with [`Shape::countable`] before.
    pub fn count(&self) -> usize {
        self.checked_count().unwrap_or_else(|| panic!("a tensor of shape {self} cannot exist"))
    }

    /// How many elements a tensor of this shape has. `None` if the product of the extents overflows a `usize`, with
    /// each zero counted as one, so that strides cannot overflow either.
    pub fn checked_count(&self) -> Option<usize> {
        let extents = self.iter().try_fold(1usize, |count, &extent| count.checked_mul(extent.max(1)))?;
        Some(if self.contains(&0) { 0 } else { extents })
    }

    /// This shape. [`Error::Argument`] if a buffer could not hold its elements in every type: f64, the largest,
    /// decides, and an extent of zero counts as one.
    pub fn countable(self, op: &'static str) -> Result<Self> {
        let all = self.iter().try_fold(size_of::<f64>(), |bytes, &extent| bytes.checked_mul(extent.max(1)));
        match all.is_some_and(|bytes| bytes < MAX_BYTES) {
            true => Ok(self),
            false => Err(Error::argument(op, format!("a tensor of shape {self} has more bytes than can be counted"))),
        }
    }

    /// [`Error::Axis`] unless a tensor of this shape has the axis.
    pub fn ensure_axis(&self, op: &'static str, axis: usize) -> Result<()> {
        if axis < self.len() { Ok(()) } else { Err(Error::Axis { op, axis, rank: self.len() }) }
    }

    /// The strides (in elements) of a contiguous tensor of this shape: the last axis moves by one. Only of shapes whose
    /// elements can be [counted](Self::checked_count).
    pub fn contiguous_strides(&self) -> Strides {
        let mut strides = Strides::from_elem(0, self.len());
        let mut step = 1;
        for axis in (0..self.len()).rev() {
            strides[axis] = step;
            step *= self[axis].max(1);
        }
        strides
    }

    /// The shape that both broadcast to by NumPy's rule: aligned at the last axis, extents equal or 1. Errors:
    /// [`Error::Broadcast`], [`Error::Argument`] if the result has more elements than can be counted.
    pub fn broadcast(&self, other: &Shape, op: &'static str) -> Result<Shape> {
        let rank = self.len().max(other.len());
        let extent = |shape: &Shape, axis: usize| (axis + shape.len()).checked_sub(rank).map_or(1, |axis| shape[axis]);
        let common = (0..rank).map(|axis| match (extent(self, axis), extent(other, axis)) {
            (a, b) if a == b || b == 1 => Ok(a),
            (1, b) => Ok(b),
            _ => Err(Error::Broadcast { op, left: self.to_string(), right: other.to_string() }),
        });
        common.collect::<Result<Shape>>()?.countable(op)
    }

    /// This shape with the extent of one axis changed. Panics when there is no such axis.
    pub fn with(&self, axis: usize, extent: usize) -> Shape {
        let mut shape = self.clone();
        shape.0[axis] = extent;
        shape
    }
}

/// Steps between neighbours along each axis, in elements; 0 along a broadcast axis.
pub type Strides = SmallVec<[usize; 6]>;

impl Deref for Shape {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.0
    }
}

impl FromIterator<usize> for Shape {
    fn from_iter<I: IntoIterator<Item = usize>>(extents: I) -> Self {
        Shape(extents.into_iter().collect())
    }
}

impl From<&[usize]> for Shape {
    fn from(extents: &[usize]) -> Self {
        Shape(SmallVec::from_slice(extents))
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(extents: [usize; N]) -> Self {
        Shape(SmallVec::from_slice(&extents))
    }
}

impl From<&Shape> for Shape {
    fn from(shape: &Shape) -> Self {
        shape.clone()
    }
}

impl From<Vec<usize>> for Shape {
    fn from(extents: Vec<usize>) -> Self {
        Shape(SmallVec::from_vec(extents))
    }
}

impl<const N: usize> PartialEq<[usize; N]> for Shape {
    fn eq(&self, other: &[usize; N]) -> bool {
        **self == *other
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(")?;
        for (axis, extent) in self.iter().enumerate() {
            write!(f, "{}{extent}", if axis > 0 { ", " } else { "" })?;
        }
        f.write_str(")")
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
