//! Stochastic depth: dropout of whole samples.
//!
//! **Forward.** y\[n\] = kₙ·x\[n\]/(1 − p) for each sample n of x (N, ...), where kₙ is 1 if the random stream's
//! uniform number f + n is at least p and 0 otherwise, with f the index of x's first sample in the whole batch: a batch
//! processed in pieces drops the same samples. For p = 0 y is x. [`drop_path_residual`] adds a residual: a branch whose kₙ
//! is 0 is as if it were skipped for sample n.
//!
//! **Backward.** y is linear in x: dx\[n\] = kₙ·dy\[n\]/(1 − p). Nothing is saved: the k are drawn again. The residual's
//! gradient is dy.
//!
//! Operands must be contiguous; f32 or f64, and bf16 on a GPU. Errors: [`tensor::Error::Argument`] for p outside [0, 1),
//! or if the numbers of the samples overflow, [`tensor::Error::Shape`] for a tensor without axes or a residual of
//! another shape, [`tensor::Error::NotContiguous`], [`tensor::Error::DType`]. Source: Huang et al., "Deep networks with
//! stochastic depth", ECCV 2016; one draw per sample, as in timm's `DropPath`.

pub mod cases;
mod cpu;
mod cuda;
pub mod reference;

use crate::dropout::Keep;
use crate::give::give;
use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use std::ops::Range;
use tensor::cpu::parallel::Out;
use tensor::cuda::Module;
use tensor::rng::Philox;
use tensor::{Device, Error, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "drops whole samples at random, scales the rest by 1/(1-p)";

/// x (N, ...) with each sample dropped with probability `p`, which `rng` decides, and the others divided by 1 − p.
/// `first` is the index of x's first sample in the whole batch, if x is only a part of it; otherwise 0.
pub fn drop_path<'t>(x: &Var<'t>, p: f64, rng: Philox, first: usize) -> Result<Var<'t>> {
    dropped(x, None, p, rng, first)
}

/// `residual` (N, ...) + [`drop_path`]`(x, p, rng, first)` in one pass.
pub fn drop_path_residual<'t>(x: &Var<'t>, residual: &Var<'t>, p: f64, rng: Philox, first: usize) -> Result<Var<'t>> {
    dropped(x, Some(residual), p, rng, first)
}

fn dropped<'t>(x: &Var<'t>, residual: Option<&Var<'t>>, p: f64, rng: Philox, first: usize) -> Result<Var<'t>> {
    let Some(&samples) = x.shape().first() else {
        return Err(Error::shape("drop_path", "x (N, ...)", x.shape()).into());
    };
    if let Some(residual) = residual.filter(|residual| residual.shape() != x.shape()) {
        return Err(Error::shape("drop_path", format!("a residual {}", x.shape()), residual.shape()).into());
    }
    let Some(keep) = Keep::new("drop_path", p, rng)? else {
        return residual.map_or_else(|| Ok(x.clone()), |residual| crate::add(residual, x));
    };
    let Some(end) = first.checked_add(samples) else {
        return Err(Error::argument("drop_path", format!("{samples} samples from number {first} on overflow")).into());
    };
    let samples = first..end;
    let device = x.value().device();
    let mut y = Tensor::empty_on(&device, x.shape().clone(), x.dtype())?;
    let added = residual.map(Var::value);
    match device {
        Device::Cpu => match_float!(x.dtype(), "drop_path", T => cpu::apply::<T>(
            x.value().as_slice("drop_path")?,
            added.map(|added| added.as_slice("drop_path")).transpose()?,
            samples.clone(),
            keep,
            Out::store(y.as_mut_slice("drop_path")?),
        )),
        Device::Cuda(_) => cuda::apply(x.value(), added, samples.clone(), keep, y.as_out("drop_path", false)?)?,
    }
    let inputs: Vec<&Var<'t>> = [Some(x), residual].into_iter().flatten().collect();
    x.tape().record("drop_path", &inputs, y, || DropPath { samples, keep, residual: residual.is_some() })
}

struct DropPath {
    samples: Range<usize>,
    keep: Keep,
    residual: bool,
}

impl Rule for DropPath {
    rule_fields!("drop_path");

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        give!(grads, 0, dy, "drop_path", out => {
            Cpu<T>: cpu::apply(dy.as_slice("drop_path")?, None, self.samples, self.keep, out),
            Cuda: cuda::apply(&dy, None, self.samples, self.keep, out)?,
        });
        if self.residual {
            grads.give(1, dy)?;
        }
        Ok(())
    }
}
