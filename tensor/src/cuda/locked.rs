//! Page-locked memory of the host: a device copies from it and to it while the host goes on.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Page-locked memory. It stays locked, and is lost, unless it is given back to its driver.
pub struct Locked {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory is this value's alone, as a vector's is.
unsafe impl Send for Locked {}

impl Locked {
    /// Takes these bytes over, and sets them to zero.
    ///
    /// # Safety
    /// The memory must be as long, and nobody else may use it.
    pub unsafe fn new(start: NonNull<u8>, len: usize) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { start.write_bytes(0, len) };
        Self { start, len }
    }

    /// Where it starts, to give it back.
    pub fn into_start(self) -> NonNull<u8> {
        self.start
    }

    #[cfg(test)]
    pub fn for_tests(len: usize) -> Self {
        let memory = NonNull::from(vec![1u8; len].leak());
        // SAFETY: it is as long, and leaked to this value alone.
        unsafe { Self::new(memory.cast(), len) }
    }
}

impl Deref for Locked {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the memory is as long, was written when it was taken over, and is this value's alone.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}
