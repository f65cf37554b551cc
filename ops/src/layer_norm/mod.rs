//! Layer normalisation over the last axis.
//!
//! **Forward.** For each row x (C): μ = mean(x), σ² = mean((x − μ)²), x̂ = (x − μ)·r with r = 1/√(σ² + ε),
//! y = γ·x̂ + β. γ and β are (C).
//!
//! **Backward.** dβ = Σ dy and dγ = Σ dy·x̂ over the rows. For x, with g = γ·dy: x̂ depends on x directly,
//! through μ and through r, which gives dx = r·(g − mean(g) − x̂·mean(g·x̂)). Saved: x, γ, and μ and r per row;
//! x̂ is recomputed wherever it is needed, and never stored. Also β, but only to recompute y.
//!
//! Operands must be contiguous; f32 or f64, and on a GPU also x in bf16 with γ and β in f32. Errors:
//! [`tensor::Error::Shape`], [`tensor::Error::Argument`] for an ε that is 0 or less, or not finite,
//! [`tensor::Error::NotContiguous`], [`tensor::Error::DType`]. Source: Ba, Kiros and Hinton, "Layer normalization",
//! 2016; biased variance, as in `torch.nn.LayerNorm`.

pub mod cases;
mod cpu;
pub(crate) mod cuda;
pub mod reference;

use crate::epsilon::ensure_epsilon;
use autograd::{InputGrads, Recompute, Result, Rule, Var, rule_fields};
use tensor::cuda::Module;
use tensor::{Device, Error, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "normalises rows to mean 0 and variance 1, then γ·x̂ + β";

/// Normalises x (..., C) over its last axis, then scales by `weight` (C) and shifts by `bias` (C). `epsilon` is above
/// 0.
/// Operands and errors: those of the [module](mod@crate::layer_norm).
pub fn layer_norm<'t>(x: &Var<'t>, weight: &Var<'t>, bias: &Var<'t>, epsilon: f64) -> Result<Var<'t>> {
    let Some(&channels) = x.shape().last() else {
        return Err(Error::shape("layer_norm", "x (..., C)", x.shape()).into());
    };
    for operand in [weight, bias] {
        if *operand.shape() != [channels] {
            return Err(Error::shape("layer_norm", format!("weight and bias of ({channels})"), operand.shape()).into());
        }
    }
    ensure_epsilon("layer_norm", epsilon, x.dtype())?;
    let rows = x.value().count().checked_div(channels).unwrap_or(0);
    let device = x.value().device();
    let mut y = x.value().empty_like()?;
    let moment = || Tensor::empty_on(&device, [rows], x.dtype().of_sums());
    let (mut mean, mut rstd) = (moment()?, moment()?);
    match device {
        Device::Cpu => match_float!(x.dtype(), "layer_norm", T => cpu::forward::<T>(
            x.value().as_slice("layer_norm")?,
            weight.value().as_slice("layer_norm")?,
            bias.value().as_slice("layer_norm")?,
            epsilon as T,
            y.as_mut_slice("layer_norm")?,
            [mean.as_mut_slice("layer_norm")?, rstd.as_mut_slice("layer_norm")?],
        )),
        Device::Cuda(_) => {
            let [weight, bias] = [weight.value(), bias.value()];
            cuda::forward(x.value(), [weight, bias], epsilon, &mut y, [&mut mean, &mut rstd])?;
        }
    }
    x.tape().record("layer_norm", &[x, weight, bias], y, || {
        let [x, weight, bias] = [x, weight, bias].map(|operand| operand.value().clone());
        LayerNorm { x, weight, mean, rstd, bias }
    })
}

struct LayerNorm {
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    /// Only for computing the value again; the gradients do not depend on it.
    bias: Tensor,
}

impl Rule for LayerNorm {
    rule_fields!("layer_norm", x, weight, mean, rstd; bias);

    fn recompute(&self) -> Option<Recompute<'_>> {
        Some(Box::new(|| {
            let mut y = self.x.empty_like()?;
            match self.x.device() {
                Device::Cpu => match_float!(self.x.dtype(), "layer_norm", T => cpu::recompute::<T>(
                    self.x.as_slice("layer_norm")?,
                    self.weight.as_slice("layer_norm")?,
                    self.bias.as_slice("layer_norm")?,
                    [self.mean.as_slice("layer_norm")?, self.rstd.as_slice("layer_norm")?],
                    y.as_mut_slice("layer_norm")?,
                )),
                Device::Cuda(_) => {
                    cuda::recompute(&self.x, [&self.weight, &self.bias], [&self.mean, &self.rstd], &mut y)?;
                }
            }
            Ok(y)
        }))
    }

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let (mut dx, mut dweight, mut dbias) = (grads.open_in(0, dy.dtype())?, grads.open(1)?, grads.open(2)?);
        match dy.device() {
            Device::Cpu => match_float!(dy.dtype(), "layer_norm", T => cpu::backward::<T>(
                dy.as_slice("layer_norm")?,
                self.x.as_slice("layer_norm")?,
                self.weight.as_slice("layer_norm")?,
                [self.mean.as_slice("layer_norm")?, self.rstd.as_slice("layer_norm")?],
                [dx.out()?, dweight.out()?, dbias.out()?],
            )),
            Device::Cuda(_) => {
                let parameters = [&mut dweight, &mut dbias];
                cuda::backward(&dy, &self.x, &self.weight, [&self.mean, &self.rstd], dx.out_on_gpu()?, parameters)?;
            }
        }
        [dx, dweight, dbias].into_iter().for_each(|slot| grads.close(slot));
        Ok(())
    }
}
