//! Batch normalisation of channels-last data: every channel over all other axes.
//!
//! **Forward.** For each channel c of x (..., C): y = γ·x̂ + β with x̂ = (x − μ)·r and r = 1/√(σ² + ε); γ, β, μ and
//! σ² are (C). In training μ and σ² are the mean and the biased variance of the channel in this batch; in
//! evaluation they are given.
//!
//! **Backward.** dβ = Σ dy and dγ = Σ dy·x̂ over the rows, in both modes. In evaluation x̂ is affine in x:
//! dx = γ·r·dy. In training x̂ depends on x also through μ and r, as in layer normalisation but along the other
//! axis: with R rows, dx = γ·r·(dy − dβ/R − x̂·dγ/R). Saved: x, γ, β, μ and r; x̂ is recomputed.
//!
//! **With GELU** after it ([`gelu`](mod@crate::gelu)), the value is gelu(y), and dy·gelu'(y) takes the place of dy.
//! Both passes compute y from x as they go, so it is never a map in memory. A GPU's backward pass computes the slope
//! twice, for the sums and for dx, rather than write and read dy·gelu'(y); the CPU's keeps dy·gelu'(y) from one to the
//! other, because there the slope costs more than the memory traffic.
//!
//! The statistics of a batch are returned beside y, with the *unbiased* variance R/(R − 1)·σ², which is what
//! running statistics are updated with. They are not part of the tape: no gradient flows through them.
//!
//! Operands must be contiguous; f32 or f64, and on a GPU also x in bf16 with parameters and statistics in f32. Errors:
//! [`tensor::Error::Shape`], [`tensor::Error::Argument`] for training on fewer than two rows, and for an ε that is 0 or
//! less, or not finite, [`tensor::Error::NotContiguous`], [`tensor::Error::DType`]. Source: Ioffe and Szegedy, "Batch
//! normalization", 2015; conventions of `torch.nn.BatchNorm2d`.

pub mod cases;
mod cpu;
mod cuda;
pub mod reference;

use crate::epsilon::ensure_epsilon;
use autograd::{InputGrads, Recompute, Result, Rule, Var, rule_fields};
use tensor::cuda::Module;
use tensor::{Device, Error, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "normalises channels over the batch, then γ·x̂ + β";

/// Where the statistics come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// From the batch itself.
    Train,
    /// From outside.
    Eval,
}

/// The statistics of a batch, per channel.
#[derive(Clone, Debug)]
pub struct BatchStatistics {
    /// The mean of each channel (C).
    pub mean: Tensor,
    /// The unbiased variance of each channel (C).
    pub variance: Tensor,
}

/// How values are normalised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchNorm {
    /// ε, above 0.
    pub epsilon: f64,
    /// Whether GELU is applied to the result.
    pub gelu: bool,
}

/// Normalises the channels of x (..., C) by their own mean and variance, then scales by `weight` (C) and
/// shifts by `bias` (C). Also gives the statistics, for running averages.
/// Operands and errors: those of the [module](mod@crate::batch_norm).
pub fn batch_norm_train<'t>(
    x: &Var<'t>,
    weight: &Var<'t>,
    bias: &Var<'t>,
    attributes: BatchNorm,
) -> Result<(Var<'t>, BatchStatistics)> {
    let BatchNorm { epsilon, gelu } = attributes;
    let channels = channels(x, [weight.value(), bias.value()])?;
    ensure_epsilon("batch_norm", epsilon, x.dtype())?;
    let rows = x.shape()[..x.shape().len() - 1].iter().product::<usize>();
    if rows < 2 {
        let message = format!("training needs two or more values per channel, got {rows} in shape {}", x.shape());
        return Err(Error::argument("batch_norm", message).into());
    }
    let device = x.value().device();
    let moment = || Tensor::empty_on(&device, [channels], x.dtype().of_sums());
    let (mut mean, mut variance, mut rstd) = (moment()?, moment()?, moment()?);
    match device {
        Device::Cpu => match_float!(x.dtype(), "batch_norm", T => cpu::statistics::<T>(
            x.value().as_slice("batch_norm")?,
            epsilon as T,
            [
                mean.as_mut_slice("batch_norm")?,
                variance.as_mut_slice("batch_norm")?,
                rstd.as_mut_slice("batch_norm")?,
            ],
        )),
        Device::Cuda(_) => cuda::statistics(x.value(), epsilon, [&mut mean, &mut variance, &mut rstd])?,
    }
    let y = normalise([x, weight, bias], [mean.clone(), rstd], Mode::Train, gelu)?;
    Ok((y, BatchStatistics { mean, variance }))
}

