//! The GPU's side of [`matmul`](super::matmul): the library's matrix product over a batch of pairs.

use tensor::cuda::{Gemm, Matrix, Out};
use tensor::{Result, Tensor};

/// y = a·b.
pub fn forward(a: &Tensor, b: &Tensor, y: &mut Tensor) -> Result<()> {
    products(a, b, y.as_out("matmul", false)?)
}

/// da = dy·bᵀ and db = aᵀ·dy.
pub fn backward(dy: &Tensor, a: &Tensor, b: &Tensor, [da, db]: [Option<Out<'_>>; 2]) -> Result<()> {
    da.map_or(Ok(()), |da| products(dy, &b.transposed()?, da))?;
    db.map_or(Ok(()), |db| products(&a.transposed()?, dy, db))
}

/// out[i] = a[i]·b[i] for views with equally many matrices. A view is copied unless its matrices, or their transposes,
/// are contiguous.
fn products(a: &Tensor, b: &Tensor, out: Out<'_>) -> Result<()> {
    let (m, n) = (a.shape()[a.rank() - 2], b.shape()[b.rank() - 1]);
    let (batch, k) = (a.shape()[..a.rank() - 2].iter().product(), a.shape()[a.rank() - 1]);
    let stored = |view: &Tensor| {
        let transpose = view.transposed()?;
        let lies = transpose.is_contiguous() && !view.is_contiguous();
        Ok((if lies { transpose } else { view.contiguous()? }, lies))
    };
    let ((a, a_lies), (b, b_lies)) = (stored(a)?, stored(b)?);
    let factor = |stored, lies| if lies { Matrix::transposed(stored) } else { Matrix::plain(stored) };
    Gemm::new("matmul", factor(&a, a_lies), factor(&b, b_lies), [m, n, k]).batch(batch).into(out)
}
