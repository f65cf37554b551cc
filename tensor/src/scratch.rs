//! What a kernel needs of the pool for itself: elements without a shape, which nobody else sees.

use crate::{Buffer, Element};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// Elements in a [`Buffer`] of the pool, 64-byte-aligned, whose contents are whatever it held. Dropping them gives it
/// back.
#[derive(Debug)]
pub struct Scratch<T> {
    buffer: Buffer,
    elements: PhantomData<T>,
}

impl<T: Element> Scratch<T> {
    /// Room for so many elements, to be written before they are read. Panics only where so many cannot exist.
    pub fn new(len: usize) -> Self {
        // What cannot be counted in bytes is more than a buffer can have, and it says so.
        Self { buffer: Buffer::new(len.saturating_mul(size_of::<T>())), elements: PhantomData }
    }
}

impl<T: Element> Deref for Scratch<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        self.buffer.slice()
    }
}

impl<T: Element> DerefMut for Scratch<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        self.buffer.slice_mut()
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
