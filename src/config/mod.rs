//! The configuration of a run: what can be set in a TOML file and on the command line.

mod average;
mod changes;
mod fields;
mod idle;
mod measure;
mod older;
mod preprocessing;
mod rates;
mod recompute;
mod schedule;

pub use average::AverageConfig;
pub use changes::{Changes, DEFAULT_MODEL, merge};
pub use fields::show;
pub use measure::Measure;
pub use preprocessing::Preprocessing;
pub use recompute::Recompute;
pub use schedule::{ScheduleConfig, ScheduleKind};

use crate::device::{Compute, DeviceName, Precision};
use crate::paths::{MAX_TEXT, names_same};
use crate::printing::one_line;
use crate::threads::MAX_THREADS;
use anyhow::{Context, Result, bail};
use changes::{parse_table, usual_folder};
use data::Augmentation;
use fields::{computes_as_zero, differences};
use model::{Features, ModelConfig, in_plain_words, preset};
use optim::{AdamWConfig, EmaConfig, Schedule};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use toml::Table;

/// The most epochs, and images in a batch.
pub const MAX_COUNT: usize = 1 << 20;

/// Fields that may change when a run is resumed. All others determined what has already been computed.
const CHANGEABLE: [&str; 10] = [
    "data",
    "out",
    "epochs",
    "device",
    "precision",
    "threads",
    "recompute",
    "max_bad_images",
    "checkpoint_every",
    "best_by",
];

/// Fields that change no bit of a result.
const WITHOUT_EFFECT: [&str; 4] = ["out", "threads", "recompute", "checkpoint_every"];

/// Everything that decides what a training run computes. The effective one is written to the run folder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// The model that `architecture` starts from.
    pub model: String,
    /// `embedded`, or the folder of a data set, relative to the folder that the program is started in; a run keeps its
    /// absolute path.
    pub data: String,
    /// Weights to start from: a run folder, its checkpoint, what `export` wrote, or another state_dict, in a
    /// safetensors or `.pth` file, of which a run keeps the absolute path; empty to start from random ones. If the run
    /// names no other model, it takes theirs and, except from a bare state_dict, their `image_size`. If their head is
    /// for other classes, those that the data have as well are copied by name; all others, or a missing head, start
    /// random.
    pub weights: String,
    /// Whether `weights` must have all tensors of this model and no others, except for the head. If false, those of the
    /// same name and shape are taken over, and the model's others start random: for a model that differs in a part.
    #[serde(default = "older::is_strict")]
    pub strict_weights: bool,
    /// Parts of the model that are not trained, by the first parts of their parameters' names: `["downsample_layers",
    /// "stages.0"]`. Their BatchNorms keep their running statistics unchanged, and normalise by them.
    pub freeze: Vec<String>,
    /// The learning rate of everything but the head, as a share of the schedule's, above 0 and up to 1: less for
    /// weights that are good already, to which a new head is to be added. `layer_decay` reduces it further.
    pub backbone_lr: f64,
    /// What the learning rate is multiplied by from each block to the one before it, and from the head to the last
    /// block, above 0 and up to 1: early layers of good weights need less change (ELECTRA, 2020; timm's `layer_decay`).
    #[serde(default = "older::no_decay")]
    pub layer_decay: f64,
    /// The run folder.
    pub out: PathBuf,
    /// Passes over the training images, 1 to 1048576.
    pub epochs: usize,
    /// Images per step, 1 to 1048576; if it is not given, reduced for small data sets to a quarter of the training
    /// images, but not below 4, or all of them if there are fewer. Images left over at the end of an epoch, too few for
    /// a batch, are skipped; which ones differs from epoch to epoch.
    pub batch_size: usize,
    /// Parts that a batch is computed in, one after the other, to save memory; their gradients add up. A divisor of
    /// `batch_size`.
    pub micro_batches: usize,
    /// What the backward pass computes again instead of keeping it. The results have the same bits either way.
    pub recompute: Recompute,
    /// The side of the images as the model sees them.
    pub image_size: usize,
    /// Decides initial weights, order, augmentation and dropped branches.
    pub seed: u64,
    /// Threads, up to 1024, of which at most 8 per core are used; 0 for one per core, or as many as `RAYON_NUM_THREADS`
    /// says.
    pub threads: usize,
    /// Where to compute: "cpu", "cuda" (or "cuda:1", ...), or "emulated". A run may go on elsewhere; another device
    /// rounds differently.
    pub device: DeviceName,
    /// The precision to compute in: "f32", "tf32" (on a GPU only), or "bf16". Weights are f32 in any case.
    pub precision: Precision,
    /// The share of each target that is spread over all classes: at least 0, less than 1.
    pub label_smoothing: f64,
    /// The largest norm of the gradient of all parameters together, above 0: larger ones are scaled down to it. 0 for
    /// no clipping.
    pub clip_norm: f64,
    /// How many undecodable images there may be in an epoch, or in the rest of it that a resumed run has left, before
    /// training stops. Until then another image is shown in place of each, and a test leaves them out.
    pub max_bad_images: usize,
    /// Steps from one checkpoint to the next within an epoch, in case the program is killed; if they take more than ten
    /// minutes, there is one sooner. 0 for checkpoints at the ends of epochs only. They change nothing in what is
    /// computed.
    pub checkpoint_every: usize,
    /// What the best epoch is chosen by: "accuracy", or "macro_accuracy", the mean of the classes' accuracies, where
    /// some classes have few test images and matter as much.
    #[serde(default)]
    pub best_by: Measure,
    /// How the learning rate changes.
    pub schedule: ScheduleConfig,
    /// The optimiser.
    pub optimizer: AdamWConfig,
    /// The moving average of the weights.
    pub ema: AverageConfig,
    /// How images are normalised, and how much of each image evaluation shows to the model.
    pub preprocessing: Preprocessing,
    /// How training images are varied.
    pub augmentation: Augmentation,
    /// The model.
    pub architecture: ModelConfig,
}

