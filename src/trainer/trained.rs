//! A trained model: its weights, and what must be known to use them.

use super::average;
use super::checkpoint::tensor_names;
use super::class_names;
use super::data_facts::DataFacts;
use super::stored::Stored;
use crate::config::{Changes, DEFAULT_MODEL, RunConfig};
use crate::printing::tell;
use anyhow::{Context, Result, bail};
use data::Statistics;
use model::{BiFormer, TensorFile, recognised};
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use tensor::{DType, Tensor};

/// What the metadata of weights that [`TrainedModel::export`] wrote calls their format.
pub(super) const FORMAT: &str = "biformer-weights-2";

/// Prints a note that, for weights without a description, images are assumed to be normalised as ImageNet's. It is left
/// out where that goes without saying, or where a mean is configured.
pub fn note_unsaid(config: &RunConfig, goes_without_saying: bool) {
    if !goes_without_saying && config.preprocessing.mean.is_empty() {
        tell!(
            io::stderr(),
            "note: weights alone do not say how images were normalised; it is taken to be as ImageNet's are \
             (--set preprocessing.mean=R,G,B preprocessing.std=R,G,B)"
        );
    }
}

/// Weights with a description of the run that they are from: those in its checkpoint, or those that were exported from
/// it.
pub struct Described {
    /// Where they were read.
    path: PathBuf,
    /// The run's configuration.
    pub config: RunConfig,
    /// What they were trained on.
    pub data: DataFacts,
    /// Its tensors. Those that are only needed to go on are among them where a
    /// [`Checkpoint`](super::checkpoint::Checkpoint) was read as such.
    pub file: TensorFile,
}

impl fmt::Debug for Described {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Described")
            .field("path", &self.path)
            .field("model", &self.config.model)
            .field("classes", &self.data.classes.len())
            .field("file", &self.file)
            .finish_non_exhaustive()
    }
}

impl Described {
    /// Weights to be written.
    pub fn new(config: RunConfig, data: DataFacts, file: TensorFile) -> Self {
        Self { path: PathBuf::new(), config, data, file }
    }

    /// The weights in a file that was read. Errors: their description is missing or invalid.
    pub fn parse(path: PathBuf, file: TensorFile) -> Result<Self> {
        let (config, data) = description(&file.metadata)?;
        let (named, classes) = (data.classes.len(), config.architecture.num_classes);
        if named != classes {
            bail!("it names {named} classes for a model of {classes}");
        }
        config.test_transform(data.statistics).context("its data")?;
        // Checked before a model is built: a damaged configuration must not ask for much more memory than the file
        // takes.
        let (stored, wanted) =
            (file.tensors.values().map(Tensor::count).sum::<usize>(), config.architecture.rough_size());
        if wanted > stored as f64 + 1e6 {
            bail!("it holds {stored} numbers, and its configuration is of a model of {wanted:.0}; take another copy");
        }
        Ok(Self { path, config, data, file })
    }

    /// Where they were read.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file, with this format and the description added to its metadata.
    pub(super) fn into_file(mut self, format: &str) -> Result<TensorFile> {
        let metadata = &mut self.file.metadata;
        metadata.insert("format".into(), format.into());
        metadata.insert("config".into(), self.config.to_toml()?);
        metadata.insert("data".into(), serde_json::to_string(&self.data)?);
        Ok(self.file)
    }

    /// Drops the average, so that the weights are those of the last step. Returns false if they cannot be: in a file
    /// that was exported, the average has already taken their place.
    pub fn drop_average(&mut self) -> bool {
        let of_average = [tensor_names::AVERAGE, tensor_names::AVERAGE_STATISTICS];
        let dropped = of_average.map(|name| self.file.tensors.remove(name)).iter().any(Option::is_some);
        dropped || !self.config.ema.enabled
    }

    /// The model that was trained. Errors: weights, or an average, that do not fit the configuration's model.
    pub fn into_model(mut self) -> Result<TrainedModel> {
        let shown = self.path.display().to_string();
        let mut model = BiFormer::blank(&self.config.architecture, DType::F32)?;
        let tensors = &mut self.file.tensors;
        tensors.remove(tensor_names::M);
        tensors.remove(tensor_names::V);
        let averages = [tensor_names::AVERAGE, tensor_names::AVERAGE_STATISTICS].map(|name| tensors.remove(name));
        model.load(&self.file, &shown)?;
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

/// What a file's metadata describe: the run's configuration, and what it was trained on.
pub(super) fn description(metadata: &HashMap<String, String>) -> Result<(RunConfig, DataFacts)> {
    let config = RunConfig::parse(entry(metadata, "config")?)?;
    Ok((config, serde_json::from_str(entry(metadata, "data")?).context("its data")?))
}

/// An entry of a file's metadata.
pub(super) fn entry<'m>(metadata: &'m HashMap<String, String>, key: &str) -> Result<&'m str> {
    metadata.get(key).map(String::as_str).with_context(|| {
        format!("it says no \"{key}\"; expected one that \"biformer train\" or \"biformer export\" wrote")
    })
}

