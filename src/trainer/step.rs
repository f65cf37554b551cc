//! One training step, and one evaluation.

use super::checkpoint::{Checkpoint, Progress};
use crate::config::RunConfig;
use anyhow::{Context, Result, bail};
use autograd::{Error, Gradients, Parameters, Tape};
use data::Batch;
use model::{BiFormer, Mode, Trace};
use optim::{AdamW, AdamWState, Ema, EmaState, clip_factor, gradient_norm};
use serde::{Deserialize, Serialize};
use tensor::{DType, Tensor};

/// How well a number of images were classified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// The sum of the images' losses.
    pub loss: f64,
    /// How many were right.
    pub right: u64,
    /// How many were right among their five likeliest classes.
    pub right_in_five: u64,
    /// How many there were.
    pub images: u64,
}

impl Score {
    /// Takes another score in.
    pub fn add(&mut self, other: Score) {
        self.loss += other.loss;
        self.right += other.right;
        self.right_in_five += other.right_in_five;
        self.images += other.images;
    }

    /// The mean loss.
    pub fn mean_loss(&self) -> f64 {
        self.loss / self.images.max(1) as f64
    }

    /// The share that was right.
    pub fn accuracy(&self) -> f64 {
        self.right as f64 / self.images.max(1) as f64
    }

    /// The share that was right among five.
    pub fn top5(&self) -> f64 {
        self.right_in_five as f64 / self.images.max(1) as f64
    }
}

/// Everything that changes while a model learns.
pub struct Learner {
    /// The model.
    pub model: BiFormer,
    gradients: Gradients,
    optimizer: AdamW,
    average: Option<Ema>,
}

impl Learner {
    /// A learner that knows nothing yet.
    pub fn new(config: &RunConfig) -> Result<Self> {
        let model = BiFormer::new(&config.architecture, config.seed, DType::F32)?;
        let average = match config.ema.enabled {
            true => Some(Ema::new(&model.parameters, config.ema.settings())?),
            false => None,
        };
        let optimizer = AdamW::new(&model.parameters, config.optimizer)?;
        Ok(Self { gradients: Gradients::new(&model.parameters), optimizer, average, model })
    }

    /// One step on a batch: gradients of all its micro-batches, clipped; AdamW; the average; the running
    /// statistics.
    pub fn train(&mut self, config: &RunConfig, batch: &Batch, step: u64, lr: f64) -> Result<Score> {
        self.gradients.begin_step();
        let parts = config.micro_batches.min(batch.labels.len()).max(1);
        let mut score = Score::default();
        for part in 0..parts {
            let (images, labels) = tensors(batch, part, parts)?;
            let mode = Mode::Train { seed: config.seed, step: step * config.micro_batches as u64 + part as u64 };
            let tape = Tape::new();
            let trace = {
                let output = self.model.forward(&tape, &images, mode)?;
                let logits = output.logits();
                let loss = ops::cross_entropy(logits, &labels, config.label_smoothing)?;
                let mean = f64::from(loss.value().item::<f32>()?);
                if !mean.is_finite() {
                    return Err(self.explain(&images, &labels, mode, config.label_smoothing, mean));
                }
                score.add(scored(logits.value(), &labels, mean)?);
                let share = ops::scale(&loss, 1.0 / parts as f64)?;
                tape.backward(&share, &mut self.gradients)?;
                output.trace
            };
            drop(tape);
            self.model.update_statistics(&trace)?;
        }
        let factor = match config.clip_norm {
            0.0 => 1.0,
            limit => clip_factor(gradient_norm(&self.gradients)?, limit).context("the gradient's norm")?,
        };
        self.optimizer.step_scaled(&mut self.model.parameters, &self.gradients, lr, factor)?;
        if let Some(average) = &mut self.average {
            average.update(&self.model.parameters)?;
        }
        Ok(score)
    }

    /// Runs a pass whose loss was not finite again, looking at every value, to name the first operation that
    /// went wrong.
    fn explain(&self, images: &Tensor, labels: &Tensor, mode: Mode, smoothing: f64, loss: f64) -> anyhow::Error {
        let tape = Tape::checking_finite();
        let pass = self.model.forward(&tape, images, mode).map_err(anyhow::Error::from).and_then(|output| {
            ops::cross_entropy(output.logits(), labels, smoothing)?;
            Ok(())
        });
        let origin = match pass {
            Err(error) => match error.chain().find_map(|cause| cause.downcast_ref::<Error>()) {
                Some(Error::NotFinite { op, node }) => {
                    format!("the first value that is not finite came from {op}, node {node}")
                }
                _ => error.to_string(),
            },
            Ok(()) => "no operation of the forward pass shows why".to_owned(),
        };
        anyhow::anyhow!("the loss is {loss}: {origin}; try a lower schedule.peak or a smaller clip_norm")
    }

    /// The score of the model, or of its average if there is one, on a batch.
    pub fn evaluate(&mut self, batch: &Batch) -> Result<Score> {
        let (images, labels) = tensors(batch, 0, 1)?;
        let counted: Vec<bool> =
            (0..batch.labels.len()).map(|slot| batch.skipped.iter().all(|s| s.slot != slot)).collect();
        let tape = Tape::inference();
        let mut score = Score::default();
        self.with_average(|model| {
            let output = model.forward(&tape, &images, Mode::Evaluate)?;
            score = score_rows(output.logits().value(), &labels, &counted)?;
            Ok(())
        })?;
        Ok(score)
    }

