//! What learns, and one step of it.

use super::average::{Average, AverageState};
use super::checkpoint::{Checkpoint, Progress, tensor_names};
use super::data_facts::DataFacts;
use super::failure::lacks_memory;
use super::recorded::Left;
use super::score::{Score, judge};
use crate::config::RunConfig;
use crate::staging::{Numbered, Staged, tensors};
use anyhow::{Context, Error, Result, bail};
use autograd::{Gradients, Profile, Tape, Var};
use data::Batch;
use model::{BiFormer, Mode, Trace};
use optim::{AdamW, AdamWState};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tensor::{DType, Device, Tensor, settle_pool};

/// Everything that changes while a model learns, in the way that a configuration asks for.
pub struct Learner {
    pub(super) config: RunConfig,
    /// On a GPU, a recorded step holds the addresses of its weights and statistics, so no other code may replace these
    /// tensors.
    pub(super) model: BiFormer,
    pub(super) device: Device,
    pub(super) gradients: Gradients,
    pub(super) optimizer: AdamW,
    pub(super) average: Option<Average>,
    /// On a GPU, the staged batch and its recorded step.
    pub(super) staged: Option<Staged<Vec<Left>>>,
    /// Measures each step, if there is one.
    pub profile: Option<Arc<Profile>>,
    /// For a run that starts from other weights: what of them was not taken over, and how its head was understood.
    pub notes: Vec<String>,
}

impl fmt::Debug for Learner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Learner")
            .field("model", &self.model)
            .field("steps", &self.optimizer.steps())
            .finish_non_exhaustive()
    }
}

impl Learner {
    /// The configuration that it was created for.
    pub fn config(&self) -> &RunConfig {
        &self.config
    }

    /// The model as it is now, not averaged.
    pub fn model(&self) -> &BiFormer {
        &self.model
    }

    /// The hardware that computes it, as far as the bits of a result depend on that.
    pub fn computed_by(&self) -> String {
        self.config.compute().computed_by(&self.device)
    }

