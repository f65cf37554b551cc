//! The GPU's side of [`mean_pool`](super::mean_pool): a sum over rows, and rows repeated.

use super::Regions;
use crate::scale::cuda::scale;
use tensor::cuda::Out;
use tensor::cuda::elements::{put, sum_rows};
use tensor::{Result, Tensor};

/// y (N, C), whose sums are rounded to its type once they are means.
pub fn forward(x: &Tensor, map: Regions) -> Result<Tensor> {
    let tokens = map.tokens[0] * map.tokens[1];
    let wide = || Tensor::empty_on(&x.device(), [map.images, map.channels], x.dtype().wide());
    let (mut sums, mut means) = (wide()?, wide()?);
    sum_rows(&x.contiguous()?, [map.images, tokens, map.channels], sums.as_out("mean_pool", false)?)?;
    scale(&sums, 1.0 / tokens as f64, means.as_out("mean_pool", false)?)?;
    means.cast(x.dtype())
}

/// dx (N, H, W, C) from dy (N, C).
pub fn backward(dy: &Tensor, map: Regions, out: Out<'_>) -> Result<()> {
    let tokens = map.tokens[0] * map.tokens[1];
    let mut token = Tensor::empty_on(&dy.device(), [map.images, 1, map.channels], dy.dtype())?;
    scale(dy, 1.0 / tokens as f64, token.as_out("mean_pool", false)?)?;
    put(out, &token.broadcast_to([map.images, tokens, map.channels])?)
}
