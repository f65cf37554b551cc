//! Checkpoints: one safetensors file with weights, running statistics, moments and average, and beside them,
//! as metadata, the configuration, the place in the run, and what must be known of the data.

use super::average;
use super::score::Score;
use crate::config::{Changes, RunConfig};
use anyhow::{Context, Result, bail};
use data::{Dataset, Statistics};
use model::{BiFormer, TensorFile};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use tensor::{DType, Tensor};

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

/// What a run must remember of its data: to be used where they are not, and to notice when they have changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataFacts {
    /// The classes' names.
    pub classes: Vec<String>,
    /// What images are normalised by.
    pub statistics: Statistics,
    /// The number of training images.
    pub train_images: usize,
}

impl DataFacts {
    /// Those of a training set.
    pub fn of(train: &dyn Dataset) -> Self {
        Self { classes: train.classes().to_vec(), statistics: train.statistics(), train_images: train.len() }
    }

    /// Checks that other data have the same classes.
    pub fn expect_classes(&self, source: &str, theirs: &[String]) -> Result<()> {
        let ours = &self.classes;
        if theirs == ours {
            return Ok(());
        }
        let what = match theirs.iter().zip(ours).find(|(theirs, ours)| theirs != ours) {
            _ if theirs.len() != ours.len() => format!("{} of them, not {}", theirs.len(), ours.len()),
            Some((theirs, ours)) => format!("\"{theirs}\" where \"{ours}\" should be"),
            None => "in another order".to_owned(),
        };
        bail!("data {source}: other classes than the model was trained on ({what}); name data with those classes")
    }
}

/// What a run must remember.
pub struct Checkpoint {
    /// Where it was read.
    path: PathBuf,
    /// Its configuration.
    pub config: RunConfig,
    /// Its place.
    pub progress: Progress,
    /// What it was trained on.
    pub data: DataFacts,
    /// All tensors.
    pub file: TensorFile,
}

/// A file of weights.
pub enum Stored {
    /// A run's checkpoint, to go on from.
    Run(Box<Checkpoint>),
    /// A model's state_dict alone.
    Weights(TensorFile),
}

impl Stored {
    /// Reads a file, or the checkpoint in a run folder.
    pub fn read(path: &Path) -> Result<Self> {
        let file = if path.is_dir() { &path.join(FILE_NAME) } else { path };
        let shown = file.display().to_string();
        if !file.try_exists().with_context(|| shown.clone())? {
            bail!(
                "{shown}: there is no checkpoint; expected a run folder, the {FILE_NAME} in it, or a safetensors file with \
                 a model's state_dict"
            );
        }
        let stored = TensorFile::read(file)?;
        // Also those that are damaged.
        let by_a_run = stored.metadata.get("format").is_some_and(|format| format.starts_with("biformer"))
            || stored.tensors.contains_key(tensor_names::M);
        if !(by_a_run || path.is_dir()) {
            return Ok(Self::Weights(stored));
        }
        let checkpoint = Checkpoint::parse(file.to_owned(), stored);
        let checkpoint = checkpoint.with_context(|| format!("{shown}: not a checkpoint that can be used"))?;
        Ok(Self::Run(checkpoint.into()))
    }

    /// The weights; averaged, if a run kept an average.
    pub fn into_weights(self) -> Result<TensorFile> {
        match self {
            Self::Weights(file) => Ok(file),
            Self::Run(checkpoint) => Ok(checkpoint.into_model()?.model.state_dict()?),
        }
    }
}

/// A model that was trained, with what is needed to use it.
pub struct TrainedModel {
    /// The model, with the averaged weights and statistics if the run kept an average.
    pub model: BiFormer,
    /// The run's configuration.
    pub config: RunConfig,
    /// What it was trained on.
    pub data: DataFacts,
    /// Whether the classes' names are known, which a state_dict does not have.
    pub named: bool,
}

impl TrainedModel {
    /// The model of a state_dict alone: with the number of classes of its head, and images normalised as the published
    /// models take them. `path` names the file in errors.
    pub fn of_weights(file: TensorFile, path: &str, model: &str, changes: &Changes) -> Result<Self> {
        let mut config = RunConfig::for_model(model)?;
        if let Some(&classes) = file.tensors.get("head.weight").and_then(|head| head.shape().first()) {
            config.architecture.num_classes = classes;
        }
        let config = config.with(changes)?;
        let mut model = BiFormer::blank(&config.architecture, DType::F32)?;
        load_all(&mut model, &file, path)?;
        let classes = (0..config.architecture.num_classes).map(|class| format!("class {class}")).collect();
        let data = DataFacts { classes, statistics: Statistics::IMAGENET, train_images: 0 };
        Ok(Self { model, config, data, named: false })
    }
}

