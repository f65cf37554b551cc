//! A trained model: its weights, and what must be known to use them.

use super::average;
use super::images::Images;
use crate::config::{Changes, RunConfig};
use crate::printing::tell;
use anyhow::{Context, Result, bail};
use data::{Dataset, Split, Statistics, fingerprint, imagenet_classes};
use model::{BiFormer, ModelConfig, TensorFile, preset};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use tensor::{DType, Tensor};

/// What the metadata of weights that [`TrainedModel::export`] wrote calls their format.
pub const FORMAT: &str = "biformer-weights-1";

/// What errors add to the name of a data source that comes from the run and not from the command line.
pub const OF_THE_RUN: &str = " (as the run had it; --data says where it is now)";

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

/// What a run must remember of its data: so that its model can be used where the data are not available, and so that
/// changes in the data are noticed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataFacts {
    /// The classes' names.
    pub classes: Vec<String>,
    /// What images are normalised by.
    pub statistics: Statistics,
    /// The number of training images.
    pub train_images: usize,
    /// The number of images that training is tested on.
    #[serde(default)] // absent from the files of older runs
    pub test_images: Option<usize>,
    /// The training images' [`fingerprint`].
    #[serde(default)]
    pub train_fingerprint: Option<String>,
    /// The test images' fingerprint.
    #[serde(default)]
    pub test_fingerprint: Option<String>,
    /// Which split of the data set the test images were.
    #[serde(default)]
    pub test_split: Option<Split>,
    /// Whether the test images were held out of the training images, because the data have no test split.
    #[serde(default)]
    pub held_out: bool,
    /// The last epoch that was tested on other images: accuracies up to it do not compare with later ones. 0 if there is
    /// none.
    #[serde(default)]
    pub comparable_after: usize,
}

impl DataFacts {
    /// Those of a run's images.
    pub fn of(images: &Images) -> Self {
        let (train, test) = (images.train(), images.test());
        let (classes, statistics) = (train.classes().to_vec(), train.statistics());
        let (train_images, test_images, held_out) = (train.len(), Some(test.len()), test.is_held_out());
        let [train_fingerprint, test_fingerprint] = [train, test].map(|dataset| Some(fingerprint(dataset)));
        let test_split = images.test_split();
        Self {
            classes,
            statistics,
            train_images,
            test_images,
            train_fingerprint,
            test_fingerprint,
            test_split,
            held_out,
            comparable_after: 0,
        }
    }

