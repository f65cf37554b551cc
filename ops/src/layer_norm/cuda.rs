//! CUDA kernels of [`layer_norm`](super::layer_norm): a warp to a row.

use std::sync::Arc;
use tensor::cuda::elements::{finish_sums, pieces};
use tensor::cuda::{Gpu, Module, Out};
use tensor::{Result, Tensor};

pub static KERNELS: Module = Module {
    name: "layer_norm",
    source: include_str!("kernel.cu"),
    headers: &[],
    kernels: &["layer_norm_forward<T>", "layer_norm_again<T>", "layer_norm_backward<T>", "layer_norm_parameters<T>"],
};

/// Rows of a block: it has a warp for each.
const ROWS: usize = 8;

/// y (R, C), and each row's mean and 1/√(variance + ε).
pub fn forward(
    gpu: &Arc<Gpu>,
    x: &Tensor,
    [weight, bias]: [&Tensor; 2],
    epsilon: f64,
    y: &mut Tensor,
    [mean, rstd]: [&mut Tensor; 2],
) -> Result<()> {
    let (rows, channels) = (mean.count(), weight.count());
    [weight, bias].into_iter().try_for_each(|parameter| parameter.expect("layer_norm", x.dtype().wide()))?;
    let launch = KERNELS.launch(gpu, "layer_norm_forward<T>", x.dtype())?.blocks(rows.div_ceil(ROWS));
    let launch = launch.input(x)?.input(weight)?.input(bias)?.number(epsilon, x.dtype());
    // SAFETY: x and y are (rows, channels), the moments (rows), the parameters (channels).
    unsafe { launch.output(y)?.output(mean)?.output(rstd)?.count(rows).extents([channels])?.run() }
}

/// y again, from the rows' moments.
pub fn again(
    gpu: &Arc<Gpu>,
    x: &Tensor,
    [weight, bias]: [&Tensor; 2],
    [mean, rstd]: [&Tensor; 2],
    y: &mut Tensor,
) -> Result<()> {
    let (rows, channels) = (mean.count(), weight.count());
    let launch = KERNELS.launch(gpu, "layer_norm_again<T>", x.dtype())?.blocks(rows.div_ceil(ROWS));
    let launch = launch.input(x)?.input(weight)?.input(bias)?.input(mean)?.input(rstd)?;
    // SAFETY: as in `forward`.
    unsafe { launch.output(y)?.count(rows).extents([channels])?.run() }
}

/// dx (R, C), dweight (C) and dbias (C) from dy (R, C).
pub fn backward(
    gpu: &Arc<Gpu>,
    dy: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    [mean, rstd]: [&Tensor; 2],
    [dx, dweight, dbias]: [Option<Out<'_>>; 3],
) -> Result<()> {
    let (rows, channels) = (mean.count(), weight.count());
    if let Some(dx) = dx {
        dx.expect("layer_norm", x.dtype())?;
        let launch = KERNELS.launch(gpu, "layer_norm_backward<T>", x.dtype())?.blocks(rows.div_ceil(ROWS));
        let launch = launch.input(dy)?.input(x)?.input(weight)?.input(mean)?.input(rstd)?;
        // SAFETY: as in `forward`; dy and dx are like x.
        unsafe { launch.out(Some(&dx)).count(rows).extents([channels])?.run()? };
    }
    if dweight.is_none() && dbias.is_none() {
        return Ok(());
    }
    let pieces = pieces(rows);
    let mut partial = Tensor::empty_on(&x.device(), [pieces, 2, channels], weight.dtype())?;
    let launch = KERNELS.launch(gpu, "layer_norm_parameters<T>", x.dtype())?.grid([channels.div_ceil(32), pieces, 1]);
    let launch = launch.input(dy)?.input(x)?.input(mean)?.input(rstd)?.output(&mut partial)?;
    // SAFETY: as above; there is a place for each piece's sums.
    unsafe { launch.count(rows).extents([channels])?.run()? };
    dweight.map_or(Ok(()), |out| finish_sums(&partial, 0, out))?;
    dbias.map_or(Ok(()), |out| finish_sums(&partial, channels, out))
}
