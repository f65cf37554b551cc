//! Softmax over the last axis.
//!
//! **Forward.** For each row x (C): yᵢ = exp(xᵢ − m) / Σⱼ exp(xⱼ − m). Any m gives the same y; with
//! m = max(x) nothing overflows and the sum is at least 1.
//!
//! **Backward.** ∂yᵢ/∂xⱼ = yᵢ·(δᵢⱼ − yⱼ), hence dxⱼ = Σᵢ dyᵢ·∂yᵢ/∂xⱼ = yⱼ·(dyⱼ − Σᵢ dyᵢ·yᵢ). Saved: y,
//! which is all that the formula asks for.
//!
//! x must be contiguous; f32 or f64, and bf16 on a GPU. −∞ gives a probability of 0 (a masked score); a row of
//! −∞ alone, or with +∞ or NaN, gives NaN, as there is no distribution to speak of. Errors: [`tensor::Error::Shape`]
//! for a tensor without axes, [`tensor::Error::NotContiguous`], [`tensor::Error::DType`]. Source:
//! `torch.softmax(x, -1)`.

pub mod cases;
pub(crate) mod cpu;
pub(crate) mod cuda;
pub mod reference;

use crate::give::give;
use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use tensor::cuda::Module;
use tensor::{Device, Error, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "exp(x) / Σ exp(x) over the last axis";

/// The softmax of x (..., C) over its last axis.
/// Operands and errors: those of the [module](mod@crate::softmax).
pub fn softmax<'t>(x: &Var<'t>) -> Result<Var<'t>> {
    let Some(&channels) = x.shape().last() else {
        return Err(Error::shape("softmax", "x (..., C)", x.shape()).into());
    };
    let mut y = x.value().empty_like()?;
    match x.value().device() {
        Device::Cpu => match_float!(x.dtype(), "softmax", T => {
            cpu::forward::<T>(x.value().as_slice("softmax")?, channels, y.as_mut_slice("softmax")?);
        }),
        Device::Cuda(_) => cuda::forward(x.value(), channels, &mut y)?,
    }
    x.tape().record("softmax", &[x], y.clone(), || Softmax { y })
}

struct Softmax {
    y: Tensor,
}

impl Rule for Softmax {
    rule_fields!("softmax", y);

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let channels = self.y.shape().last().copied().unwrap_or(1);
        give!(grads, 0, dy, "softmax", out => {
            Cpu<T>: cpu::backward(dy.as_slice("softmax")?, self.y.as_slice("softmax")?, channels, out),
            Cuda: cuda::backward(&dy, &self.y, channels, out)?,
        });
        Ok(())
    }
}
