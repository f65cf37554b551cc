//! What a kernel needs for itself: elements without a shape, which nobody else sees.
//!
//! Kernels ask for it ten thousands of times a step, once for each head and each block of rows. The pool is there for all
//! threads, and its cache lines travel from core to core each time; so a thread keeps what it has used, and uses it again.

use crate::{Buffer, Element};
use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// The sizes of the buffers that a thread keeps are powers of two, from a page to what fits into a core's own cache.
const KEPT: [usize; 2] = [1 << 12, 1 << 20];
const SIZES: usize = (KEPT[1] / KEPT[0]).ilog2() as usize + 1;

thread_local! {
    /// This thread's free buffers of each size; the last one to be used is the first to go.
    static FREE: RefCell<[Vec<Buffer>; SIZES]> = const { RefCell::new([const { Vec::new() }; SIZES]) };
}

/// Elements in a [`Buffer`], 64-byte-aligned, whose contents are whatever it held. Dropping them leaves it to the thread, or
/// to the pool where it is large.
#[derive(Debug)]
pub struct Scratch<T> {
    /// There until it is dropped.
    buffer: Option<Buffer>,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Element> Scratch<T> {
    /// Room for so many elements, to be written before they are read. Panics only where so many cannot exist.
    pub fn new(len: usize) -> Self {
        // What cannot be counted in bytes is more than a buffer can have, and it says so.
        let bytes = len.saturating_mul(size_of::<T>());
        let size = if bytes > KEPT[1] { bytes } else { bytes.next_power_of_two().max(KEPT[0]) };
        let kept = place_of(size).and_then(|place| FREE.with_borrow_mut(|free| free[place].pop()));
        let buffer = kept.map_or_else(|| Buffer::new(size), Buffer::reused);
        Self { buffer: Some(buffer), len, elements: PhantomData }
    }
}

/// Where buffers of this size are kept, if they are.
fn place_of(size: usize) -> Option<usize> {
    (size <= KEPT[1]).then(|| (size / KEPT[0]).ilog2() as usize)
}

impl<T> Drop for Scratch<T> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take()
            && let Some(place) = place_of(buffer.len())
        {
            // A thread that ends keeps nothing any more.
            let _ = FREE.try_with(|free| free.borrow_mut()[place].push(buffer));
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
    #[should_panic(expected = "cannot exist")]
    fn more_than_can_be_counted_is_refused() {
        let _ = Scratch::<f64>::new(usize::MAX / 4);
    }
}
