//! Room for large pictures. As many are decoded at once as there are threads, and if together they took more memory
//! than the machine has, the system would end the program.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use tensor::lock;

/// A picture that takes no more bytes than this is decoded at once: whatever the threads, there is room for it.
const SMALL: u64 = 64 << 20;
/// How often a picture asks again for room that no other one will make: some may still be held that are decoded
/// already.
const PATIENCE: u32 = 100;
/// As how many times it counts that the system refuses it: a limit of the address space, unlike the machine's memory,
/// is not relaxed by waiting, unless another picture returns its room.
const REFUSED: u32 = 10;

/// The memory of the large pictures that are being decoded.
pub(crate) struct Room {
    taken: Mutex<u64>,
    returned: Condvar,
    /// How long a picture waits before it asks again.
    pause: Duration,
}

/// A part of it, which is returned when this is dropped.
pub(crate) struct Taken<'r> {
    room: &'r Room,
    bytes: u64,
}

impl Room {
    pub const fn new(pause: Duration) -> Self {
        Self { taken: Mutex::new(0), returned: Condvar::new(), pause }
    }

    /// Takes room for a picture, as soon as there is; `None` if there is too little even for this one alone. `granted`
    /// says whether the system would grant that much now, which a small picture needs, too, and `free` how much memory
    /// the machine has left, if that is known.
    pub fn take(&self, bytes: u64, granted: impl Fn() -> bool, free: impl Fn() -> Option<u64>) -> Option<Taken<'_>> {
        let counted = if bytes > SMALL { bytes } else { 0 };
        if counted == 0 && granted() {
            return Some(Taken { room: self, bytes: 0 });
        }
        let (mut taken, mut waited) = (lock(&self.taken), 0);
        loop {
            let granted = granted();
            // What was granted to others may still be counted as free.
            let is_free = || free().is_none_or(|free| counted <= free.saturating_sub(*taken));
            if granted && is_free() {
                break;
            }
            waited += match (*taken, granted) {
                (0, true) => 1,
                (0, false) => REFUSED,
                _ => 0,
            };
            if waited > PATIENCE {
                return None;
            }
            let woken = self.returned.wait_timeout(taken, self.pause);
            taken = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        *taken += counted;
        Some(Taken { room: self, bytes: counted })
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if self.bytes > 0 {
            *lock(&self.room.taken) -= self.bytes;
            self.room.returned.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    const LARGE: u64 = 2 * SMALL;

    fn room() -> Room {
        Room::new(Duration::from_millis(1))
    }

    #[test]
    fn large_pictures_wait_for_each_other_and_small_ones_for_nobody() {
        let (room, machine) = (room(), || Some(2 * LARGE + 1));
        let [first, second] = [(); 2].map(|()| room.take(LARGE, || true, machine).unwrap());
        drop(room.take(SMALL, || true, || Some(0)).unwrap());
        // Two can be there at once, and two must, as they wait for each other.
        let (started, both) = (Barrier::new(7), Barrier::new(2));
        let (most, at_once) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| {
                    started.wait();
                    let taken = room.take(LARGE, || true, machine).unwrap();
                    most.fetch_max(at_once.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    both.wait();
                    at_once.fetch_sub(1, Ordering::SeqCst);
                    drop(taken);
                });
            }
            started.wait();
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(most.load(Ordering::SeqCst), 0, "there is no room yet");
            drop((first, second));
        });
        assert_eq!(most.load(Ordering::SeqCst), 2);
        assert_eq!(*lock(&room.taken), 0);
        // Where nobody knows how much there is, nobody waits.
        let _all = [(); 9].map(|()| room.take(LARGE, || true, || None).unwrap());
    }

    #[test]
    fn a_picture_that_is_alone_waits_for_a_while_and_gives_up() {
        let (room, asked) = (room(), AtomicU64::new(0));
        let soon = || Some(if asked.fetch_add(1, Ordering::SeqCst) < 3 { 0 } else { LARGE });
        assert!(room.take(LARGE, || true, soon).is_some());
        assert!(room.take(LARGE, || true, || Some(LARGE - 1)).is_none());
    }

    /// As under a limit of the address space, of which another picture holds the rest for a while.
    #[test]
    fn what_the_system_does_not_grant_is_waited_for_whatever_the_size() {
        let room = room();
        for bytes in [1, SMALL, LARGE] {
            let (asked, returned) = (AtomicU64::new(0), AtomicBool::new(false));
            let granted = || {
                asked.fetch_add(1, Ordering::SeqCst);
                returned.load(Ordering::SeqCst)
            };
            let other = room.take(LARGE, || true, || None).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while asked.load(Ordering::SeqCst) < u64::from(PATIENCE) + 5 {
                        std::thread::yield_now();
                    }
                    returned.store(true, Ordering::SeqCst);
                    drop(other);
                });
                assert!(room.take(bytes, granted, || None).is_some(), "{bytes}");
            });
        }
        assert!([1, LARGE].into_iter().all(|bytes| room.take(bytes, || false, || None).is_none()));
    }
}
