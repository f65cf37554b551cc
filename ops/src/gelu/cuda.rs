//! CUDA kernels of [`gelu`](super::gelu).

use tensor::cuda::{Module, Out};
use tensor::{Result, Tensor};

/// What other kernels that have a GELU include.
pub const NORMAL: (&str, &str) = ("normal.cuh", include_str!("normal.cuh"));

pub static KERNELS: Module = Module {
    name: "gelu",
    source: include_str!("kernel.cu"),
    headers: &[NORMAL],
    kernels: &["gelu_forward<T>", "gelu_backward<T>"],
};

pub fn forward(x: &Tensor, y: &mut Tensor) -> Result<()> {
    let launch = KERNELS.launch_on(x, "gelu_forward<T>")?.over_packs(x.count(), x.dtype());
    // SAFETY: y has as many elements as x, of its type.
    unsafe { launch.input(x)?.output(y)?.count(x.count()).run() }
}

/// dx from dy; and `y`, the value of the forward pass, for a caller that did not keep it.
pub fn backward(dy: &Tensor, x: &Tensor, dx: Out<'_>, y: Option<&mut Tensor>) -> Result<()> {
    dx.ensure_dtype("gelu", x.dtype())?;
    let launch = KERNELS.launch_on(x, "gelu_backward<T>")?.over_packs(x.count(), x.dtype());
    let launch = launch.input(dy)?.input(x)?.out(Some(&dx))?.optional_output(y)?;
    // SAFETY: dy, dx and y have as many elements as x, of its type.
    unsafe { launch.count(x.count()).run() }
}
