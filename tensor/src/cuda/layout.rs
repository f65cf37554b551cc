//! Where the elements of a view lie.

use crate::{Error, Result};
use smallvec::SmallVec;

/// The number of axes of a `Layout` in `prelude.cuh`.
const AXES: usize = 6;

/// Extents and strides that enumerate the elements of a view in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// Extent and stride, outermost first.
    axes: SmallVec<[(usize, usize); AXES]>,
}

impl Layout {
    /// The axes as they are.
    pub fn plain(extents: &[usize], strides: &[usize]) -> Self {
        Self { axes: extents.iter().copied().zip(strides.iter().copied()).collect() }
    }

    /// As few axes as lead to the same places: two neighbouring axes are merged if a step along the outer one is as
    /// long as the whole inner one. A contiguous tensor is a single axis.
    pub fn merged(extents: &[usize], strides: &[usize]) -> Self {
        let mut axes = SmallVec::<[(usize, usize); AXES]>::new();
        for (&extent, &stride) in extents.iter().zip(strides).filter(|&(&extent, _)| extent != 1) {
            match axes.last_mut() {
                Some(outer) if Some(outer.1) == extent.checked_mul(stride) => *outer = (outer.0 * extent, stride),
                _ => axes.push((extent, stride)),
            }
        }
        Self { axes }
    }

    /// Whether the elements lie in contiguous runs of whole packs of `of` elements, all aligned to packs if the first
    /// one is.
    pub fn is_in_packs(&self, of: usize) -> bool {
        self.axes.split_last().is_some_and(|(&(extent, stride), outer)| {
            stride == 1 && extent.is_multiple_of(of) && outer.iter().all(|(_, stride)| stride.is_multiple_of(of))
        })
    }

    /// The distance from the first element to the last, if there are any; `None` if it overflows a `usize`.
    pub fn reach(&self) -> Option<usize> {
        let along = |&(extent, stride): &(usize, usize)| extent.saturating_sub(1).checked_mul(stride);
        self.axes.iter().try_fold(0, |reach: usize, axis| reach.checked_add(along(axis)?))
    }

    /// The six extents and six strides of a `Layout` in `prelude.cuh`. [`Error::Argument`] when there are more.
    pub fn argument(&self, op: &'static str) -> Result<[i64; 2 * AXES]> {
        let missing = AXES.checked_sub(self.axes.len()).ok_or_else(|| {
            Error::argument(op, format!("a GPU kernel takes up to {AXES} axes, not {}", self.axes.len()))
        })?;
        let mut argument = [0; 2 * AXES];
        argument[..missing].fill(1);
        for (axis, &(extent, stride)) in self.axes.iter().enumerate() {
            argument[missing + axis] = extent as i64;
            argument[AXES + missing + axis] = stride as i64;
        }
        Ok(argument)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_are_merged_where_they_are_one() {
        let axes = |extents: &[usize], strides: &[usize]| Layout::merged(extents, strides).axes.to_vec();
        assert_eq!(axes(&[2, 3, 5], &[15, 5, 1]), [(30, 1)]);
        assert_eq!(axes(&[2, 3, 5], &[30, 10, 1]), [(6, 10), (5, 1)]);
        assert_eq!(axes(&[2, 1, 5], &[5, 77, 1]), [(10, 1)]);
        assert_eq!(axes(&[4, 2, 3], &[0, 0, 1]), [(8, 0), (3, 1)]);
        assert_eq!(axes(&[5, 3], &[1, 5]), [(5, 1), (3, 5)]);
        assert_eq!(axes(&[1, 1], &[1, 1]), []);
    }

    #[test]
    fn packs_are_whole_and_aligned() {
        let packs = |extents: &[usize], strides: &[usize]| Layout::merged(extents, strides).is_in_packs(4);
        assert!(packs(&[3, 8], &[12, 1]));
        assert!(packs(&[2, 6], &[6, 1]), "12 elements in a row");
        assert!(!packs(&[3, 8], &[10, 1]), "rows begin anywhere");
        assert!(!packs(&[3, 6], &[12, 1]), "rows end anywhere");
        assert!(!packs(&[8, 3], &[1, 8]), "elements lie apart");
        assert!(!packs(&[3, 8], &[16, 2]), "every other element");
        assert!(!packs(&[], &[]));
    }
}
