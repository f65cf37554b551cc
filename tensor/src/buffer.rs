//! Memory: 64-byte-aligned buffers that a pool hands out again.
//!
//! A training step asks for the same sizes as the step before it. Dropped buffers therefore go back to
//! the pool and come out again, old contents and all: after the first step the system allocator is no
//! longer asked, and no memory is cleared only to be overwritten. A fresh buffer is zero, so a
//! buffer's bytes are always initialised and reading one before writing it is a bug, but never
//! undefined behaviour. [`set_poison`] makes that bug visible.
//!
//! A network's maps shrink from stage to stage. What an early stage has given back serves the later ones too:
//! a large request that finds no free block of its own size takes the smallest larger one, up to twice its size.

use bytemuck::Pod;
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// One cache line, and the width of an AVX-512 register.
pub const ALIGNMENT: usize = 64;

/// A pooled, aligned block of initialised bytes. Dropping it gives it back to the pool.
#[derive(Debug)]
pub struct Buffer {
    start: NonNull<u8>,
    capacity: usize,
    /// The largest length that it has had. What lies behind is not initialised yet, and takes no memory of the
    /// machine: the rounding of capacities costs none.
    initialised: usize,
    len: usize,
    scratch: bool,
}

// SAFETY: a Buffer owns its block like a Vec<u8> does; shared access only reads.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

/// Blocks by capacity.
type Blocks = Mutex<BTreeMap<usize, Vec<Buffer>>>;

#[derive(Default)]
struct Pool {
    /// Free blocks: those of values, and those of tasks.
    values: Blocks,
    scratch: Blocks,
    in_use: AtomicUsize,
    peak_in_use: AtomicUsize,
    held: AtomicUsize,
    resident: AtomicUsize,
    system_allocations: AtomicUsize,
    cleared: AtomicUsize,
    poison: AtomicBool,
}

static POOL: LazyLock<Pool> = LazyLock::new(Pool::default);

/// What the pool has done since the program started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolStats {
    /// Bytes of live buffers.
    pub in_use: usize,
    /// The most bytes that were ever in live buffers at once (since [`reset_peak`]).
    pub peak_in_use: usize,
    /// Bytes taken from the system, live or free.
    pub held: usize,
    /// Those of them that have been part of a buffer: what the pool takes of the machine's memory.
    pub resident: usize,
    /// How often the system allocator was asked.
    pub system_allocations: usize,
    /// Bytes of buffers that were filled with zeros on request ([`Buffer::clear`]).
    pub cleared: usize,
}

/// The pool's figures now.
pub fn pool_stats() -> PoolStats {
    PoolStats {
        in_use: POOL.in_use.load(Ordering::Relaxed),
        peak_in_use: POOL.peak_in_use.load(Ordering::Relaxed),
        held: POOL.held.load(Ordering::Relaxed),
        resident: POOL.resident.load(Ordering::Relaxed),
        system_allocations: POOL.system_allocations.load(Ordering::Relaxed),
        cleared: POOL.cleared.load(Ordering::Relaxed),
    }
}

/// Starts a new measurement of [`PoolStats::peak_in_use`].
pub fn reset_peak() {
    POOL.peak_in_use.store(POOL.in_use.load(Ordering::Relaxed), Ordering::Relaxed);
}

/// Gives the free blocks back to the system.
pub fn trim_pool() {
    for scratch in [false, true] {
        let free = std::mem::take(&mut *free_blocks(scratch));
        free.into_values().flatten().for_each(Buffer::back_to_system);
    }
}

/// Takes spare blocks from the system for a computation that has run once and will run again: of each size as many as
/// every thread may come to need at once, and a quarter of those that there are. Which pieces of a batch run at the same
/// time is left to chance, and with it which of the free blocks serves which request; the spare ones make up for that.
/// They take no memory until they are used.
pub fn reserve_pool() {
    // Larger ones are those of operations on whole batches, which run one after the other.
    const OF_A_PIECE: usize = 1 << 24;
    let threads = rayon::current_num_threads();
    let sizes: Vec<(usize, usize)> =
        free_blocks(false).range(..=OF_A_PIECE).map(|(&size, blocks)| (size, blocks.len())).collect();
    for (capacity, blocks) in sizes {
        let spare: Vec<Buffer> = (0..2 * threads + blocks / 4).map(|_| Buffer::from_system(capacity, false)).collect();
        free_blocks(false).entry(capacity).or_default().splice(0..0, spare);
    }
}

