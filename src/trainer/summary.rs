//! What a run's folder tells of it, without its weights.

use super::checkpoint::{FILE_NAME, Progress};
use super::data_facts::DataFacts;
use super::folder::read;
use super::logs::TIMINGS;
use super::metrics::Timing;
use super::trained::description;
use crate::config::RunConfig;
use anyhow::{Context, Result, bail};
use model::TensorFile;
use std::collections::HashMap;
use std::path::Path;

/// A run, as its checkpoint and its timings tell of it.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Its configuration.
    pub config: RunConfig,
    /// What it is trained on.
    pub data: DataFacts,
    /// How far it has come.
    pub progress: Progress,
    /// How long its epochs took, as far as its timings say; of one within which it was resumed, only the rest. None if
    /// they say nothing.
    pub seconds: Option<f64>,
}

impl Summary {
    /// Of the run in a folder, or of a checkpoint in one. Of the checkpoint, only the metadata are read. Errors: there
    /// is none, or it is damaged.
    pub fn read(path: &Path) -> Result<Self> {
        let file = if path.is_dir() { path.join(FILE_NAME) } else { path.to_owned() };
        let shown = file.display();
        if !file.try_exists().with_context(|| shown.to_string())? {
            bail!("{shown}: there is no checkpoint; expected a run folder");
        }
        let metadata = TensorFile::read_metadata(&file)?;
        let read = Self::parse(&metadata).with_context(|| format!("{shown}: not a checkpoint that can be used"))?;
        let seconds = file.parent().and_then(|folder| seconds(folder, &read.progress));
        Ok(Self { seconds, ..read })
    }

    fn parse(metadata: &HashMap<String, String>) -> Result<Self> {
        let progress = Progress::of(metadata)?;
        let (config, data) = description(metadata)?;
        Ok(Self { config, data, progress, seconds: None })
    }
}

/// How long the epochs that are done took, as the timings in a run folder say.
fn seconds(folder: &Path, progress: &Progress) -> Option<f64> {
    let bytes = read(&folder.join(TIMINGS)).ok()??;
    let timings = bytes.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice::<Timing>(line).ok());
    let done = timings.filter(|timing| timing.epoch <= progress.epoch()).map(|timing| timing.seconds);
    done.fold(None, |sum, seconds| Some(sum.unwrap_or(0.0) + seconds))
}
