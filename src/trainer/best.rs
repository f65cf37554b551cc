//! The checkpoint of the best epoch, which a run folder keeps beside the last one.

use super::checkpoint::{Checkpoint, FILE_NAME, Progress};
use super::folder::{RunFolder, kind};
use super::summary::Summary;
use crate::config::Measure;
use crate::printing::tell;
use anyhow::{Error, Result, anyhow, bail};
use model::copy_safely;
use std::io;
use std::path::Path;

/// The checkpoint as it was after the best epoch.
pub const BEST: &str = "best.safetensors";

impl RunFolder {
    /// The epoch that the best epoch's checkpoint is of: an earlier or a worse one if the best one's was lost. None if
    /// it is not there, or damaged.
    pub fn kept_epoch(&self) -> Option<usize> {
        kept_in(self.path())
    }

    /// Prints a note if the best epoch's checkpoint is missing: its weights are then lost, unless there is a copy
    /// elsewhere.
    pub(super) fn note_lost(&self, progress: &Progress, by: Measure) {
        if let Some([_, best]) = by.last_and_best(&progress.epochs)
            && self.kept_epoch() != Some(best.epoch)
        {
            let (path, epoch) = (self.path().join(BEST), best.epoch);
            tell!(
                io::stderr(),
                "note: {} is not that of epoch {epoch}, the best so far; it will be the best of the others",
                path.display()
            );
        }
    }

    /// The error of an unusable checkpoint, with the advice to use the best epoch's in its place if that one is intact.
    /// If the file cannot be read there is no such advice: the checkpoint itself may be intact.
    pub fn or_best(&self, error: Error) -> Error {
        let is_read = matches!(kind(&error), None | Some(io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData));
        match is_read.then(|| whole_best(self.path())).flatten() {
            Some(best) => anyhow!("{error:#}; or {best}"),
            None => error,
        }
    }

    /// Refuses to resume after this many epochs if the best epoch's checkpoint is of a later one, because it would be
    /// overwritten.
    pub(super) fn ensure_no_later_best(&self, epochs: usize) -> Result<()> {
        let path = self.path().join(BEST);
        match Checkpoint::read_progress(&path) {
            Ok(best) if best.epoch() > epochs => bail!(
                "{}: it is of epoch {}, which the checkpoint has not come to, and would be written over; move it elsewhere, or \
                 put it in the place of {FILE_NAME}",
                path.display(),
                best.epoch()
            ),
            _ => Ok(()),
        }
    }

    /// If the last epoch is better than the one that is kept, keeps a copy of the checkpoint that was written after it.
    /// As long as nothing is lost, the one that is kept is the best so far.
    pub(super) fn keep_best(&self, progress: &Progress, by: Measure) -> Result<()> {
        let Some([last, best]) = by.last_and_best(&progress.epochs) else { return Ok(()) };
        let path = self.path().join(BEST);
        let is_better = match Checkpoint::read_progress(&path) {
            Ok(kept) => {
                let kept = progress.epochs.iter().find(|epoch| epoch.epoch == kept.epoch());
                kept.is_none_or(|kept| by.prefers(&last, kept))
            }
            Err(error) if kind(&error) == Some(io::ErrorKind::NotFound) => true,
            // It may be intact where it cannot be read.
            Err(_) => last.epoch == best.epoch,
        };
        if !is_better {
            return Ok(());
        }
        self.ensure_own()?;
        copy_safely(&self.checkpoint(), &path).map_err(|error| self.unsaved(error.into()))
    }

    /// The same for a run that is resumed, in case it was killed before it could do this. What was the best by another
    /// measure stays: its weights may be nowhere else.
    pub(super) fn keep_best_of_before(&self, progress: &Progress, by: Measure) -> Result<()> {
        match Summary::read(&self.path().join(BEST)) {
            Ok(kept) if kept.config.best_by != by => Ok(()),
            _ => self.keep_best(progress, by),
        }
    }
}

/// The advice for a run whose checkpoint is unusable, if that of the best epoch is intact.
pub(super) fn whole_best(folder: &Path) -> Option<String> {
    let best = Checkpoint::read(&folder.join(BEST)).ok()?;
    let epoch = best.progress.epoch();
    Some(format!("put {BEST} in its place, which is whole: the run goes on after epoch {epoch}"))
}

/// The epoch of the best epoch's checkpoint in a run folder.
pub(super) fn kept_in(folder: &Path) -> Option<usize> {
    // Not the whole file: it is long, and whoever goes on to use its weights is told if they are damaged.
    Checkpoint::read_progress(&folder.join(BEST)).ok().map(|kept| kept.epoch())
}
