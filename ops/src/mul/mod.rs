//! Multiplication with broadcasting.
//!
//! **Forward.** y = a·b element by element, shapes aligned at the last axis, extents equal or 1 (NumPy's
//! rule).
//!
//! **Backward.** ∂y/∂a = b, so da = dy·b, added up over the axes along which a was repeated; db likewise
//! with a. Saved: both factors, each for the other's gradient.
//!
//! Operands may be views; f32 or f64 (on a GPU also bf16), both the same, or on a GPU b in f32 beside a in bf16.
//! Errors: [`tensor::Error::Broadcast`], [`tensor::Error::DType`], [`tensor::Error::Argument`] when y is more than can be counted.

pub mod cases;
mod cuda;
pub mod reference;

use crate::broadcast;
use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use tensor::cuda::Module;
use tensor::{DType, Device, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "a·b element by element, with broadcasting";

/// a·b element by element, with broadcasting.
pub fn mul<'t>(a: &Var<'t>, b: &Var<'t>) -> Result<Var<'t>> {
    let y = product(a.value(), b.value())?;
    a.tape().record("mul", &[a, b], y, || Mul { a: a.value().clone(), b: b.value().clone() })
}

fn product(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    Ok(match a.device() {
        Device::Cpu => match_float!(a.dtype(), "mul", T => broadcast::cpu::zip("mul", a, b, |a: T, b: T| a * b)?),
        // A parameter, in f32 beside maps in bf16, is rounded.
        Device::Cuda(_) if (a.dtype(), b.dtype()) == (DType::Bf16, DType::F32) => {
            broadcast::cuda::zip(&cuda::KERNELS, a, &b.cast(DType::Bf16)?)?
        }
        Device::Cuda(_) => broadcast::cuda::zip(&cuda::KERNELS, a, b)?,
    })
}

struct Mul {
    a: Tensor,
    b: Tensor,
}

impl Rule for Mul {
    rule_fields!("mul", a, b);

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        for (input, factor, other) in [(0, &self.a, &self.b), (1, &self.b, &self.a)] {
            if !grads.wanted(input) {
                continue;
            }
            let mut product = product(&dy, other)?;
            // What is added up takes the factor's type by itself.
            if product.shape() == factor.shape() {
                product = product.cast(factor.dtype())?;
            }
            broadcast::give("mul", grads, input, product, factor.shape())?;
        }
        Ok(())
    }
}
