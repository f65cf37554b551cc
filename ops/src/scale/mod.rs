//! Multiplication by a constant.
//!
//! **Forward.** y = c·x.
//!
//! **Backward.** ∂y/∂x = c, so dx = c·dy. Nothing is saved but c.
//!
//! x must be contiguous; f32 or f64, and bf16 on a GPU. Errors: [`tensor::Error::NotContiguous`],
//! [`tensor::Error::DType`].

pub mod cases;
mod cpu;
mod cuda;
pub mod reference;

use crate::give::give;
use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use tensor::cpu::parallel::Out;
use tensor::cuda::Module;
use tensor::{Device, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "c·x for a constant c";

/// `factor` times x.
/// Operands and errors: those of the [module](mod@crate::scale).
pub fn scale<'t>(x: &Var<'t>, factor: f64) -> Result<Var<'t>> {
    let mut y = x.value().empty_like()?;
    match x.value().device() {
        Device::Cpu => match_float!(x.dtype(), "scale", T => cpu::scale::<T>(
            x.value().as_slice("scale")?,
            factor as T,
            Out::store(y.as_mut_slice("scale")?),
        )),
        Device::Cuda(_) => cuda::scale(x.value(), factor, y.as_out("scale", false)?)?,
    }
    x.tape().record("scale", &[x], y, || Scale { factor })
}

struct Scale {
    factor: f64,
}

impl Rule for Scale {
    rule_fields!("scale");

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        give!(grads, 0, dy, "scale", out => {
            Cpu<T>: cpu::scale(dy.as_slice("scale")?, self.factor as T, out),
            Cuda: cuda::scale(&dy, self.factor, out)?,
        });
        Ok(())
    }
}
