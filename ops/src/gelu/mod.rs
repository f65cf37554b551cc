//! The Gaussian error linear unit, exact.
//!
//! **Forward.** y = x·Φ(x), with Φ(x) = (1 + erf(x/√2)) / 2 the distribution function of the standard
//! normal distribution, element by element on any shape.
//!
//! **Backward.** Φ' = φ, the density φ(x) = exp(−x²/2)/√(2π), so by the product rule
//! dx = dy·(Φ(x) + x·φ(x)). Saved: x. Φ(x) could be saved as well, but it takes as many
//! bytes as x, and to read it again takes about as long as to compute it again.
//!
//! x must be contiguous; f32 or f64, and bf16 on a GPU. In f32 the error is at most 3e-7·max(1, |x|), from the
//! polynomials that approximate Φ, and in bf16 it is that of rounding. Errors: [`tensor::Error::NotContiguous`],
//! [`tensor::Error::DType`]. Source: Hendrycks and Gimpel, "Gaussian error linear units", 2016; `torch.nn.GELU` without
//! approximation.

pub mod cases;
pub(crate) mod cpu;
pub(crate) mod cuda;
pub mod reference;

use crate::give::give;
use autograd::{InputGrads, Recompute, Result, Rule, Var, rule_fields};
use tensor::cuda::Module;
use tensor::{Device, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "x·Φ(x), the exact Gaussian error linear unit";

/// x·Φ(x), element by element.
/// Operands and errors: those of the [module](mod@crate::gelu).
pub fn gelu<'t>(x: &Var<'t>) -> Result<Var<'t>> {
    x.tape().record("gelu", &[x], value(x.value())?, || Gelu { x: x.value().clone() })
}

/// The same for a value that the caller no longer needs. If no other owner and no backward pass needs it either, the
/// result overwrites it on the CPU, and takes no memory of its own.
pub(crate) fn gelu_of(x: Var<'_>) -> Result<Var<'_>> {
    let tape = x.tape();
    if !tape.is_inference() || x.value().device() != Device::Cpu || !x.value().is_unique() {
        return gelu(&x);
    }
    let mut y = x.into_value();
    match_float!(y.dtype(), "gelu", T => cpu::forward_in_place::<T>(y.as_mut_slice("gelu")?));
    // The input has been overwritten. A profile asks for its size and whether it was in another buffer, so a broadcast
    // scalar stands in for it.
    let x = tape.constant(Tensor::empty([1], y.dtype()).broadcast_to(y.shape().clone())?);
    tape.record("gelu", &[&x], y, || Gelu { x: x.value().clone() })
}

fn value(x: &Tensor) -> Result<Tensor> {
    let mut y = x.empty_like()?;
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

    fn recompute(&self) -> Option<Recompute<'_>> {
        Some(Box::new(|| value(&self.x)))
    }

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        give!(grads, 0, dy, "gelu", out => {
            Cpu<T>: cpu::backward(dy.as_slice("gelu")?, self.x.as_slice("gelu")?, out),
            Cuda: cuda::backward(&dy, &self.x, out, None)?,
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use autograd::Tape;
    use tensor::cpu::isa::unlimited;

    #[test]
    fn a_value_is_written_over_only_where_nobody_else_has_it() {
        let x = || Tensor::from_slice(&[-1.5f32, 0.0, 0.5, 3.0], [4]).unwrap();
        let _unlimited = unlimited();
        let expected = value(&x()).unwrap().to_vec::<f32>().unwrap();
        let is_in_place = |tape: &Tape, x: Var<'_>| {
            let before = x.value().buffer_id();
            let y = gelu_of(x).unwrap();
            assert_eq!(y.value().to_vec::<f32>().unwrap(), expected);
            assert_eq!(y.node().is_some(), !tape.is_inference());
            y.value().buffer_id() == before
        };
        let inference = Tape::inference();
        assert!(is_in_place(&inference, inference.constant(x())));
        let other = x();
        assert!(!is_in_place(&inference, inference.constant(other.clone())));
        assert_eq!(other.to_vec::<f32>().unwrap(), x().to_vec::<f32>().unwrap());
        let training = Tape::new();
        assert!(!is_in_place(&training, training.input(x())));
    }
}