impl RunConfig {
    /// The defaults for a model. Except for what the preset says (size, architecture), they are the recipe that `nano`
    /// was tuned with. A run of fewer epochs than the warm-up needs a shorter one, too, unless they are changed by
    /// [`RunConfig::changed`], which shortens it. Errors: there is no model of this name.
    pub fn for_model(name: &str) -> Result<Self> {
        let (preset, EmaConfig { decay, warmup }) = (preset(name)?, EmaConfig::default());
        Ok(Self {
            model: name.to_owned(),
            data: "embedded".into(),
            weights: String::new(),
            strict_weights: true,
            freeze: vec![],
            backbone_lr: 1.0,
            layer_decay: 1.0,
            out: usual_folder(name),
            epochs: 24,
            batch_size: 64,
            micro_batches: 1,
            recompute: Recompute::default(),
            image_size: preset.image_size,
            seed: 1,
            threads: 0,
            device: DeviceName::Cpu,
            precision: Precision::F32,
            label_smoothing: 0.1,
            clip_norm: 5.0,
            max_bad_images: 0,
            checkpoint_every: 500,
            best_by: Measure::default(),
            schedule: ScheduleConfig {
                rule: ScheduleKind::Cosine,
                peak: 1e-3,
                start: 1e-5,
                min: 1e-5,
                warmup_epochs: 3.0,
            },
            optimizer: AdamWConfig::default(),
            ema: AverageConfig { enabled: false, decay, warmup },
            preprocessing: Preprocessing::default(),
            augmentation: Augmentation::default(),
            architecture: preset.config(),
        })
    }

    /// The configuration of a new run: the model's defaults, changed. Errors: those of
    /// [`changed_for`](Self::changed_for).
    pub fn changed(changes: &Changes) -> Result<Self> {
        Self::changed_for(DEFAULT_MODEL, changes)
    }

    /// The same with `model` as the default model, used unless the changes name one. Errors: a field that does not
    /// exist, or a value that makes no sense ([`check`](Self::check)), with what is expected.
    pub fn changed_for(model: &str, changes: &Changes) -> Result<Self> {
        Self::for_model(changes.model()?.unwrap_or(model))?.begun(changes)
    }

    /// The configuration of a new run that starts from the weights of a run with this configuration, and preprocesses
    /// images in the same way. Unless the changes name another model, it takes that run's model and image size,
    /// except for the number of classes, which depends on the data. Errors: those of
    /// [`changed_for`](Self::changed_for).
    pub fn tuning(&self, changes: &Changes) -> Result<Self> {
        let model = changes.model()?.unwrap_or(&self.model);
        let mut config = Self::for_model(model)?;
        if model == self.model {
            let num_classes = config.architecture.num_classes;
            config.architecture = ModelConfig { num_classes, ..self.architecture.clone() };
            config.image_size = self.image_size;
        }
        config.preprocessing = self.preprocessing.clone();
        config.begun(changes)
    }

