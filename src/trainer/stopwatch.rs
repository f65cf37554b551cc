//! How long the training of an epoch takes, and how much of that it waits for images.

use std::time::{Duration, Instant};

/// The time since an epoch, or the rest of it that a resumed run has left, began, and what has been done since.
pub struct Stopwatch {
    started: Instant,
    waited: Duration,
    /// The images so far.
    pub images: u64,
}

impl Stopwatch {
    /// Begins now.
    pub fn start() -> Self {
        Self { started: Instant::now(), waited: Duration::ZERO, images: 0 }
    }

    /// Runs `next`, and counts its time as waiting.
    pub fn waiting<T>(&mut self, next: impl FnOnce() -> T) -> T {
        let since = Instant::now();
        let value = next();
        self.waited += since.elapsed();
        value
    }

    /// What has been done so far.
    pub fn lap(&self) -> Lap {
        Lap { elapsed: self.started.elapsed(), waited: self.waited, images: self.images }
    }
}

/// What was done in some time.
#[derive(Clone, Copy, Debug)]
pub struct Lap {
    /// The time.
    pub elapsed: Duration,
    waited: Duration,
    images: u64,
}

impl Lap {
    /// Images per second, if there were any.
    pub fn rate(self) -> Option<f64> {
        let seconds = self.elapsed.max(Duration::from_nanos(1)).as_secs_f64();
        (self.images > 0).then(|| self.images as f64 / seconds)
    }

    /// Which share of the time went by waiting for images; on a GPU, which computes meanwhile, this may cost nothing.
    pub fn share_waited(self) -> f64 {
        self.waited.as_secs_f64() / self.elapsed.max(self.waited).max(Duration::from_nanos(1)).as_secs_f64()
    }

    /// Whether the waiting is a large enough share, and long enough, that the user should know.
    pub fn waits_long(self) -> bool {
        self.share_waited() > 0.25 && self.waited > Duration::from_secs(3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_is_told_from_working() {
        let mut watch = Stopwatch::start();
        assert_eq!(watch.waiting(|| 7), 7);
        assert_eq!(watch.lap().rate(), None);
        let lap = |elapsed, waited| Lap {
            elapsed: Duration::from_secs(elapsed),
            waited: Duration::from_secs(waited),
            images: 10,
        };
        assert_eq!(lap(5, 1).rate(), Some(2.0));
        assert_eq!(lap(10, 4).share_waited(), 0.4);
        assert_eq!([lap(10, 4), lap(4, 2), lap(100, 20)].map(Lap::waits_long), [true, false, false]);
        assert!(lap(0, 0).share_waited() == 0.0 && lap(0, 1).share_waited() <= 1.0);
    }
}
