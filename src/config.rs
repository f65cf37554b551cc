//! The configuration of a run: what can be set in a TOML file and on the command line.

use anyhow::{Context, Result, bail};
use data::Augmentation;
use model::{ModelConfig, nearest, preset};
use optim::{AdamWConfig, EmaConfig, Schedule};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Everything that decides what a training run computes. The effective one is written to the run folder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// The model that `architecture` starts from.
    pub model: String,
    /// `embedded`, or the folder of a data set.
    pub data: String,
    /// The run folder.
    pub out: PathBuf,
    /// Passes over the training images.
    pub epochs: usize,
    /// Images per step.
    pub batch_size: usize,
    /// Parts that a batch is computed in, one after the other, to save memory; their gradients add up.
    pub micro_batches: usize,
    /// The side of the images as the model sees them.
    pub image_size: usize,
    /// Decides initial weights, order, augmentation and dropped blocks.
    pub seed: u64,
    /// Threads; 0 for one per core.
    pub threads: usize,
    /// The share of each target that is spread over all classes.
    pub label_smoothing: f64,
    /// Gradients longer than this are shortened to it; 0 for never.
    pub clip_norm: f64,
    /// So many undecodable images are passed over in an epoch before training stops.
    pub max_bad_images: usize,
    /// How the learning rate changes.
    pub schedule: ScheduleConfig,
    /// The optimiser.
    pub optimizer: AdamWConfig,
    /// The moving average of the weights.
    pub ema: AverageConfig,
    /// How training images are varied.
    pub augmentation: Augmentation,
    /// The model.
    pub architecture: ModelConfig,
}

/// The learning rate over a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleConfig {
    /// Per step, or per epoch as the reference was trained.
    pub rule: Rule,
    /// The highest learning rate.
    pub peak: f64,
    /// The learning rate at the very start.
    pub start: f64,
    /// The learning rate at the end.
    pub min: f64,
    /// Epochs of linear rise from `start` to `peak`.
    pub warmup_epochs: f64,
}

/// See [`ScheduleConfig::rule`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// A linear rise and a cosine fall, step by step.
    Cosine,
    /// The reference's: constant within an epoch, by timm's rule.
    Timm,
}

/// The moving average of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AverageConfig {
    /// Whether there is one; evaluation then uses it.
    pub enabled: bool,
    /// The weight of the old average.
    pub decay: f64,
    /// Averages less at the start.
    pub warmup: bool,
}

impl AverageConfig {
    /// The optimiser crate's form.
    pub fn settings(&self) -> EmaConfig {
        EmaConfig { decay: self.decay, warmup: self.warmup }
    }
}

impl RunConfig {
    /// The defaults for a model: those of the main job, for which `nano` is made.
    pub fn for_model(name: &str) -> Result<Self> {
        let preset = preset(name)?;
        Ok(Self {
            model: name.to_owned(),
            data: "embedded".into(),
            out: PathBuf::from("runs").join(name),
            epochs: 12,
            batch_size: 64,
            micro_batches: 1,
            image_size: preset.image_size,
            seed: 1,
            threads: 0,
            label_smoothing: 0.1,
            clip_norm: 5.0,
            max_bad_images: 0,
            schedule: ScheduleConfig { rule: Rule::Cosine, peak: 2e-3, start: 1e-5, min: 1e-5, warmup_epochs: 1.0 },
            optimizer: AdamWConfig::default(),
            ema: AverageConfig { enabled: false, decay: 0.999, warmup: true },
            augmentation: Augmentation::default(),
            architecture: preset.config(),
        })
    }

    /// The defaults, changed by a TOML file (if there is one) and then by `overrides`.
    pub fn load(file: Option<&Path>, overrides: Vec<(&str, Value)>) -> Result<Self> {
        let from_file = match file {
            Some(path) => {
                let text =
                    std::fs::read_to_string(path).with_context(|| format!("configuration {}", path.display()))?;
                text.parse::<Table>().with_context(|| format!("configuration {}", path.display()))?
            }
            None => Table::new(),
        };
        let overrides: Table = overrides.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        let name = match overrides.get("model").or(from_file.get("model")) {
            Some(Value::String(name)) => name.clone(),
            Some(other) => bail!("model: expected a name, got {other}"),
            None => "nano".into(),
        };
        let mut table = Table::try_from(Self::for_model(&name)?).context("default configuration")?;
        overlay(&mut table, from_file, "")?;
        overlay(&mut table, overrides, "")?;
        let origin = file.map_or_else(|| "command line".to_owned(), |path| path.display().to_string());
        let config: Self = table.try_into().with_context(|| format!("configuration ({origin})"))?;
        config.check()?;
        Ok(config)
    }