/// Fills every buffer that is handed out from now on with 0xFF: NaN in floating point and an impossible
/// index, so that a kernel that reads what it did not write is caught. For tests.
pub fn set_poison(on: bool) {
    POOL.poison.store(on, Ordering::Relaxed);
}

/// The free blocks of values, or those of tasks. A thread that panicked while it held the lock left a valid map
/// behind: no invariant spans the lock.
fn free_blocks(scratch: bool) -> MutexGuard<'static, BTreeMap<usize, Vec<Buffer>>> {
    let blocks = if scratch { &POOL.scratch } else { &POOL.values };
    blocks.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Capacities come in eight steps per power of two: at most an eighth is wasted, and sizes that nearly
/// agree (the last, smaller batch) share blocks. They are whole pages of a power of two.
pub(crate) fn capacity_for(bytes: usize, page: usize) -> usize {
    let step = bytes.max(1).ilog2().saturating_sub(3).max(page.ilog2());
    bytes.max(1).next_multiple_of(1 << step)
}

/// The largest free block that may serve a request. With more than twice the size, values that live long would sit
/// in blocks that larger ones need; with less, every stage of a network would have memory of its own. Small values
/// are not worth it: running statistics, which each step makes anew, would move through blocks that others need.
fn most_spacious(capacity: usize) -> usize {
    const SMALL: usize = 1 << 16;
    if capacity < SMALL { capacity } else { 2 * capacity }
}

/// Scratch buffers that a thread may have at once: those of a task and of one within it, and the two of the matrix product
/// which that calls.
const PER_THREAD: usize = 4;

fn layout(capacity: usize) -> Layout {
    // invariant: ALIGNMENT is a power of two, and capacities beyond isize::MAX are refused in `Buffer::new`.
    Layout::from_size_align(capacity, ALIGNMENT).expect("capacity fits")
}

impl Buffer {
    /// A buffer of `len` bytes with arbitrary (but initialised) contents.
    pub fn new(len: usize) -> Self {
        Self::take(len, false)
    }

    /// The same for a task, which gives it back before it ends. How many tasks run at once is left to chance; so the
    /// first that finds no block takes enough for all threads from the system, and no later one has to ask.
    pub fn scratch(len: usize) -> Self {
        Self::take(len, true)
    }

    fn take(len: usize, scratch: bool) -> Self {
        assert!(len < isize::MAX as usize / 2, "a buffer of {len} bytes cannot exist");
        let capacity = capacity_for(len, ALIGNMENT);
        let most = if scratch { usize::MAX } else { most_spacious(capacity) };
        // One lock for the search, and none while the system is asked.
        let recycled = free_blocks(scratch).range_mut(capacity..=most).find_map(|(_, blocks)| blocks.pop());
        let mut buffer = recycled.unwrap_or_else(|| {
            if scratch {
                let others = 1..PER_THREAD * rayon::current_num_threads();
                let others: Vec<Buffer> = others.map(|_| Self::from_system(capacity, scratch)).collect();
                free_blocks(scratch).entry(capacity).or_default().extend(others);
            }
            Self::from_system(capacity, scratch)
        });
        buffer.len = len;
        buffer.initialise();
        let in_use = POOL.in_use.fetch_add(len, Ordering::Relaxed) + len;
        POOL.peak_in_use.fetch_max(in_use, Ordering::Relaxed);
        if POOL.poison.load(Ordering::Relaxed) {
            buffer.slice_mut::<u32>().fill(u32::MAX);
        }
        buffer
    }