/// A model that was trained, with what is needed to use it.
pub struct TrainedModel {
    /// The model, with the averaged weights and statistics if the run kept an average.
    pub model: BiFormer,
    /// The run's configuration.
    pub config: RunConfig,
    /// What it was trained on.
    pub data: DataFacts,
    /// Whether the class names come with the weights; a state_dict alone has none.
    pub named: bool,
}

impl fmt::Debug for TrainedModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainedModel")
            .field("model", &self.model)
            .field("classes", &self.data.classes.len())
            .field("named", &self.named)
            .finish_non_exhaustive()
    }
}

impl TrainedModel {
    /// The model of a run folder, or of a file that `biformer export` wrote. Errors: those of [`Stored::read`]; a
    /// state_dict alone, which does not say what it is of ([`of_weights`](Self::of_weights)).
    pub fn read(path: &Path) -> Result<Self> {
        match Stored::read(path)? {
            Stored::Described(described, _) => described.into_model(),
            Stored::Alone(_) => bail!(
                "{}: a state_dict alone, without class names; expected a run folder, or what \"biformer export\" wrote",
                path.display()
            ),
        }
    }

    /// The model of a state_dict alone: it has as many classes as the head of the state_dict, which get ImageNet's
    /// names if they are 1,000, and its images are normalised as for the published models. `path` names the file in
    /// errors.
    pub fn of_weights(file: TensorFile, path: &str, model: &str, changes: &Changes) -> Result<Self> {
        if file.head_classes().is_none() && recognised(&file)?.is_some() {
            bail!(
                "{path}: there is no head in it, so it tells no classes apart; train one: biformer train --weights {path} \
                 --data DATA --out RUN"
            );
        }
        let config = config_of(&file, model)?.of_trained(changes)?;
        let mut model = BiFormer::blank(&config.architecture, DType::F32)?;
        model.load(&file, path)?;
        let data = DataFacts::unknown(class_names::usual(config.architecture.num_classes), Statistics::IMAGENET);
        Ok(Self { model, config, data, named: false })
    }

    /// The weights alone under their state_dict names, as other programs read them; the metadata, which those skip,
    /// have all that this one needs to use them. Of a model with layers of one's own
    /// ([`BiFormer::with`]) it has those as well, but this program reads it no longer. Errors: a configuration or
    /// classes of another model.
    pub fn export(&self) -> Result<TensorFile> {
        let (own, described) = (self.model.config(), &self.config.architecture);
        if own != described {
            bail!("the model is not the one that config.architecture describes: it has {own:?}, not {described:?}");
        }
        if self.data.classes.len() != own.num_classes {
            bail!("there are {} names for the model's {} classes", self.data.classes.len(), own.num_classes);
        }
        Described::new(self.config.clone(), self.data.clone(), self.model.state_dict()?).into_file(FORMAT)
    }
}

/// The configuration of a state_dict alone, of the model of this name: it has as many classes as its head. Errors:
/// there is no model of this name.
pub fn config_of(file: &TensorFile, model: &str) -> Result<RunConfig> {
    let mut config = RunConfig::for_model(model)?;
    let architecture = &mut config.architecture;
    architecture.num_classes = file.head_classes().unwrap_or(architecture.num_classes);
    Ok(config)
}

/// The name of the model whose tensors a state_dict alone has. `path` and `way_out` are for the error if the program
/// knows none.
pub fn name_of(file: &TensorFile, path: &Path, way_out: &str) -> Result<&'static str> {
    let Some(preset) = recognised(file)? else {
        bail!("{}: weights alone, and of none of the models that the program knows{way_out}", path.display());
    };
    Ok(preset.name)
}

/// The same, or the default model's: where others can be loaded, the error tells how their tensors differ.
pub fn name_or_default(file: &TensorFile) -> Result<&'static str> {
    Ok(recognised(file)?.map_or(DEFAULT_MODEL, |preset| preset.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_not_exported_under_another_ones_description() -> Result<()> {
        let config = RunConfig::for_model("nano")?;
        let exported = |fields: &[&str], classes: usize| {
            let model = BiFormer::blank(&config.architecture.with_overrides(fields.iter().copied())?, DType::F32)?;
            let data = DataFacts::unknown(class_names::usual(classes), Statistics::IMAGENET);
            TrainedModel { model, config: config.clone(), data, named: true }.export()
        };
        exported(&[], 10)?;
        for (fields, classes, said) in [(&["topks=1,1,-2"][..], 10, "is not the one"), (&[], 2, "2 names for")] {
            let refused = exported(fields, classes).unwrap_err().to_string();
            assert!(refused.contains(said), "{refused}");
        }
        Ok(())
    }

    #[test]
    fn what_is_printed_of_weights_does_not_grow_with_their_classes() -> Result<()> {
        let data = DataFacts::unknown(class_names::usual(1000), Statistics::IMAGENET);
        let described = Described::new(RunConfig::for_model("tiny")?, data, TensorFile::default());
        let shown = format!("{:?}", Stored::Described(Box::new(described), None));
        assert!(shown.contains("classes: 1000") && shown.len() < 200, "{shown}");
        Ok(())
    }
}
