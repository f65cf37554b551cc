//! Rows picked by index, for each image on its own.
//!
//! **Forward.** With x (N, R, rest...) and indices (N, Q...), y[n, q] = x[n, indices[n, q]], of shape
//! (N, Q..., rest...). In routing attention x holds the keys and values of R regions, (N, R, T, C), and
//! indices (N, R, k) the k regions that each region attends to; y is then (N, R, k, T, C).
//!
//! **Backward.** A row may be picked many times, so dx[n, r] = Σ dy[n, q] over all q with
//! indices[n, q] = r. The indices are turned round first (for each row, the positions that picked it), so
//! that every row adds up its own terms, in ascending order of q: no atomics, and the bits do not depend
//! on the number of threads. Saved: the indices; not x.
//!
//! x and indices must be contiguous, x of f32 or f64. Errors: [`tensor::Error::OutOfRange`] names an index
//! that is not below R; [`tensor::Error::Shape`], [`tensor::Error::NotContiguous`],
//! [`tensor::Error::DType`]. Source: Zhu et al., "BiFormer: Vision Transformer with Bi-Level Routing
//! Attention", 2023, section 3.2.

pub mod cases;
pub(crate) mod cpu;
pub mod reference;

use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use tensor::{Error, Shape, Tensor, match_float};

pub(crate) const SUMMARY: &str = "rows picked by index, for each image on its own";

/// Picks rows of x (N, R, rest...) by indices (N, Q...): (N, Q..., rest...).
pub fn gather<'t>(x: &Var<'t>, indices: &Tensor) -> Result<Var<'t>> {
    let &[images, rows, ref rest @ ..] = &x.shape()[..] else {
        return Err(Error::shape("gather", "x (N, R, ...)", x.shape()).into());
    };
    if indices.shape().first() != Some(&images) {
        return Err(
            Error::shape("gather", format!("indices ({images}, ...), as x is {}", x.shape()), indices.shape()).into()
        );
    }
    let picked = indices.as_slice::<u32>("gather")?;
    if let Some(&index) = picked.iter().find(|&&index| index as usize >= rows) {
        return Err(Error::OutOfRange { op: "gather", what: "index", index: index as usize, bound: rows }.into());
    }
    let shape: Shape = indices.shape().iter().chain(rest).copied().collect();
    let mut y = Tensor::empty(shape, x.dtype());
    let extents = [images, rows, rest.iter().product()];
    match_float!(x.dtype(), "gather", T => {
        cpu::forward::<T>(x.value().as_slice("gather")?, picked, extents, y.as_mut_slice("gather")?);
    });
    x.tape().record("gather", &[x], y, || Gather { indices: indices.clone(), extents })
}

struct Gather {
    indices: Tensor,
    /// N, R, and the elements of a row.
    extents: [usize; 3],
}

impl Rule for Gather {
    rule_fields!("gather", indices);

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let mut dx = grads.open(0)?;
        match_float!(dy.dtype(), "gather", T => {
            if let Some(out) = dx.out::<T>()? {
                cpu::backward(dy.as_slice("gather")?, self.indices.as_slice("gather")?, self.extents, out);
            }
        });
        grads.close(dx);
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
        assert_eq!(gather(&x, &indices).unwrap_err().to_string(), "gather: index 7 is out of range, must be below 3");
    }

    #[test]
    fn indices_of_another_batch_are_refused() {
        let tape = Tape::new();
        let x = tape.input(Tensor::zeros([2, 3, 4], DType::F32));
        let error = gather(&x, &Tensor::zeros([3, 2], DType::Index)).unwrap_err();
        assert_eq!(error.to_string(), "gather: expected indices (2, ...), as x is (2, 3, 4), got shape (3, 2)");
        assert!(gather(&x, &Tensor::zeros([2, 2], DType::F32)).is_err());
    }
}
