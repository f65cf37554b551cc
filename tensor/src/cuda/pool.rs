//! The pool of a device's memory: blocks that tensors have given back, for the next ones.

use super::{Gpu, Stream};
use crate::buffer::MAX_BYTES;
use crate::{Error, Result, lock};
use std::collections::BTreeMap;

/// The capacities of recycled blocks are multiples of this many bytes.
const PAGE: usize = 512;

/// A block of the device's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub address: u64,
    /// Bytes.
    pub capacity: usize,
    /// How many recordings had been made when it was taken.
    pub age: u64,
}

/// What was returned while work was being submitted aside: by that work, which may take it again unless a recording
/// uses it, and by other threads.
#[derive(Default)]
struct HeldBack {
    own: Vec<Block>,
    others: Vec<Block>,
}

#[derive(Default)]
pub(super) struct Pool {
    /// Free blocks by capacity.
    pub(super) free: BTreeMap<usize, Vec<u64>>,
    stats: GpuStats,
    /// How many recordings were made, and the numbers of those that live.
    recorded: u64,
    pub(super) recordings: Vec<u64>,
    /// Blocks that no tensor owns any more, but that recordings may use.
    pub(super) retained: Vec<Block>,
    /// Whether returned blocks are held back, because work that is being submitted [aside](Gpu::aside) may use them,
    /// and those that were.
    pub(super) holds_back: bool,
    held_back: HeldBack,
}

impl Pool {
    /// The blocks that are kept for a new recording, all that are free when it ends, and its number.
    pub(super) fn add_recording(&mut self) -> (BTreeMap<usize, Vec<u64>>, u64) {
        self.recordings.push(self.recorded);
        self.recorded += 1;
        (std::mem::take(&mut self.free), self.recorded - 1)
    }

    /// Whether a recording may use a block that was taken when this many had been made.
    pub(super) fn may_be_used(&self, age: u64) -> bool {
        self.recordings.iter().any(|&number| age <= number)
    }
}

/// What the pool of a GPU has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuStats {
    /// Bytes of live tensors.
    pub in_use: usize,
    /// The peak of [`GpuStats::in_use`].
    pub peak_in_use: usize,
    /// Bytes taken from the device, live or free.
    pub held: usize,
    /// How often the device was asked for memory.
    pub allocations: usize,
}

impl Gpu {
    /// The pool's figures now.
    pub fn stats(&self) -> GpuStats {
        lock(&self.pool).stats
    }

    /// Gives free memory back to the device.
    pub(super) fn trim(&self) -> Result<()> {
        // The pool stays locked, so no block becomes free after the wait.
        let mut pool = lock(&self.pool);
        self.synchronize()?;
        self.free_all(&mut pool);
        Ok(())
    }

    /// The same, for callers that have waited for the device.
    fn free_all(&self, pool: &mut Pool) {
        for (size, blocks) in std::mem::take(&mut pool.free) {
            pool.stats.held -= size * blocks.len();
            // SAFETY: free blocks are in nobody's hands, and the device has done all that was asked of it.
            blocks.into_iter().for_each(|block| unsafe { self.driver.free(block) });
        }
    }

    /// A block of at least `bytes`. A recycled one may be up to twice as large.
    pub(super) fn take(&self, bytes: usize) -> Result<Block> {
        match self.take_now(bytes) {
            // What is aside may keep some.
            Err(Error::OutOfMemory { .. }) => self.meet().and_then(|()| self.take_now(bytes)),
            taken => taken,
        }
    }

    fn take_now(&self, bytes: usize) -> Result<Block> {
        // Capacities must not wrap around.
        assert!(bytes < MAX_BYTES, "a block of {bytes} bytes cannot exist");
        // What another thread is recording will use the blocks that are free now.
        let stream = self.stream_to_ask()?;
        let mut pool = lock(&self.pool);
        let capacity = if self.driver.recycles() { capacity_for(bytes) } else { bytes };
        let fits = capacity..=2 * capacity;
        let may_again = self.driver.recycles() && stream == Stream::Aside;
        let is_fit = |block: &Block| may_again && fits.contains(&block.capacity) && !pool.may_be_used(block.age);
        let again = pool.held_back.own.iter().position(is_fit);
        let again = again.map(|place| pool.held_back.own.swap_remove(place));
        let again = again.map(|block| (block.address, block.capacity));
        let recycled = || pool.free.range_mut(fits).find_map(|(&size, blocks)| Some((blocks.pop()?, size)));
        let (address, capacity) = match again.or_else(recycled) {
            Some(known) => known,
            None => (self.allocate(&mut pool, capacity, bytes)?, capacity),
        };
        let block = Block { address, capacity, age: pool.recorded };
        pool.stats.in_use += bytes;
        pool.stats.peak_in_use = pool.stats.peak_in_use.max(pool.stats.in_use);
        drop(pool);
        if self.poison {
            // SAFETY: the block is nobody else's.
            unsafe { self.driver.fill(stream, address, 0xFF, capacity) }
                .inspect_err(|_| self.give_back(block, bytes))?;
        }
        Ok(block)
    }

