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

pub fn backward(dy: &Tensor, x: &Tensor, dx: Out<'_>) -> Result<()> {
    dx.ensure_dtype("gelu", x.dtype())?;
    let launch = KERNELS.launch_on(x, "gelu_backward<T>")?.over_packs(x.count(), x.dtype());
    // SAFETY: dy and dx have as many elements as x, of its type.
    unsafe { launch.input(dy)?.input(x)?.out(Some(&dx)).count(x.count()).run() }
}
