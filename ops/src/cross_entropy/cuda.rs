//! CUDA kernels of [`cross_entropy`](super::cross_entropy) and [`soft_cross_entropy`](super::soft_cross_entropy): a
//! warp to a row.

use crate::softmax;
use tensor::cuda::elements::sum_rows;
use tensor::cuda::{Module, Out};
use tensor::{DType, Result, Tensor};

pub static KERNELS: Module = Module {
    name: "cross_entropy",
    source: include_str!("kernel.cu"),
    headers: &[softmax::cuda::HEADER],
    kernels: &[
        "cross_entropy_forward<T>",
        "cross_entropy_backward<T>",
        "soft_cross_entropy_forward<T>",
        "soft_cross_entropy_backward<T>",
    ],
};

/// The mean loss of logits (N, K) against labels (N), smoothed, or against shares (N, K) of the type of `p`, which
/// takes the probabilities (N, K).
pub fn forward(
    op: &'static str,
    logits: &Tensor,
    targets: &Tensor,
    smoothing: f64,
    p: &mut Tensor,
    loss: &mut Tensor,
) -> Result<()> {
    let [rows, classes] = logits.dims(op, "logits (N, K)")?;
    let mut losses = Tensor::empty_on(&logits.device(), [rows], p.dtype())?;
    let launch = |kernel| KERNELS.launch_on(logits, kernel)?.input(logits)?.input(targets);
    let launch = match targets.dtype() {
        DType::Index => launch("cross_entropy_forward<T>")?.number(smoothing, logits.dtype()),
        _ => launch("soft_cross_entropy_forward<T>")?,
    };
    let launch = launch.over_warps(rows).output(p)?.output(&mut losses)?;
    // SAFETY: the logits, p and shares are (rows, classes), labels and losses (rows); the caller has ensured the types
    // of the targets. A label is only compared.
    unsafe { launch.count(rows).extents([classes])?.run()? };
    sum_rows(&losses, [1, rows, 1], loss.as_out(op, false)?)
}

/// dx (N, K) from the gradient of the loss.
pub fn backward(dy: &Tensor, p: &Tensor, targets: &Tensor, smoothing: f64, dx: Out<'_>) -> Result<()> {
    let [rows, classes] = p.dims("cross_entropy", "probabilities (N, K)")?;
    [dy, p].into_iter().try_for_each(|given| given.ensure_dtype("cross_entropy", dx.dtype().of_sums()))?;
    let launch = |kernel| KERNELS.launch(dx.gpu(), kernel, dx.dtype())?.input(dy)?.input(p)?.input(targets);
    let launch = match targets.dtype() {
        DType::Index => launch("cross_entropy_backward<T>")?.number(smoothing, dx.dtype()),
        _ => launch("soft_cross_entropy_backward<T>")?,
    };
    let launch = launch.over_warps(rows).out(Some(&dx))?;
    // SAFETY: dx is the gradient of the logits, and as in `forward`; dy is a scalar of the type of p, as the loss.
    unsafe { launch.count(rows).extents([classes])?.run() }
}
