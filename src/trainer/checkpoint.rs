//! Checkpoints: one safetensors file with weights, running statistics, moments and average, and beside them,
//! as metadata, the configuration, the place in the run, and what must be known of the data.

use super::data_facts::DataFacts;
use super::metrics::EpochMetrics;
use super::score::Score;
use super::trained::{self, Described, entry};
use crate::config::RunConfig;
use anyhow::{Context, Result, bail};
use model::TensorFile;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// The name of a run folder's checkpoint.
pub const FILE_NAME: &str = data::OF_A_RUN;

/// Names of the tensors that a checkpoint holds beside the model's.
pub mod tensor_names {
    /// AdamW's first moments, flat.
    pub const M: &str = "optimizer.m";
    /// AdamW's second moments, flat.
    pub const V: &str = "optimizer.v";
    /// The averaged parameters, flat.
    pub const AVERAGE: &str = "average.parameters";
    /// The averaged statistics of the BatchNorms, flat.
    pub const AVERAGE_STATISTICS: &str = "average.statistics";
}

/// What the metadata of checkpoints call their format.
pub(super) const FORMAT: &str = "biformer-checkpoint-2";
/// The entry of the metadata that says what computed the run so far.
const COMPUTED_BY: &str = "computed_by";

/// The place in a run. With the configuration it determines everything that is still to come.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Progress {
    /// The metrics of all epochs that are done, in their order.
    pub epochs: Vec<EpochMetrics>,
    /// Batches of the current epoch that are done.
    pub batch: usize,
    /// The score on them.
    pub score: Score,
    /// Steps that the optimiser took.
    pub optimizer_steps: u64,
    /// Updates that the average took.
    pub average_updates: u64,
}

impl Progress {
    /// How many epochs are done.
    pub fn epoch(&self) -> usize {
        self.epochs.len()
    }

    /// What a checkpoint's metadata say. Errors: they are no checkpoint's, or those of [`parse`](Self::parse).
    pub(super) fn of(metadata: &HashMap<String, String>) -> Result<Self> {
        match entry(metadata, "format")? {
            FORMAT => Self::parse(entry(metadata, "progress")?).context("its progress"),
            trained::FORMAT => bail!("it has weights alone, as \"biformer export\" writes them"),
            format => {
                bail!("it is of format \"{format}\", this program reads \"{FORMAT}\"; use the program that wrote it")
            }
        }
    }

    /// Reads it from where a checkpoint has it. Errors: epochs that are not numbered from 1 on, and impossible scores.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let progress: Self = serde_json::from_str(text)?;
        if let Some((number, line)) = (1..).zip(&progress.epochs).find(|(number, line)| *number != line.epoch) {
            bail!("epoch {} stands where epoch {number} should", line.epoch);
        }
        let shares = |line: &EpochMetrics| {
            [line.train_accuracy, line.test_accuracy, line.test_top5, line.test_macro_accuracy.unwrap_or_default()]
        };
        if let Some(share) = progress.epochs.iter().flat_map(shares).find(|share| !(0.0..=1.0).contains(share)) {
            bail!("an accuracy is {share}, not 0 to 1");
        }
        let Score { right, right_in_five, images, .. } = progress.score;
        if right.max(right_in_five) > images {
            bail!("more of an epoch's first {images} images are right than there are");
        }
        Ok(progress)
    }
}

/// What a run must remember.
pub struct Checkpoint {
    /// Its weights, and all else that it has learned.
    pub described: Described,
    /// Its place.
    pub progress: Progress,
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint")
            .field("described", &self.described)
            .field("epochs", &self.progress.epoch())
            .finish_non_exhaustive()
    }
}

impl Checkpoint {
    /// A checkpoint to be written. `computed_by` is the hardware that computes the run, as
    /// [`Compute::computed_by`](crate::device::Compute::computed_by) names it.
    pub fn new(
        config: RunConfig,
        progress: Progress,
        data: DataFacts,
        mut file: TensorFile,
        computed_by: String,
    ) -> Self {
        file.metadata.insert(COMPUTED_BY.into(), computed_by);
        Self { described: Described::new(config, data, file), progress }
    }

    /// Reads a checkpoint from its file. Errors: it cannot be read, is damaged, or is none from which a run can go on.
    pub fn read(path: &Path) -> Result<Self> {
        Self::parse(path.to_owned(), TensorFile::read(path)?)
    }

    /// The progress that a checkpoint stores; of the file, only the metadata are read.
    pub(super) fn read_progress(path: &Path) -> Result<Progress> {
        Progress::of(&TensorFile::read_metadata(path)?)
    }

    pub(super) fn parse(path: PathBuf, file: TensorFile) -> Result<Self> {
        let shown = path.display().to_string();
        let parse = || {
            if file.metadata.get("format").is_some_and(|format| format == trained::FORMAT) {
                bail!(
                    "it has weights alone, as \"biformer export\" writes them, from which no run can go on; start a new \
                     one with --weights"
                );
            }
            let progress = Progress::of(&file.metadata)?;
            let described = Described::parse(path, file)?;
            if progress.epoch() > described.config.epochs {
                bail!("it is in epoch {} of a run of {}", progress.epoch() + 1, described.config.epochs);
            }
            let (images, most) = (progress.score.images, progress.batch.saturating_mul(described.config.batch_size));
            if images > most as u64 {
                bail!("{images} images of the epoch are done, more than {} batches have", progress.batch);
            }
            Ok(Self { described, progress })
        };
        parse().with_context(|| format!("{shown}: not a checkpoint that can be used"))
    }

    /// The hardware that has computed the run so far, if the file says.
    pub fn computed_by(&self) -> Option<&str> {
        self.described.file.metadata.get(COMPUTED_BY).map(String::as_str)
    }

    /// Where it was read.
    pub fn path(&self) -> &Path {
        self.described.path()
    }

    /// Writes it. If anything goes wrong, an old checkpoint under that name is left intact. Errors: those of
    /// [`TensorFile::write`].
    pub fn write(self, path: &Path) -> Result<()> {
        let mut file = self.described.into_file(FORMAT)?;
        file.metadata.insert("progress".into(), serde_json::to_string(&self.progress)?);
        Ok(file.write(path)?)
    }
}
