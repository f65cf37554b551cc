//! Small downloads (losses, logits), by way of page-locked memory. Copies to other memory go through the driver's own,
//! and are waited for one by one; meanwhile the GPU is idle, as the next training step is not submitted before.

use std::ptr::NonNull;

/// Bytes of page-locked memory: logits of 128 images and 1,000 classes have half as many in f32.
pub const ROOM: usize = 1 << 20;

/// Page-locked memory that downloads pass through, one after the other.
#[derive(Default)]
pub struct Downloads {
    start: Option<NonNull<u8>>,
}

// SAFETY: the memory is this value's alone, as a vector's is.
unsafe impl Send for Downloads {}

impl Downloads {
    /// With [`ROOM`] bytes of page-locked memory, or none.
    pub fn new(start: Option<NonNull<u8>>) -> Self {
        // SAFETY: the memory is as long, and nobody else's.
        start.iter().for_each(|start| unsafe { start.as_ptr().write_bytes(0, ROOM) });
        Self { start }
    }

    /// A place for so many bytes, if there is room.
    pub fn place(&mut self, bytes: usize) -> Option<&mut [u8]> {
        let start = self.start.filter(|_| bytes <= ROOM)?;
        // SAFETY: the memory is as long, was written when it was new, and is this value's alone.
        Some(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), bytes) })
    }

    /// The memory, to give it back.
    pub fn take(&mut self) -> Option<NonNull<u8>> {
        self.start.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_for_so_much_and_no_more() {
        let mut memory = vec![1u8; ROOM];
        let mut downloads = Downloads::new(NonNull::new(memory.as_mut_ptr()));
        assert_eq!(downloads.place(ROOM).map(|place| place.to_vec()), Some(vec![0; ROOM]));
        assert_eq!(downloads.place(0), Some(&mut [][..]));
        assert_eq!(downloads.place(ROOM + 1), None);
        assert_eq!(downloads.take().map(NonNull::as_ptr), Some(memory.as_mut_ptr()));
        assert_eq!(downloads.place(1), None);
    }
}