    /// What a pass over a batch leaves behind: where regions looked.
    pub fn trace(&mut self, batch: &Batch) -> Result<Trace> {
        let (images, _) = tensors(batch, 0, 1)?;
        let tape = Tape::inference();
        let mut trace = Trace::default();
        self.with_average(|model| {
            trace = model.forward(&tape, &images, Mode::Evaluate)?.trace;
            Ok(())
        })?;
        Ok(trace)
    }

    /// Lets `work` see the model with the averaged weights in place of its own, if there is an average.
    fn with_average(&mut self, work: impl FnOnce(&BiFormer) -> Result<()>) -> Result<()> {
        let Some(average) = &mut self.average else { return work(&self.model) };
        let own = std::mem::replace(&mut self.model.parameters, average.average().duplicate()?);
        let result = work(&self.model);
        self.model.parameters = own;
        result
    }

    /// What is needed to go on from here.
    pub fn checkpoint(&self, config: &RunConfig, progress: &Progress, classes: Vec<String>) -> Result<Checkpoint> {
        let AdamWState { steps, m, v } = self.optimizer.state();
        let average = self.average.as_ref().map(Ema::state);
        let mut file = self.model.state_dict()?;
        let mut progress = progress.clone();
        progress.optimizer_steps = steps;
        file.tensors.insert(checkpoint_names::M.into(), m);
        file.tensors.insert(checkpoint_names::V.into(), v);
        if let Some(EmaState { updates, average }) = average {
            progress.average_updates = updates;
            file.tensors.insert(checkpoint_names::AVERAGE.into(), average);
        }
        Ok(Checkpoint { config: config.clone(), progress, classes, file })
    }

    /// Goes back to where a checkpoint was made.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let mut file = checkpoint.file.clone();
        let mut take = |name: &str| file.tensors.remove(name).with_context(|| format!("the checkpoint has no {name}"));
        let (m, v) = (take(checkpoint_names::M)?, take(checkpoint_names::V)?);
        self.optimizer.restore(&AdamWState { steps: checkpoint.progress.optimizer_steps, m, v })?;
        if let Some(average) = &mut self.average {
            let updates = checkpoint.progress.average_updates;
            average.restore(&EmaState { updates, average: take(checkpoint_names::AVERAGE)? })?;
        }
        self.model.load(&file, "checkpoint")?;
        Ok(())
    }
}

/// Names of the tensors that a checkpoint holds beside the model's.
pub mod checkpoint_names {
    /// AdamW's first moments, flat.
    pub const M: &str = "optimizer.m";
    /// AdamW's second moments, flat.
    pub const V: &str = "optimizer.v";
    /// The averaged parameters, flat.
    pub const AVERAGE: &str = "average.parameters";
}

/// A model's parameters replaced by averaged ones, from a checkpoint's flat buffer.
pub fn take_average(parameters: &mut Parameters, flat: &Tensor) -> Result<()> {
    let (own, average) = (parameters.flat().shape().clone(), flat.as_slice::<f32>("average")?);
    if *flat.shape() != own {
        bail!("the averaged parameters are {}, the model's {own}", flat.shape());
    }
    parameters.flat_mut::<f32>()?.copy_from_slice(average);
    Ok(())
}

/// Part `part` of `parts` of a batch: images (N, H, W, 3) and labels (N).
fn tensors(batch: &Batch, part: usize, parts: usize) -> Result<(Tensor, Tensor)> {
    let [count, height, width, channels] = batch.shape;
    let (start, end) = (count * part / parts, count * (part + 1) / parts);
    let image = height * width * channels;
    let images = Tensor::from_slice(&batch.images[start * image..end * image], [end - start, height, width, channels])?;
    Ok((images, Tensor::from_slice(&batch.labels[start..end], [end - start])?))
}

/// The score of logits (N, K), given their mean training loss.
fn scored(logits: &Tensor, labels: &Tensor, mean_loss: f64) -> Result<Score> {
    let counted = vec![true; labels.count()];
    let score = score_rows(logits, labels, &counted)?;
    Ok(Score { loss: mean_loss * score.images as f64, ..score })
}

/// The score of those rows of logits (N, K) that count, with the plain cross-entropy as loss.
pub fn score_rows(logits: &Tensor, labels: &Tensor, counted: &[bool]) -> Result<Score> {
    let [_, classes] = logits.dims("score", "logits (N, K)")?;
    let (logits, labels) = (logits.as_slice::<f32>("score")?, labels.as_slice::<u32>("score")?);
    let mut score = Score::default();
    for ((row, &label), _) in logits.chunks(classes).zip(labels).zip(counted).filter(|(_, counted)| **counted) {
        let own = row.get(label as usize).copied().with_context(|| format!("label {label} of {classes} classes"))?;
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let total: f64 = row.iter().map(|&x| f64::from(x - largest).exp()).sum();
        let before = row.iter().enumerate().filter(|&(i, &x)| x > own || (x == own && i < label as usize)).count();
        score.loss += total.ln() - f64::from(own - largest);
        score.right += u64::from(before == 0);
        score.right_in_five += u64::from(before < 5);
        score.images += 1;
    }
    Ok(score)
}