    /// The configuration that a run folder or checkpoint holds.
    pub fn parse(text: &str) -> Result<Self> {
        let config: Self = toml::from_str(text).context("stored configuration")?;
        config.check()?;
        Ok(config)
    }

    /// As TOML.
    pub fn to_toml(&self) -> Result<String> {
        Ok(toml::to_string(self)?)
    }

    fn check(&self) -> Result<()> {
        self.architecture.check()?;
        self.architecture.check_image(self.image_size, self.image_size)?;
        let positive = |name: &str, value: usize| if value == 0 { bail!("{name} must be at least 1") } else { Ok(()) };
        positive("epochs", self.epochs)?;
        positive("batch_size", self.batch_size)?;
        positive("micro_batches", self.micro_batches)?;
        positive("image_size", self.image_size)?;
        if !self.batch_size.is_multiple_of(self.micro_batches) {
            bail!("micro_batches = {} does not divide batch_size = {}", self.micro_batches, self.batch_size);
        }
        if !(0.0..1.0).contains(&self.label_smoothing) {
            bail!("label_smoothing = {} must be in [0, 1)", self.label_smoothing);
        }
        if !(self.clip_norm >= 0.0 && self.clip_norm.is_finite()) {
            bail!("clip_norm = {} must be 0 (never) or more", self.clip_norm);
        }
        if !(self.schedule.warmup_epochs >= 0.0 && self.schedule.warmup_epochs <= self.epochs as f64) {
            let ScheduleConfig { warmup_epochs, .. } = self.schedule;
            bail!("schedule.warmup_epochs = {warmup_epochs} must be from 0 to epochs = {}", self.epochs);
        }
        self.optimizer.validate()?;
        self.ema.settings().validate()?;
        self.schedule(1)?;
        Ok(())
    }

    /// The learning rate over a run of so many steps an epoch.
    pub fn schedule(&self, steps_per_epoch: usize) -> Result<Schedule> {
        let ScheduleConfig { rule, peak, start, min, warmup_epochs } = self.schedule;
        let steps_per_epoch = steps_per_epoch as u64;
        let schedule = match rule {
            Rule::Cosine => Schedule::Cosine {
                peak,
                start,
                min,
                warmup_steps: (warmup_epochs * steps_per_epoch as f64).round() as u64,
                total_steps: self.epochs as u64 * steps_per_epoch,
            },
            Rule::Timm => Schedule::Timm {
                peak,
                start,
                min,
                warmup_epochs: warmup_epochs.round() as u64,
                epochs: self.epochs as u64,
                steps_per_epoch,
            },
        };
        schedule.validate()?;
        Ok(schedule)
    }
}

/// Puts changes over a table, key by key; a key that the table does not have is an error that names the
/// nearest one.
fn overlay(base: &mut Table, changes: Table, path: &str) -> Result<()> {
    for (key, change) in changes {
        let name = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        let known: Vec<String> = base.keys().cloned().collect();
        match (base.get_mut(&key), change) {
            (None, _) => {
                let hint = nearest(&key, known.iter().map(String::as_str));
                let hint = hint.map_or_else(String::new, |hint| format!(" (did you mean \"{hint}\"?)"));
                bail!("there is no configuration key \"{name}\"{hint}; known here: {}", known.join(", "));
            }
            (Some(Value::Table(inner)), Value::Table(change)) => overlay(inner, change, &name)?,
            (Some(Value::Table(_)), other) => bail!("{name}: expected a table, got {other}"),
            // 1 is a fine way to write 1.0.
            (Some(value @ Value::Float(_)), Value::Integer(change)) => *value = Value::Float(change as f64),
            (Some(value), change) => *value = change,
        }
    }
    Ok(())
}
