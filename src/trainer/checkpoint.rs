//! Checkpoints: one safetensors file with weights, running statistics, moments and average, and beside them,
//! as metadata, the configuration, the classes' names and the place in the run.

use super::step::{Score, checkpoint_names, take_average};
use crate::config::RunConfig;
use anyhow::{Context, Result, bail};
use model::{BiFormer, TensorFile};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use tensor::DType;

/// The name of a run folder's checkpoint.
pub const FILE_NAME: &str = "checkpoint.safetensors";
const FORMAT: &str = "biformer-checkpoint-1";

/// The place in a run. With the configuration it determines everything that is still to come.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Progress {
    /// Epochs that are done.
    pub epoch: usize,
    /// Batches of the current epoch that are done.
    pub batch: usize,
    /// The score on them.
    pub score: Score,
    /// Steps that the optimiser took.
    pub optimizer_steps: u64,
    /// Updates that the average took.
    pub average_updates: u64,
}

/// What a run must remember.
pub struct Checkpoint {
    /// Its configuration.
    pub config: RunConfig,
    /// Its place.
    pub progress: Progress,
    /// The classes' names.
    pub classes: Vec<String>,
    /// All tensors.
    pub file: TensorFile,
}

impl Checkpoint {
    /// Reads a checkpoint from its file, or from a run folder.
    pub fn read(path: &Path) -> Result<Self> {
        let path = if path.is_dir() { path.join(FILE_NAME) } else { PathBuf::from(path) };
        let shown = path.display();
        if !path.exists() {
            bail!("{shown}: there is no checkpoint; give a run folder, or the {FILE_NAME} in it");
        }
        let file = TensorFile::read(&path)?;
        let get = |key: &str| {
            file.metadata.get(key).with_context(|| format!("{shown}: not a checkpoint of this program (no \"{key}\")"))
        };
        let format = get("format")?;
        if format != FORMAT {
            bail!("{shown}: a checkpoint of format \"{format}\", this program reads \"{FORMAT}\"");
        }
        let config = RunConfig::parse(get("config")?).with_context(|| format!("{shown}"))?;
        let progress = serde_json::from_str(get("progress")?).with_context(|| format!("{shown}: its progress"))?;
        let classes: Vec<String> =
            serde_json::from_str(get("classes")?).with_context(|| format!("{shown}: its classes"))?;
        if classes.len() != config.architecture.num_classes {
            bail!("{shown}: {} class names for a model of {} classes", classes.len(), config.architecture.num_classes);
        }
        Ok(Self { config, progress, classes, file })
    }

    /// Writes it; an old one under that name survives whatever goes wrong.
    pub fn write(mut self, path: &Path) -> Result<()> {
        let metadata = &mut self.file.metadata;
        metadata.insert("format".into(), FORMAT.into());
        metadata.insert("config".into(), self.config.to_toml()?);
        metadata.insert("progress".into(), serde_json::to_string(&self.progress)?);
        metadata.insert("classes".into(), serde_json::to_string(&self.classes)?);
        Ok(self.file.write(path)?)
    }

    /// The trained model: with the averaged weights, if the run kept an average.
    pub fn into_model(mut self, path: &Path) -> Result<(BiFormer, RunConfig, Vec<String>)> {
        let mut model = BiFormer::new(&self.config.architecture, 0, DType::F32)?;
        let tensors = &mut self.file.tensors;
        tensors.remove(checkpoint_names::M);
        tensors.remove(checkpoint_names::V);
        let average = tensors.remove(checkpoint_names::AVERAGE);
        model.load(&self.file, &path.display().to_string())?;
        if let Some(average) = average {
            take_average(&mut model.parameters, &average).with_context(|| path.display().to_string())?;
        }
        Ok((model, self.config, self.classes))
    }
}
