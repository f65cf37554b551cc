//! CUDA kernels of [`softmax`](super::softmax): a warp to a row.

use tensor::cuda::{Module, Out};
use tensor::{Result, Tensor};

/// What the kernels of other operations may include: `row.cuh`.
pub(crate) const HEADER: (&str, &str) = ("row.cuh", include_str!("row.cuh"));

pub static KERNELS: Module = Module {
    name: "softmax",
    source: include_str!("kernel.cu"),
    headers: &[HEADER],
    kernels: &["softmax_forward<T>", "softmax_backward<T>"],
};

/// y (R, C) from x (R, C).
pub fn forward(x: &Tensor, channels: usize, y: &mut Tensor) -> Result<()> {
    let rows = x.count().checked_div(channels).unwrap_or(0);
    let launch = KERNELS.launch_on(x, "softmax_forward<T>")?.over_warps(rows);
    // SAFETY: x and y are (rows, channels).
    unsafe { launch.input(x)?.output(y)?.count(rows).extents([channels])?.run() }
}

/// dx (R, C) from dy (R, C).
pub fn backward(dy: &Tensor, y: &Tensor, channels: usize, dx: Out<'_>) -> Result<()> {
    dx.ensure_dtype("softmax", y.dtype())?;
    let rows = y.count().checked_div(channels).unwrap_or(0);
    let launch = KERNELS.launch_on(y, "softmax_backward<T>")?.over_warps(rows);
    // SAFETY: dy, y and dx are (rows, channels).
    unsafe { launch.input(dy)?.input(y)?.out(Some(&dx))?.count(rows).extents([channels])?.run() }
}
