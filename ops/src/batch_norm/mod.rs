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
//! **With GELU** after it ([`gelu`](mod@crate::gelu)), the value is gelu(y), and dy·gelu'(y) takes the place of dy. Both
//! passes compute y from x as they go, so it is never a map in memory. A GPU's backward pass computes the slope twice,
//! for the sums and for dx, rather than write and read dy·gelu'(y); the CPU's keeps dy·gelu'(y) from one to the other,
//! because there the slope costs more than the memory traffic.
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

/// Normalises the channels of x (..., C) by their own mean and variance, then scales by `weight` (C) and
/// shifts by `bias` (C). Also gives the statistics, for running averages. `epsilon` is above 0.
pub fn batch_norm_train<'t>(
    x: &Var<'t>,
    weight: &Var<'t>,
    bias: &Var<'t>,
    epsilon: f64,
) -> Result<(Var<'t>, BatchStatistics)> {
    train([x, weight, bias], epsilon, false)
}

/// The same, and GELU of the result.
pub fn batch_norm_gelu_train<'t>(
    x: &Var<'t>,
    weight: &Var<'t>,
    bias: &Var<'t>,
    epsilon: f64,
) -> Result<(Var<'t>, BatchStatistics)> {
    train([x, weight, bias], epsilon, true)
}

fn train<'t>([x, weight, bias]: [&Var<'t>; 3], epsilon: f64, gelu: bool) -> Result<(Var<'t>, BatchStatistics)> {
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
/// and shifts by `bias` (C). `epsilon` is above 0.
pub fn batch_norm_eval<'t>(
    x: &Var<'t>,
    weight: &Var<'t>,
    bias: &Var<'t>,
    mean: &Tensor,
    variance: &Tensor,
    epsilon: f64,
) -> Result<Var<'t>> {
    evaluate([x, weight, bias], [mean, variance], epsilon, false)
}

/// The same, and GELU of the result.
pub fn batch_norm_gelu_eval<'t>(
    x: &Var<'t>,
    weight: &Var<'t>,
    bias: &Var<'t>,
    mean: &Tensor,
    variance: &Tensor,
    epsilon: f64,
) -> Result<Var<'t>> {
    evaluate([x, weight, bias], [mean, variance], epsilon, true)
}

fn evaluate<'t>(
    [x, weight, bias]: [&Var<'t>; 3],
    [mean, variance]: [&Tensor; 2],
    epsilon: f64,
    gelu: bool,
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
    let rule = BatchNorm { x: x_value, weight: weight_value, bias: bias_value, mean, rstd, mode, gelu };
    x.tape().record("batch_norm", &[x, weight, bias], rule.value()?, || rule)
}

struct BatchNorm {
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    mode: Mode,
    gelu: bool,
}

impl BatchNorm {
    fn value(&self) -> Result<Tensor> {
        let Self { x, weight, bias, mean, rstd, gelu, .. } = self;
        let mut y = Tensor::empty_on(&x.device(), x.shape().clone(), x.dtype())?;
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

impl Rule for BatchNorm {
    rule_fields!("batch_norm", x, weight, bias, mean, rstd);

    /// Only where [`gelu`](crate::gelu()) would be recomputed.
    fn recompute(&self) -> Option<Recompute<'_>> {
        self.gelu.then(|| -> Recompute<'_> { Box::new(|| self.value()) })
    }

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let (mut dx, mut dweight, mut dbias) = (grads.open(0)?, grads.open(1)?, grads.open(2)?);
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
mod tests {
    use super::*;
    use crate::case::uniform;
    use crate::gelu;
    use autograd::Tape;
    use autograd::gradcheck::{Function, backward, value};
    use tensor::{DType, Shape};

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

    /// Batch normalisation with GELU, as one operation or as two.
    struct WithGelu {
        fused: bool,
        mode: Mode,
    }

    impl Function for WithGelu {
        fn apply<'t>(&self, x: &[Var<'t>]) -> Result<Var<'t>> {
            let [x, weight, bias] = x else { unreachable!() };
            let (mean, variance, epsilon) = (bias.value(), weight.value(), 1e-5);
            match (self.mode, self.fused) {
                (Mode::Train, true) => Ok(batch_norm_gelu_train(x, weight, bias, epsilon)?.0),
                (Mode::Train, false) => gelu(&batch_norm_train(x, weight, bias, epsilon)?.0),
                (Mode::Eval, true) => batch_norm_gelu_eval(x, weight, bias, mean, variance, epsilon),
                (Mode::Eval, false) => gelu(&batch_norm_eval(x, weight, bias, mean, variance, epsilon)?),
            }
        }
    }

    #[test]
    fn gelu_on_the_cpu_gives_the_bits_of_its_own_operation() -> Result<()> {
        let _unlimited = tensor::cpu::isa::unlimited();
        // Several blocks of rows: of few channels, and of more than a register has places for.
        for (rows, channels) in [(3000, 24), (200, 300)] {
            let operand = |shape: Shape, seed| uniform(shape, seed).cast(DType::F32);
            let x = [
                operand([rows, channels].into(), 1)?,
                Tensor::full([channels], 0.7f32),
                operand([channels].into(), 2)?,
            ];
            let upstream = operand([rows, channels].into(), 3)?;
            for mode in [Mode::Train, Mode::Eval] {
                let run = |fused| -> Result<Vec<Option<Tensor>>> {
                    let f = WithGelu { fused, mode };
                    Ok([vec![Some(value(&f, &x)?)], backward(&f, &x, &upstream)?].concat())
                };
                for (one, two) in run(true)?.into_iter().flatten().zip(run(false)?.into_iter().flatten()) {
                    assert!(one.to_vec::<f32>()? == two.to_vec::<f32>()?, "{mode:?}, {channels} channels");
                }
            }
        }
        Ok(())
    }

    #[test]
    fn training_on_one_row_is_refused() {
        let tape = Tape::inference();
        let [x, w] = [vec![1, 1, 3], vec![3]].map(|shape: Vec<usize>| tape.constant(Tensor::full(shape, 1f32)));
        let error = batch_norm_train(&x, &w, &w, 1e-5).unwrap_err();
        assert!(matches!(error, autograd::Error::Tensor(Error::Argument { op: "batch_norm", .. })), "{error}");
    }
}
