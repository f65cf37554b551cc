//! Addition with broadcasting.
//!
//! **Forward.** y = a + b, shapes aligned at the last axis, extents equal or 1 (NumPy's rule).
//!
//! **Backward.** ∂y/∂a = 1, so da = dy, added up over the axes along which a was repeated; db likewise.
//! Nothing is saved but shapes.
//!
//! Operands may be views; f32 or f64 (on a GPU also bf16), both the same. Errors: [`tensor::Error::Broadcast`],
//! [`tensor::Error::DType`].

pub mod cases;
mod cpu;
mod cuda;
pub mod reference;

use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use tensor::cuda::Module;
use tensor::{Device, Shape, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "a + b, with broadcasting";

/// a + b, with broadcasting.
pub fn add<'t>(a: &Var<'t>, b: &Var<'t>) -> Result<Var<'t>> {
    let y = match a.value().device() {
        Device::Cpu => match_float!(a.dtype(), "add", T => cpu::forward::<T>(a.value(), b.value())?),
        Device::Cuda(_) => cuda::forward(a.value(), b.value())?,
    };
    let shapes = [a.shape().clone(), b.shape().clone()];
    a.tape().record("add", &[a, b], y, || Add { shapes })
}

struct Add {
    shapes: [Shape; 2],
}

impl Rule for Add {
    rule_fields!("add");

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        for (input, shape) in self.shapes.iter().enumerate() {
            if shape == dy.shape() {
                grads.give(input, dy.clone())?;
                continue;
            }
            let mut slot = grads.open(input)?;
            match dy.device() {
                Device::Cpu => match_float!(dy.dtype(), "add", T => {
                    if let Some(out) = slot.out::<T>()? {
                        cpu::backward(&dy, shape, out)?;
                    }
                }),
                Device::Cuda(_) => slot.out_on_gpu()?.map_or(Ok(()), |out| cuda::backward(&dy, shape, out))?,
            }
            grads.close(slot);
        }
        Ok(())
    }
}
