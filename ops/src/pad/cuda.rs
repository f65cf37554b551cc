//! The GPU's side of [`pad`](super::pad): a copy into a part of y, and out of a part of dy.

use super::geometry::Geometry;
use tensor::cuda::{Out, elements};
use tensor::{Result, Tensor};

pub fn forward(x: &Tensor, g: Geometry, y: &mut Tensor) -> Result<()> {
    let lines = x.reshape([x.shape()[0], g.rows, g.row])?;
    let mut out = y.as_out("pad", false)?;
    out.clear()?;
    elements::put_within(out, 0, &[g.padded_rows * g.padded_row, g.padded_row, 1], &lines)
}

pub fn backward(dy: &Tensor, g: Geometry, out: Out<'_>) -> Result<()> {
    let lines = dy.reshape([dy.shape()[0], g.padded_rows, g.padded_row])?;
    elements::put(out, &lines.slice(1, 0..g.rows)?.slice(2, 0..g.row)?)
}
