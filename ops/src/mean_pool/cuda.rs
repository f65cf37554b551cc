//! The GPU's side of [`mean_pool`](super::mean_pool): a sum over rows, and rows repeated.

use super::Regions;
use crate::scale::cuda::scale;
use tensor::cuda::Out;
use tensor::cuda::elements::{put, scaled_sum_rows};
use tensor::{Result, Tensor};

pub fn forward(x: &Tensor, map: Regions, y: &mut Tensor) -> Result<()> {
    let tokens = map.tokens[0] * map.tokens[1];
    let extents = [map.images, tokens, map.channels];
    scaled_sum_rows(&x.contiguous()?, extents, 1.0 / tokens as f64, y.as_out("mean_pool", false)?)
}

pub fn backward(dy: &Tensor, map: Regions, out: Out<'_>) -> Result<()> {
    let tokens = map.tokens[0] * map.tokens[1];
    let mut token = Tensor::empty_on(&dy.device(), [map.images, 1, map.channels], dy.dtype())?;
    scale(dy, 1.0 / tokens as f64, token.as_out("mean_pool", false)?)?;
    put(out, &token.broadcast_to([map.images, tokens, map.channels])?)
}