    /// These defaults of a new run, changed. Those of the schedule give way to the highest rate and the number of
    /// epochs that are asked for.
    fn begun(mut self, changes: &Changes) -> Result<Self> {
        let RunConfig { epochs, schedule: asked, .. } = self.with_checked(changes, |_| Ok(()))?;
        let ScheduleConfig { start, min, warmup_epochs, .. } = &mut self.schedule;
        (*start, *min) = (start.min(asked.peak), min.min(asked.peak));
        *warmup_epochs = warmup_epochs.min(asked.shorter_warm_up(epochs));
        self.with_checked(changes, Self::check)
    }

    /// The configuration of a run that goes on: this one, changed. A change to the value it already has is allowed;
    /// otherwise only paths, the number of epochs or threads, device and precision, and settings that do not affect
    /// results may change (`CHANGEABLE`). Errors: any other change; those of [`changed_for`](Self::changed_for).
    pub fn resumed(&self, changes: &Changes) -> Result<Self> {
        let mut changed = self.with_checked(changes, |_| Ok(()))?;
        if names_same("weights", &changed.weights, &self.weights)? {
            changed.weights.clone_from(&self.weights);
        }
        // As for a new run, a model's default number of classes gives way to that of the data. (The model may be one of
        // a later version.)
        let usual = Self::for_model(&changed.model).map(|model| model.architecture.num_classes);
        if usual.is_ok_and(|classes| changed.architecture.num_classes == classes) {
            changed.architecture.num_classes = self.architecture.num_classes;
        }
        self.ensure_resumable(&changed)?;
        let (epochs, warm_up) = (changed.epochs, self.schedule.warmup_epochs);
        if (epochs as f64) < warm_up {
            bail!("epochs = {epochs}: this run's learning rate rises for {warm_up}; ask for no fewer");
        }
        changed.check().with_context(|| format!("configuration ({})", changes.origin()))?;
        Ok(changed)
    }

    fn ensure_resumable(&self, other: &Self) -> Result<()> {
        let differences = differences(&Table::try_from(self)?, &Table::try_from(other)?);
        match differences.iter().find(|(name, ..)| !CHANGEABLE.contains(&name.as_str())) {
            None => Ok(()),
            Some((name, was, asked)) => bail!(
                "{name} = {asked} cannot be had: this run began with {was} and is to go on as it began (only {} can \
                 change); leave it out, or start another run with another --out, from this one's weights with --weights",
                CHANGEABLE.join(", ")
            ),
        }
    }

    /// The same for a trained model: only the fields of the model and its preprocessing are checked, as its training no
    /// longer matters. Errors: those of [`changed_for`](Self::changed_for) that concern these fields.
    pub fn of_trained(&self, changes: &Changes) -> Result<Self> {
        self.with_checked(changes, Self::check_model)
    }

    fn with_checked(&self, changes: &Changes, check: fn(&Self) -> Result<()>) -> Result<Self> {
        let mut table = Table::try_from(self).context("configuration to start from")?;
        let named = || format!("configuration ({})", changes.origin());
        changes.apply(&mut table).with_context(named)?;
        let config = from_table(table).with_context(named)?;
        check(&config).with_context(named)?;
        Ok(config)
    }

    /// The configuration that a run folder or checkpoint holds. Errors: it is no TOML, or not that of a valid
    /// configuration.
    pub fn parse(text: &str) -> Result<Self> {
        if text.len() > MAX_TEXT {
            bail!("stored configuration: more than {MAX_TEXT} bytes");
        }
        let config = parse_table(text).and_then(from_table).context("stored configuration")?;
        config.check().context("stored configuration")?;
        Ok(config)
    }

    /// As TOML. Errors: none but those of the `toml` crate.
    pub fn to_toml(&self) -> Result<String> {
        Ok(toml::to_string(self)?)
    }

