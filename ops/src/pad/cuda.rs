//! The GPU's side of [`pad`](super::pad): a copy into a part of y, and out of a part of dy.

use super::Extents;
use tensor::cuda::{Out, elements};
use tensor::{Result, Tensor};

pub fn forward(x: &Tensor, e: Extents, y: &mut Tensor) -> Result<()> {
    let lines = x.reshape([x.shape()[0], e.rows, e.row])?;
    let mut out = y.as_out("pad", false)?;
    out.clear()?;
    elements::put_within(out, 0, &[e.padded_rows * e.padded_row, e.padded_row, 1], &lines)
}

pub fn backward(dy: &Tensor, e: Extents, out: Out<'_>) -> Result<()> {
    let lines = dy.reshape([dy.shape()[0], e.padded_rows, e.padded_row])?;
    elements::put(out, &lines.slice(1, 0..e.rows)?.slice(2, 0..e.row)?)
}
