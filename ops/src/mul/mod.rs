//! Multiplication with broadcasting.
//!
//! **Forward.** y = a·b element by element, shapes aligned at the last axis, extents equal or 1 (NumPy's
//! rule).
//!
//! **Backward.** ∂y/∂a = b, so da = dy·b, summed over the axes along which a was broadcast; db likewise with a. Saved:
//! both factors, each for the other's gradient.
//!
//! Operands may be views, both of the same type: f32 or f64, and on a GPU also bf16; or on a GPU a in bf16 with b in
//! f32, which is rounded. Errors: [`tensor::Error::Broadcast`], [`tensor::Error::DType`], [`tensor::Error::Argument`]
//! if the size of y overflows.

pub mod cases;
mod cuda;
pub mod reference;

use crate::broadcast;
use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use tensor::cuda::Module;
use tensor::{Device, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "a·b element by element, with broadcasting";

/// a·b element by element, with broadcasting.
/// Operands and errors: those of the [module](mod@crate::mul).
pub fn mul<'t>(a: &Var<'t>, b: &Var<'t>) -> Result<Var<'t>> {
    let y = product(a.value(), b.value())?;
    a.tape().record("mul", &[a, b], y, || Mul { a: a.value().clone(), b: b.value().clone() })
}

fn product(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    Ok(match a.device() {
        Device::Cpu => match_float!(a.dtype(), "mul", T => broadcast::cpu::zip("mul", a, b, |a: T, b: T| a * b)?),
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
            let product = product(&dy, other)?;
            broadcast::give("mul", grads, input, product, (factor.shape(), factor.dtype()))?;
        }
        Ok(())
    }
}
