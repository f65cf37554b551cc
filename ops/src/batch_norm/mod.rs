//! Batch normalisation of channels-last data: every channel over all other axes.
//!
//! **Forward.** For each channel c of x (..., C): y = γ·x̂ + β with x̂ = (x − μ)·r and r = 1/√(σ² + ε); γ, β, μ and
//! σ² are (C). In training μ and σ² are the mean and the biased variance of the channel in this batch; in
//! evaluation they are given.
//!
//! **Backward.** dβ = Σ dy and dγ = Σ dy·x̂ over the rows, in both modes. In evaluation x̂ is affine in x:
//! dx = γ·r·dy. In training x̂ depends on x also through μ and r, as in layer normalisation but along the other
//! axis: with R rows, dx = γ·r·(dy − dβ/R − x̂·dγ/R). Saved: x, γ, μ and r; x̂ is recomputed.
//!
//! The statistics of a batch are returned beside y, with the *unbiased* variance R/(R − 1)·σ², which is what
//! running statistics are updated with. They are not part of the tape: no gradient flows through them.
//!
//! Operands must be contiguous; f32 or f64, and on a GPU also x in bf16 with parameters and statistics in f32. Errors:
//! [`tensor::Error::Shape`], [`tensor::Error::Argument`] for training on fewer than two rows,
//! [`tensor::Error::NotContiguous`], [`tensor::Error::DType`]. Source: Ioffe and Szegedy, "Batch normalization", 2015;
//! conventions of `torch.nn.BatchNorm2d`.

pub mod cases;
mod cpu;
mod cuda;
pub mod reference;

use crate::epsilon::ensure_epsilon;
use autograd::{InputGrads, Result, Rule, Var, rule_fields};
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

/// Normalises the channels of x (..., C) by their own mean and variance, then scales by `weight` (C) and
/// shifts by `bias` (C). Also gives the statistics, for running averages. `epsilon` is above 0.
pub fn batch_norm_train<'t>(
    x: &Var<'t>,
    weight: &Var<'t>,
    bias: &Var<'t>,
    epsilon: f64,
) -> Result<(Var<'t>, BatchStatistics)> {
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
    let y = normalise(x, weight, bias, mean.clone(), rstd, Mode::Train)?;
    Ok((y, BatchStatistics { mean, variance }))
}

/// Normalises the channels of x (..., C) by a given `mean` (C) and `variance` (C), then scales by `weight` (C)
/// and shifts by `bias` (C). `epsilon` is above 0.
pub fn batch_norm_eval<'t>(
    x: &Var<'t>,
    weight: &Var<'t>,
    bias: &Var<'t>,
    mean: &Tensor,
    variance: &Tensor,
    epsilon: f64,
) -> Result<Var<'t>> {
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
    normalise(x, weight, bias, mean.clone(), rstd, Mode::Eval)
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
    x: &Var<'t>,
    weight: &Var<'t>,
    bias: &Var<'t>,
    mean: Tensor,
    rstd: Tensor,
    mode: Mode,
) -> Result<Var<'t>> {
    let device = x.value().device();
    let mut y = Tensor::empty_on(&device, x.shape().clone(), x.dtype())?;
    match device {
        Device::Cpu => match_float!(x.dtype(), "batch_norm", T => cpu::forward::<T>(
            x.value().as_slice("batch_norm")?,
            weight.value().as_slice("batch_norm")?,
            bias.value().as_slice("batch_norm")?,
            [mean.as_slice("batch_norm")?, rstd.as_slice("batch_norm")?],
            y.as_mut_slice("batch_norm")?,
        )),
        Device::Cuda(_) => {
            cuda::forward(x.value(), [weight.value(), bias.value()], [&mean, &rstd], &mut y)?;
        }
    }
    let rule = || BatchNorm { x: x.value().clone(), weight: weight.value().clone(), mean, rstd, mode };
    x.tape().record("batch_norm", &[x, weight, bias], y, rule)
}

struct BatchNorm {
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    mode: Mode,
}

impl Rule for BatchNorm {
    rule_fields!("batch_norm", x, weight, mean, rstd);

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let (mut dx, mut dweight, mut dbias) = (grads.open(0)?, grads.open(1)?, grads.open(2)?);
        match dy.device() {
            Device::Cpu => match_float!(dy.dtype(), "batch_norm", T => cpu::backward::<T>(
                dy.as_slice("batch_norm")?,
                self.x.as_slice("batch_norm")?,
                self.weight.as_slice("batch_norm")?,
                [self.mean.as_slice("batch_norm")?, self.rstd.as_slice("batch_norm")?],
                self.mode,
                [dx.out()?, dweight.out()?, dbias.out()?],
            )),
            Device::Cuda(_) => {
                let outs = [dx.out_on_gpu()?, dweight.out_on_gpu()?, dbias.out_on_gpu()?];
                cuda::backward(&dy, &self.x, &self.weight, [&self.mean, &self.rstd], self.mode, outs)?;
            }
        }
        [dx, dweight, dbias].into_iter().for_each(|slot| grads.close(slot));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use autograd::Tape;

    #[test]
    fn the_variance_for_running_averages_is_unbiased() {
        let tape = Tape::inference();
        let [x, ones] = [vec![1.0, 10.0, 2.0, 20.0, 6.0, 60.0], vec![1.0, 1.0]]
            .map(|values: Vec<f64>| tape.constant(Tensor::from_slice(&values, [values.len() / 2, 2]).unwrap()));
        let ones = tape.constant(ones.value().reshape([2]).unwrap());
        let (_, BatchStatistics { mean, variance }) = batch_norm_train(&x, &ones, &ones, 1e-5).unwrap();
        assert_eq!(mean.to_vec::<f64>().unwrap(), [3.0, 30.0]);
        assert_eq!(variance.to_vec::<f64>().unwrap(), [7.0, 700.0]);
    }

    #[test]
    fn statistics_in_f32_survive_a_mean_far_larger_than_the_deviation() {
        let tape = Tape::inference();
        let values: Vec<f32> = (0..100_000).map(|i| 1000.0 + (i % 2) as f32).collect();
        let x = tape.constant(Tensor::from_slice(&values, [100_000, 1]).unwrap());
        let one = tape.constant(Tensor::full([1], 1f32));
        let (_, BatchStatistics { mean, variance }) = batch_norm_train(&x, &one, &one, 1e-5).unwrap();
        assert_eq!(mean.item::<f32>().unwrap(), 1000.5);
        let variance = variance.item::<f32>().unwrap();
        assert!((variance - 0.2500025).abs() < 1e-6, "{variance}");
    }

    #[test]
    fn training_on_one_row_is_refused() {
        let tape = Tape::inference();
        let [x, w] = [vec![1, 1, 3], vec![3]].map(|shape: Vec<usize>| tape.constant(Tensor::full(shape, 1f32)));
        let error = batch_norm_train(&x, &w, &w, 1e-5).unwrap_err();
        assert!(matches!(error, autograd::Error::Tensor(Error::Argument { op: "batch_norm", .. })), "{error}");
    }
}
