//! One training step, and one evaluation.

use super::average::{Average, AverageState};
use super::checkpoint::{Checkpoint, DataFacts, Progress, load_all, read_weights, tensor_names};
use super::recorded::{Staged, lacks_memory};
use crate::config::RunConfig;
use crate::inference::Inference;
use crate::staging::{Numbered, tensors};
use anyhow::{Context, Result, bail};
use autograd::{Gradients, Profile, Tape};
use data::Batch;
use model::{BiFormer, Loaded, Mode, Trace};
use optim::{AdamW, AdamWState, clip_factor, gradient_norm};
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::path::Path;
use std::sync::Arc;
use tensor::{DType, Device, Tensor, settle_pool};

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
    pub(super) device: Device,
    pub(super) gradients: Gradients,
    pub(super) optimizer: AdamW,
    pub(super) average: Option<Average>,
    /// On a GPU, the batch that is there.
    pub(super) staged: Option<Staged>,
    /// Measures each step, if there is one.
    pub profile: Option<Arc<Profile>>,
    /// What was different about the weights that the run started from.
    pub loaded: Loaded,
}

impl Learner {
    /// A learner at the start of a run: with random weights, or with those that the configuration names.
    pub fn new(config: &RunConfig) -> Result<Self> {
        let mut model = BiFormer::new(&config.architecture, config.seed, DType::F32)?;
        let mut loaded = Loaded::default();
        if !config.weights.is_empty() {
            loaded = model.load(&read_weights(Path::new(&config.weights))?, &config.weights)?;
        }
        Self::around(model, loaded, config)
    }

    /// A learner of a model without weights: to measure what a step takes.
    pub fn blank(config: &RunConfig) -> Result<Self> {
        Self::around(BiFormer::blank(&config.architecture, DType::F32)?, Loaded::default(), config)
    }

    fn around(mut model: BiFormer, loaded: Loaded, config: &RunConfig) -> Result<Self> {
        let device = config.compute().place(&mut model)?;
        let average = match config.ema.enabled {
            true => Some(Average::new(&model, config.ema.settings())?),
            false => None,
        };
        let optimizer = AdamW::new(&model.parameters, config.optimizer)?;
        let gradients = Gradients::new(&model.parameters)?;
        Ok(Self { device, gradients, optimizer, average, staged: None, profile: None, model, loaded })
    }

