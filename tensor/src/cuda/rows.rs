//! How the kernels that include `rows.cuh` cut rows of columns.

use super::Launch;
use super::sums::{ENOUGH_BLOCKS, partial_sums, pieces};
use crate::{DType, Result, Tensor};

/// Threads of a block, and how many rows each of them asks for at once: as in the kernels.
const THREADS: usize = 256;
const BATCH: usize = 4;
/// Packs of columns that a block has at most.
const MOST_ACROSS: usize = 32;

/// How many blocks x (R, C) is shared out among.
#[derive(Clone, Copy, Debug)]
pub struct Tiles {
    /// R
    pub rows: usize,
    /// C
    pub columns: usize,
    /// Blocks for all columns of a row.
    pub strips: usize,
    /// Packs of columns in each.
    across: usize,
}

impl Tiles {
    /// Of elements of a type.
    pub fn new(rows: usize, columns: usize, dtype: DType) -> Self {
        let packs = columns.div_ceil(16 / dtype.size());
        let strips = packs.div_ceil(MOST_ACROSS);
        let across = packs.checked_div(strips).map_or(1, |_| packs.div_ceil(strips));
        Self { rows, columns, strips, across }
    }

    /// Pieces of a sum over the rows, of `outer` such matrices.
    pub fn pieces(&self, outer: usize) -> usize {
        pieces(self.rows, outer * self.strips)
    }

    /// A block for each of them.
    pub fn sum<'a>(&self, launch: Launch<'a>, outer: usize) -> Launch<'a> {
        launch.threads(THREADS).grid([outer * self.strips, self.pieces(outer), 1])
    }

    /// Room for what they find: so many sums of each column of such matrices x.
    pub fn partial(&self, x: &Tensor, outer: usize, sums: usize) -> Result<Tensor> {
        let count = sums * self.across * 16 / x.dtype().size();
        partial_sums(&x.device(), x.dtype().of_sums(), [outer * self.strips, self.pieces(outer), count])
    }

    /// A batch of rows to a thread, and more where there are enough blocks: to begin one costs as much as a few rows.
    pub fn sweep<'a>(&self, launch: Launch<'a>) -> Launch<'a> {
        let pieces = self.rows.div_ceil(THREADS / self.across * BATCH).min(ENOUGH_BLOCKS.div_ceil(self.strips.max(1)));
        launch.threads(THREADS).grid([self.strips, pieces, 1])
    }

    /// The last arguments of each of these kernels.
    pub fn describe<'a>(&self, launch: Launch<'a>) -> Result<Launch<'a>> {
        launch.count(self.rows).extents([self.columns, self.across])
    }
}