    /// What the images are called that training is tested on.
    pub fn tested_on(&self) -> &'static str {
        if self.test_split == Some(Split::Val) { "validation" } else { "test" }
    }

    /// Lets a run continue on these images after so many epochs. The training images must be the same as before, by their
    /// classes, number, labels and names. If the test images are others, prints a note; from now on they are the run's.
    pub fn take_up(&mut self, source: &str, images: &Images, epochs: usize) -> Result<()> {
        self.ensure_classes(source, images.train().classes())?;
        let (count, before) = (images.train().len(), self.train_images);
        if count != before && images.test().is_held_out() && !self.held_out {
            bail!("data {source}: it has neither val/ nor test/; bring back what the run was tested on");
        }
        let [trained_on, tested_on] = [images.train(), images.test()].map(fingerprint);
        let others = match self.train_fingerprint.replace(trained_on.clone()) {
            _ if count != before => Some(format!("{count} training images, the run began with {before}")),
            Some(known) if known != trained_on => Some("other training images, by their names or classes".to_owned()),
            _ => None,
        };
        if let Some(others) = others {
            bail!(
                "data {source}: {others}; go on with those that the run began with (--data), or anew from what it has learned \
                 (--weights RUN --out NEW)"
            );
        }
        self.held_out = images.test().is_held_out();
        let now = images.test().len();
        let were = self.test_images.replace(now).unwrap_or(now);
        let known = self.test_fingerprint.replace(tested_on.clone());
        let part = self.test_split.and_then(|before| Some((before, images.test_split()?)));
        self.test_split = images.test_split();
        let others = if part.is_some_and(|(before, now)| before != now) {
            Some("the test images are those of another folder".to_owned())
        } else if were != now {
            Some(format!("there are {now} test images, and were {were}"))
        } else if known.is_some_and(|known| known != tested_on) {
            Some("the test images are others".to_owned())
        } else {
            None
        };
        if let Some(others) = others {
            self.comparable_after = epochs;
            tell!(io::stderr(), "note: {others}: accuracies do not compare with those before");
        }
        Ok(())
    }

    /// A note for the user if these images, a split of the run's own data, are not those that the run used.
    pub fn differ(&self, source: &str, split: Split, images: &dyn Dataset) -> Option<String> {
        let evaluated = if self.held_out { Split::Test } else { Split::evaluated(source) };
        let (known, how) = match split {
            Split::Train => (&self.train_fingerprint, "trained"),
            split if split == evaluated => (&self.test_fingerprint, "tested"),
            _ => return None,
        };
        // Another split may have the same file names.
        let of_another_part = split == evaluated && self.test_split.is_some_and(|part| part != split);
        let others = of_another_part || known.as_ref().is_some_and(|known| *known != fingerprint(images));
        others.then(|| {
            format!("these are not the images that the run was {how} on, by their folder, number, names or classes")
        })
    }

    /// Checks that other data have the same classes.
    fn ensure_classes(&self, source: &str, theirs: &[String]) -> Result<()> {
        let ours = &self.classes;
        let what = match theirs.iter().zip(ours).find(|(theirs, ours)| theirs != ours) {
            _ if theirs.len() != ours.len() => format!("{} of them, not {}", theirs.len(), ours.len()),
            Some((theirs, ours)) => format!("\"{theirs}\" where \"{ours}\" should be"),
            None => return Ok(()),
        };
        bail!(
            "data {source}: other classes than the model was trained on ({what}); name data with those classes, or begin anew from \
             what it has learned (--weights RUN --out NEW)"
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
    /// All tensors, in a checkpoint also those that are only needed to go on.
    pub file: TensorFile,
}

impl Described {
    /// Weights to be written.
    pub fn new(config: RunConfig, data: DataFacts, file: TensorFile) -> Self {
        Self { path: PathBuf::new(), config, data, file }
    }

    /// The weights in a file that was read. Errors: their description is missing or invalid.
    pub fn parse(path: PathBuf, file: TensorFile) -> Result<Self> {
        let config = RunConfig::parse(entry(&file, "config")?)?;
        let data: DataFacts = serde_json::from_str(entry(&file, "data")?).context("its data")?;
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
    pub fn into_file(mut self, format: &str) -> Result<TensorFile> {
        let metadata = &mut self.file.metadata;
        metadata.insert("format".into(), format.into());
        metadata.insert("config".into(), self.config.to_toml()?);
        metadata.insert("data".into(), serde_json::to_string(&self.data)?);
        Ok(self.file)
    }

    /// The model that was trained.
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

/// An entry of a file's metadata.
pub fn entry<'f>(file: &'f TensorFile, key: &str) -> Result<&'f str> {
    file.metadata.get(key).map(String::as_str).with_context(|| {
        format!("it says no \"{key}\"; expected one that \"biformer train\" or \"biformer export\" wrote")
    })
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

impl TrainedModel {
    /// The model of a state_dict alone: it has as many classes as the head of the state_dict, which get ImageNet's
    /// names if they are 1,000, and its images are normalised as for the published models. `path` names the file in
    /// errors.
    pub fn of_weights(file: TensorFile, path: &str, model: &str, changes: &Changes) -> Result<Self> {
        let config = RunConfig { architecture: architecture(&file, model)?, ..RunConfig::for_model(model)? };
        let config = config.of_trained(changes)?;
        let mut model = BiFormer::blank(&config.architecture, DType::F32)?;
        model.load(&file, path)?;
        let classes = match config.architecture.num_classes {
            1000 => imagenet_classes(),
            count => (0..count).map(|class| format!("class {class}")).collect(),
        };
        let data = DataFacts {
            classes,
            statistics: Statistics::IMAGENET,
            train_images: 0,
            test_images: None,
            train_fingerprint: None,
            test_fingerprint: None,
            test_split: None,
            held_out: false,
            comparable_after: 0,
        };
        Ok(Self { model, config, data, named: false })
    }

    /// The weights alone under their state_dict names, as other programs read them; the metadata, which those skip,
    /// have all that this one needs to use them.
    pub fn export(self) -> Result<TensorFile> {
        Described::new(self.config, self.data, self.model.state_dict()?).into_file(FORMAT)
    }
}

/// The model of this name, with as many classes as a state_dict's head has.
pub fn architecture(file: &TensorFile, model: &str) -> Result<ModelConfig> {
    let config = preset(model)?.config();
    Ok(ModelConfig { num_classes: file.head_classes().unwrap_or(config.num_classes), ..config })
}
