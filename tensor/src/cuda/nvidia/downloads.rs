//! Small downloads (losses, logits), by way of page-locked memory. Copies to other memory go through the driver's own,
//! and are waited for one by one; meanwhile the GPU is idle, as the next training step is not submitted before.

use crate::Result;
use crate::cuda::locked::Locked;

/// Bytes of page-locked memory: logits of 128 images and 1,000 classes have half as many in f32.
pub const ROOM: usize = 1 << 20;

/// Page-locked memory that downloads pass through, one after the other.
#[derive(Default)]
pub struct Downloads {
    memory: Option<Locked>,
}

impl Downloads {
    /// With [`ROOM`] bytes of memory, or none.
    pub fn new(memory: Option<Locked>) -> Self {
        Self { memory }
    }

    /// Copies from each address as many bytes as its slice has: `request` asks for one of the copies, and `finish`
    /// waits for all of them. Errors: theirs.
    pub fn fetch(
        &mut self,
        pieces: &mut [(u64, &mut [u8])],
        request: impl Fn(u64, &mut [u8]) -> Result<()>,
        finish: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let Some(place) = self.place(pieces.iter().map(|(_, to)| to.len()).sum()) else {
            let requested = pieces.iter_mut().try_for_each(|(from, to)| request(*from, to));
            // Even if one could not be asked for: the others must not come later.
            return finish().and(requested);
        };
        let mut rest = &mut *place;
        for (from, to) in &*pieces {
            let (own, after) = rest.split_at_mut(to.len());
            request(*from, own)?;
            rest = after;
        }
        finish()?;
        let mut rest = &*place;
        for (_, to) in pieces {
            let (own, after) = rest.split_at(to.len());
            to.copy_from_slice(own);
            rest = after;
        }
        Ok(())
    }

    /// A place for so many bytes, if there is room.
    fn place(&mut self, bytes: usize) -> Option<&mut [u8]> {
        self.memory.as_mut()?.get_mut(..bytes)
    }

    /// The memory, to give it back.
    pub fn take(&mut self) -> Option<Locked> {
        self.memory.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use std::cell::Cell;

    /// Copies of which each byte tells from where it came.
    fn fetched(downloads: &mut Downloads, lengths: [usize; 2]) -> [Vec<u8>; 2] {
        let mut all = lengths.map(|len| vec![0u8; len]);
        let [one, two] = &mut all;
        let request = |from: u64, to: &mut [u8]| {
            to.iter_mut().zip(from..).for_each(|(to, at)| *to = at as u8);
            Ok(())
        };
        downloads.fetch(&mut [(7, one), (99, two)], request, || Ok(())).unwrap();
        all
    }

    #[test]
    fn pieces_come_whole_whether_there_is_room_or_not() {
        let mut downloads = Downloads::new(Some(Locked::for_tests(ROOM)));
        for lengths in [[0, 3], [ROOM - 5, 5], [ROOM - 5, 6]] {
            let bytes = |from: usize, len: usize| -> Vec<u8> { (from..from + len).map(|at| at as u8).collect() };
            let expected = [bytes(7, lengths[0]), bytes(99, lengths[1])];
            assert!(fetched(&mut downloads, lengths) == expected, "{lengths:?}");
        }
        assert_eq!([downloads.place(ROOM).is_some(), downloads.place(ROOM + 1).is_some()], [true, false]);
        assert!(downloads.take().is_some());
        assert_eq!(fetched(&mut downloads, [1, 2]), [vec![7], vec![99, 100]]);
    }

    /// What was requested must have come, or it would be written to memory that is no longer borrowed.
    #[test]
    fn a_request_that_fails_leaves_no_copy_behind() {
        let (mut one, mut two) = ([0; 4], [0; 4]);
        let waited = Cell::new(false);
        let request = |from: u64, _: &mut [u8]| match from {
            1 => Ok(()),
            _ => Err(Error::argument("test", "it is gone")),
        };
        let finish = || {
            waited.set(true);
            Ok(())
        };
        assert!(Downloads::default().fetch(&mut [(1, &mut one), (2, &mut two)], request, finish).is_err());
        assert!(waited.get());
    }
}
