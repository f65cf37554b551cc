//! Rows picked by index along an axis.
//!
//! **Forward.** With x (N..., R, rest...), whose axis of extent R is the chosen one, and indices (N..., Q...),
//! y[n, q] = x[n, indices[n, q]], of shape (N..., Q..., rest...): each n has picks of its own. In routing
//! attention x holds the keys and values of R regions, (N, R, T, C), and indices (N, R, k) the k regions that
//! each region attends to; y is then (N, R, k, T, C). Along axis 0 there is no n, as in a table look-up.
//!
//! **Backward.** A row may be picked many times, so dx[n, r] = Σ dy[n, q] over all q with indices[n, q] = r. The
//! indices are inverted first (for each row, the positions that picked it), so that every row accumulates its own
//! terms, in ascending order of q: no atomics are needed, and the bits do not depend on the number of threads. On a GPU
//! every row scans all indices of its n instead: slower, but in the same order. Saved: the indices; not x.
//!
//! x and indices must be contiguous, x of f32 or f64, and on a GPU also of bf16. Errors: [`tensor::Error::OutOfRange`]
//! names an index that is not below R; [`tensor::Error::Axis`], [`tensor::Error::Shape`],
//! [`tensor::Error::NotContiguous`], [`tensor::Error::DType`], [`tensor::Error::Argument`] if the size of y overflows.
//! Indices on a GPU cannot be checked without synchronising with it: there an index that is not below R yields a row of
//! NaN, and contributes no gradient. Source: Zhu et al., "BiFormer: Vision Transformer with Bi-Level Routing
//! Attention", 2023, section 3.2.

pub mod cases;
mod cpu;
mod cuda;
pub mod reference;

use crate::give::give;
use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use tensor::cuda::Module;
use tensor::{DType, Device, Error, Shape, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "rows picked by index along an axis";

/// Picks rows of x (N..., R, rest...) along `axis` by indices (N..., Q...): (N..., Q..., rest...).
/// Operands and errors: those of the [module](mod@crate::gather).
pub fn gather<'t>(x: &Var<'t>, axis: usize, indices: &Tensor) -> Result<Var<'t>> {
    let Some((lead, [rows, rest @ ..])) = x.shape().split_at_checked(axis) else {
        return Err(Error::Axis { op: "gather", axis, rank: x.shape().len() }.into());
    };
    let rows = *rows;
    if !indices.shape().starts_with(lead) {
        let expected = format!("indices that begin with {}, as x is {}", Shape::from(lead), x.shape());
        return Err(Error::shape("gather", expected, indices.shape()).into());
    }
    let device = x.value().device();
    indices.ensure_dtype("gather", DType::Index)?;
    if device == Device::Cpu
        && let Some(&index) = indices.as_slice::<u32>("gather")?.iter().find(|&&index| index as usize >= rows)
    {
        return Err(Error::OutOfRange { op: "gather", what: "index", index: index as usize, bound: rows }.into());
    }
    let shape: Shape = indices.shape().iter().chain(rest).copied().collect();
    let mut y = Tensor::empty_on(&device, shape.countable("gather")?, x.dtype())?;
    let extents = [lead.iter().product(), rows, rest.iter().product()];
    match device {
        Device::Cpu => {
            let picked = indices.as_slice("gather")?;
            match_float!(x.dtype(), "gather", T => {
                cpu::forward::<T>(x.value().as_slice("gather")?, picked, extents, y.as_mut_slice("gather")?);
            });
        }
        Device::Cuda(_) => cuda::forward(x.value(), indices, extents, &mut y)?,
    }
    x.tape().record("gather", &[x], y, || Gather { indices: indices.clone(), extents })
}

struct Gather {
    indices: Tensor,
    /// The product of the extents N, R, and the elements of a row.
    extents: [usize; 3],
}

impl Rule for Gather {
    rule_fields!("gather", indices);

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        give!(grads, 0, dy, "gather", out => {
            Cpu<T>: cpu::backward(dy.as_slice("gather")?, self.indices.as_slice("gather")?, self.extents, out),
            Cuda: cuda::backward(&dy, &self.indices, self.extents, out)?,
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use autograd::Tape;
    use tensor::DType;

    #[test]
    fn an_index_out_of_range_is_named() {
        let tape = Tape::new();
        let x = tape.input(Tensor::zeros([2, 3, 4], DType::F32));
        let indices = Tensor::from_slice(&[0u32, 2, 7, 1], [2, 2]).unwrap();
        assert_eq!(
            gather(&x, 1, &indices).unwrap_err().to_string(),
            "gather: index 7 is out of range, must be below 3"
        );
    }

    #[test]
    fn indices_of_another_batch_are_refused() {
        let tape = Tape::new();
        let x = tape.input(Tensor::zeros([2, 3, 4], DType::F32));
        let error = gather(&x, 1, &Tensor::zeros([3, 2], DType::Index)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "gather: expected indices that begin with (2), as x is (2, 3, 4), got shape (3, 2)"
        );
        assert!(gather(&x, 1, &Tensor::zeros([2, 2], DType::F32)).is_err());
    }
}