    fn from_system(capacity: usize, scratch: bool) -> Self {
        // SAFETY: capacity_for never returns 0.
        let start = unsafe { alloc(layout(capacity)) };
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout(capacity)));
        POOL.held.fetch_add(capacity, Ordering::Relaxed);
        POOL.system_allocations.fetch_add(1, Ordering::Relaxed);
        Self { start, capacity, initialised: 0, len: 0, scratch }
    }

    /// Zeros up to the length, where the block has never been used.
    fn initialise(&mut self) {
        let fresh = self.len.saturating_sub(self.initialised);
        // SAFETY: `len` is at most the capacity of the block, which is this buffer's alone.
        unsafe { self.start.add(self.len - fresh).write_bytes(0, fresh) };
        POOL.resident.fetch_add(fresh, Ordering::Relaxed);
        self.initialised += fresh;
    }

    fn back_to_system(self) {
        let block = ManuallyDrop::new(self);
        POOL.held.fetch_sub(block.capacity, Ordering::Relaxed);
        POOL.resident.fetch_sub(block.initialised, Ordering::Relaxed);
        // SAFETY: `from_system` took the block with this layout, and nobody else has it.
        unsafe { dealloc(block.start.as_ptr(), layout(block.capacity)) };
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The contents as elements; a remainder shorter than one element is left out.
    pub fn slice<T: Pod>(&self) -> &[T] {
        const { assert!(align_of::<T>() <= ALIGNMENT) };
        let count = self.len / size_of::<T>();
        // SAFETY: the block is initialised up to `len`, aligned at least as T needs, and every
        // bit pattern of a Pod type is a value.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), count) }
    }

    /// The contents as elements, to be written.
    pub fn slice_mut<T: Pod>(&mut self) -> &mut [T] {
        const { assert!(align_of::<T>() <= ALIGNMENT) };
        let count = self.len / size_of::<T>();
        // SAFETY: as in `slice`; `&mut self` excludes every other access.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), count) }
    }

    /// Fills the buffer with zeros. It is counted, because a kernel that overwrites its result has no use for it.
    pub fn clear(&mut self) {
        POOL.cleared.fetch_add(self.len, Ordering::Relaxed);
        self.slice_mut::<u8>().fill(0);
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        POOL.in_use.fetch_sub(self.len, Ordering::Relaxed);
        let block = Buffer { len: 0, ..*self };
        free_blocks(self.scratch).entry(self.capacity).or_default().push(block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacities_waste_at_most_an_eighth() {
        for bytes in (1..5000).chain([1 << 20, (1 << 20) + 1, 123_456_789]) {
            let capacity = capacity_for(bytes, ALIGNMENT);
            assert!(capacity >= bytes && capacity.is_multiple_of(ALIGNMENT));
            assert!(capacity <= (bytes + bytes / 8).max(bytes + ALIGNMENT), "{bytes} -> {capacity}");
        }
    }

    #[test]
    fn a_dropped_buffer_comes_back_aligned_and_serves_what_is_smaller() {
        let bytes = 77_777_777; // larger than what any other test uses
        let first = Buffer::new(bytes);
        assert!(first.slice::<u8>().iter().all(|&byte| byte == 0), "fresh memory is zero");
        let address = first.slice::<u32>().as_ptr();
        assert!((address as usize).is_multiple_of(ALIGNMENT));
        drop(first);
        for bytes in [bytes, bytes * 2 / 3, bytes] {
            assert_eq!(Buffer::new(bytes).slice::<u32>().as_ptr(), address, "{bytes}");
        }
        let less_than_half = Buffer::new(bytes / 3);
        assert_ne!(less_than_half.slice::<u32>().as_ptr(), address);
    }

    /// In every order of sizes, once each size was asked for.
    #[test]
    fn scratch_for_all_threads_is_there_at_once() {
        let threads = crate::cpu::parallel::thread_pool(3).unwrap();
        threads.install(|| {
            let sizes = [1_111_111, 2_222_222, 555_555];
            sizes.iter().for_each(|&size| drop(Buffer::scratch(size)));
            let blocks = || free_blocks(true).values().flatten().filter(|block| block.capacity > 500_000).count();
            assert_eq!(blocks(), 2 * PER_THREAD * 3, "for two sizes; the third is served by larger blocks");
            for size in sizes {
                let all: Vec<Buffer> = (0..PER_THREAD * 3).map(|_| Buffer::scratch(size)).collect();
                assert_eq!(blocks() + all.len(), 2 * PER_THREAD * 3);
            }
        });
    }
}
