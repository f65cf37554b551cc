//! CUDA kernel of [`drop_path`](super::drop_path), which is the same forward and backward.

use super::draws::Draws;
use tensor::cuda::{Module, Out};
use tensor::{Result, Tensor};

pub static KERNELS: Module =
    Module { name: "drop_path", source: include_str!("kernel.cu"), headers: &[], kernels: &["drop_path<T>"] };

/// Threads of a block, each of which has 16 bytes of a sample.
const THREADS: usize = 256;

pub fn apply(x: &Tensor, residual: Option<&Tensor>, draws: &Draws, out: Out<'_>) -> Result<()> {
    let dtype = x.dtype();
    out.ensure_dtype("drop_path", dtype)?;
    residual.map_or(Ok(()), |residual| residual.ensure_dtype("drop_path", dtype))?;
    let size = x.count().checked_div(draws.samples()).unwrap_or(0);
    let blocks = (size * dtype.size()).div_ceil(16 * THREADS);
    let launch = KERNELS.launch(out.gpu(), "drop_path<T>", dtype)?.threads(THREADS).blocks(draws.samples() * blocks);
    let launch = draws.keep.arguments(launch.input(x)?.optional(residual)?, dtype)?;
    let launch = launch.count(draws.numbers.start).out(Some(&out))?;
    // SAFETY: x, out and the residual have `size` elements for each of the samples, of one type.
    unsafe { launch.count(size).extents([blocks])?.run() }
}
