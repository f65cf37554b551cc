//! Inference on batch after batch.
//!
//! A forward pass is several hundred kernels, many of which run for less time than their launch takes. So on a GPU the
//! second pass over batches of one size is recorded (as a CUDA graph), and from then on a pass is a single launch.

use crate::staging::{Numbered, Staged};
use anyhow::{Context, Result};
use autograd::{Profile, Tape, Var};
use model::{BiFormer, Factors, Mode};
use std::fmt;
use std::sync::Arc;
use tensor::{Device, Tensor, settle_pool};

/// To record a pass takes about as long as this many save: an estimate, which nobody has measured.
const WORTH_RECORDING: usize = 8;

/// A model used for inference. A recording holds the addresses of the model's tensors, so this borrows the model, whose
/// weights can then neither change nor be dropped:
///
/// ```compile_fail,E0506
/// use biformer::inference::Inference;
/// use biformer::{model::{BiFormer, preset}, tensor::DType};
///
/// let mut model = BiFormer::new(&preset("nano").unwrap().config(), 0, DType::F32).unwrap();
/// let inference = Inference::new(&model, 100);
/// model.parameters = model.parameters.share();
/// drop(inference);
/// ```
pub struct Inference<'m> {
    model: &'m BiFormer,
    device: Device,
    /// The model's [prepared](BiFormer::prepared) factors, after the first pass.
    factors: Option<Factors>,
    profile: Option<Arc<Profile>>,
    may_record: bool,
    staged: Option<Staged<Vec<Tensor>>>,
}

impl fmt::Debug for Inference<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inference")
            .field("model", self.model)
            .field("prepared", &self.factors.is_some())
            .finish_non_exhaustive()
    }
}

impl<'m> Inference<'m> {
    /// Inference of about this many passes: for a few, recording one is not worthwhile. While one is recorded, which is
    /// the second over batches of a size, no other thread may use the GPU.
    pub fn new(model: &'m BiFormer, passes: usize) -> Self {
        let may_record = passes >= WORTH_RECORDING;
        Self { model, device: model.device(), factors: None, profile: None, may_record, staged: None }
    }

    /// The same, with a profile that measures each operation; passes are then not recorded.
    pub fn profiled(self, profile: Option<Arc<Profile>>) -> Self {
        Self { may_record: self.may_record && profile.is_none(), profile, ..self }
    }

    /// The model.
    pub fn model(&self) -> &'m BiFormer {
        self.model
    }

    /// Copies a batch to the model's device. A batch of another size replaces the previous staging buffers and discards
    /// what was recorded for them. Errors: those of the device.
    pub fn stage(&mut self, batch: &Numbered) -> Result<()> {
        Staged::stage(&mut self.staged, batch, 1, &self.device)
    }

    /// A pass over the batch that is staged. It gives what [`BiFormer::run`] gives: logits (N, classes), or a
    /// backbone's maps; the next pass overwrites them. On a GPU this does not wait for the pass to finish, and the
    /// batch that `next` returns is uploaded in the meantime. Errors: those of the model and of the device.
    pub fn pass<'b>(&mut self, next: impl FnOnce() -> Option<&'b Numbered>) -> Result<&[Tensor]> {
        let Self { model, device, factors, profile, may_record, staged } = self;
        settle_pool();
        let factors = match factors {
            Some(factors) => factors,
            none => none.insert(model.prepared()?),
        };
        let Staged { work, batch } = staged.as_mut().context("no batch is staged")?;
        let [images, _] = &batch.parts()[0];
        let values = work.run(
            device,
            *may_record,
            |_| vec![],
            || {
                let tape = Tape::inference().profiled(profile.clone());
                let values = model.run(&model.pass_with(factors.clone(), &tape, Mode::Evaluate), images)?;
                Ok::<_, anyhow::Error>(values.into_iter().map(Var::into_value).collect())
            },
        )?;
        batch.send(next)?;
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use data::Batch;
    use model::preset;
    use tensor::DType;

    /// Which an image that is to be classified has not.
    #[test]
    fn a_batch_needs_no_labels() -> Result<()> {
        let config = preset("nano")?.config().with_overrides(["depth=1,1,1", "embed_dim=24,24,24"])?;
        let model = BiFormer::new(&config, 1, DType::F32)?;
        let mut inference = Inference::new(&model, 1);
        let images = |by: f32| (0..2 * 32 * 32 * 3).map(|i| (by * i as f32).sin()).collect::<Vec<_>>();
        for (by, labels) in [(0.37, vec![]), (0.41, vec![3, 4]), (0.43, vec![]), (0.47, vec![])] {
            let (tape, shape) = (Tape::inference(), [2, 32, 32, 3]);
            let expected = model.forward(&tape, &Tensor::from_slice(&images(by), shape)?, Mode::Evaluate)?;
            let expected = expected.logits()?.value().to_vec::<f32>()?;
            inference.stage(&Batch { images: images(by), shape, labels, ..Batch::default() }.into())?;
            let found = inference.pass(|| None)?[0].to_vec::<f32>()?;
            let near = |(found, expected): (&f32, &f32)| (found - expected).abs() < 1e-4;
            assert!(found.len() == 20 && found.iter().zip(&expected).all(near), "{found:?} {expected:?}");
        }
        let short = Batch { images: images(0.37), shape: [3, 32, 32, 3], ..Batch::default() };
        assert!(inference.stage(&short.into()).is_err());
        Ok(())
    }
}
