//! Sums that the blocks of a launch finish themselves: see `sums.cuh`.

use crate::{DType, Device, Error, Result, Tensor};
use std::cell::Cell;

/// How many multiprocessors are to be kept busy where the order of a summation depends on it: an H200's. It is
/// constant, so that results do not depend on the GPU.
pub const MULTIPROCESSORS: usize = 132;

thread_local! {
    static KEPT_BUSY: Cell<usize> = const { Cell::new(MULTIPROCESSORS) };
}

/// Does a test's work as if that constant were smaller: what would be a small map for so large a GPU is then one in
/// which blocks have many turns.
#[doc(hidden)]
pub fn with_multiprocessors<R>(count: usize, work: impl FnOnce() -> R) -> R {
    struct Restored(usize);
    impl Drop for Restored {
        fn drop(&mut self) {
            KEPT_BUSY.set(self.0);
        }
    }
    let _restored = Restored(KEPT_BUSY.replace(count));
    work()
}

/// How many blocks a kernel has at most, if it is this many where all [`MULTIPROCESSORS`] are kept busy: all of them,
/// but for a [test](with_multiprocessors).
pub fn at_most(blocks: usize) -> usize {
    (blocks * KEPT_BUSY.get()).div_ceil(MULTIPROCESSORS)
}

/// Counters of tickets that the kernels of a module have, as in `sums.cuh`.
const COUNTERS: usize = 2048;

/// How many rows make a piece of a sum worth a block.
const PIECE: usize = 128;
/// About the most blocks: as many as the largest GPUs execute at once. More would only leave more to be added up.
const MAX_BLOCKS: usize = 512;

/// Into how many pieces the rows of each of `strips` sums are split: this depends on these two numbers alone.
pub fn pieces(rows: usize, strips: usize) -> usize {
    rows.div_ceil(PIECE).clamp(1, at_most(MAX_BLOCKS).div_ceil(strips.max(1)))
}

/// Whether there are enough counters for the blocks: one for each group of 16 or more, and one for the groups. A single
/// piece needs none.
fn have_counters(strips: usize, pieces: usize) -> bool {
    pieces <= 1 || strips * (pieces.div_ceil(16) + 1) <= COUNTERS
}

/// Workspace for the partial sums of blocks, (strips, pieces, count); `dtype` is the type of sums. [`Error::Argument`]
/// when there are more blocks than counters for them.
pub fn partial_sums(device: &Device, dtype: DType, [strips, pieces, count]: [usize; 3]) -> Result<Tensor> {
    if !have_counters(strips, pieces) {
        return Err(Error::argument(
            "sum",
            format!("{strips} sums over {pieces} blocks each need more counters than there are"),
        ));
    }
    Tensor::empty_on(device, [strips, pieces, count.next_multiple_of(dtype.per_pack())], dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_sum_is_cut_into_more_pieces_than_there_are_counters_for() {
        for strips in 0..3000 {
            for rows in [0, 1, 256, 257, 4096, 4097, 50_000, 200_000, 10_000_000] {
                let pieces = pieces(rows, strips);
                assert!(pieces == 1 || strips * pieces < MAX_BLOCKS + strips, "{strips} sums of {rows}");
                assert!(have_counters(strips, pieces), "{strips} sums of {rows}");
            }
        }
        assert_eq!([pieces(129, 511), pieces(129, 512), pieces(129, 2047)], [2, 1, 1]);
    }
}
