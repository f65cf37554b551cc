//! Matrix products of tensors on a GPU.

use super::elements::{add_row, put};
use super::{Operand, Out, Product};
use crate::{Error, Result, Tensor};

/// A factor of a product: a tensor whose elements are a batch of row-major matrices, one after another, or their
/// transposes.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    tensor: &'a Tensor,
    transposed: bool,
}

impl<'a> Matrix<'a> {
    /// The matrices as they lie.
    pub fn plain(tensor: &'a Tensor) -> Self {
        Self { tensor, transposed: false }
    }

    /// The transposes of what lies there.
    pub fn transposed(tensor: &'a Tensor) -> Self {
        Self { tensor, transposed: true }
    }
}

/// A batch of matrix products, A (m, k) · B (k, n), with what is added to them on the way (the epilogue). A and B have
/// one floating-point type; sums are computed in that of its sums ([`DType::of_sums`](crate::DType::of_sums)).
#[derive(Debug)]
pub struct Gemm<'a> {
    op: &'static str,
    factors: [Matrix<'a>; 2],
    batch: usize,
    extents: [usize; 3],
    plus: Option<&'a Tensor>,
    row: Option<&'a Tensor>,
}

impl<'a> Gemm<'a> {
    /// A product of two matrices, whose extents are m, n and k.
    pub fn new(op: &'static str, a: Matrix<'a>, b: Matrix<'a>, extents: [usize; 3]) -> Self {
        Self { op, factors: [a, b], batch: 1, extents, plus: None, row: None }
    }

    /// Makes it a batch of this many products, of matrices that lie one after the other.
    pub fn batch(self, batch: usize) -> Self {
        Self { batch, ..self }
    }

    /// Adds a matrix like the result, if there is one.
    pub fn plus(self, plus: Option<&'a Tensor>) -> Self {
        Self { plus, ..self }
    }

    /// Adds a row (n), if there is one, to every row: rounded to the result's type where the device's library adds it.
    pub fn row(self, row: Option<&'a Tensor>) -> Self {
        Self { row, ..self }
    }

    /// Computes the product and everything that was asked for with it. The result is stored or accumulated, in the
    /// factors' type or that of their sums. Errors: [`Error::Shape`], [`Error::DType`], [`Error::NotContiguous`],
    /// [`Error::Device`], [`Error::Argument`] for a matrix to be added to a result that is itself added.
    pub fn into(self, mut out: Out<'_>) -> Result<()> {
        self.check(&out)?;
        let [m, n, k] = self.extents;
        let mut row_added = false;
        match self.plus {
            _ if self.batch * m * n * k > 0 => row_added = self.multiply(&mut out)?,
            Some(plus) => put(out.part(0, plus.count()), plus)?,
            None if !out.accumulate => out.clear()?,
            None => {}
        }
        match self.row {
            Some(row) if !row_added => add_row(out.part(0, self.batch * m * n), row),
            _ => Ok(()),
        }
    }

    /// Computes the product. Whether the device has added the row, too.
    fn multiply(&self, out: &mut Out<'_>) -> Result<bool> {
        let (op, gpu, [m, n, k]) = (self.op, out.gpu(), self.extents);
        let [a, b] = self.factors;
        let operand = |Matrix { tensor, transposed }: Matrix<'_>, stride| -> Result<Operand> {
            Ok(Operand { address: tensor.address(op, gpu)?, transposed, stride })
        };
        let row = self.row.map(|row| row.cast(out.dtype())).transpose()?;
        let product = Product {
            extents: self.extents,
            batch: self.batch,
            a: operand(a, m * k)?,
            b: operand(b, k * n)?,
            c: Operand { address: out.address(), transposed: false, stride: m * n },
            inputs: a.tensor.dtype(),
            output: out.dtype(),
            plus: match self.plus {
                Some(plus) => plus.address(op, gpu)?,
                None if out.accumulate => out.address(),
                None => 0,
            },
            row: row.as_ref().map_or(Ok(0), |row| row.address(op, gpu))?,
            tf32: gpu.tf32(),
        };
        let stream = gpu.stream_to_ask()?;
        // SAFETY: the operands have the elements that the extents ask for: see `check`.
        gpu.with_room(|| unsafe { gpu.driver.multiply(stream, &product) })
    }

    /// Checks the types and lengths of all operands.
    fn check(&self, out: &Out<'_>) -> Result<()> {
        let (op, [m, n, k]) = (self.op, self.extents);
        let [a, b] = self.factors;
        let inputs = a.tensor.dtype();
        b.tensor.ensure_dtype(op, inputs)?;
        if out.dtype() != inputs {
            out.ensure_dtype(op, inputs.of_sums())?;
        }
        let counts = [[m, k], [k, n], [m, n]].map(|[rows, columns]| rows.checked_mul(columns)?.checked_mul(self.batch));
        let [Some(of_a), Some(of_b), Some(of_c)] = counts else {
            return Err(Error::argument(op, "matrices with more elements than can be counted"));
        };
        let lengths = [(a.tensor, of_a, "a factor"), (b.tensor, of_b, "a factor")];
        let plus = self.plus.map(|plus| (plus, of_c, "a matrix to add"));
        let row = self.row.map(|row| (row, n, "a row to add"));
        for (tensor, count, what) in lengths.into_iter().chain(plus).chain(row) {
            if tensor.count() != count {
                return Err(Error::shape(op, format!("{what} of {count} elements"), tensor.shape()));
            }
            if !tensor.is_contiguous() {
                return Err(tensor.not_contiguous(op));
            }
        }
        self.plus.map_or(Ok(()), |plus| plus.ensure_dtype(op, out.dtype()))?;
        if self.plus.is_some() && out.accumulate {
            return Err(Error::argument(
                op,
                "a matrix cannot be added to a product that is itself accumulated into the result",
            ));
        }
        if out.count() != of_c {
            return Err(Error::shape(op, format!("a product of {of_c} elements"), &[out.count()]));
        }
        Ok(())
    }
}
