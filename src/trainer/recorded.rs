//! A training step on a GPU, recorded once and replayed.
//!
//! A step is more than a thousand kernels (1,117 for BiFormer-S when they were last counted), many of which run for
//! less time than their launch takes. So the first step on batches of one size runs normally, the second is recorded
//! (as a CUDA graph), and from then on a step is a single launch. What changes from step to step is in the GPU's
//! memory and is written there before each replay: images and labels, the optimiser's numbers, and (by the recording
//! itself) the keys of random streams. A step's losses and logits are read when all of it is done; until then, the
//! next batch is uploaded.

use super::average::Average;
use super::failure::lacks_memory;
use super::learner::{Learner, modes, with_advice};
use super::score::{Score, judge};
use crate::staging::{Numbered, Staged};
use anyhow::{Context, Error, Result};
use model::Mode;
use tensor::Tensor;

/// What a micro-batch leaves: for the host, its loss and its logits, and for a replay its draws of random numbers.
#[derive(Debug)]
pub(super) struct Left {
    loss_and_logits: [Tensor; 2],
    draws: Vec<u64>,
}

impl Learner {
    /// As [`Learner::train`], on a GPU.
    pub(super) fn train_on_gpu<'b>(
        &mut self,
        batch: &Numbered,
        step: u64,
        lr: f64,
        next: impl FnOnce() -> Option<&'b Numbered>,
    ) -> Result<Score> {
        let parts = self.config.parts(batch.labels.len());
        let stage = |learner: &mut Self| Staged::stage(&mut learner.staged, batch, parts, &learner.device);
        let block = self.config.recompute.advice("--recompute block or ");
        let with_way_out = |error: Error| match lacks_memory(&error) {
            true => error.context(format!("{block}a smaller --batch-size needs less memory")),
            false => error,
        };
        stage(self).map_err(with_way_out)?;
        // Taken out, because a step changes the learner as well.
        let mut staged = self.staged.take().context("no batch is staged")?;
        let result = self.step(&mut staged, batch, step, lr, next);
        self.staged = Some(staged);
        result.map_err(with_way_out)
    }

    fn step<'b>(
        &mut self,
        staged: &mut Staged<Vec<Left>>,
        given: &Numbered,
        step: u64,
        lr: f64,
        next: impl FnOnce() -> Option<&'b Numbered>,
    ) -> Result<Score> {
        // A replay does not check: it would change what a caller has of them.
        for running in &self.model.statistics {
            [&running.mean, &running.variance].into_iter().try_for_each(|values| values.ensure_unique("batch_norm"))?;
        }
        let average = self.average.as_mut().map(Average::of_parameters);
        self.optimizer.prepare(&self.model.parameters, lr, self.config.max_norm(), average)?;
        let Staged { work, batch } = staged;
        let modes = modes(&self.config, step, batch.parts().len());
        let streams = |parts: &Vec<Left>| -> Vec<_> {
            let of_part =
                |(left, &mode): (&Left, &Mode)| left.draws.iter().filter_map(|&draw| mode.stream(draw)).collect();
            parts.iter().zip(&modes).flat_map(|part| -> Vec<_> { of_part(part) }).collect()
        };
        // A profile measures each operation, so a profiled step is not recorded.
        let (device, may_record) = (self.device.clone(), self.profile.is_none());
        let results = work.run(&device, may_record, streams, || self.run(batch.parts(), &modes))?;
        // While the GPU works.
        batch.send(next)?;
        let results = Tensor::all_to_cpu(results.iter().flat_map(|part| &part.loss_and_logits))?;
        let mut score = Score::default();
        for (part, (result, tensors)) in results.chunks_exact(2).zip(batch.parts()).enumerate() {
            self.model.count_batch();
            let labels = &given.labels[given.slots(part, modes.len())];
            let smoothing = self.config.label_smoothing;
            score.add(judge(&self.model, step, tensors, labels, modes[part], smoothing, [&result[0], &result[1]])?);
        }
        self.optimizer
            .finish(self.average.as_mut().map(Average::of_parameters))
            .map_err(|error| with_advice(error, step))?;
        Ok(score)
    }

    /// All that the GPU does in a step: nothing here waits for it.
    fn run(&mut self, parts: &[[Tensor; 2]], modes: &[Mode]) -> Result<Vec<Left>> {
        self.gradients.begin_step();
        let mut results = vec![];
        let whole = parts.iter().map(|[_, targets]| targets.shape()[0]).sum();
        for (given, &mode) in parts.iter().zip(modes) {
            let mut loss_and_logits = None;
            let trace = self.pass(given, mode, whole, |_, left| {
                loss_and_logits = Some(left.map(Tensor::clone));
                Ok(())
            })?;
            self.model.move_statistics(&trace)?;
            let loss_and_logits = loss_and_logits.context("a pass has no loss")?;
            results.push(Left { loss_and_logits, draws: trace.draws });
        }
        let average = self.average.as_mut().map(Average::of_parameters);
        self.optimizer.clip_and_step(&mut self.model.parameters, &mut self.gradients, average)?;
        if let Some(average) = &mut self.average {
            average.follow_statistics(&self.model)?;
        }
        Ok(results)
    }
}
