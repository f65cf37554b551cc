//! The Gaussian error linear unit, exact.
//!
//! **Forward.** y = x·Φ(x), with Φ(x) = (1 + erf(x/√2)) / 2 the distribution function of the standard
//! normal distribution, element by element on any shape.
//!
//! **Backward.** Φ' = φ, the density φ(x) = exp(−x²/2)/√(2π), so by the product rule
//! dx = dy·(Φ(x) + x·φ(x)). Saved: x. Φ(x) could be saved as well, but it costs as many bytes as x and
//! about as long to read again as to compute again.
//!
//! x must be contiguous; f32 or f64, and bf16 on a GPU. In f32 the error is at most 3e-7·max(1, |x|), from the polynomials
//! that stand for Φ, and in bf16 that of rounding. Errors: [`tensor::Error::NotContiguous`], [`tensor::Error::DType`]. Source:
//! Hendrycks and Gimpel, "Gaussian error linear units", 2016; `torch.nn.GELU` without approximation.

pub mod cases;
mod cpu;
pub(crate) mod cuda;
pub mod reference;

use crate::give::give;
use autograd::{Again, InputGrads, Result, Rule, Var, rule_fields};
use tensor::cuda::Module;
use tensor::{Device, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "x·Φ(x), the exact Gaussian error linear unit";

/// x·Φ(x), element by element.
pub fn gelu<'t>(x: &Var<'t>) -> Result<Var<'t>> {
    x.tape().record("gelu", &[x], value(x.value())?, || Gelu { x: x.value().clone() })
}

fn value(x: &Tensor) -> Result<Tensor> {
    let mut y = Tensor::empty_on(&x.device(), x.shape().clone(), x.dtype())?;
    match x.device() {
        Device::Cpu => match_float!(x.dtype(), "gelu", T => {
            cpu::forward::<T>(x.as_slice("gelu")?, y.as_mut_slice("gelu")?);
        }),
        Device::Cuda(_) => cuda::forward(x, &mut y)?,
    }
    Ok(y)
}

struct Gelu {
    x: Tensor,
}

impl Rule for Gelu {
    rule_fields!("gelu", x);

    fn again(&self) -> Option<Again<'_>> {
        Some(Box::new(|| value(&self.x)))
    }

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        give!(grads, 0, dy, "gelu", out => {
            Cpu<T>: cpu::backward(dy.as_slice("gelu")?, self.x.as_slice("gelu")?, out),
            Cuda: cuda::backward(&dy, &self.x, out)?,
        });
        Ok(())
    }
}
