//! Dropout.
//!
//! **Forward.** yᵢ = kᵢ·xᵢ/(1 − p), where kᵢ is 1 when the random stream's i-th uniform number is p or
//! more and 0 otherwise. So kᵢ = 1 has the probability 1 − p, and y has the mean x. For p = 0 y is x.
//!
//! **Backward.** y is linear in x, element by element: dxᵢ = kᵢ·dyᵢ/(1 − p). Nothing is saved: the
//! stream is a function of the position, so the same k are drawn again.
//!
//! The stream is indexed from the first element of x, even if x is only a part of a batch: [in
//! pieces](autograd::Tape::in_pieces) all pieces would drop the same elements, so give each piece a stream of its own,
//! keyed by its first sample.
//!
//! To evaluate a model, leave the call out. x must be contiguous; f32 or f64, and bf16 on a GPU. Errors:
//! [`tensor::Error::Argument`] for p outside [0, 1), [`tensor::Error::NotContiguous`], [`tensor::Error::DType`].
//! Source: Srivastava et al., "Dropout", JMLR 2014; `torch.nn.Dropout`.

pub mod cases;
mod cpu;
mod cuda;
pub mod reference;

use crate::give::give;
use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use tensor::cpu::parallel::Out;
use tensor::cuda::Module;
use tensor::rng::Philox;
use tensor::{Device, Error, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "drops elements at random, scales the rest by 1/(1-p)";

/// x with each element dropped with probability `p`, which `rng` decides, and the others divided by 1 − p.
/// Operands and errors: those of the [module](mod@crate::dropout).
pub fn dropout<'t>(x: &Var<'t>, p: f64, rng: Philox) -> Result<Var<'t>> {
    let Some(keep) = Keep::new("dropout", p, rng)? else { return Ok(x.clone()) };
    let mut y = x.value().empty_like()?;
    match x.value().device() {
        Device::Cpu => match_float!(x.dtype(), "dropout", T => {
            cpu::apply::<T>(x.value().as_slice("dropout")?, keep, Out::store(y.as_mut_slice("dropout")?));
        }),
        Device::Cuda(_) => cuda::apply(x.value(), keep, y.as_out("dropout", false)?)?,
    }
    x.tape().record("dropout", &[x], y, || Dropout { keep })
}

/// Which elements are kept, and the factor on them.
#[derive(Clone, Copy)]
pub(crate) struct Keep {
    pub rng: Philox,
    /// 1/(1 − p)
    pub scale: f64,
    /// A uniform number is its word's upper 24 bits times 2^-24, so it is p or more exactly when they
    /// are ⌈p·2^24⌉ or more.
    threshold: u32,
}

impl Keep {
    /// None for p = 0, when everything survives as it is; [`Error::Argument`] for p outside [0, 1).
    pub fn new(op: &'static str, p: f64, rng: Philox) -> tensor::Result<Option<Self>> {
        if !(0.0..1.0).contains(&p) {
            return Err(Error::argument(op, format!("the probability p is {p}, but must be at least 0 and below 1")));
        }
        let threshold = (p * f64::from(1 << 24)).ceil() as u32;
        Ok((p > 0.0).then_some(Self { rng, scale: 1.0 / (1.0 - p), threshold }))
    }

    /// Whether this word of the stream means survival.
    #[inline(always)]
    pub fn allows(&self, word: u32) -> bool {
        word >> 8 >= self.threshold
    }
}

struct Dropout {
    keep: Keep,
}

impl Rule for Dropout {
    rule_fields!("dropout");

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        give!(grads, 0, dy, "dropout", out => {
            Cpu<T>: cpu::apply(dy.as_slice("dropout")?, self.keep, out),
            Cuda: cuda::apply(&dy, self.keep, out)?,
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_that_are_none_are_refused() {
        for p in [-0.1, 1.0, 1.5, f64::NAN, f64::INFINITY] {
            assert!(matches!(Keep::new("dropout", p, Philox::new(0, 0)), Err(Error::Argument { .. })), "{p}");
        }
    }

    #[test]
    fn the_threshold_decides_as_the_uniform_number_does() {
        let rng = Philox::new(8, 9);
        for p in [1e-9, 0.1, 0.5, 0.75, 1.0 - 1e-9, f64::from(rng.uniform(17))] {
            let keep = Keep::new("dropout", p, rng).unwrap().unwrap();
            for i in 0..2000 {
                assert_eq!(keep.allows(rng.word(i)), f64::from(rng.uniform(i)) >= p, "p {p}, element {i}");
            }
        }
    }
}
