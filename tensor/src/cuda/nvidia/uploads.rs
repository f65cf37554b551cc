//! Small uploads (an optimiser's constants, keys of random streams), for which the host need not wait: it keeps the
//! bytes in page-locked memory until the GPU has read them.

use crate::cuda::locked::Locked;

/// Bytes of page-locked memory.
pub const ROOM: usize = 1 << 16;
/// For a longer upload the host waits: it would soon fill the memory.
const MAX_KEPT: usize = ROOM / 4;

/// Page-locked memory, and how much of it the GPU may still have to read.
#[derive(Default)]
pub struct Uploads {
    memory: Option<Locked>,
    used: usize,
}

impl Uploads {
    /// With [`ROOM`] bytes of memory, or none.
    pub fn new(memory: Option<Locked>) -> Self {
        Self { memory, used: 0 }
    }

    /// Copies these bytes to where they stay until [`Uploads::all_read`]; `None` if there is no room for them.
    pub fn keep(&mut self, bytes: &[u8]) -> Option<&[u8]> {
        let memory = self.memory.as_mut().filter(|_| bytes.len() <= MAX_KEPT.min(ROOM - self.used))?;
        let kept = &mut memory[self.used..][..bytes.len()];
        kept.copy_from_slice(bytes);
        // The next bytes start at a multiple of 64, which a GPU reads efficiently.
        self.used = (self.used + bytes.len()).next_multiple_of(64);
        Some(kept)
    }

    /// The GPU has read all of it.
    pub fn all_read(&mut self) {
        self.used = 0;
    }

    /// The memory, to give it back.
    pub fn take(&mut self) -> Option<Locked> {
        self.memory.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_stay_until_they_have_been_read() {
        let mut uploads = Uploads::new(Some(Locked::for_tests(ROOM)));
        assert_eq!(uploads.keep(&vec![1; MAX_KEPT + 1]), None);
        let count = |uploads: &mut Uploads| (0..).take_while(|&i| uploads.keep(&[i as u8; 65]).is_some()).count();
        assert_eq!(count(&mut uploads), ROOM / 128, "each has a place of its own");
        uploads.all_read();
        assert_eq!(count(&mut uploads), ROOM / 128);
        let memory = uploads.take().unwrap();
        assert_eq!(uploads.keep(&[1]), None);
        assert!((0..ROOM / 128).all(|i| memory[128 * i..][..65] == [i as u8; 65]), "in order");
    }
}
