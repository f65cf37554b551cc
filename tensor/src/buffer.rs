//! Memory: 64-byte-aligned buffers that a pool hands out again.
//!
//! A training step asks for the same sizes as the step before it. Dropped buffers therefore go back to
//! the pool and come out again, old contents and all: after the first step the system allocator is no
//! longer asked, and no memory is cleared only to be overwritten. A fresh buffer is zero, so a
//! buffer's bytes are always initialised and reading one before writing it is a bug, but never
//! undefined behaviour. [`set_poison`] makes that bug visible.
//!
//! The pool takes large blocks, slabs, from the system; they occupy no physical memory until they are used. `arena.rs`
//! decides where in them a buffer lies.

use crate::arena::{Arena, Place};
use crate::memory::refusable;
use crate::{lock, scratch};
use bytemuck::Pod;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex};

/// The beginning of the panic message if the system has no memory for a buffer.
pub const OUT_OF_MEMORY: &str = "out of memory";

/// One cache line, and the width of an AVX-512 register.
pub const ALIGNMENT: usize = 64;

/// A pooled, aligned block of initialised bytes. Dropping it gives it back to the pool.
pub struct Buffer {
    start: NonNull<u8>,
    place: Place,
    len: usize,
    slabs: &'static Mutex<Slabs>,
}

// SAFETY: a Buffer owns its block like a Vec<u8> does; shared access only reads.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

#[derive(Default)]
struct Pool {
    /// Small buffers, and those that threads keep, have slabs of their own: many are long-lived, and would prevent
    /// large free places from being coalesced.
    small: Mutex<Slabs>,
    large: Mutex<Slabs>,
    in_use: AtomicUsize,
    peak_in_use: AtomicUsize,
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
    /// Bytes that threads keep for kernels: idle [`Scratch`](crate::Scratch).
    pub kept: usize,
    /// The most bytes that live buffers and those that threads keep have taken together, since [`reset_peak`].
    pub peak_in_use: usize,
    /// Bytes taken from the system, live or free.
    pub held: usize,
    /// Those of them that have ever been part of a buffer: the physical memory that the pool occupies.
    pub resident: usize,
    /// How often the system allocator was asked.
    pub system_allocations: usize,
    /// Bytes of buffers that were filled with zeros on request ([`Buffer::clear`]).
    pub cleared: usize,
}

/// The pool's figures now.
pub fn pool_stats() -> PoolStats {
    let kept = scratch::kept();
    let [small, large] = [lock(&POOL.small), lock(&POOL.large)];
    PoolStats {
        in_use: POOL.in_use.load(Ordering::Relaxed).saturating_sub(kept),
        kept,
        peak_in_use: POOL.peak_in_use.load(Ordering::Relaxed),
        held: small.held() + large.held(),
        resident: small.arena.reached() + large.arena.reached(),
        system_allocations: POOL.system_allocations.load(Ordering::Relaxed),
        cleared: POOL.cleared.load(Ordering::Relaxed),
    }
}

/// Starts a new measurement of [`PoolStats::peak_in_use`].
pub fn reset_peak() {
    POOL.peak_in_use.store(POOL.in_use.load(Ordering::Relaxed), Ordering::Relaxed);
}

/// Returns unused slabs to the system, after taking back what threads keep as [`Scratch`](crate::Scratch).
pub fn trim_pool() {
    scratch::give_back();
    lock(&POOL.small).trim();
    lock(&POOL.large).trim();
}

/// To be called between the steps of a repeated computation. Coalesces free memory, so that every step starts from the
/// same state, and adds a slab if little is left that no step has used: which pieces of a batch run at the same
/// time is left to chance, and so is how well their buffers fit together. The reserve takes no physical memory until it
/// is used.
pub fn settle_pool() {
    lock(&POOL.small).settle();
    lock(&POOL.large).settle();
}

/// Fills every buffer that is handed out from now on with 0xFF: NaN in floating point and an impossible
/// index, so that a kernel that reads what it did not write is caught. For tests.
pub fn set_poison(on: bool) {
    POOL.poison.store(on, Ordering::Relaxed);
}

