//! The logs in a run folder: a line for each epoch, of its metrics and of its timing. They may be edited or damaged, which
//! must not keep a run from going on.

use super::checkpoint::Progress;
use super::folder::{RunFolder, read};
use super::metrics::{EpochMetrics, Timing};
use crate::printing::{plural, tell};
use anyhow::Result;
use serde::de::DeserializeOwned;
use std::io;
use std::path::Path;

pub(super) const METRICS: &str = "metrics.jsonl";
pub(super) const TIMINGS: &str = "timings.jsonl";

impl RunFolder {
    /// All epochs' metrics.
    pub fn metrics(&self) -> Result<Vec<EpochMetrics>> {
        metrics_in(self.path())
    }

    /// Adds an epoch's lines.
    pub fn append(&self, metrics: &EpochMetrics, timing: &Timing) -> Result<()> {
        self.append_line(METRICS, &serde_json::to_string(metrics)?)?;
        self.append_line(TIMINGS, &serde_json::to_string(timing)?)
    }

    fn append_line(&self, name: &str, line: &str) -> Result<()> {
        let mut bytes = read(&self.path().join(name))?;
        if bytes.last().is_some_and(|&last| last != b'\n') {
            bytes.push(b'\n');
        }
        bytes.extend(line.bytes().chain([b'\n']));
        self.write(name, &bytes)
    }

    /// Removes the lines of epochs that are still to come at this place of the run, and completes the metrics.
    pub(super) fn rewind_logs(&self, progress: &Progress) -> Result<()> {
        self.retain_lines::<EpochMetrics>(METRICS, |line| line.epoch <= progress.epoch)?;
        self.retain_lines::<Timing>(TIMINGS, |line| line.epoch <= progress.epoch)?;
        self.complete_metrics(progress)
    }

    fn complete_metrics(&self, progress: &Progress) -> Result<()> {
        let (lines, best) = (lines::<EpochMetrics>(&self.path().join(METRICS))?, self.best_progress());
        let mut missing: Vec<usize> = (1..=progress.epoch).collect();
        missing.retain(|&epoch| lines.iter().all(|(_, line)| line.is_none_or(|line| line.epoch != epoch)));
        let known = [Some(progress), best.as_ref()].into_iter().filter_map(|progress| progress?.last);
        let mut known: Vec<EpochMetrics> = known.filter(|last| missing.contains(&last.epoch)).collect();
        known.sort_by_key(|last| last.epoch);
        known.dedup_by_key(|last| last.epoch);
        missing.retain(|&epoch| known.iter().all(|last| last.epoch != epoch));
        if !known.is_empty() {
            // A line that is not an epoch's stays behind the one that it follows.
            let mut epoch = 0;
            let mut placed: Vec<(usize, Vec<u8>)> = vec![];
            for (bytes, line) in lines {
                epoch = line.map_or(epoch, |line| line.epoch);
                placed.push((epoch, bytes));
            }
            for last in known {
                placed.push((last.epoch, serde_json::to_vec(&last)?));
            }
            placed.sort_by_key(|&(epoch, _)| epoch);
            self.write(METRICS, &joined(placed.into_iter().map(|(_, bytes)| bytes)))?;
        }
        if !missing.is_empty() {
            const MAX_NAMED: usize = 10;
            let (s, others) = (plural(missing.len()), missing.len().saturating_sub(MAX_NAMED));
            let named = missing.iter().take(MAX_NAMED).map(usize::to_string).collect::<Vec<_>>().join(", ");
            let others = if others > 0 { format!(" and {others} others") } else { String::new() };
            tell!(
                io::stderr(),
                "note: {} has no line of epoch{s} {named}{others}; another copy of the run may have",
                self.path().join(METRICS).display()
            );
        }
        Ok(())
    }

    fn retain_lines<T: DeserializeOwned>(&self, name: &str, fits: impl Fn(&T) -> bool) -> Result<()> {
        let path = self.path().join(name);
        let lines = lines::<T>(&path)?;
        let strange = |(bytes, line): &(Vec<u8>, Option<T>)| line.is_none() && !bytes.trim_ascii().is_empty();
        if let Some(first) = lines.iter().position(strange) {
            let others = match lines[first + 1..].iter().filter(|line| strange(line)).count() {
                0 => String::new(),
                count => format!(", and so {} {count} other{}", if count == 1 { "is" } else { "are" }, plural(count)),
            };
            tell!(io::stderr(), "note: {} line {} is not an epoch's, and ignored{others}", path.display(), first + 1);
        }
        let count = lines.len();
        let kept = lines.into_iter().filter(|(_, line)| line.as_ref().is_none_or(&fits));
        let kept: Vec<Vec<u8>> = kept.map(|(bytes, _)| bytes).collect();
        if kept.len() == count { Ok(()) } else { self.write(name, &joined(kept)) }
    }
}

/// The metrics of all epochs in a run folder, whose run may be in progress; an empty list if there is no metrics file.
pub fn metrics_in(folder: &Path) -> Result<Vec<EpochMetrics>> {
    Ok(lines(&folder.join(METRICS))?.into_iter().filter_map(|(_, line)| line).collect())
}

/// The lines of a JSON Lines file, with what they say; `None` for one that is not an epoch's.
fn lines<T: DeserializeOwned>(path: &Path) -> Result<Vec<(Vec<u8>, Option<T>)>> {
    let mut bytes = read(path)?;
    if bytes.last() == Some(&b'\n') {
        bytes.pop();
    }
    if bytes.is_empty() {
        return Ok(vec![]);
    }
    Ok(bytes.split(|&byte| byte == b'\n').map(|line| (line.to_vec(), serde_json::from_slice(line).ok())).collect())
}

/// Lines, each with its end.
fn joined(lines: impl IntoIterator<Item = Vec<u8>>) -> Vec<u8> {
    lines.into_iter().flat_map(|line| line.into_iter().chain([b'\n'])).collect()
}