    /// Where it computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// One step on a batch: gradients of all its micro-batches, each of which also moves the running statistics;
    /// their sum, clipped; AdamW; the average. On a GPU, while the step is on its way, `next` is asked for the batch after
    /// this one, which is sent ahead; on the CPU it is not.
    pub fn train<'b>(
        &mut self,
        config: &RunConfig,
        batch: &Numbered,
        step: u64,
        lr: f64,
        next: impl FnOnce() -> Option<&'b Numbered>,
    ) -> Result<Score> {
        if self.device != Device::Cpu {
            return self.train_on_gpu(config, batch, step, lr, next);
        }
        let lap = |name| self.profile.iter().for_each(|profile| profile.lap(name));
        self.gradients.begin_step();
        let parts = config.parts(batch.labels.len());
        let mut score = Score::default();
        for part in 0..parts {
            let [images, labels] = tensors(batch, part, parts)?;
            let mode = Mode::Train { seed: config.seed, step: step * config.micro_batches as u64 + part as u64 };
            lap("copy of the images");
            let tape = config.recompute.tape(&self.device).profiled(self.profile.clone());
            let trace = {
                let output = self.model.forward(&tape, &images, mode)?;
                let logits = output.logits();
                let loss = ops::cross_entropy(logits, &labels, config.label_smoothing)?;
                let mean = f64::from(loss.value().item::<f32>()?);
                if !mean.is_finite() {
                    let first = first_to_go_wrong(&self.model, &images, &labels, mode);
                    bail!("{LOWER_RATE}: the loss is {mean}; {first}");
                }
                score.add(scored(logits.value(), &labels, mean)?);
                lap("score");
                let share = ops::scale(&loss, 1.0 / parts as f64)?;
                tape.backward(&share, &mut self.gradients)?;
                output.trace
            };
            drop(tape);
            self.model.update_statistics(&trace)?;
            lap("running statistics");
        }
        // The norm is looked at in any case: a step along a gradient that is not finite would destroy the weights.
        let norm = gradient_norm(&self.gradients)?;
        let factor = clip_factor(norm, config.longest_gradient()).context(LOWER_RATE)?;
        lap("gradient norm");
        self.optimizer.step_scaled(&mut self.model.parameters, &self.gradients, lr, factor)?;
        lap("optimizer");
        if let Some(average) = &mut self.average {
            average.update(&self.model)?;
            lap("moving average");
        }
        settle_pool();
        Ok(score)
    }

    /// Lets `work` see the model as it is to be used: averaged, if there is an average. Where a GPU has no room for that
    /// beside a training step, `work` is done once more without the memory of the step, which is then recorded anew.
    pub fn with_average<R>(&mut self, mut work: impl FnMut(&BiFormer) -> Result<R>) -> Result<R> {
        match self.lend(&mut work) {
            Err(error) if lacks_memory(&error) && self.staged.take().is_some() => self.lend(work),
            result => result,
        }
    }

    fn lend<R>(&mut self, work: impl FnOnce(&BiFormer) -> Result<R>) -> Result<R> {
        match &self.average {
            Some(average) => average.lend(&mut self.model, work),
            None => work(&self.model),
        }
    }

    /// What is needed to go on from here. Weights that are not finite are refused: nobody could go on from there.
    pub fn checkpoint(&self, config: &RunConfig, progress: &Progress, data: DataFacts) -> Result<Checkpoint> {
        if self.model.parameters.flat().find(|weight| !weight.is_finite())?.is_some() {
            bail!("{LOWER_RATE}: after step {} some weights are not finite", self.optimizer.steps());
        }
        let AdamWState { steps, m, v } = self.optimizer.state();
        let mut file = self.model.state_dict()?;
        let mut progress = progress.clone();
        progress.optimizer_steps = steps;
        file.tensors.insert(tensor_names::M.into(), m);
        file.tensors.insert(tensor_names::V.into(), v);
        if let Some(average) = &self.average {
            let AverageState { updates, parameters, statistics } = average.state()?;
            progress.average_updates = updates;
            file.tensors.insert(tensor_names::AVERAGE.into(), parameters);
            file.tensors.insert(tensor_names::AVERAGE_STATISTICS.into(), statistics);
        }
        for tensor in file.tensors.values_mut() {
            *tensor = tensor.to_device(&Device::Cpu)?;
        }
        Ok(Checkpoint::new(config.clone(), progress, data, file))
    }

    /// A learner that goes on where a checkpoint was made.
    pub fn resume(checkpoint: &Checkpoint) -> Result<Self> {
        let shown = checkpoint.path().display().to_string();
        let config = &checkpoint.config;
        let mut learner = Self::around(BiFormer::blank(&config.architecture, DType::F32)?, Loaded::default(), config)?;
        let mut file = checkpoint.file.clone();
        let mut take =
            |name: &str| file.tensors.remove(name).with_context(|| format!("{shown}: there is no tensor {name}"));
        let (m, v) = (take(tensor_names::M)?, take(tensor_names::V)?);
        let moments = AdamWState { steps: checkpoint.progress.optimizer_steps, m, v };
        learner.optimizer.restore(&moments).with_context(|| shown.clone())?;
        if let Some(average) = &mut learner.average {
            let updates = checkpoint.progress.average_updates;
            let (parameters, statistics) = (take(tensor_names::AVERAGE)?, take(tensor_names::AVERAGE_STATISTICS)?);
            let state = AverageState { updates, parameters, statistics };
            average.restore(state).with_context(|| shown.clone())?;
        }
        load_all(&mut learner.model, &file, &shown)?;
        Ok(learner)
    }
}

/// The way out of a run that diverges.
pub(super) const LOWER_RATE: &str = "training diverged (try a lower --lr, a smaller clip_norm or a longer warm-up)";

/// A model's scores on those images of a batch that count, with the labels that they have. `next` gives the batch that is
/// evaluated after this one, and is asked as by [`Inference::pass`].
pub fn evaluate<'b>(
    inference: &mut Inference<'_>,
    batch: &Numbered,
    next: impl FnOnce() -> Option<&'b Numbered>,
) -> Result<Vec<(u32, Score)>> {
    inference.stage(batch)?;
    let logits = inference.pass(next)?.first().context("a model that gives nothing")?;
    let scores = score_rows(logits, &batch.labels, cross_entropy)?;
    let counted = batch.labels.iter().copied().zip(scores).zip(batch.counted());
    let counted: Vec<(u32, Score)> = counted.filter_map(|(scored, counts)| counts.then_some(scored)).collect();
    match counted.iter().find(|(_, score)| !score.loss.is_finite()) {
        None => Ok(counted),
        Some((_, score)) => {
            let [images, labels] = tensors(batch, 0, 1)?;
            let first = first_to_go_wrong(inference.model(), &images, &labels, Mode::Evaluate);
            bail!("the loss is {}; {first}; the weights are of no use, take those of another run", score.loss)
        }
    }
}

/// Runs a pass whose loss was not finite again, looking at every value, to name the first operation that went
/// wrong.
pub(super) fn first_to_go_wrong(model: &BiFormer, images: &Tensor, labels: &Tensor, mode: Mode) -> String {
    let tape = Tape::checking_finite();
    let pass = model.forward(&tape, images, mode).map_err(anyhow::Error::from).and_then(|output| {
        ops::cross_entropy(output.logits(), &labels.to_device(&output.logits().value().device())?, 0.0)?;
        Ok(())
    });
    match pass {
        Err(error) => format!("the first operation to go wrong: {error:#}"),
        Ok(()) => "no operation of the forward pass shows why".to_owned(),
    }
}

/// What a pass over a batch leaves behind: where regions looked.
pub fn trace(model: &BiFormer, batch: &Batch) -> Result<Trace> {
    let [images, _] = tensors(batch, 0, 1)?;
    let tape = Tape::inference();
    Ok(model.forward(&tape, &images, Mode::Evaluate)?.trace)
}

