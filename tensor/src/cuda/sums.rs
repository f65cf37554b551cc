//! Sums that the blocks of a launch finish themselves: see `sums.cuh`.

use crate::{DType, Device, Error, Result, Tensor};

/// Counters of tickets that the kernels of a module have, as in `sums.cuh`.
pub const COUNTERS: usize = 2048;

/// Rows that make a piece of a sum worth a block's while, and the most pieces that there are.
const PIECE: usize = 256;
const MOST_PIECES: usize = 512;
/// Blocks that keep any GPU busy.
pub(super) const ENOUGH_BLOCKS: usize = 2048;

/// Into how many pieces the rows of each of so many sums are cut: these two numbers alone decide.
pub fn pieces(rows: usize, strips: usize) -> usize {
    rows.div_ceil(PIECE).clamp(1, MOST_PIECES).min(ENOUGH_BLOCKS.div_ceil(strips.max(1)))
}

/// Room for what blocks leave to each other, (strips, pieces, count), `dtype` being that of sums. [`Error::Argument`] when
/// there are more blocks than counters for them.
pub fn partial_sums(device: &Device, dtype: DType, [strips, pieces, count]: [usize; 3]) -> Result<Tensor> {
    // One for each group of 16 or more, and one for the groups; who is alone needs none.
    if pieces > 1 && strips * (pieces.div_ceil(16) + 1) > COUNTERS {
        return Err(Error::argument("sum", format!("{strips} times {pieces} blocks that share a sum are too many")));
    }
    Tensor::empty_on(device, [strips, pieces, count.next_multiple_of(16 / dtype.size())], dtype)
}
