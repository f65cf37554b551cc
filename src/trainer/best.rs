//! The checkpoint of the best epoch, which a run folder keeps beside the last one.

use super::checkpoint::{Checkpoint, FILE_NAME, Progress};
use super::data_facts::DataFacts;
use super::folder::{RunFolder, kind};
use super::logs::{METRICS, metrics_in};
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
    /// The file name of the best epoch's checkpoint, if it was kept: a run that began before such files existed has
    /// none, or one of a later epoch.
    pub fn kept(&self, best: &EpochMetrics) -> Option<&'static str> {
        kept_in(self.path(), best)
    }

    /// Prints a note if the best epoch's checkpoint is missing or damaged: its weights are then lost, unless there is a
    /// copy elsewhere.
    pub fn note_lost(&self, facts: &DataFacts) -> Result<()> {
        if let Some([_, best]) = self.last_and_best(facts)?
            && self.kept(&best).is_none()
        {
            let (path, epoch) = (self.path().join(BEST), best.epoch);
            tell!(
                io::stderr(),
                "note: {} is not there, or not that of epoch {epoch}, the best so far; an epoch that is better will be kept",
                path.display()
            );
        }
        Ok(())
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
            Some(best) if best.epoch > epochs => bail!(
                "{}: it is of epoch {}, which the checkpoint has not come to, and would be written over; move it elsewhere, or \
                 put it in the place of {FILE_NAME}",
                path.display(),
                best.epoch
            ),
            _ => Ok(()),
        }
    }

    /// How far the run had come when the best epoch's checkpoint was kept, if it was.
    pub(super) fn best_progress(&self) -> Option<Progress> {
        Checkpoint::read_progress(&self.path().join(BEST)).ok()
    }

    /// If the epoch after which the checkpoint was written is the best so far, keeps a copy of the checkpoint. An
    /// existing copy of an earlier epoch whose metrics are missing may be better, and is not replaced; one that was tested
    /// on other images gets another name.
    pub fn keep_best(&self, of_checkpoint: usize, facts: &DataFacts) -> Result<()> {
        // The metrics of the checkpoint's own epoch may be missing, too.
        if self.last_and_best(facts)?.is_none_or(|both| both.map(|epoch| epoch.epoch) != [of_checkpoint; 2]) {
            return Ok(());
        }
        let (path, kept) = (self.path().join(BEST), self.best_progress());
        if let Some(Progress { epoch, .. }) = kept
            && epoch <= facts.comparable_after
            && facts.comparable_after < of_checkpoint
        {
            self.ensure_own()?;
            let aside = format!("best-{epoch}.safetensors");
            fs::rename(&path, path.with_file_name(&aside)).map_err(|error| self.unsaved(error.into()))?;
            tell!(
                io::stderr(),
                "note: the best epoch so far was tested on other images: {} is now called {aside}",
                path.display()
            );
        } else if let Some(Progress { epoch, last: None, .. }) = kept
            && epoch < of_checkpoint
            && self.metrics()?.iter().all(|line| line.epoch != epoch)
        {
            // Older checkpoints have no metrics of their own.
            tell!(
                io::stderr(),
                "note: {} is of epoch {epoch}, of which {METRICS} has no line to compare with: it is kept; remove it if \
                 it is not wanted",
                path.display()
            );
            return Ok(());
        }
        self.ensure_own()?;
        copy_safely(&self.checkpoint(), &path).map_err(|error| self.unsaved(error.into()))
    }
}

/// The epochs in a run folder whose test accuracies compare with each other, in order: those since the test images last
/// changed, or before that if none has followed. Where the line of the best one is missing, its checkpoint has its
/// metrics.
pub fn comparable_in(folder: &Path, facts: &DataFacts) -> Result<Vec<EpochMetrics>> {
    let mut epochs = metrics_in(folder)?;
    epochs.extend(Checkpoint::read_progress(&folder.join(BEST)).ok().and_then(|kept| kept.last));
    epochs.sort_by_key(|line| line.epoch);
    epochs.dedup_by_key(|line| line.epoch);
    if epochs.last().is_some_and(|last| last.epoch > facts.comparable_after) {
        epochs.retain(|line| line.epoch > facts.comparable_after);
    }
    Ok(epochs)
}

/// The advice for a run whose checkpoint is unusable, if that of the best epoch is intact.
pub(super) fn whole_best(folder: &Path) -> Option<String> {
    let best = Checkpoint::read(&folder.join(BEST)).ok()?;
    let epoch = best.progress.epoch;
    Some(format!("put {BEST} in its place, which is whole: the run goes on after epoch {epoch}"))
}

/// The checkpoint of the best epoch in a run folder, if it was kept.
pub(super) fn kept_in(folder: &Path, best: &EpochMetrics) -> Option<&'static str> {
    let kept = Checkpoint::read(&folder.join(BEST)).ok()?;
    (kept.progress.epoch == best.epoch).then_some(BEST)
}
