//! CUDA kernels of [`batch_norm`](super): sums over pieces of the rows, and sweeps over the elements.

use super::cpu::Mode;
use std::sync::Arc;
use tensor::cuda::elements::{finish_sums, pieces, put};
use tensor::cuda::{Gpu, Launch, Module, Out};
use tensor::{DType, Result, Tensor};

pub static KERNELS: Module = Module {
    name: "batch_norm",
    source: include_str!("kernel.cu"),
    headers: &[],
    kernels: &[
        "batch_norm_statistics<T>",
        "batch_norm_moments<T>",
        "batch_norm_rstd<T>",
        "batch_norm_forward<T>",
        "batch_norm_sums<T>",
        "batch_norm_backward<T>",
    ],
};

/// Threads of a block, and how many rows each of them asks for at once: as in `kernel.cu`.
const THREADS: usize = 256;
const BATCH: usize = 4;
/// Packs of channels that a block has at most.
const MOST_ACROSS: usize = 32;

/// How the kernels cut rows of channels.
struct Tiles {
    rows: usize,
    channels: usize,
    /// Blocks for all channels of a row.
    blocks: usize,
    /// Packs of channels in each.
    across: usize,
}

impl Tiles {
    fn new(x: &Tensor, channels: usize) -> Self {
        let packs = channels.div_ceil(16 / x.dtype().size());
        let blocks = packs.div_ceil(MOST_ACROSS);
        let across = packs.checked_div(blocks).map_or(1, |_| packs.div_ceil(blocks));
        Self { rows: x.count().checked_div(channels).unwrap_or(0), channels, blocks, across }
    }

    /// Partial sums of a pair of values, (pieces, 2, C).
    fn partial(&self, x: &Tensor) -> Result<Tensor> {
        Tensor::empty_on(&x.device(), [pieces(self.rows), 2, self.channels], x.dtype().wide())
    }

    /// A call of a kernel that has a block for each piece of a sum.
    fn sum<'a>(&self, gpu: &'a Arc<Gpu>, kernel: &'static str, dtype: DType) -> Result<Launch<'a>> {
        Ok(KERNELS.launch(gpu, kernel, dtype)?.threads(THREADS).grid([self.blocks, pieces(self.rows), 1]))
    }

    /// A call of a kernel in which a thread has a batch of rows, or several where that makes too many blocks for a grid.
    fn sweep<'a>(&self, gpu: &'a Arc<Gpu>, kernel: &'static str, dtype: DType) -> Result<Launch<'a>> {
        let pieces = self.rows.div_ceil(THREADS / self.across * BATCH).min(65_535);
        Ok(KERNELS.launch(gpu, kernel, dtype)?.threads(THREADS).grid([self.blocks, pieces, 1]))
    }

    /// The last arguments of each of these kernels.
    fn describe<'a>(&self, launch: Launch<'a>) -> Result<Launch<'a>> {
        launch.count(self.rows).extents([self.channels, self.across])
    }
}

/// Mean, unbiased variance and 1/√(biased variance + ε) of each channel of x (R, C), R ≥ 2.
pub fn statistics(gpu: &Arc<Gpu>, x: &Tensor, epsilon: f64, [mean, variance, rstd]: [&mut Tensor; 3]) -> Result<()> {
    let tiles = Tiles::new(x, mean.count());
    let mut partial = tiles.partial(x)?;
    let launch = tiles.sum(gpu, "batch_norm_statistics<T>", x.dtype())?.input(x)?.output(&mut partial)?;
    // SAFETY: x is (rows, channels), and there is a place for each piece's moments.
    unsafe { tiles.describe(launch)?.run()? };
    let launch = KERNELS.launch(gpu, "batch_norm_moments<T>", x.dtype())?.blocks(tiles.channels.div_ceil(THREADS / 32));
    let launch = launch.threads(THREADS).input(&partial)?.extents([pieces(tiles.rows)])?.number(epsilon, x.dtype());
    let launch = launch.output(mean)?.output(variance)?.output(rstd)?;
    // SAFETY: as above; the results are (channels).
    unsafe { launch.count(tiles.rows).extents([tiles.channels])?.run() }
}

