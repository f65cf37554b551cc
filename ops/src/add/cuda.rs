//! CUDA kernels of [`add`](super::add).

use tensor::cuda::Module;

pub static KERNELS: Module = Module {
    name: "add",
    source: include_str!("kernel.cu"),
    headers: &[],
    kernels: &["add_values<T>", "add_packs<T>"],
};
