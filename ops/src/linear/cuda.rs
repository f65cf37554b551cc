//! The GPU's side of [`linear`](super::linear): matrix products by cuBLASLt, and the bias.

use tensor::cuda::elements::sum_rows;
use tensor::cuda::{Gemm, Matrix, Out};
use tensor::{Result, Tensor};

/// y (R, O) = x (R, I) · weight (O, I)ᵀ + bias (O) + residual (R, O).
pub fn forward(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
    y: &mut Tensor,
) -> Result<()> {
    let [outputs, inputs] = weight.dims("linear", "a weight (O, I)")?;
    let rows = rows(x, inputs, y.count(), outputs);
    let weight = weight.cast(x.dtype())?;
    let product = Gemm::new("linear", Matrix::plain(x), Matrix::transposed(&weight), [rows, outputs, inputs]);
    product.row(bias).plus(residual).into(y.as_out("linear", false)?)
}

/// dx (R, I), dweight (O, I) and dbias (O) from dy (R, O).
pub fn backward(dy: &Tensor, x: &Tensor, weight: &Tensor, [dx, dweight, dbias]: [Option<Out<'_>>; 3]) -> Result<()> {
    let [outputs, inputs] = weight.dims("linear", "a weight (O, I)")?;
    let rows = rows(x, inputs, dy.count(), outputs);
    if let Some(dx) = dx {
        let weight = weight.cast(dy.dtype())?;
        Gemm::new("linear", Matrix::plain(dy), Matrix::plain(&weight), [rows, inputs, outputs]).into(dx)?;
    }
    if let Some(dweight) = dweight {
        Gemm::new("linear", Matrix::transposed(dy), Matrix::plain(x), [outputs, inputs, rows]).into(dweight)?;
    }
    dbias.map_or(Ok(()), |dbias| sum_rows(dy, [1, rows, outputs], dbias))
}

/// The number of rows R, from x (R, I) or from the `count` elements of y (R, O), as one of the two may have no columns.
fn rows(x: &Tensor, inputs: usize, count: usize, outputs: usize) -> usize {
    x.count().checked_div(inputs).or(count.checked_div(outputs)).unwrap_or(0)
}
