//! A step on a GPU in three calls, of which the second can be recorded.

use super::Controls;
use crate::error::Result;
use crate::{AdamW, Ema, Error};
use autograd::{Gradients, Parameters};

impl AdamW {
    /// The first of the three calls that a step on a GPU consists of, so that the second can be recorded: uploads the
    /// constants of this step, and the rate of the moving average if there is one. `max_norm` is the norm to which
    /// gradients are clipped. Errors: [`Error::Setting`]; [`tensor::Error::Device`] on the CPU;
    /// [`tensor::Error::Shared`] if anything else shares the buffers that the step will write, which a replayed step
    /// does not check itself.
    pub fn prepare(
        &mut self,
        parameters: &Parameters,
        lr: f64,
        max_norm: f64,
        average: Option<&mut Ema>,
    ) -> Result<()> {
        let constants = self.constants(lr, max_norm)?;
        [parameters.flat(), &self.m, &self.v].into_iter().try_for_each(|written| written.ensure_unique("adamw"))?;
        let elsewhere = tensor::Error::Device { op: "adamw", expected: "cuda".into(), actual: "cpu".into() };
        let controls = self.controls.as_mut().ok_or(elsewhere)?;
        average.map(Ema::prepare).transpose()?;
        Ok(controls.set(&constants, max_norm)?)
    }

    /// The second: computes the norm of the gradients, clips them, makes a step and, in the same sweep, updates the
    /// moving average; all without waiting, so that it can be [recorded](tensor::cuda::Gpu::record) and replayed. If
    /// the norm of the gradients is not finite, or its square is not even after clipping (it then counts as infinite),
    /// no step is made. In either case it [ends](Gradients::end_step) the step of the gradients. Errors:
    /// [`Error::Layout`], [`autograd::Error::Unreached`], [`autograd::Error::NoBackward`] and [`tensor::Error::Shared`]
    /// as of [`AdamW::step_clipped`]; those of [`Ema::update`]; [`tensor::Error::Argument`] without [`AdamW::prepare`],
    /// or the second time after it.
    pub fn clip_and_step(
        &mut self,
        parameters: &mut Parameters,
        gradients: &mut Gradients,
        average: Option<&mut Ema>,
    ) -> Result<()> {
        let flat = self.ensure_own(parameters, gradients)?;
        let controls = prepared(&mut self.controls)?;
        if controls.made {
            return Err(tensor::Error::argument("adamw", "the prepared step has been made; call AdamW::finish").into());
        }
        let average = average.map(|average| average.with_rate(parameters)).transpose()?;
        controls.clip(flat)?;
        controls.made = true;
        controls.step([parameters.flat_tensor_mut(), &mut self.m, &mut self.v], flat, average)?;
        gradients.end_step();
        Ok(())
    }

    /// The third: waits for the step, counts it and the average's update, and returns the norm of the gradients.
    /// Errors: [`Error::NonFinite`] if that is not finite (NaN if there was no second call), so that no step was made,
    /// and none is counted; [`tensor::Error::Argument`] without [`AdamW::prepare`]; those of the GPU.
    pub fn finish(&mut self, average: Option<&mut Ema>) -> Result<f64> {
        let controls = prepared(&mut self.controls)?;
        let norm = controls.norm()?;
        controls.prepared = false;
        let made = norm.is_finite();
        self.steps += u64::from(made);
        if let Some(average) = average {
            average.finish(made);
        }
        if made { Ok(norm) } else { Err(Error::NonFinite { norm }) }
    }
}

/// The controls, if they hold a step.
fn prepared(controls: &mut Option<Controls>) -> Result<&mut Controls> {
    let missing = || tensor::Error::argument("adamw", "no step was prepared; call AdamW::prepare first");
    Ok(controls.as_mut().filter(|controls| controls.prepared).ok_or_else(missing)?)
}