const SMALL: usize = 1 << 16;
/// Every buffer is shorter than this, half of the largest allocation: rounding its size up and aligning its slab cannot
/// overflow.
pub(crate) const MAX_BYTES: usize = isize::MAX as usize / 2;
pub(crate) const PAGE: usize = 1 << 12;
/// The alignment of slabs.
const HUGE_PAGE: usize = 1 << 21;

/// The bytes that a buffer occupies: whole cache lines, or whole pages if it is large, so that buffers of nearly equal
/// sizes can reuse each other's places.
fn capacity_for(bytes: usize) -> usize {
    bytes.max(1).next_multiple_of(if bytes < SMALL { ALIGNMENT } else { PAGE })
}

/// The slabs, and the account of what is free in them.
#[derive(Default)]
struct Slabs {
    arena: Arena,
    memory: BTreeMap<Place, SlabMemory>,
}

/// A slab's memory, from the system: zeroed, and without physical memory until it is written.
struct SlabMemory {
    memory: NonNull<u8>,
    layout: Layout,
    /// The first huge-page boundary in it, and the number of bytes from there.
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a slab is owned by the pool, which hands its places out to one buffer each.
unsafe impl Send for SlabMemory {}

impl Slabs {
    fn take(&mut self, capacity: usize) -> (NonNull<u8>, Place) {
        let place = self.arena.take(capacity).unwrap_or_else(|| {
            self.grow(capacity);
            // invariant: the new slab has room for it.
            self.arena.take(capacity).expect("room in a new slab")
        });
        let (&begin, slab) = self.memory.range(..=place).next_back().expect("places lie in slabs");
        // SAFETY: the arena hands out places within this slab.
        (unsafe { slab.start.add(place - begin) }, place)
    }

    fn grow(&mut self, at_least: usize) {
        let slab = self.ample(at_least).or_else(|| SlabMemory::from_system(at_least));
        self.add(slab.unwrap_or_else(|| refused(at_least)));
    }

    /// A slab at least as large as all present ones together, so that there are few. A system that limits address space
    /// may refuse that, and still grant what is needed.
    fn ample(&self, at_least: usize) -> Option<SlabMemory> {
        const MIN: usize = 1 << 26;
        SlabMemory::from_system(at_least.max(self.held()).max(MIN))
    }

    fn add(&mut self, slab: SlabMemory) {
        self.memory.insert(self.arena.add_slab(slab.len), slab);
    }

    fn settle(&mut self) {
        self.arena.join();
        let reached = self.arena.reached();
        // A part of the reserve may be used up; otherwise each use of a bit of it would add a slab.
        if self.arena.unreached() < reached / 8
            && let Some(slab) = self.ample(0)
        {
            self.add(slab);
        }
    }

    fn trim(&mut self) {
        for begin in self.arena.remove_free_slabs() {
            self.memory.remove(&begin);
        }
    }

    fn held(&self) -> usize {
        self.memory.values().map(|slab| slab.len).sum()
    }
}

impl SlabMemory {
    /// Without alignment: an allocator that aligns has to write the zeros itself.
    fn layout(len: usize) -> Layout {
        // invariant: `Buffer::new` refuses what comes near isize::MAX.
        Layout::from_size_align(len + HUGE_PAGE, 1).expect("a slab fits into the address space")
    }

    /// None where the system refuses it.
    fn from_system(len: usize) -> Option<Self> {
        let layout = Self::layout(len);
        // SAFETY: the size is not 0.
        let memory = NonNull::new(refusable(|| unsafe { alloc_zeroed(layout) }))?;
        // SAFETY: the offset is less than the alignment, by which the allocation is longer than the slab.
        let start = unsafe { memory.add(memory.align_offset(HUGE_PAGE)) };
        ask_for_huge_pages(start, len);
        POOL.system_allocations.fetch_add(1, Ordering::Relaxed);
        Some(Self { memory, layout, start, len })
    }
}

/// Requests huge pages, whose addresses are translated faster: a hint, which the system may ignore.
fn ask_for_huge_pages(start: NonNull<u8>, len: usize) {
    #[cfg(target_os = "linux")]
    // SAFETY: memory of this length, whose contents the hint does not change.
    unsafe {
        libc::madvise(start.as_ptr().cast(), len, libc::MADV_HUGEPAGE);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, len);
}

impl Drop for SlabMemory {
    fn drop(&mut self) {
        // SAFETY: `from_system` took it with this layout, and the arena said that nothing of it is in use.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) };
    }
}

impl Buffer {
    /// A buffer of `len` bytes with arbitrary (but initialised) contents. Panics with [`OUT_OF_MEMORY`] where the
    /// system has none for it.
    pub fn new(len: usize) -> Self {
        Self::of(if len < SMALL { &POOL.small } else { &POOL.large }, len)
    }

