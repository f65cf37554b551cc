//! CPU kernels of [`mul`](super::mul).

use crate::broadcast::cpu as broadcast;
use tensor::cpu::parallel::Out;
use tensor::{Float, Result, Shape, Tensor};

pub fn forward<T: Float>(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    broadcast::zip("mul", a, b, |a: T, b: T| a * b)
}

pub fn sum_to<T: Float>(product: &Tensor, shape: &Shape, out: Out<'_, T>) -> Result<()> {
    broadcast::reduce("mul", product, shape, out)
}