    /// Errors: a field that is invalid for any run, with what is expected.
    pub fn check(&self) -> Result<()> {
        self.check_architecture()?;
        for (name, value) in
            [("epochs", self.epochs), ("batch_size", self.batch_size), ("micro_batches", self.micro_batches)]
        {
            if !(1..=MAX_COUNT).contains(&value) {
                bail!("{name} = {value}, expected 1 to {MAX_COUNT}");
            }
        }
        if self.data.is_empty() {
            bail!("data is empty, expected \"embedded\" or a folder with images");
        }
        if self.out.as_os_str().is_empty() {
            bail!("out is empty, expected a folder for the run");
        }
        if !self.batch_size.is_multiple_of(self.micro_batches) {
            bail!(
                "micro_batches = {} does not divide batch_size = {}; choose a multiple of it as batch_size",
                self.micro_batches,
                self.batch_size
            );
        }
        self.ensure_statistics([self.image_size; 2])?;
        if self.threads > MAX_THREADS {
            bail!("threads = {}, expected up to {MAX_THREADS}, or 0 for one per core", self.threads);
        }
        if !(0.0..1.0).contains(&self.label_smoothing) {
            bail!("label_smoothing = {}, expected at least 0 and less than 1", self.label_smoothing);
        }
        if !(self.clip_norm >= 0.0 && self.clip_norm.is_finite()) {
            bail!("clip_norm = {}, expected a length above 0, or 0 for no clipping", self.clip_norm);
        }
        for (name, share) in [("backbone_lr", self.backbone_lr), ("layer_decay", self.layer_decay)] {
            if !(share > 0.0 && share <= 1.0) {
                bail!("{name} = {share}, expected a share above 0, up to 1; for what is to stay as it is: freeze");
            }
        }
        self.schedule.check(self.epochs)?;
        self.ensure_rates()?;
        self.augmentation.check(self.image_size).context("augmentation")?;
        self.optimizer.check().context("optimizer")?;
        self.ema.settings().check().context("ema")?;
        self.ensure_none_vanishes()
    }

    /// Errors: an invalid field of the model or of the preprocessing of its images, or a number that computes as 0.
    fn check_model(&self) -> Result<()> {
        self.check_architecture()?;
        self.ensure_none_vanishes()
    }

    fn check_architecture(&self) -> Result<()> {
        self.architecture.check().context("architecture")?;
        self.architecture.check_image(self.image_size, self.image_size).context("image_size and architecture")?;
        if self.architecture.features != Features::Logits {
            bail!(
                "architecture.features: only \"logits\" can be trained and measured; take other features with \"biformer forward\", or in programs of your own"
            );
        }
        self.check_preprocessing().context("preprocessing")
    }

    fn ensure_none_vanishes(&self) -> Result<()> {
        if let Some((name, number)) = computes_as_zero(&Table::try_from(self)?) {
            bail!(
                "{name} = {number:?}, which computes as 0; expected a number further from it, or 0 where that is allowed"
            );
        }
        Ok(())
    }

    /// Errors: the last map of all that a step computes at once, on images of this size, is a single token, so that
    /// batch normalisation has no statistics.
    pub fn ensure_statistics(&self, size: [usize; 2]) -> Result<()> {
        let last = self.architecture.stages() - 1;
        if self.at_once() == 1 && size.iter().all(|&side| self.architecture.map_side(side, last) == 1) {
            bail!(
                "one image at a time (batch_size / micro_batches), of which the last map is a single token: batch \
                 normalisation has nothing to normalise by; expected two images or more"
            );
        }
        Ok(())
    }

    /// Errors: images are to be mixed, and each is alone in its micro-batch. Runs that began before this was refused go
    /// on.
    pub fn ensure_mixable(&self) -> Result<()> {
        if self.augmentation.mixes() && self.at_once() == 1 {
            bail!(
                "augmentation.mixup or cutmix: one image at a time (batch_size / micro_batches) has no other to be mixed \
                 with; expected two images or more"
            );
        }
        Ok(())
    }

    /// The number of images that a step computes at once: those of a micro-batch.
    pub fn at_once(&self) -> usize {
        self.batch_size.div_ceil(self.micro_batches)
    }

    /// The number of micro-batches for a batch of this many images.
    pub fn parts(&self, images: usize) -> usize {
        self.micro_batches.min(images).max(1)
    }

    /// The norm that gradients are clipped to; infinite for no clipping.
    pub fn max_norm(&self) -> f64 {
        if self.clip_norm == 0.0 { f64::INFINITY } else { self.clip_norm }
    }

    /// Where and how it computes.
    pub fn compute(&self) -> Compute {
        Compute { device: self.device, precision: self.precision }
    }

    /// The learning rate schedule of a run with this many steps per epoch. Errors: those of [`optim::Schedule::check`].
    pub fn schedule(&self, steps_per_epoch: usize) -> Result<Schedule> {
        self.schedule.over(self.epochs, steps_per_epoch)
    }
}

/// A table as a configuration, or the field that is wrong, in one line.
fn from_table(table: Table) -> Result<RunConfig> {
    table.try_into().map_err(|error: toml::de::Error| anyhow::anyhow!(in_plain_words(&one_line(&error.to_string()))))
}
