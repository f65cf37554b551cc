//! Cross-entropy with soft targets, fused with the softmax: for mixed images and token labels.
//!
//! **Forward.** Logits x (N, K) and targets t (N, K): the mean over the rows of −Σₖ tₖ·ln pₖ with
//! p = softmax(x), that is of Σt·ln Σ exp(x − m) − Σ t·(x − m) with m = max(x). Σt is 1 for
//! distributions, but nothing here relies on it.
//!
//! **Backward.** dxₖ = dy·(pₖ·Σt − tₖ)/N, as in [`cross_entropy`](mod@crate::cross_entropy). Saved: p, for the
//! reasons given there, and t.
//!
//! The targets are a constant and get no gradient. Both must be contiguous and of one type, f32 or f64, and on a GPU
//! also x in bf16 with p, t and the loss in f32; the loss has the shape (). Errors: [`tensor::Error::Shape`] if the
//! shapes do not fit, or if there are no rows or no classes, [`tensor::Error::NotContiguous`],
//! [`tensor::Error::DType`]. Source: `torch.nn.CrossEntropyLoss` with class probabilities; timm's
//! `SoftTargetCrossEntropy`.

pub mod cases;
mod cpu;
mod cuda;
pub mod reference;

use crate::cross_entropy::cpu::{backward, forward};
use crate::cross_entropy::extents_of;
use crate::give::give;
use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use cpu::Soft;
use tensor::cuda::Module;
use tensor::{Device, Error, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "mean of -Σ t·ln softmax(x) for target distributions";

/// The mean cross-entropy of logits (N, K) against the distributions `targets` (N, K): a scalar.
pub fn soft_cross_entropy<'t>(logits: &Var<'t>, targets: &Tensor) -> Result<Var<'t>> {
    let [_, classes] = extents_of("soft_cross_entropy", logits.value())?;
    if targets.shape() != logits.shape() {
        let expected = format!("targets like the logits, {}", logits.shape());
        return Err(Error::shape("soft_cross_entropy", expected, targets.shape()).into());
    }
    let device = logits.value().device();
    let mut p = Tensor::empty_on(&device, logits.shape().clone(), logits.dtype().of_sums())?;
    let loss = match device {
        Device::Cpu => match_float!(logits.dtype(), "soft_cross_entropy", T => Tensor::scalar(forward::<T>(
            logits.value().as_slice("soft_cross_entropy")?,
            &Soft { targets: targets.as_slice("soft_cross_entropy")?, classes },
            p.as_mut_slice("soft_cross_entropy")?,
        ))),
        Device::Cuda(_) => {
            let mut loss = Tensor::empty_on(&device, [], p.dtype())?;
            cuda::forward(logits.value(), targets, &mut p, &mut loss)?;
            loss
        }
    };
    logits.tape().record("soft_cross_entropy", &[logits], loss, || SoftCrossEntropy { p, targets: targets.clone() })
}

struct SoftCrossEntropy {
    p: Tensor,
    targets: Tensor,
}

impl Rule for SoftCrossEntropy {
    rule_fields!("soft_cross_entropy", p, targets);

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let [_, classes] = extents_of("soft_cross_entropy", &self.p)?;
        give!(grads, 0, dy, "soft_cross_entropy", out => {
            Cpu<T>: {
                let targets = Soft { targets: self.targets.as_slice("soft_cross_entropy")?, classes };
                backward(dy.item()?, self.p.as_slice("soft_cross_entropy")?, &targets, out);
            },
            Cuda: cuda::backward(&dy, &self.p, &self.targets, out)?,
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::uniform;
    use autograd::Tape;

    #[test]
    fn targets_that_do_not_fit_are_refused() {
        let tape = Tape::inference();
        let refused = |logits: [usize; 2], targets: &Tensor| {
            soft_cross_entropy(&tape.constant(uniform(logits, 1)), targets).expect_err("does not fit").to_string()
        };
        assert!(refused([2, 3], &uniform([3, 2], 1)).contains("targets like the logits, (2, 3)"));
        assert!(refused([0, 3], &uniform([0, 3], 1)).contains("(0, 3)"));
        assert!(refused([2, 3], &Tensor::full([2, 3], 0.5f32)).contains("expected f64"));
    }
}