    /// A buffer that a thread will keep.
    pub(crate) fn to_keep(len: usize) -> Self {
        Self::of(&POOL.small, len)
    }

    fn of(slabs: &'static Mutex<Slabs>, len: usize) -> Self {
        assert!(len < MAX_BYTES, "a buffer of {len} bytes cannot exist");
        let (start, place) = if cfg!(exact_buffers) { (alone(len), 0) } else { lock(slabs).take(capacity_for(len)) };
        let in_use = POOL.in_use.fetch_add(len, Ordering::Relaxed) + len;
        POOL.peak_in_use.fetch_max(in_use, Ordering::Relaxed);
        Self { start, place, len, slabs }.reused()
    }

    /// The buffer as the pool hands it out: poisoned, if [`set_poison`] says so.
    pub(crate) fn reused(mut self) -> Self {
        if POOL.poison.load(Ordering::Relaxed) {
            self.slice_mut::<u8>().fill(u8::MAX);
        }
        self
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
        const { assert!(align_of::<T>() <= ALIGNMENT && size_of::<T>() > 0) };
        let count = self.len / size_of::<T>();
        // SAFETY: the block is initialised up to `len`, aligned at least as T needs, and every
        // bit pattern of a Pod type is a value.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), count) }
    }

    /// The contents as elements, to be written.
    pub fn slice_mut<T: Pod>(&mut self) -> &mut [T] {
        const { assert!(align_of::<T>() <= ALIGNMENT && size_of::<T>() > 0) };
        let count = self.len / size_of::<T>();
        // SAFETY: as in `slice`; `&mut self` excludes every other access.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), count) }
    }

    /// Fills the buffer with zeros. The bytes are counted, because clearing a result that a kernel overwrites anyway is
    /// wasted work.
    pub fn clear(&mut self) {
        POOL.cleared.fetch_add(self.len, Ordering::Relaxed);
        self.slice_mut::<u8>().fill(0);
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("start", &self.start).field("len", &self.len).finish_non_exhaustive()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        POOL.in_use.fetch_sub(self.len, Ordering::Relaxed);
        if cfg!(exact_buffers) {
            // SAFETY: `alone` took it with this layout, and nobody else has it.
            unsafe { dealloc(self.start.as_ptr(), layout_alone(self.len)) };
        } else {
            lock(self.slabs).arena.give_back(self.place, capacity_for(self.len));
        }
    }
}

fn refused(bytes: usize) -> ! {
    panic!("{OUT_OF_MEMORY}: the system refused {} kB more", bytes.div_ceil(1000))
}

/// Memory that is no part of a slab. Built with `--cfg exact_buffers`, each buffer is an allocation of exactly its
/// size, so that a sanitizer, or Miri, sees the first byte that is touched beyond it.
fn alone(len: usize) -> NonNull<u8> {
    // SAFETY: the size is not 0.
    let memory = refusable(|| unsafe { alloc_zeroed(layout_alone(len)) });
    POOL.system_allocations.fetch_add(1, Ordering::Relaxed);
    NonNull::new(memory).unwrap_or_else(|| refused(len))
}

fn layout_alone(len: usize) -> Layout {
    // invariant: `Buffer::of` refuses what comes near isize::MAX.
    Layout::from_size_align(len.max(1), ALIGNMENT).expect("a buffer fits into the address space")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_apart_whatever_their_sizes() {
        let buffers = [1, 63, 65, 0, SMALL - 1, SMALL + 1, 100, 3 * PAGE + 5, 70_000].map(Buffer::new);
        let mut places = buffers.each_ref().map(|buffer| buffer.slice::<u8>().as_ptr_range());
        assert!(places.iter().all(|place| place.start.addr().is_multiple_of(ALIGNMENT)), "{places:?}");
        places.sort_by_key(|place| place.start);
        assert!(places.windows(2).all(|pair| pair[0].end <= pair[1].start), "{places:?}");
    }
}
