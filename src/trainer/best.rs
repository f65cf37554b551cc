//! The checkpoint of the best epoch, which a run folder keeps beside the last one.

use super::checkpoint::{Checkpoint, FILE_NAME, Progress};
use super::data_facts::DataFacts;
use super::folder::{RunFolder, kind};
use super::metrics::EpochMetrics;
use crate::printing::tell;
use anyhow::{Error, Result, anyhow, bail};
use model::copy_safely;
use std::fs;
use std::io;
use std::path::Path;

/// The checkpoint as it was after the best epoch.
pub(super) const BEST: &str = "best.safetensors";

impl RunFolder {
    /// The file name of the best epoch's checkpoint, if it is there.
    pub fn kept(&self, best: &EpochMetrics) -> Option<&'static str> {
        kept_in(self.path(), best)
    }

    /// Prints a note if the best epoch's checkpoint is missing: its weights are then lost, unless there is a copy
    /// elsewhere.
    pub(super) fn note_lost(&self, progress: &Progress, facts: &DataFacts) {
        if let Some([_, best]) = progress.last_and_best(facts)
            && self.kept(&best).is_none()
        {
            let (path, epoch) = (self.path().join(BEST), best.epoch);
            tell!(
                io::stderr(),
                "note: {} is not there, or not that of epoch {epoch}, the best so far; an epoch that is better will be kept",
                path.display()
            );
        }
    }

    /// The error of an unusable checkpoint, with the advice to use the best epoch's in its place if that one is intact. If
    /// the file cannot be read there is no such advice: the checkpoint itself may be intact.
    pub fn or_best(&self, error: Error) -> Error {
        let is_read = matches!(kind(&error), None | Some(io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData));
        match whole_best(self.path()).filter(|_| is_read) {
            Some(best) => anyhow!("{error:#}; or {best}"),
            None => error,
        }
    }

    /// Refuses to resume after this many epochs if the best epoch's checkpoint is of a later one, because it would be
    /// overwritten.
    pub fn ensure_no_later_best(&self, epochs: usize) -> Result<()> {
        let path = self.path().join(BEST);
        match self.best_progress() {
            Some(best) if best.epoch() > epochs => bail!(
                "{}: it is of epoch {}, which the checkpoint has not come to, and would be written over; move it elsewhere, or \
                 put it in the place of {FILE_NAME}",
                path.display(),
                best.epoch()
            ),
            _ => Ok(()),
        }
    }

    /// How far the run had come when the best epoch's checkpoint was kept, if it was.
    fn best_progress(&self) -> Option<Progress> {
        Checkpoint::read_progress(&self.path().join(BEST)).ok()
    }

    /// If the last epoch is the best so far, keeps a copy of the checkpoint that was written after it. An existing copy that
    /// was tested on other images gets another name.
    pub(super) fn keep_best(&self, progress: &Progress, facts: &DataFacts) -> Result<()> {
        if progress.last_and_best(facts).is_none_or(|[last, best]| last.epoch != best.epoch) {
            return Ok(());
        }
        self.ensure_own()?;
        let path = self.path().join(BEST);
        if let Some(epoch) = self.best_progress().map(|kept| kept.epoch())
            && epoch <= facts.comparable_after
            && facts.comparable_after < progress.epoch()
        {
            let aside = format!("best-{epoch}.safetensors");
            fs::rename(&path, path.with_file_name(&aside)).map_err(|error| self.unsaved(error.into()))?;
            tell!(
                io::stderr(),
                "note: the best epoch so far was tested on other images: {} is now called {aside}",
                path.display()
            );
        }
        copy_safely(&self.checkpoint(), &path).map_err(|error| self.unsaved(error.into()))
    }
}

/// The advice for a run whose checkpoint is unusable, if that of the best epoch is intact.
pub(super) fn whole_best(folder: &Path) -> Option<String> {
    let best = Checkpoint::read(&folder.join(BEST)).ok()?;
    let epoch = best.progress.epoch();
    Some(format!("put {BEST} in its place, which is whole: the run goes on after epoch {epoch}"))
}

/// The checkpoint of the best epoch in a run folder, if it was kept.
pub(super) fn kept_in(folder: &Path, best: &EpochMetrics) -> Option<&'static str> {
    // Not the whole file: it is long, and whoever goes on to use its weights is told if they are damaged.
    let kept = Checkpoint::read_progress(&folder.join(BEST)).ok()?;
    (kept.epoch() == best.epoch).then_some(BEST)
}
