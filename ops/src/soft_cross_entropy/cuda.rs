//! CUDA kernels of [`soft_cross_entropy`](super::soft_cross_entropy): those of
//! [`cross_entropy`](crate::cross_entropy) for other targets.

use crate::cross_entropy::cuda::HEADERS;
use tensor::cuda::elements::sum_rows;
use tensor::cuda::{Module, Out};
use tensor::{Result, Tensor};

pub static KERNELS: Module = Module {
    name: "soft_cross_entropy",
    source: include_str!("kernel.cu"),
    headers: HEADERS,
    kernels: &["soft_cross_entropy_forward<T>", "soft_cross_entropy_backward<T>"],
};

/// The mean loss of logits (N, K) against targets (N, K); `p` takes the probabilities (N, K).
pub fn forward(logits: &Tensor, targets: &Tensor, p: &mut Tensor, loss: &mut Tensor) -> Result<()> {
    targets.ensure_dtype("soft_cross_entropy", p.dtype())?;
    let [rows, classes] = logits.dims("soft_cross_entropy", "logits (N, K)")?;
    let mut losses = Tensor::empty_on(&logits.device(), [rows], p.dtype())?;
    let launch = KERNELS.launch_on(logits, "soft_cross_entropy_forward<T>")?.over_warps(rows);
    let launch = launch.input(logits)?.input(targets)?.output(p)?.output(&mut losses)?;
    // SAFETY: the logits, the targets and p are (rows, classes), the losses (rows).
    unsafe { launch.count(rows).extents([classes])?.run()? };
    sum_rows(&losses, [1, rows, 1], loss.as_out("soft_cross_entropy", false)?)
}

/// dx (N, K) from the gradient of the loss.
pub fn backward(dy: &Tensor, p: &Tensor, targets: &Tensor, dx: Out<'_>) -> Result<()> {
    let [rows, classes] = p.dims("soft_cross_entropy", "probabilities (N, K)")?;
    let launch = KERNELS.launch(dx.gpu(), "soft_cross_entropy_backward<T>", dx.dtype())?.over_warps(rows);
    let launch = launch.input(dy)?.input(p)?.input(targets)?.out(Some(&dx));
    // SAFETY: dx is the gradient of the logits, and as in `forward`; dy is a scalar of the type of p, as the loss.
    unsafe { launch.count(rows).extents([classes])?.run() }
}