/// 1/√(variance + ε), for activations of type `dtype`.
pub fn reciprocal_deviation(
    gpu: &Arc<Gpu>,
    variance: &Tensor,
    epsilon: f64,
    dtype: DType,
    rstd: &mut Tensor,
) -> Result<()> {
    variance.expect("batch_norm", dtype.wide())?;
    let launch = KERNELS.launch(gpu, "batch_norm_rstd<T>", dtype)?.over(variance.count());
    let launch = launch.input(variance)?.number(epsilon, dtype).output(rstd)?;
    // SAFETY: both have as many elements, of the type of sums.
    unsafe { launch.count(variance.count()).run() }
}

/// y (R, C) = (x − μ)·γr + β.
pub fn forward(
    gpu: &Arc<Gpu>,
    x: &Tensor,
    [weight, bias]: [&Tensor; 2],
    [mean, rstd]: [&Tensor; 2],
    y: &mut Tensor,
) -> Result<()> {
    [weight, bias, mean].into_iter().try_for_each(|operand| operand.expect("batch_norm", x.dtype().wide()))?;
    let tiles = Tiles::new(x, weight.count());
    let launch = tiles.sweep(gpu, "batch_norm_forward<T>", x.dtype())?;
    let launch = launch.input(x)?.input(weight)?.input(bias)?.input(mean)?.input(rstd)?.output(y)?;
    // SAFETY: x and y are (rows, channels), the others (channels), of the types that the kernel declares.
    unsafe { tiles.describe(launch)?.run() }
}

/// dx (R, C), dweight (C) and dbias (C) from dy (R, C).
pub fn backward(
    gpu: &Arc<Gpu>,
    dy: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    moments: [&Tensor; 2],
    mode: Mode,
    [dx, dweight, dbias]: [Option<Out<'_>>; 3],
) -> Result<()> {
    let tiles = Tiles::new(x, weight.count());
    let wanted = mode == Mode::Train || dweight.is_some() || dbias.is_some();
    let sums = if wanted { Some(gradient_sums(gpu, &tiles, dy, x, moments)?) } else { None };
    if let Some(sums) = &sums {
        dweight.map_or(Ok(()), |out| put(out, &sums.slice(0, 0..1)?))?;
        dbias.map_or(Ok(()), |out| put(out, &sums.slice(0, 1..2)?))?;
    }
    let Some(dx) = dx else { return Ok(()) };
    dx.expect("batch_norm", x.dtype())?;
    let [mean, rstd] = moments;
    let launch = tiles.sweep(gpu, "batch_norm_backward<T>", x.dtype())?;
    let launch = launch.input(dy)?.input(x)?.input(weight)?.input(mean)?.input(rstd)?;
    let launch = launch.optional(sums.as_ref().filter(|_| mode == Mode::Train))?.out(Some(&dx));
    // SAFETY: as in `forward`; dy and dx are like x, and there are two sums for each channel.
    unsafe { tiles.describe(launch)?.run() }
}

/// The gradients of γ and β, (2, C): Σ dy·x̂ and Σ dy.
fn gradient_sums(gpu: &Arc<Gpu>, tiles: &Tiles, dy: &Tensor, x: &Tensor, [mean, rstd]: [&Tensor; 2]) -> Result<Tensor> {
    let mut partial = tiles.partial(x)?;
    let launch = tiles.sum(gpu, "batch_norm_sums<T>", x.dtype())?;
    let launch = launch.input(dy)?.input(x)?.input(mean)?.input(rstd)?.output(&mut partial)?;
    // SAFETY: dy and x are (rows, channels), the moments (channels), and there is a place for each piece's sums.
    unsafe { tiles.describe(launch)?.run()? };
    let mut sums = Tensor::empty_on(&x.device(), [2, tiles.channels], partial.dtype())?;
    finish_sums(&partial, 0, sums.as_out("batch_norm", false)?)?;
    Ok(sums)
}
