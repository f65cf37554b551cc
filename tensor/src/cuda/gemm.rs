//! Matrix products of tensors on a GPU.

use super::elements::add_row;
use super::{Operand, Out, Product};
use crate::{Error, Result, Tensor};

/// A factor of a product: a tensor whose elements are, matrix by matrix and row by row, one of a batch of matrices, or
/// their transposes.
#[derive(Clone, Copy, Debug)]
pub struct Factor<'a> {
    tensor: &'a Tensor,
    transposed: bool,
}

impl<'a> Factor<'a> {
    /// The matrices as they lie.
    pub fn plain(tensor: &'a Tensor) -> Self {
        Self { tensor, transposed: false }
    }

    /// The transposes of what lies there.
    pub fn transposed(tensor: &'a Tensor) -> Self {
        Self { tensor, transposed: true }
    }
}

/// out (m, n) = A (m, k) · B (k, n) + row (n), where the row is rounded to the product's type. Errors: as [`gemm`]'s.
pub fn gemm_plus_row(
    op: &'static str,
    a: Factor<'_>,
    b: Factor<'_>,
    [m, n, k]: [usize; 3],
    row: &Tensor,
    out: &mut Tensor,
) -> Result<()> {
    let rounded = row.cast(out.dtype())?;
    if row.count() != n {
        return Err(Error::shape(op, format!("a row of {n}"), row.shape()));
    }
    let place = out.as_out(op, false)?;
    let product = product(op, a, b, 1, [m, n, k], &place)?;
    let product =
        product.map(|product| Ok(Product { row: rounded.address(op, place.gpu())?, ..product })).transpose()?;
    match product.filter(|product| place.gpu().driver().adds_row(product)) {
        // SAFETY: the factors, the row and the output have the elements that the extents ask for.
        Some(product) => unsafe { place.gpu().driver().multiply(&product) },
        None => {
            gemm(op, a, b, 1, [m, n, k], place)?;
            add_row(out, row)
        }
    }
}

/// out (batch, m, n) = A (batch, m, k) · B (batch, k, n), stored or added. A and B have one floating-point type, and `out`
/// that type or that of its sums ([`DType::wide`](crate::DType::wide)); sums are computed there. Errors:
/// [`Error::Shape`], [`Error::DType`], [`Error::NotContiguous`], [`Error::Device`].
pub fn gemm(
    op: &'static str,
    a: Factor<'_>,
    b: Factor<'_>,
    batch: usize,
    [m, n, k]: [usize; 3],
    out: Out<'_>,
) -> Result<()> {
    let gpu = out.gpu();
    match product(op, a, b, batch, [m, n, k], &out)? {
        // SAFETY: the factors and the output have the elements that the extents ask for.
        Some(product) => unsafe { gpu.driver().multiply(&product) },
        // SAFETY: the memory is the output's.
        None if !out.accumulate => unsafe { gpu.driver().fill(out.address(), 0, out.count() * out.dtype().size()) },
        None => Ok(()),
    }
}

/// A product as a driver takes it, or none of matrices without elements. Errors: those of [`gemm`].
fn product(
    op: &'static str,
    a: Factor<'_>,
    b: Factor<'_>,
    batch: usize,
    [m, n, k]: [usize; 3],
    out: &Out<'_>,
) -> Result<Option<Product>> {
    let gpu = out.gpu();
    for (factor, count) in [(a, batch * m * k), (b, batch * k * n)] {
        if factor.tensor.count() != count {
            return Err(Error::shape(op, format!("a factor of {count} elements"), factor.tensor.shape()));
        }
        if !factor.tensor.is_contiguous() {
            return Err(factor.tensor.not_contiguous(op));
        }
    }
    let inputs = a.tensor.dtype();
    b.tensor.expect(op, inputs)?;
    if out.dtype() != inputs {
        out.expect(op, inputs.wide())?;
    }
    if out.count() != batch * m * n {
        return Err(Error::shape(op, format!("a product of {} elements", batch * m * n), &[out.count()]));
    }
    if batch * m * n * k == 0 {
        return Ok(None);
    }
    let operand = |factor: Factor<'_>, stride| -> Result<Operand> {
        Ok(Operand { address: factor.tensor.address(op, gpu)?, transposed: factor.transposed, stride })
    };
    Ok(Some(Product {
        extents: [m, n, k],
        batch,
        a: operand(a, m * k)?,
        b: operand(b, k * n)?,
        c: Operand { address: out.address(), transposed: false, stride: m * n },
        inputs,
        output: out.dtype(),
        row: 0,
        accumulate: out.accumulate,
        tf32: gpu.tf32(),
    }))
}
