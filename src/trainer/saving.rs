//! When a run saves within an epoch, in case the program is killed.

use super::folder::is_full;
use anyhow::{Error, Result};
use std::time::{Duration, Instant};

/// From the last checkpoint to the next while a run trains: however slow its steps are, one that is killed then loses
/// little more work than this.
const LONGEST: Duration = Duration::from_secs(600);

/// When checkpoints are due within an epoch, which begins with one.
pub struct Saving {
    /// Steps from one to the next; 0 for none within an epoch.
    every: u64,
    longest: Duration,
    last: Instant,
    /// Whether there was no room for the last one.
    full: bool,
}

impl Saving {
    /// From now on, after this many steps each, or sooner where they take long.
    pub fn every(steps: usize) -> Self {
        Self { every: steps as u64, longest: LONGEST, last: Instant::now(), full: false }
    }

    /// Saves if that is due, now that the run has taken this many steps. Gives the error of a full disk, with which
    /// training goes on: there may be room again when enough time has passed for the next try, or before the epoch
    /// ends. Errors: all others of saving.
    pub fn after(&mut self, steps: u64, save: impl FnOnce() -> Result<()>) -> Result<Option<Error>> {
        let in_steps = self.every > 0 && steps.is_multiple_of(self.every) && !self.full;
        let in_time = self.every > 0 && self.last.elapsed() >= self.longest;
        if !in_steps && !in_time {
            return Ok(None);
        }
        let saved = save();
        self.last = Instant::now();
        self.full = saved.as_ref().is_err_and(is_full);
        match saved {
            Err(error) if self.full => Ok(Some(error)),
            saved => saved.map(|()| None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    /// The steps after which a run saves.
    fn saved(mut saving: Saving) -> Vec<u64> {
        let mut saved = vec![];
        for step in 1..=7 {
            let save = || {
                saved.push(step);
                Ok(())
            };
            assert!(saving.after(step, save).unwrap().is_none());
        }
        saved
    }

    #[test]
    fn checkpoints_are_due_after_some_steps_or_some_time() {
        assert_eq!(saved(Saving::every(3)), [3, 6]);
        let slow = |steps| Saving { longest: Duration::ZERO, ..Saving::every(steps) };
        assert_eq!(saved(slow(3)), [1, 2, 3, 4, 5, 6, 7]);
        assert!(saved(slow(0)).is_empty(), "who wants none within an epoch gets none");
        let ago = Instant::now().checked_sub(Duration::from_secs(3)).unwrap();
        let once = Saving { longest: Duration::from_secs(2), last: ago, ..Saving::every(500) };
        assert_eq!(saved(once), [1], "the time counts from the last one");
    }

    #[test]
    fn a_full_disk_ends_no_epoch() {
        let failing = |kind: io::ErrorKind| -> Result<()> {
            let cause = io::Error::from(kind);
            Err(Error::from(model::Error::Io { path: "checkpoint".into(), cause }).context("saving failed"))
        };
        for full in [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded] {
            let mut saving = Saving::every(1);
            assert_eq!(saving.after(1, || failing(full)).unwrap().unwrap().to_string(), "saving failed");
            assert!(saving.after(2, || panic!("the next try is due later")).unwrap().is_none());
            saving.longest = Duration::ZERO;
            assert!(saving.after(3, || Ok(())).unwrap().is_none());
            saving.longest = LONGEST;
            assert!(
                saving.after(4, || failing(full)).unwrap().is_some(),
                "there is room, and checkpoints are due again"
            );
        }
        assert!(Saving::every(1).after(1, || failing(io::ErrorKind::PermissionDenied)).is_err());
    }
}
