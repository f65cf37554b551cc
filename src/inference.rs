//! Inference on batch after batch.
//!
//! A forward pass is some hundreds of kernels, many of them shorter than it takes to ask for them. So on a GPU the second
//! pass over batches of a size is recorded, and from then on a pass is one request.

use crate::staging::{Numbered, Staging};
use anyhow::{Context, Result};
use autograd::{Profile, Tape, Var};
use model::{BiFormer, Factors, Mode};
use std::sync::Arc;
use tensor::cuda::Repeated;
use tensor::{Device, Tensor, settle_pool};

/// To record a pass takes about as long as this many save: an estimate, which nobody has measured.
const WORTH_RECORDING: usize = 8;

/// A model in use. What is recorded holds the addresses of the model's tensors; so it borrows the model, whose weights can
/// neither change nor go while it lives:
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
    /// The model's, [prepared](BiFormer::prepared), once there was a pass.
    factors: Option<Factors>,
    profile: Option<Arc<Profile>>,
    may_record: bool,
    staged: Option<Staged>,
}

/// Batches of one size. The memory that a recording works with is its own.
struct Staged {
    values: Repeated<Vec<Tensor>>,
    batch: Staging,
}

impl<'m> Inference<'m> {
    /// Of about so many passes: it is not worth while to record one for a few.
    pub fn new(model: &'m BiFormer, passes: usize) -> Self {
        let may_record = passes >= WORTH_RECORDING;
        Self { model, device: model.device(), factors: None, profile: None, may_record, staged: None }
    }

    /// The same, with a profile that measures each operation, for which none may be recorded.
    pub fn profiled(self, profile: Option<Arc<Profile>>) -> Self {
        Self { may_record: self.may_record && profile.is_none(), profile, ..self }
    }

    /// The model.
    pub fn model(&self) -> &'m BiFormer {
        self.model
    }

    /// Brings a batch to the model's device. Batches of another size take the place of those before, and of what was
    /// recorded for them. Errors: those of the device.
    pub fn stage(&mut self, batch: &Numbered) -> Result<()> {
        if let Some(staged) = &mut self.staged
            && staged.batch.fill(batch, 1)?
        {
            return Ok(());
        }
        self.staged = None;
        self.staged = Some(Staged { values: Repeated::default(), batch: Staging::new(batch, 1, &self.device)? });
        Ok(())
    }

    /// A pass over the batch that is staged. It gives what [`BiFormer::run`] gives: logits (N, classes), or a backbone's maps;
    /// the next pass overwrites them. On a GPU nothing here waits for it, and the batch that `next` gives is sent ahead
    /// meanwhile. Errors: those of the model and of the device.
    pub fn pass<'b>(&mut self, next: impl FnOnce() -> Option<&'b Numbered>) -> Result<&[Tensor]> {
        let Self { model, device, factors, profile, may_record, staged } = self;
        settle_pool();
        let factors = match factors {
            Some(factors) => factors,
            none => none.insert(model.prepared()?),
        };
        let Staged { values, batch } = staged.as_mut().context("no batch is staged")?;
        let [images, _] = &batch.parts()[0];
        let values = values.run(
            device,
            *may_record,
            |_| vec![],
            || {
                let tape = Tape::inference().profiled(profile.clone());
                let output = model.forward_with(factors.clone(), &tape, images, Mode::Evaluate)?;
                Ok::<_, anyhow::Error>(output.values.into_iter().map(Var::into_value).collect())
            },
        )?;
        batch.send(next)?;
        Ok(values)
    }
}
