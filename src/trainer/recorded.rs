//! A training step on a GPU, recorded once and replayed.
//!
//! A step is some two thousand kernels, each of them shorter than it takes to ask for it. So the first step on batches of
//! a size runs as it stands, the second is recorded, and from then on a step is one request. What changes lies in the
//! GPU's memory and is written there before: images and labels, the optimiser's numbers, and (by the recording) the keys
//! of random streams. What a step leaves behind, losses and logits, is read when all of it is done.

use super::step::{LOWER_RATE, Learner, Score, first_to_go_wrong, scored, tensors};
use crate::config::{Recompute, RunConfig};
use anyhow::{Context, Result, bail};
use data::Batch;
use model::Mode;
use optim::clip_factor;
use tensor::cuda::Recording;
use tensor::{Device, Tensor};

/// A batch in the memory of a GPU, and a step on it, if one has been recorded.
pub struct Staged {
    /// Images and labels of each micro-batch.
    parts: Vec<[Tensor; 2]>,
    recompute: Recompute,
    steps: u64,
    recorded: Option<(Recording, Vec<Traces>)>,
}

/// What a micro-batch leaves behind: its loss and its logits.
struct Traces {
    loss: Tensor,
    logits: Tensor,
}

impl Staged {
    /// Puts a batch into memory of its own.
    fn new(batch: &Batch, parts: usize, recompute: Recompute, device: &Device) -> Result<Self> {
        let part = |part| {
            let (images, labels) = tensors(batch, part, parts)?;
            Ok([images.to_device(device)?, labels.to_device(device)?])
        };
        let parts = (0..parts).map(part).collect::<Result<_>>()?;
        Ok(Self { parts, recompute, steps: 0, recorded: None })
    }

    /// Puts another batch of the same size in its place. False when it is of another size.
    fn overwrite(&mut self, batch: &Batch, parts: usize, recompute: Recompute) -> Result<bool> {
        if parts != self.parts.len() || recompute != self.recompute {
            return Ok(false);
        }
        let next = (0..parts).map(|part| tensors(batch, part, parts)).collect::<Result<Vec<_>>>()?;
        if next.iter().zip(&self.parts).any(|((images, _), own)| images.shape() != own[0].shape()) {
            return Ok(false);
        }
        for ((images, labels), own) in next.iter().zip(&mut self.parts) {
            own[0].overwrite(0, images)?;
            own[1].overwrite(0, labels)?;
        }
        Ok(true)
    }
}

impl Learner {
    /// Brings a batch to the GPU, for [`Learner::train_staged`].
    pub fn stage(&mut self, config: &RunConfig, batch: &Batch) -> Result<()> {
        let parts = config.micro_batches.min(batch.labels.len()).max(1);
        if let Some(staged) = &mut self.staged
            && staged.overwrite(batch, parts, config.recompute)?
        {
            return Ok(());
        }
        // The memory of what was recorded for another size goes first.
        self.staged = None;
        self.staged = Some(Staged::new(batch, parts, config.recompute, &self.device)?);
        Ok(())
    }

    /// As [`Learner::train`], on the batch that is staged.
    pub fn train_staged(&mut self, config: &RunConfig, step: u64, lr: f64) -> Result<Score> {
        let mut staged = self.staged.take().context("no batch is staged")?;
        let result = self.step(config, &mut staged, step, lr);
        self.staged = Some(staged);
        result
    }

    fn step(&mut self, config: &RunConfig, staged: &mut Staged, step: u64, lr: f64) -> Result<Score> {
        let longest = if config.clip_norm == 0.0 { f64::INFINITY } else { config.clip_norm };
        self.optimizer.prepare(lr, longest)?;
        if let Some(average) = &mut self.average {
            average.prepare()?;
        }
        let first = step * config.micro_batches as u64;
        let passes = first..first + staged.parts.len() as u64;
        let modes: Vec<Mode> = passes.map(|step| Mode::Train { seed: config.seed, step }).collect();
        let Staged { parts, steps, recorded, .. } = staged;
        // The first step compiles kernels, and a profile watches each operation.
        if recorded.is_none()
            && *steps > 0
            && self.profile.is_none()
            && let Device::Cuda(gpu) = self.device.clone()
        {
            *recorded = Some(gpu.record(|| self.run(config, parts, &modes))?);
        }
        *steps += 1;
        let as_it_stands;
        let traces = match recorded {
            Some((recording, traces)) => {
                replay(recording, &modes)?;
                traces
            }
            None => {
                as_it_stands = self.run(config, parts, &modes)?;
                &as_it_stands
            }
        };
        let mut score = Score::default();
        for ((Traces { loss, logits }, [images, labels]), &mode) in traces.iter().zip(&*parts).zip(&modes) {
            self.model.count_batch();
            let mean = f64::from(loss.item::<f32>()?);
            let labels = labels.to_device(&Device::Cpu)?;
            if !mean.is_finite() {
                let first = first_to_go_wrong(&self.model, images, &labels, mode);
                bail!("{LOWER_RATE}: the loss is {mean}; {first}");
            }
            score.add(scored(logits, &labels, mean)?);
        }
        let norm = self.optimizer.finish()?;
        if let Some(average) = &mut self.average {
            average.finish();
        }
        clip_factor(norm, longest).context(LOWER_RATE)?;
        Ok(score)
    }

    /// All that the GPU does in a step: nothing here waits for it.
    fn run(&mut self, config: &RunConfig, parts: &[[Tensor; 2]], modes: &[Mode]) -> Result<Vec<Traces>> {
        self.gradients.begin_step();
        let mut traces = vec![];
        for ([images, labels], &mode) in parts.iter().zip(modes) {
            let tape = config.recompute.tape(&self.device).profiled(self.profile.clone());
            let trace = {
                let output = self.model.forward(&tape, images, mode)?;
                let loss = ops::cross_entropy(output.logits(), labels, config.label_smoothing)?;
                tape.backward(&ops::scale(&loss, 1.0 / parts.len() as f64)?, &mut self.gradients)?;
                traces.push(Traces { loss: loss.value().clone(), logits: output.logits().value().clone() });
                output.trace
            };
            drop(tape);
            self.model.move_statistics(&trace)?;
        }
        self.optimizer.clip_and_step(&mut self.model.parameters, &self.gradients)?;
        if let Some(average) = &mut self.average {
            average.follow(&self.model)?;
        }
        Ok(traces)
    }
}

/// Does a recorded step again, with the random streams of these passes.
fn replay(recording: &Recording, modes: &[Mode]) -> Result<()> {
    let draws = recording.streams().len() / modes.len().max(1);
    let streams = modes.iter().flat_map(|mode| (0..draws as u64).filter_map(|draw| mode.stream(draw)));
    Ok(recording.replay(&streams.collect::<Vec<_>>())?)
}
