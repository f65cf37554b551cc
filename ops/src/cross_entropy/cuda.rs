//! CUDA kernels of [`cross_entropy`](super::cross_entropy): a warp to a row.

use crate::softmax;
use tensor::cuda::elements::sum_rows;
use tensor::cuda::{Module, Out};
use tensor::{DType, Result, Tensor};

/// Headers that the kernels of [`soft_cross_entropy`](crate::soft_cross_entropy) include as well: everything except the
/// targets.
pub(crate) const HEADERS: &[(&str, &str)] = &[("loss.cuh", include_str!("loss.cuh")), softmax::cuda::HEADER];

pub static KERNELS: Module = Module {
    name: "cross_entropy",
    source: include_str!("kernel.cu"),
    headers: HEADERS,
    kernels: &["cross_entropy_forward<T>", "cross_entropy_backward<T>"],
};

/// The mean loss of logits (N, K) against labels (N); `p` takes the probabilities (N, K).
pub fn forward(logits: &Tensor, labels: &Tensor, smoothing: f64, p: &mut Tensor, loss: &mut Tensor) -> Result<()> {
    labels.ensure_dtype("cross_entropy", DType::Index)?;
    let [rows, classes] = logits.dims("cross_entropy", "logits (N, K)")?;
    let mut losses = Tensor::empty_on(&logits.device(), [rows], p.dtype())?;
    let launch = KERNELS.launch_on(logits, "cross_entropy_forward<T>")?.over_warps(rows);
    let launch =
        launch.input(logits)?.input(labels)?.number(smoothing, logits.dtype()).output(p)?.output(&mut losses)?;
    // SAFETY: the logits and p are (rows, classes), labels and losses (rows). A label is only compared.
    unsafe { launch.count(rows).extents([classes])?.run()? };
    sum_rows(&losses, [1, rows, 1], loss.as_out("cross_entropy", false)?)
}

/// dx (N, K) from the gradient of the loss.
pub fn backward(dy: &Tensor, p: &Tensor, labels: &Tensor, smoothing: f64, dx: Out<'_>) -> Result<()> {
    let [rows, classes] = p.dims("cross_entropy", "probabilities (N, K)")?;
    let launch = KERNELS.launch(dx.gpu(), "cross_entropy_backward<T>", dx.dtype())?.over_warps(rows);
    let launch = launch.input(dy)?.input(p)?.input(labels)?.number(smoothing, dx.dtype()).out(Some(&dx));
    // SAFETY: dx is the gradient of the logits, and as in `forward`; dy is a scalar of the type of p, as the loss.
    unsafe { launch.count(rows).extents([classes])?.run() }
}
