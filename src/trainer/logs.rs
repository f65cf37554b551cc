//! The logs in a run folder: a line for each epoch, of its metrics and of its timing.
//!
//! The metrics are a copy, for people and their tools, of what the checkpoint has, and no run goes on from them.
//! Timings are nowhere else, because equal runs have equal checkpoints; they may be edited or damaged, which must not
//! keep a run from going on.

use super::checkpoint::Progress;
use super::folder::{RunFolder, read};
use super::metrics::Timing;
use crate::printing::tell;
use anyhow::{Context, Result};
use std::{fs, io};

pub(super) const METRICS: &str = "metrics.jsonl";
pub(super) const TIMINGS: &str = "timings.jsonl";

impl RunFolder {
    /// Writes the metrics of the epochs that are done.
    pub(super) fn write_metrics(&self, progress: &Progress) -> Result<()> {
        let lines = progress.epochs.iter().map(|epoch| Ok(serde_json::to_string(epoch)? + "\n"));
        self.write(METRICS, lines.collect::<Result<String>>()?.as_bytes())
    }

    /// Adds the line of an epoch's timing.
    pub(super) fn append_timing(&self, timing: &Timing) -> Result<()> {
        let path = self.path().join(TIMINGS);
        let mut bytes = read(&path)?.with_context(|| format!("{}: it cannot be read", path.display()))?;
        if bytes.last().is_some_and(|&last| last != b'\n') {
            bytes.push(b'\n');
        }
        bytes.extend(serde_json::to_string(timing)?.bytes().chain([b'\n']));
        self.write(TIMINGS, &bytes)
    }

    /// Removes the lines of epochs that are still to come at this place of the run. Lines that are not an epoch's stay.
    pub(super) fn rewind_logs(&self, progress: &Progress) -> Result<()> {
        let path = self.path().join(TIMINGS);
        let Some(bytes) = read(&path)? else {
            let aside = path.with_extension("unread");
            tell!(io::stderr(), "note: {} cannot be read, and is now {}", path.display(), aside.display());
            fs::rename(&path, &aside).with_context(|| path.display().to_string())?;
            return self.write_metrics(progress);
        };
        let is_to_come =
            |line: &&[u8]| serde_json::from_slice::<Timing>(line).is_ok_and(|timing| timing.epoch > progress.epoch());
        let lines = bytes.split_inclusive(|&byte| byte == b'\n');
        let kept: Vec<u8> = lines.filter(|line| !is_to_come(line)).flatten().copied().collect();
        if kept.len() < bytes.len() {
            self.write(TIMINGS, &kept)?;
        }
        self.write_metrics(progress)
    }
}
