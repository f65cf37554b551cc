//! The GPU's side of [`linear`](super::linear): matrix products by cuBLASLt, and the bias.

use tensor::cuda::elements::sum_rows;
use tensor::cuda::{Factor, Out, gemm, gemm_plus_row};
use tensor::{Result, Tensor};

/// y (R, O) = x (R, I) · weight (O, I)ᵀ + bias (O).
pub fn forward(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, y: &mut Tensor) -> Result<()> {
    let [outputs, inputs] = weight.dims("linear", "a weight (O, I)")?;
    let rows = y.count().checked_div(outputs).unwrap_or(0);
    let weight = weight.cast(x.dtype())?;
    let (x_factor, weight) = (Factor::plain(x), Factor::transposed(&weight));
    let extents = [rows, outputs, inputs];
    match bias {
        Some(bias) => gemm_plus_row("linear", x_factor, weight, extents, bias, y),
        None => gemm("linear", x_factor, weight, 1, extents, y.as_out("linear", false)?),
    }
}

/// dx (R, I), dweight (O, I) and dbias (O) from dy (R, O).
pub fn backward(dy: &Tensor, x: &Tensor, weight: &Tensor, [dx, dweight, dbias]: [Option<Out<'_>>; 3]) -> Result<()> {
    let [outputs, inputs] = weight.dims("linear", "a weight (O, I)")?;
    let rows = dy.count().checked_div(outputs).unwrap_or(0);
    if let Some(dx) = dx {
        let weight = weight.cast(dy.dtype())?;
        gemm("linear", Factor::plain(dy), Factor::plain(&weight), 1, [rows, inputs, outputs], dx)?;
    }
    if let Some(dweight) = dweight {
        gemm("linear", Factor::transposed(dy), Factor::plain(x), 1, [outputs, inputs, rows], dweight)?;
    }
    dbias.map_or(Ok(()), |dbias| sum_rows(dy, [1, rows, outputs], dbias))
}
