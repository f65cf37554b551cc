//! Addition with broadcasting.
//!
//! **Forward.** y = a + b, shapes aligned at the last axis, extents equal or 1 (NumPy's rule).
//!
//! **Backward.** ∂y/∂a = 1, so da = dy, summed over the axes along which a was broadcast; db likewise. Only shapes and
//! types are saved.
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
use tensor::{DType, Device, Shape, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "a + b, with broadcasting";

/// a + b, with broadcasting.
/// Operands and errors: those of the [module](mod@crate::add).
pub fn add<'t>(a: &Var<'t>, b: &Var<'t>) -> Result<Var<'t>> {
    let y = match a.value().device() {
        Device::Cpu => match_float!(a.dtype(), "add", T => {
            broadcast::cpu::zip("add", a.value(), b.value(), |a: T, b: T| a + b)?
        }),
        Device::Cuda(_) => broadcast::cuda::zip(&cuda::KERNELS, a.value(), b.value())?,
    };
    let operands = [a, b].map(|operand| (operand.shape().clone(), operand.dtype()));
    a.tape().record("add", &[a, b], y, || Add { operands })
}

struct Add {
    operands: [(Shape, DType); 2],
}

impl Rule for Add {
    rule_fields!("add");

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        for (input, (shape, dtype)) in self.operands.iter().enumerate() {
            broadcast::give("add", grads, input, dy.clone(), (shape, *dtype))?;
        }
        Ok(())
    }
}
