//! CUDA kernel of [`scale`](super::scale), forward and backward.

use tensor::cuda::{Module, Out};
use tensor::{Result, Tensor};

pub static KERNELS: Module =
    Module { name: "scale", source: include_str!("kernel.cu"), headers: &[], kernels: &["scale_values<T>"] };

/// out = factor·x, for as many elements as x has.
pub fn scale(x: &Tensor, factor: f64, out: Out<'_>) -> Result<()> {
    let (dtype, count) = (x.dtype(), x.count());
    out.ensure_dtype("scale", dtype)?;
    let launch = KERNELS.launch(out.gpu(), "scale_values<T>", dtype)?.over_packs(count, dtype);
    // SAFETY: x and out have as many elements, of one type.
    unsafe { launch.input(x)?.number(factor, dtype).out(Some(&out))?.count(count).run() }
}
