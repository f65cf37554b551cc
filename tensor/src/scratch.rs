//! The workspace of a kernel: elements without a shape, private to it.
//!
//! Kernels ask for it tens of thousands of times a step, once for each head and each block of rows. All threads share
//! the pool, whose cache lines would move from core to core each time; so each thread keeps the buffers that it has
//! used, and reuses them.

use crate::buffer::PAGE;
use crate::{Buffer, Element, lock};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, Weak};

/// The most bytes that a thread keeps: what fits in its core's cache. The least recently used buffers are evicted
/// first.
const MAX_KEPT: usize = 1 << 20;
/// The largest buffer among them. Sizes are rounded up to pages, unless buffers are to be of exactly their size.
const MAX_BLOCK: usize = if cfg!(exact_buffers) { 1 } else { 1 << 18 };

/// The buffers that each thread keeps, so that other threads can reclaim them. For its own thread the lock is normally
/// uncontended, and in its cache.
static THREADS: Mutex<Vec<Weak<Mutex<Vec<Buffer>>>>> = Mutex::new(vec![]);

thread_local! {
    /// The buffers that this thread keeps, the most recently used one last.
    static KEPT: Arc<Mutex<Vec<Buffer>>> = {
        let kept = Arc::default();
        let mut threads = lock(&THREADS);
        threads.retain(|thread| thread.strong_count() > 0);
        threads.push(Arc::downgrade(&kept));
        kept
    };
}

/// Makes this thread ready to keep buffers. Where it has no memory for that any more, the C library ends the program.
pub(crate) fn prepare() {
    KEPT.with(|_| ());
}

/// How many bytes threads keep.
pub(crate) fn kept() -> usize {
    lock(&THREADS).iter().filter_map(Weak::upgrade).map(|kept| bytes_of(&lock(&kept))).sum()
}

fn bytes_of(kept: &[Buffer]) -> usize {
    kept.iter().map(Buffer::len).sum()
}

/// Gives the pool back what threads have kept.
pub(crate) fn give_back() {
    lock(&THREADS).iter().filter_map(Weak::upgrade).for_each(|kept| lock(&kept).clear());
}

/// Elements in a 64-byte-aligned [`Buffer`], whose contents are whatever it held before: initialised, so that a kernel
/// may load padding that nobody wrote, if no result depends on it (attention does). Dropping them leaves the buffer to
/// the thread, or returns it to the pool if it is large.
#[derive(Debug)]
pub struct Scratch<T> {
    /// `None` only while it is being dropped.
    buffer: Option<Buffer>,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Element> Scratch<T> {
    /// Workspace of this many elements, to be written before they are read. Panics as [`Buffer::new`] does.
    pub fn new(len: usize) -> Self {
        // If the number of bytes overflows, `Buffer::new` panics, as for any size that is too large.
        let bytes = len.saturating_mul(size_of::<T>());
        let buffer = if bytes > MAX_BLOCK { Buffer::new(bytes) } else { small(bytes.max(1).next_multiple_of(PAGE)) };
        Self { buffer: Some(buffer), len, elements: PhantomData }
    }
}

/// A buffer that the thread has kept, or a new one, which it will keep.
fn small(size: usize) -> Buffer {
    let again = |kept: &Arc<Mutex<Vec<Buffer>>>| {
        let mut kept = lock(kept);
        let last = kept.iter().rposition(|buffer| buffer.len() == size)?;
        Some(kept.remove(last))
    };
    // A thread that is ending no longer keeps any buffers.
    let again = KEPT.try_with(again).ok().flatten();
    again.map_or_else(|| Buffer::to_keep(size), Buffer::reused)
}

impl<T> Drop for Scratch<T> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take()
            && buffer.len() <= MAX_BLOCK
        {
            let _ = KEPT.try_with(|kept| {
                let mut kept = lock(kept);
                kept.push(buffer);
                let mut bytes = bytes_of(&kept);
                while bytes > MAX_KEPT {
                    bytes -= kept.remove(0).len();
                }
            });
        }
    }
}

impl<T: Element> Deref for Scratch<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        &self.buffer.as_ref().map_or(&[][..], Buffer::slice)[..self.len]
    }
}

impl<T: Element> DerefMut for Scratch<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.buffer.as_mut().map_or(&mut [][..], Buffer::slice_mut)[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ALIGNMENT, bf16};

    fn is_room_for<T: Element>(len: usize, value: T) {
        let mut scratch = Scratch::<T>::new(len);
        assert_eq!(scratch.len(), len);
        assert!(scratch.as_ptr().addr().is_multiple_of(ALIGNMENT));
        scratch.fill(value);
        assert!(scratch.iter().all(|&element| element == value));
    }

    #[test]
    fn it_has_as_many_elements_as_asked_for() {
        for len in [0, 1, 63, 1000, 100_000] {
            is_room_for(len, 1.5f64);
            is_room_for(len, 1.5f32);
            is_room_for(len, bf16::from_f32(1.5));
            is_room_for(len, 7u32);
        }
    }

    #[test]
    fn a_thread_uses_it_again_until_somebody_wants_it_back() {
        // Together, because the other threads of this test use the pool as well.
        let first = Scratch::<f32>::new(13_000).as_ptr().addr();
        let (again, larger) = (Scratch::<f64>::new(6_600), Scratch::<f32>::new(17_000));
        assert_eq!(again.as_ptr().addr(), first, "of the same size, in pages");
        assert_ne!(larger.as_ptr().addr(), first);
        drop((again, larger));
        let own = || KEPT.with(|kept| lock(kept).len());
        assert_eq!(own(), 2);
        assert!(kept() >= 53_248 + 69_632, "{} bytes", kept());
        drop((0..2 * MAX_KEPT / PAGE).map(|_| Scratch::<f32>::new(1)).collect::<Vec<_>>());
        assert_eq!(own(), MAX_KEPT / PAGE, "not without an end");
        give_back();
        assert_eq!(own(), 0);
    }

    #[test]
    #[should_panic(expected = "cannot exist")]
    fn more_than_can_be_counted_is_refused() {
        let _ = Scratch::<f64>::new(usize::MAX / 4);
    }
}