impl Checkpoint {
    /// A checkpoint to be written.
    pub fn new(config: RunConfig, progress: Progress, data: DataFacts, file: TensorFile) -> Self {
        Self { path: PathBuf::new(), config, progress, data, file }
    }

    /// Reads a checkpoint from its file, or from a run folder.
    pub fn read(path: &Path) -> Result<Self> {
        match Stored::read(path)? {
            Stored::Run(checkpoint) => Ok(*checkpoint),
            Stored::Weights(_) => bail!("{}: a model's weights alone, expected a run's checkpoint", path.display()),
        }
    }

    fn parse(path: PathBuf, file: TensorFile) -> Result<Self> {
        let get = |key: &str| {
            let hint = "expected one that \"biformer train\" wrote";
            file.metadata.get(key).map(String::as_str).with_context(|| format!("it says no \"{key}\"; {hint}"))
        };
        let format = get("format")?;
        if format != FORMAT {
            bail!("it is of format \"{format}\", this program reads \"{FORMAT}\"; use the program that wrote it");
        }
        let config = RunConfig::parse(get("config")?)?;
        let progress: Progress = serde_json::from_str(get("progress")?).context("its progress")?;
        let data: DataFacts = serde_json::from_str(get("data")?).context("its data")?;
        let (named, classes) = (data.classes.len(), config.architecture.num_classes);
        if named != classes {
            bail!("it names {named} classes for a model of {classes}");
        }
        config.test_transform(data.statistics).context("its data")?;
        // Before a model is made: a damaged configuration must not ask for more memory than the file is large.
        let (stored, wanted) =
            (file.tensors.values().map(Tensor::count).sum::<usize>(), config.architecture.rough_size());
        if wanted > stored as f64 + 1e6 {
            bail!("it holds {stored} numbers, and its configuration is of a model of {wanted:.0}; take another copy");
        }
        if progress.epoch > config.epochs {
            bail!("it is in epoch {} of a run of {}", progress.epoch + 1, config.epochs);
        }
        Ok(Self { path, config, progress, data, file })
    }

    /// Where it was read.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes it; an old one under that name survives whatever goes wrong.
    pub fn write(mut self, path: &Path) -> Result<()> {
        let metadata = &mut self.file.metadata;
        metadata.insert("format".into(), FORMAT.into());
        metadata.insert("config".into(), self.config.to_toml()?);
        metadata.insert("progress".into(), serde_json::to_string(&self.progress)?);
        metadata.insert("data".into(), serde_json::to_string(&self.data)?);
        Ok(self.file.write(path)?)
    }

    /// The model that was trained.
    pub fn into_model(mut self) -> Result<TrainedModel> {
        let shown = self.path.display().to_string();
        let mut model = BiFormer::blank(&self.config.architecture, DType::F32)?;
        let tensors = &mut self.file.tensors;
        tensors.remove(tensor_names::M);
        tensors.remove(tensor_names::V);
        let averages = [tensor_names::AVERAGE, tensor_names::AVERAGE_STATISTICS].map(|name| tensors.remove(name));
        load_all(&mut model, &self.file, &shown)?;
        match &averages {
            [Some(parameters), Some(statistics)] => {
                average::adopt(&mut model, parameters, statistics).context(shown)?;
            }
            [None, None] => {}
            _ => bail!("{shown}: half of the average is missing; take another copy, or train again"),
        }
        Ok(TrainedModel { model, config: self.config, data: self.data, named: true })
    }
}

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

/// The weights in a run folder or its checkpoint (averaged, if the run kept an average), or in any file of a
/// model's state_dict.
pub fn read_weights(path: &Path) -> Result<TensorFile> {
    Stored::read(path).with_context(|| format!("weights {}", path.display()))?.into_weights()
}

/// Loads weights of which none may be left out: unlike those for another number of classes.
pub fn load_all(model: &mut BiFormer, file: &TensorFile, path: &str) -> Result<()> {
    if let Some(classes) = model.load(file, path)?.head_replaced {
        bail!("{path}: its head has {classes} classes, its configuration {}", model.config().num_classes);
    }
    Ok(())
}