    /// Where it computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// One step on a batch: the gradients of all its micro-batches; clipping of their sum; AdamW; an update of the
    /// running statistics for each micro-batch (on a GPU along with its gradients); the moving average. On a GPU,
    /// `next` is called while the step runs, for the batch after this one, which is uploaded in advance; on the CPU it
    /// is not called. Errors: a loss, a gradient or, on the CPU, a batch's statistics that are not finite, with what
    /// helps; those of the device.
    pub fn train<'b>(
        &mut self,
        batch: &Numbered,
        step: u64,
        lr: f64,
        next: impl FnOnce() -> Option<&'b Numbered>,
    ) -> Result<Score> {
        let score = self.train_unless(&AtomicBool::new(false), batch, step, lr, next)?;
        score.context("a step that nobody stops has a score")
    }

    /// The same, except that on the CPU, where a step may take minutes, a step is abandoned if `stop` is set while it
    /// has micro-batches left: then there is no score, and nothing has changed but the gradients. Errors: those of
    /// [`train`](Self::train).
    pub fn train_unless<'b>(
        &mut self,
        stop: &AtomicBool,
        batch: &Numbered,
        step: u64,
        lr: f64,
        next: impl FnOnce() -> Option<&'b Numbered>,
    ) -> Result<Option<Score>> {
        if self.device != Device::Cpu {
            return self.train_on_gpu(batch, step, lr, next).map(Some);
        }
        let profile = self.profile.clone();
        let lap = |name| profile.iter().for_each(|profile| profile.lap(name));
        self.gradients.begin_step();
        let (parts, smoothing) = (self.config.parts(batch.labels.len()), self.config.label_smoothing);
        let (mut score, mut traces) = (Score::default(), vec![]);
        for (part, mode) in modes(&self.config, step, parts).into_iter().enumerate() {
            if part > 0 && stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let given = tensors(batch, part, parts)?;
            lap("copy of the images");
            traces.push(self.pass(&given, mode, batch.labels.len(), |model, left| {
                // Before the backward pass, whose gradients a loss that is not finite would spoil.
                score.add(judge(model, step, &given, &batch.labels[batch.slots(part, parts)], mode, smoothing, left)?);
                lap("score");
                Ok(())
            })?);
        }
        let (parameters, gradients) = (&mut self.model.parameters, &mut self.gradients);
        self.optimizer
            .step_clipped(parameters, gradients, lr, self.config.max_norm())
            .map_err(|error| with_advice(error, step))?;
        lap("optimizer");
        traces.iter().try_for_each(|trace| self.model.update_statistics(trace))?;
        lap("running statistics");
        if let Some(average) = &mut self.average {
            average.update(&self.model)?;
            lap("moving average");
        }
        settle_pool();
        Ok(Some(score))
    }

    /// Forward and backward on a part of a batch of `whole` images; the gradients are added to the step's. `seen` is
    /// called with the loss and the logits in between.
    pub(super) fn pass(
        &mut self,
        [images, targets]: &[Tensor; 2],
        mode: Mode,
        whole: usize,
        seen: impl FnOnce(&BiFormer, [&Tensor; 2]) -> Result<()>,
    ) -> Result<Trace> {
        let tape = self.config.recompute.tape(&self.device).profiled(self.profile.clone());
        let output = self.model.forward(&tape, images, mode)?;
        let logits = output.logits()?;
        let loss = loss(logits, targets, self.config.label_smoothing)?;
        seen(&self.model, [loss.value(), logits.value()])?;
        let share = ops::scale(&loss, targets.shape()[0] as f64 / whole as f64)?;
        tape.backward(&share, &mut self.gradients)?;
        Ok(output.trace)
    }

    /// Runs `work` on the model as it is to be used: averaged, if there is an average. If a GPU has no room for that
    /// beside a recorded training step, the step's memory is released and `work` is run again; the step is then
    /// recorded anew. Errors: those of `work`.
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

    /// A checkpoint from which the run can be resumed. Errors: numbers that are not finite, from which no run could
    /// continue.
    pub fn checkpoint(&self, progress: &Progress, data: DataFacts) -> Result<Checkpoint> {
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
        for (name, tensor) in &mut file.tensors {
            *tensor = tensor.to_device(&Device::Cpu)?;
            if tensor.find(|number| !number.is_finite())?.is_some() {
                bail!("{LOWER_RATE}: after step {steps} numbers of {name} are not finite");
            }
        }
        Ok(Checkpoint::new(self.config.clone(), progress, data, file, self.computed_by()))
    }
}

/// The modes of a step's passes, one for each micro-batch: no two passes of a run have random numbers in common.
pub(super) fn modes(config: &RunConfig, step: u64, parts: usize) -> Vec<Mode> {
    let first = step * config.micro_batches as u64;
    (first..first + parts as u64).map(|step| Mode::Train { seed: config.seed, step }).collect()
}

/// The loss of logits (N, K) against classes (N), which are smoothed, or against distributions over them (N, K), which
/// are taken as they are.
pub(super) fn loss<'t>(logits: &Var<'t>, targets: &Tensor, smoothing: f64) -> autograd::Result<Var<'t>> {
    match targets.dtype() {
        DType::Index => ops::cross_entropy(logits, targets, smoothing),
        _ => ops::soft_cross_entropy(logits, targets),
    }
}

/// The advice for a run that diverges.
pub(super) const LOWER_RATE: &str = "training diverged (begin again with a lower --lr, a smaller clip_norm above 0, less weight_decay or a longer warm-up, and \
     another --out)";

/// The advice for a run whose first step fails already.
const USELESS: &str = "nothing has been learned yet, so the fault is not the learning rate's: these weights, or the images, are of \
     no use";

