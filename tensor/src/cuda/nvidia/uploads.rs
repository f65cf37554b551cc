//! Small uploads (an optimiser's constants, keys of random streams), for which the host need not wait: it keeps the
//! bytes in page-locked memory until the GPU has read them.

use std::ptr::NonNull;

/// Bytes of page-locked memory.
pub const ROOM: usize = 1 << 16;
/// For a longer upload the host waits: it would soon fill the memory.
const MAX_KEPT: usize = ROOM / 4;

/// Page-locked memory, and how much of it the GPU may still have to read.
#[derive(Default)]
pub struct Uploads {
    start: Option<NonNull<u8>>,
    used: usize,
}

// SAFETY: the memory is this value's alone, as a vector's is.
unsafe impl Send for Uploads {}

impl Uploads {
    /// With [`ROOM`] bytes of page-locked memory, or none.
    pub fn new(start: Option<NonNull<u8>>) -> Self {
        Self { start, used: 0 }
    }

    /// Copies these bytes to where they stay until [`Uploads::all_read`]; `None` if there is no room for them.
    pub fn keep(&mut self, bytes: &[u8]) -> Option<&[u8]> {
        let start = self.start.filter(|_| bytes.len() <= MAX_KEPT.min(ROOM - self.used))?;
        // SAFETY: so many bytes of the memory are free, and nobody else's.
        let kept = unsafe {
            let place = start.as_ptr().add(self.used);
            place.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            std::slice::from_raw_parts(place, bytes.len())
        };
        // The next bytes start at a multiple of 64, which a GPU reads efficiently.
        self.used = (self.used + bytes.len()).next_multiple_of(64);
        Some(kept)
    }

    /// The GPU has read all of it.
    pub fn all_read(&mut self) {
        self.used = 0;
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
    fn bytes_stay_until_they_have_been_read() {
        let mut memory = vec![0u8; ROOM];
        let mut uploads = Uploads::new(NonNull::new(memory.as_mut_ptr()));
        assert_eq!(uploads.keep(&vec![1; MAX_KEPT + 1]), None);
        let count = |uploads: &mut Uploads| (0..).take_while(|&i| uploads.keep(&[i as u8; 65]).is_some()).count();
        assert_eq!(count(&mut uploads), ROOM / 128, "each has a place of its own");
        uploads.all_read();
        assert_eq!(count(&mut uploads), ROOM / 128);
        assert_eq!(uploads.take().map(NonNull::as_ptr), Some(memory.as_mut_ptr()));
        assert_eq!(uploads.keep(&[1]), None);
        assert!((0..ROOM / 128).all(|i| memory[128 * i..][..65] == [i as u8; 65]), "in order");
    }
}
