//! CUDA kernels of [`add`](super::add).

use crate::broadcast::cuda as broadcast;
use tensor::cuda::{Module, Out};
use tensor::{Result, Shape, Tensor};

pub static KERNELS: Module = Module {
    name: "add",
    source: include_str!("kernel.cu"),
    headers: &[],
    kernels: &["add_values<T>", "add_packs<T>"],
};

pub fn forward(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    broadcast::zip(&KERNELS, ["add_values<T>", "add_packs<T>"], a, b)
}

pub fn backward(dy: &Tensor, shape: &Shape, out: Out<'_>) -> Result<()> {
    broadcast::reduce("add", dy, shape, out)
}