/// The advice for a step, counted from 0, that goes wrong.
pub(super) fn advice(step: u64) -> &'static str {
    if step == 0 { USELESS } else { LOWER_RATE }
}

/// The error of a step, with this advice if the gradients were not finite.
pub(super) fn with_advice(error: optim::Error, step: u64) -> Error {
    let diverged = matches!(error, optim::Error::NonFinite { .. });
    let error = Error::from(error);
    if diverged { error.context(advice(step)) } else { error }
}

/// The trace of a pass over a batch, with the regions that each region was routed to. Errors: a batch that is not of
/// the model's images.
pub fn trace(model: &BiFormer, batch: &Batch) -> Result<Trace> {
    let [images, _] = tensors(batch, 0, 1)?;
    let tape = Tape::inference();
    Ok(model.forward(&tape, &images, Mode::Evaluate)?.trace)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

    #[test]
    fn no_two_passes_of_a_run_have_a_mode_in_common() -> Result<()> {
        let config = RunConfig { micro_batches: 3, ..RunConfig::for_model("nano")? };
        let modes: Vec<Mode> = (0..4).flat_map(|step| modes(&config, step, 3)).collect();
        let numbered: Vec<Mode> = (0..12).map(|step| Mode::Train { seed: config.seed, step }).collect();
        assert_eq!(modes, numbered);
        Ok(())
    }

    /// A model of three narrow blocks.
    fn small(micro_batches: usize) -> Result<RunConfig> {
        let mut config = RunConfig { micro_batches, ..RunConfig::for_model("nano")? };
        config.architecture = config.architecture.with_overrides(["depth=1,1,1", "embed_dim=24,48,96"])?;
        Ok(config)
    }

    fn batch(images: Range<usize>) -> Numbered {
        let pixels = images.start * 3072..images.end * 3072;
        let pixel = |i: usize| (i as f32 * 0.37).sin() + (i / 3072) as f32 * 0.1;
        let labels = images.clone().map(|image| image as u32 % 10).collect();
        let shape = [images.len(), 32, 32, 3];
        Batch { images: pixels.map(pixel).collect(), shape, labels, ..Batch::default() }.into()
    }

    /// Each part normalises by itself, so that the gradient of a batch in parts is the mean of the parts' own.
    #[test]
    fn micro_batches_give_the_mean_of_their_gradients() -> Result<()> {
        let gradients = |parts: usize, batch: Numbered| -> Result<(Vec<f32>, u64)> {
            let mut learner = Learner::new(&small(parts)?)?;
            learner.train(&batch, 0, 1e-3, || None)?;
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
    fn each_part_is_judged_by_its_own_labels() -> Result<()> {
        let mut learner = Learner::new(&small(2)?)?;
        let bias = learner.model.parameters.layout().find("head.bias").context("a head")?;
        let fifth: Vec<f32> = (0..10).map(|class| if class == 5 { 9.0 } else { 0.0 }).collect();
        learner.model.parameters.set(bias, &Tensor::from_slice(&fifth, [10])?)?;
        // The only image of that class is in the second half.
        assert_eq!(learner.train(&batch(0..8), 0, 1e-3, || None)?.right, 1);
        Ok(())
    }

    #[test]
    fn a_step_that_is_given_up_between_micro_batches_changes_nothing() -> Result<()> {
        let state = |learner: &Learner| learner.model.state_dict()?.to_bytes();
        let mut learner = Learner::new(&small(2)?)?;
        let before = state(&learner)?;
        let step =
            |learner: &mut Learner, stop| learner.train_unless(&AtomicBool::new(stop), &batch(0..8), 0, 1e-3, || None);
        assert!(step(&mut learner, true)?.is_none());
        assert!(state(&learner)? == before);
        let mut other = Learner::new(&small(2)?)?;
        assert_eq!(step(&mut learner, false)?, step(&mut other, false)?);
        assert!(state(&learner)? != before);
        assert!(state(&learner)? == state(&other)?);
        Ok(())
    }
}