/// Normalises the channels of x (..., C) by a given `mean` (C) and `variance` (C), then scales by `weight` (C)
/// and shifts by `bias` (C).
/// Operands and errors: those of the [module](mod@crate::batch_norm).
pub fn batch_norm_eval<'t>(
    x: &Var<'t>,
    weight: &Var<'t>,
    bias: &Var<'t>,
    mean: &Tensor,
    variance: &Tensor,
    attributes: BatchNorm,
) -> Result<Var<'t>> {
    let BatchNorm { epsilon, gelu } = attributes;
    let channels = channels(x, [weight.value(), bias.value(), mean, variance])?;
    ensure_epsilon("batch_norm", epsilon, x.dtype())?;
    let device = x.value().device();
    let mut rstd = Tensor::empty_on(&device, [channels], x.dtype().of_sums())?;
    match device {
        Device::Cpu => match_float!(x.dtype(), "batch_norm", T => {
            let rstd = rstd.as_mut_slice::<T>("batch_norm")?;
            cpu::reciprocal_deviation(variance.as_slice("batch_norm")?, epsilon as T, rstd);
        }),
        Device::Cuda(_) => cuda::reciprocal_deviation(variance, epsilon, x.dtype(), &mut rstd)?,
    }
    normalise([x, weight, bias], [mean.clone(), rstd], Mode::Eval, gelu)
}

/// The number of channels of x; all other operands must be of shape (C).
fn channels<const N: usize>(x: &Var<'_>, operands: [&Tensor; N]) -> tensor::Result<usize> {
    let Some(&channels) = x.shape().last() else {
        return Err(Error::shape("batch_norm", "x (..., C)", x.shape()));
    };
    match operands.into_iter().find(|operand| *operand.shape() != [channels]) {
        Some(operand) => {
            let expected = format!("weight, bias, mean and variance of ({channels})");
            Err(Error::shape("batch_norm", expected, operand.shape()))
        }
        None => Ok(channels),
    }
}

fn normalise<'t>(
    [x, weight, bias]: [&Var<'t>; 3],
    [mean, rstd]: [Tensor; 2],
    mode: Mode,
    gelu: bool,
) -> Result<Var<'t>> {
    let [x_value, weight_value, bias_value] = [x, weight, bias].map(|operand| operand.value().clone());
    let rule = BatchNormRule { x: x_value, weight: weight_value, bias: bias_value, mean, rstd, mode, gelu };
    x.tape().record("batch_norm", &[x, weight, bias], rule.value()?, || rule)
}

struct BatchNormRule {
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    mode: Mode,
    gelu: bool,
}

impl BatchNormRule {
    fn value(&self) -> Result<Tensor> {
        let Self { x, weight, bias, mean, rstd, gelu, .. } = self;
        let mut y = x.empty_like()?;
        match x.device() {
            Device::Cpu => match_float!(x.dtype(), "batch_norm", T => cpu::forward::<T>(
                x.as_slice("batch_norm")?,
                [weight.as_slice("batch_norm")?, bias.as_slice("batch_norm")?],
                [mean.as_slice("batch_norm")?, rstd.as_slice("batch_norm")?],
                *gelu,
                y.as_mut_slice("batch_norm")?,
            )),
            Device::Cuda(_) => cuda::forward(x, [weight, bias], [mean, rstd], *gelu, &mut y)?,
        }
        Ok(y)
    }
}

impl Rule for BatchNormRule {
    rule_fields!("batch_norm", x, weight, bias, mean, rstd);

    /// Only where [`gelu`](crate::gelu()) would be recomputed.
    fn recompute(&self) -> Option<Recompute<'_>> {
        self.gelu.then(|| -> Recompute<'_> { Box::new(|| self.value()) })
    }

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let (mut dx, mut dweight, mut dbias) = (grads.open_in(0, dy.dtype())?, grads.open(1)?, grads.open(2)?);
        let Self { x, weight, bias, mean, rstd, mode, gelu } = *self;
        match dy.device() {
            Device::Cpu => match_float!(dy.dtype(), "batch_norm", T => cpu::backward::<T>(
                dy.as_slice("batch_norm")?,
                x.as_slice("batch_norm")?,
                [weight.as_slice("batch_norm")?, bias.as_slice("batch_norm")?],
                [mean.as_slice("batch_norm")?, rstd.as_slice("batch_norm")?],
                (mode, gelu),
                [dx.out()?, dweight.out()?, dbias.out()?],
            )),
            Device::Cuda(_) => {
                let outs = [dx.out_on_gpu()?, dweight.out_on_gpu()?, dbias.out_on_gpu()?];
                cuda::backward(&dy, &x, [&weight, &bias], [&mean, &rstd], (mode, gelu), outs)?;
            }
        }
        [dx, dweight, dbias].into_iter().for_each(|slot| grads.close(slot));
        Ok(())
    }
}

#[cfg(test)]
mod tests;