    /// New memory from the device. If there is too little, the pool's free blocks are returned to it first, unless work
    /// is being recorded.
    fn allocate(&self, pool: &mut Pool, capacity: usize, bytes: usize) -> Result<u64> {
        let mut address = self.driver.allocate(capacity)?;
        if address.is_none() && lock(&self.keys).is_none() {
            self.synchronize()?;
            self.free_all(pool);
            address = self.driver.allocate(capacity)?;
        }
        let address = address.ok_or_else(|| self.out_of_memory(pool, bytes))?;
        pool.stats.held += capacity;
        pool.stats.allocations += 1;
        Ok(address)
    }

    fn out_of_memory(&self, pool: &Pool, bytes: usize) -> Error {
        let (in_use, total) = (pool.stats.in_use, self.driver.properties().memory);
        match self.driver.free_memory() {
            Ok(free) => {
                Error::OutOfMemory { what: "a tensor".into(), bytes: Some(bytes), in_use: Some(in_use), total, free }
            }
            Err(error) => error,
        }
    }

    /// Takes back a block of which `bytes` were in use.
    pub(super) fn give_back(&self, block: Block, bytes: usize) {
        let mut pool = lock(&self.pool);
        pool.stats.in_use -= bytes;
        match (pool.holds_back, self.stream()) {
            (true, Stream::Aside) => pool.held_back.own.push(block),
            (true, _) => pool.held_back.others.push(block),
            (false, _) => self.settle(&mut pool, block),
        }
    }

    /// The blocks that were held back.
    pub(super) fn held_back(&self) -> Vec<Block> {
        let HeldBack { own, others } = std::mem::take(&mut lock(&self.pool).held_back);
        [own, others].concat()
    }

    /// Gives them back, when other work waits for the work that used them.
    pub(super) fn release(&self, held_back: Vec<Block>) {
        let mut pool = lock(&self.pool);
        held_back.into_iter().for_each(|block| self.settle(&mut pool, block));
    }

    /// Takes in a block that no tensor owns any more.
    pub(super) fn settle(&self, pool: &mut Pool, block: Block) {
        // The recording in progress may use the block, too. If the device recycles blocks that is no problem: the next
        // user comes later on the stream.
        let recording = lock(&self.keys).is_some() && !self.driver.recycles();
        if recording || pool.may_be_used(block.age) {
            return pool.retained.push(block);
        }
        self.put_away(pool, block);
    }

    /// Takes in a block that nobody will use any more.
    pub(super) fn put_away(&self, pool: &mut Pool, Block { address, capacity, .. }: Block) {
        if self.driver.recycles() {
            pool.free.entry(capacity).or_default().push(address);
            return;
        }
        pool.stats.held -= capacity;
        // SAFETY: the tensor that had the memory is gone.
        unsafe { self.driver.free(address) };
    }
}

/// Takes free blocks into a pool.
pub(super) fn give_free(pool: &mut BTreeMap<usize, Vec<u64>>, free: BTreeMap<usize, Vec<u64>>) {
    for (capacity, blocks) in free {
        pool.entry(capacity).or_default().extend(blocks);
    }
}

/// Capacities come in eight steps per power of two, so that buffers of nearly equal sizes (the last, smaller batch) can
/// use the same blocks, and at most an eighth of a block, or a page, is wasted. They are multiples of
/// [`PAGE`].
fn capacity_for(bytes: usize) -> usize {
    let step = bytes.max(1).ilog2().saturating_sub(3).max(PAGE.ilog2());
    bytes.max(1).next_multiple_of(1 << step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacities_waste_at_most_an_eighth() {
        for bytes in (1..5000).chain([1 << 20, (1 << 20) + 1, 123_456_789]) {
            let capacity = capacity_for(bytes);
            assert!(capacity >= bytes && capacity.is_multiple_of(PAGE));
            assert!(capacity <= (bytes + bytes / 8).max(bytes + PAGE), "{bytes} -> {capacity}");
        }
    }
}
