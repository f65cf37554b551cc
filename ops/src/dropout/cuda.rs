//! CUDA kernel of [`dropout`](super::dropout), which is the same forward and backward.

use super::Keep;
use tensor::cuda::{Launch, Module, Out};
use tensor::{DType, Result, Tensor};

pub static KERNELS: Module =
    Module { name: "dropout", source: include_str!("kernel.cu"), headers: &[], kernels: &["dropout<T>"] };

impl Keep {
    /// What a kernel must know, as five parameters: `const u64* key, u64 seed, u64 stream, u32 threshold, wide<T>
    /// scale`.
    pub fn arguments<'a>(&self, launch: Launch<'a>, dtype: DType) -> Result<Launch<'a>> {
        Ok(launch.random(&self.rng)?.int(self.threshold as i32).number(self.scale, dtype))
    }
}

pub fn apply(x: &Tensor, keep: Keep, out: Out<'_>) -> Result<()> {
    let (dtype, count) = (x.dtype(), x.count());
    out.ensure_dtype("dropout", dtype)?;
    let launch = KERNELS.launch(out.gpu(), "dropout<T>", dtype)?.over_packs(count, dtype);
    // SAFETY: x and out have as many elements, of one type.
    unsafe { keep.arguments(launch.input(x)?, dtype)?.out(Some(&out))?.count(count).run() }
}