/// The score of logits (N, K), given their mean training loss.
pub(super) fn scored(logits: &Tensor, labels: &Tensor, mean_loss: f64) -> Result<Score> {
    let mut score = Score::default();
    score_rows(logits, labels.as_slice("score")?, |_, _| 0.0)?.into_iter().for_each(|row| score.add(row));
    Ok(Score { loss: mean_loss * score.images as f64, ..score })
}

/// The plain cross-entropy of a row of logits, of which `own` is its label's.
fn cross_entropy(row: &[f32], own: f32) -> f64 {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = row.iter().map(|&x| f64::from(x - largest).exp()).sum();
    total.ln() - f64::from(own - largest)
}

/// The score of each row of logits (N, K), whose loss follows from the row and its label's logit.
fn score_rows(logits: &Tensor, labels: &[u32], loss: impl Fn(&[f32], f32) -> f64) -> Result<Vec<Score>> {
    let [_, classes] = logits.dims("score", "logits (N, K)")?;
    let logits = logits.to_device(&Device::Cpu)?.cast(DType::F32)?;
    let logits = logits.as_slice::<f32>("score")?;
    let score = |(row, &label): (&[f32], &u32)| {
        let own = row.get(label as usize).copied().with_context(|| format!("label {label} of {classes} classes"))?;
        // Not simply x > own: a row of NaN is not right.
        let wins = |(class, x): (usize, &f32)| match x.partial_cmp(&own) {
            Some(Ordering::Less) => false,
            Some(Ordering::Equal) => class < label as usize,
            _ => true,
        };
        let before = row.iter().enumerate().filter(|&entry| wins(entry)).count();
        Ok(Score {
            loss: loss(row, own),
            right: u64::from(before == 0),
            right_in_five: u64::from(before < 5),
            images: 1,
        })
    };
    logits.chunks(classes).zip(labels).map(score).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn score(logits: &[f32], label: u32) -> Result<Score> {
        let logits = Tensor::from_slice(logits, [1, logits.len()])?;
        Ok(score_rows(&logits, &[label], cross_entropy)?[0])
    }

    #[test]
    fn a_row_is_right_where_its_label_is_first() -> Result<()> {
        let row = [0.5, 2.0, 2.0, -1.0, 0.0, 0.1, 0.2];
        let right: Vec<u64> = (0..7).map(|label| Ok(score(&row, label)?.right)).collect::<Result<_>>()?;
        assert_eq!(right, [0, 1, 0, 0, 0, 0, 0], "of equal ones, the lower class");
        let in_five: Vec<u64> = (0..7).map(|label| Ok(score(&row, label)?.right_in_five)).collect::<Result<_>>()?;
        assert_eq!(in_five, [1, 1, 1, 0, 0, 1, 1]);
        Ok(())
    }

    /// Each part normalises by itself, so that the gradient of a batch in parts is the mean of the parts' own.
    #[test]
    fn micro_batches_give_the_mean_of_their_gradients() -> Result<()> {
        let mut config = RunConfig::for_model("nano")?;
        config.architecture = config.architecture.with_overrides(["depth=1,1,1", "embed_dim=24,48,96"])?;
        let batch = |images: std::ops::Range<usize>| {
            let pixels = images.start * 3072..images.end * 3072;
            let pixel = |i: usize| (i as f32 * 0.37).sin() + (i / 3072) as f32 * 0.1;
            let labels = images.clone().map(|image| image as u32 % 10).collect();
            let shape = [images.len(), 32, 32, 3];
            Batch { images: pixels.map(pixel).collect(), shape, labels, samples: vec![], skipped: vec![] }
        };
        let gradients = |parts: usize, batch: Batch| -> Result<(Vec<f32>, u64)> {
            let config = RunConfig { micro_batches: parts, ..config.clone() };
            let mut learner = Learner::new(&config)?;
            learner.train(&config, &batch.into(), 0, 1e-3, || None)?;
            let flat = learner.gradients.flat().context("gradients")?.to_vec::<f32>()?;
            Ok((flat, learner.model.statistics[0].batches))
        };
        let (whole, batches) = gradients(2, batch(0..8))?;
        assert_eq!(batches, 2, "each part goes into the running statistics");
        let (first, second) = (gradients(1, batch(0..4))?.0, gradients(1, batch(4..8))?.0);
        let scale = whole.iter().fold(0f32, |scale, x| scale.max(x.abs()));
        for (whole, (first, second)) in whole.iter().zip(first.iter().zip(&second)) {
            assert!((whole - 0.5 * (first + second)).abs() < 1e-5 * scale, "{whole} of {first} and {second}");
        }
        Ok(())
    }

    #[test]
    fn nothing_is_right_about_nan() -> Result<()> {
        for (row, label) in [([f32::NAN; 7], 0), ([0.0, 0.0, f32::NAN, 0.0, 0.0, 0.0, 0.0], 2)] {
            let score = score(&row, label)?;
            assert_eq!([score.right, score.right_in_five, score.images], [0, 0, 1]);
            assert!(!score.mean_loss().is_finite());
        }
        Ok(())
    }
}
