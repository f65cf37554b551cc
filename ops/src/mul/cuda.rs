//! CUDA kernels of [`mul`](super::mul).

use tensor::cuda::Module;

pub static KERNELS: Module = Module {
    name: "mul",
    source: include_str!("kernel.cu"),
    headers: &[],
    kernels: &["mul_values<T>", "mul_packs<T>"],
};
