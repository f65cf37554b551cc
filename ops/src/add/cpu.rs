//! CPU kernels of [`add`](super::add).

use crate::broadcast::cpu as broadcast;
use tensor::cpu::parallel::Out;
use tensor::{Float, Result, Shape, Tensor};

pub fn forward<T: Float>(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    broadcast::zip("add", a, b, |a: T, b: T| a + b)
}

pub fn backward<T: Float>(dy: &Tensor, shape: &Shape, out: Out<'_, T>) -> Result<()> {
    broadcast::reduce("add", dy, shape, out)
}
