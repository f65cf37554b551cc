//! CUDA kernels of [`top_k`](super::top_k): a warp to a row.

use tensor::cuda::{Module, Out};
use tensor::{Result, Tensor};

pub static KERNELS: Module = Module {
    name: "top_k",
    source: include_str!("kernel.cu"),
    headers: &[],
    kernels: &["top_k_forward<T>", "top_k_backward<T>"],
};

/// y (R, k) and indices (R, k) from x (R, T), T ≥ k; `extents` are T and k.
pub fn forward(x: &Tensor, [extent, k]: [usize; 2], y: &mut Tensor, indices: &mut Tensor) -> Result<()> {
    let rows = x.count().checked_div(extent).unwrap_or(0);
    let launch = KERNELS.launch_on(x, "top_k_forward<T>")?.over_warps(rows);
    let launch = launch.input(x)?.output(y)?.output(indices)?;
    // SAFETY: x is (rows, extent), y and the indices are (rows, k); a row has an element for each of k rounds.
    unsafe { launch.count(rows).extents([extent, k])?.run() }
}

/// dx (R, T) from dy (R, k).
pub fn backward(dy: &Tensor, indices: &Tensor, [extent, k]: [usize; 2], dx: Out<'_>) -> Result<()> {
    dx.ensure_dtype("top_k", dy.dtype())?;
    let rows = dx.count().checked_div(extent).unwrap_or(0);
    let launch = KERNELS.launch_on(dy, "top_k_backward<T>")?.over_warps(rows);
    // SAFETY: dx is (rows, extent), dy and the indices are (rows, k).
    unsafe { launch.input(dy)?.input(indices)?.out(Some(&dx))?.count(rows).extents([extent, k])?.run() }
}
