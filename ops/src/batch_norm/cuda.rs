//! CUDA kernels of [`batch_norm`](super): sums over pieces of the rows, and sweeps over the elements.

use super::Mode;
use crate::gelu;
use tensor::cuda::{Module, Out, Tiles};
use tensor::{DType, Result, Tensor};

pub static KERNELS: Module = Module {
    name: "batch_norm",
    source: include_str!("kernel.cu"),
    headers: &[gelu::cuda::NORMAL],
    kernels: &[
        "batch_norm_statistics<T>",
        "batch_norm_moments<T>",
        "batch_norm_rstd<T>",
        "batch_norm_forward<T, false|true>",
        "batch_norm_sums<T, false|true>",
        "batch_norm_backward<T, false|true>",
    ],
};

/// How x (..., C) is cut.
fn tiles(x: &Tensor, channels: usize) -> Tiles {
    Tiles::new(x.count().checked_div(channels).unwrap_or(0), channels, x.dtype())
}

/// Mean, unbiased variance and 1/√(biased variance + ε) of each channel of x (R, C), R ≥ 2.
pub fn statistics(x: &Tensor, epsilon: f64, [mean, variance, rstd]: [&mut Tensor; 3]) -> Result<()> {
    let tiles = tiles(x, mean.count());
    let pieces = tiles.pieces(1);
    let mut partial = Tensor::empty_on(&x.device(), [pieces, 2, tiles.columns], x.dtype().of_sums())?;
    let launch = tiles.sum(KERNELS.launch_on(x, "batch_norm_statistics<T>")?, 1).input(x)?.output(&mut partial)?;
    // SAFETY: x is (rows, channels), and there is a place for each piece's moments.
    unsafe { tiles.describe(launch)?.run()? };
    let launch = KERNELS.launch_on(x, "batch_norm_moments<T>")?.over_warps(tiles.columns);
    let launch = launch.input(&partial)?.extents([pieces])?.number(epsilon, x.dtype());
    let launch = launch.output(mean)?.output(variance)?.output(rstd)?;
    // SAFETY: as above; the results are (channels).
    unsafe { launch.count(tiles.rows).extents([tiles.columns])?.run() }
}

/// 1/√(variance + ε), for activations of type `dtype`.
pub fn reciprocal_deviation(variance: &Tensor, epsilon: f64, dtype: DType, rstd: &mut Tensor) -> Result<()> {
    variance.ensure_dtype("batch_norm", dtype.of_sums())?;
    let launch = KERNELS.launch(variance.gpu("batch_norm")?, "batch_norm_rstd<T>", dtype)?.over(variance.count());
    let launch = launch.input(variance)?.number(epsilon, dtype).output(rstd)?;
    // SAFETY: both have as many elements, of the type of sums.
    unsafe { launch.count(variance.count()).run() }
}

/// y (R, C) = (x − μ)·γr + β, or GELU of that.
pub fn forward(
    x: &Tensor,
    [weight, bias]: [&Tensor; 2],
    [mean, rstd]: [&Tensor; 2],
    gelu: bool,
    y: &mut Tensor,
) -> Result<()> {
    [weight, bias, mean].into_iter().try_for_each(|operand| operand.ensure_dtype("batch_norm", x.dtype().of_sums()))?;
    let tiles = tiles(x, weight.count());
    let launch = tiles.sweep(KERNELS.launch_on(x, &format!("batch_norm_forward<T, {gelu}>"))?);
    let launch = launch.input(x)?.input(weight)?.input(bias)?.input(mean)?.input(rstd)?.output(y)?;
    // SAFETY: x and y are (rows, channels), the others (channels), of the types that the kernel declares.
    unsafe { tiles.describe(launch)?.run() }
}

/// dx (R, C), dweight (C) and dbias (C) from dy (R, C).
pub fn backward(
    dy: &Tensor,
    x: &Tensor,
    [weight, bias]: [&Tensor; 2],
    [mean, rstd]: [&Tensor; 2],
    (mode, gelu): (Mode, bool),
    [dx, dweight, dbias]: [Option<Out<'_>>; 3],
) -> Result<()> {
    let wide = x.dtype().of_sums();
    [&dweight, &dbias].into_iter().flatten().try_for_each(|out| out.ensure_dtype("batch_norm", wide))?;
    let tiles = tiles(x, weight.count());
    let mut sums = None;
    if mode == Mode::Train || dweight.is_some() || dbias.is_some() {
        let mut partial = tiles.partial(x, 1, 2)?;
        let sums = sums.insert(Tensor::empty_on(&x.device(), [2, tiles.columns], wide)?);
        let launch = tiles.sum(KERNELS.launch_on(x, &format!("batch_norm_sums<T, {gelu}>"))?, 1);
        let launch = launch.input(dy)?.input(x)?.input(weight)?.input(bias)?.input(mean)?.input(rstd)?;
        let launch = launch.output(&mut partial)?.output(sums)?;
        // SAFETY: dy and x are (rows, channels), the moments, the parameters and their gradients (channels), and there
        // is a place for each piece's sums.
        unsafe { tiles.describe(launch.out(dweight.as_ref())?.out(dbias.as_ref())?)?.run()? };
    }
    let Some(dx) = dx else { return Ok(()) };
    dx.ensure_dtype("batch_norm", x.dtype())?;
    let launch = tiles.sweep(KERNELS.launch_on(x, &format!("batch_norm_backward<T, {gelu}>"))?);
    let launch = launch.input(dy)?.input(x)?.input(weight)?.input(bias)?.input(mean)?.input(rstd)?;
    let launch = launch.optional(sums.as_ref().filter(|_| mode == Mode::Train))?.out(Some(&dx))?;
    // SAFETY: as in `forward`; dy and dx are like x, and there are two sums for each channel.
    unsafe { tiles.describe(launch)?.run() }
}
