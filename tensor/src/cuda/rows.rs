//! How the kernels that include `rows.cuh` divide a matrix (rows, columns) among blocks.

use super::Launch;
use super::sums::{at_most, partial_sums, pieces};
use crate::{DType, Result, Tensor};

/// Threads of a block, and how many rows each of them asks for at once: as in the kernels.
const THREADS: usize = 256;
const BATCH: usize = 4;
/// Packs of columns that a block has at most: a cache line of them, or more if there are too few rows for its threads.
/// Narrow blocks leave few sums to each block that finishes them.
const LINE: usize = 8;
const MAX_ACROSS: usize = 32;
/// Blocks that keep any GPU busy.
const ENOUGH_BLOCKS: usize = 2048;

/// How x (R, C) is divided among blocks.
#[derive(Clone, Copy, Debug)]
pub struct Tiles {
    /// R
    pub rows: usize,
    /// C
    pub columns: usize,
    /// How many blocks it takes to cover the columns.
    pub strips: usize,
    /// Packs of columns in each.
    across: usize,
}

impl Tiles {
    /// The division for elements of a type.
    pub fn new(rows: usize, columns: usize, dtype: DType) -> Self {
        let packs = columns.div_ceil(dtype.per_pack());
        let strips = packs.div_ceil((THREADS / rows.max(1)).clamp(LINE, MAX_ACROSS));
        let across = packs.checked_div(strips).map_or(1, |_| packs.div_ceil(strips));
        Self { rows, columns, strips, across }
    }

    /// Into how many pieces sums over the rows are split, for `outer` such matrices.
    pub fn pieces(&self, outer: usize) -> usize {
        pieces(self.rows, outer * self.strips)
    }

    /// Launches a block for each piece of a sum.
    pub fn sum<'a>(&self, launch: Launch<'a>, outer: usize) -> Launch<'a> {
        launch.threads(THREADS).grid([outer * self.strips, self.pieces(outer), 1])
    }

    /// Workspace for the blocks' partial sums: `sums` of them for each column of `outer` matrices like x.
    pub fn partial(&self, x: &Tensor, outer: usize, sums: usize) -> Result<Tensor> {
        let count = sums * self.across * x.dtype().per_pack();
        partial_sums(&x.device(), x.dtype().of_sums(), [outer * self.strips, self.pieces(outer), count])
    }

    /// One batch of rows per thread, or more if there are enough blocks: starting a block costs as much as a few rows.
    pub fn sweep<'a>(&self, launch: Launch<'a>) -> Launch<'a> {
        let most = at_most(ENOUGH_BLOCKS).div_ceil(self.strips.max(1));
        let pieces = self.rows.div_ceil(THREADS / self.across * BATCH).min(most);
        launch.threads(THREADS).grid([self.strips, pieces, 1])
    }

    /// The last arguments of each of these kernels.
    pub fn describe<'a>(&self, launch: Launch<'a>) -> Result<Launch<'a>> {
        launch.count(self.rows).extents([self.columns, self.across])
    }
}
