//! CUDA kernels of [`mul`](super::mul).

use crate::broadcast::cuda as broadcast;
use tensor::cuda::{Module, Out};
use tensor::{Result, Shape, Tensor};

pub static KERNELS: Module = Module {
    name: "mul",
    source: include_str!("kernel.cu"),
    headers: &[],
    kernels: &["mul_values<T>", "mul_packs<T>"],
};

pub fn forward(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    broadcast::zip(&KERNELS, ["mul_values<T>", "mul_packs<T>"], a, b)
}

pub fn sum_to(product: &Tensor, shape: &Shape, out: Out<'_>) -> Result<()> {
    broadcast::reduce("mul", product, shape, out)
}
