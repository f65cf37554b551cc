//! The k largest elements of each row, in descending order.
//!
//! **Forward.** For each row x (T): y (k) holds its k largest elements, the largest first, and indices (k)
//! their places. Of equal elements the one at the lower place comes first. A NaN is smaller than every
//! number, so it is chosen only when the numbers run out.
//!
//! **Backward.** As long as the order does not change, y is x at the chosen places, so dx is dy there and 0
//! elsewhere; where elements are equal this is the derivative of the choice that was made. The indices are
//! piecewise constant and have no gradient. Saved: the indices.
//!
//! x must be contiguous; f32 or f64, and bf16 on a GPU. Errors: [`tensor::Error::Argument`] when k is larger than
//! T, or T than an index can be, [`tensor::Error::Shape`], [`tensor::Error::NotContiguous`],
//! [`tensor::Error::DType`]. Source: `torch.topk`, whose order of equal elements is left open; here it is fixed.

pub mod cases;
pub(crate) mod cpu;
mod cuda;
pub mod reference;

use crate::give::give;
use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use tensor::cuda::Module;
use tensor::{DType, Device, Error, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "the k largest of each row, and where they lie";

/// The k largest elements of each row of x (..., T), in descending order, (..., k), and their places in
/// the row, an index tensor (..., k).
/// Operands and errors: those of the [module](mod@crate::top_k).
pub fn top_k<'t>(x: &Var<'t>, k: usize) -> Result<(Var<'t>, Tensor)> {
    let Some(&extent) = x.shape().last() else {
        return Err(Error::shape("top_k", "x (..., T)", x.shape()).into());
    };
    if k > extent {
        let message = format!("k = {k} is more than the {extent} elements of a row");
        return Err(Error::argument("top_k", message).into());
    }
    if u32::try_from(extent.saturating_sub(1)).is_err() {
        return Err(Error::argument("top_k", format!("the {extent} elements of a row cannot be numbered")).into());
    }
    let (device, shape) = (x.value().device(), x.shape().with(x.shape().len() - 1, k));
    let mut y = Tensor::empty_on(&device, shape.clone(), x.dtype())?;
    let mut indices = Tensor::empty_on(&device, shape, DType::Index)?;
    match device {
        Device::Cpu => match_float!(x.dtype(), "top_k", T => cpu::forward::<T>(
            x.value().as_slice("top_k")?,
            [extent, k],
            y.as_mut_slice("top_k")?,
            indices.as_mut_slice("top_k")?,
        )),
        Device::Cuda(_) => cuda::forward(x.value(), [extent, k], &mut y, &mut indices)?,
    }
    let rule = || TopK { indices: indices.clone(), extent };
    Ok((x.tape().record("top_k", &[x], y, rule)?, indices))
}

struct TopK {
    indices: Tensor,
    /// The length of a row of x.
    extent: usize,
}

impl Rule for TopK {
    rule_fields!("top_k", indices);

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let k = dy.shape().last().copied().unwrap_or(0);
        give!(grads, 0, dy, "top_k", out => {
            Cpu<T>: cpu::backward(dy.as_slice("top_k")?, self.indices.as_slice("top_k")?, [self.extent, k], out),
            Cuda: cuda::backward(&dy, &self.indices, [self.extent, k], out)?,
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use autograd::{Gradients, Tape};

    #[test]
    fn more_than_there_are_is_refused() {
        let tape = Tape::new();
        let x = tape.input(Tensor::zeros([2, 3], DType::F32));
        let error = top_k(&x, 4).map(|_| ()).unwrap_err();
        assert_eq!(error.to_string(), "top_k: k = 4 is more than the 3 elements of a row");
        assert!(top_k(&tape.input(Tensor::scalar(1.0f32)), 0).is_err());
    }

    #[test]
    fn of_equal_elements_the_first_is_chosen_and_gets_the_gradient() -> Result<()> {
        let tape = Tape::new();
        let x = tape.input(Tensor::from_slice(&[1.0f32, 5.0, 5.0, 5.0], [1, 4])?);
        let (y, indices) = top_k(&x, 2)?;
        assert_eq!(y.value().to_vec::<f32>()?, [5.0, 5.0]);
        assert_eq!(indices.to_vec::<u32>()?, [1, 2]);
        let mut gradients = Gradients::default();
        tape.backward_from(&y, Tensor::from_slice(&[3.0f32, 4.0], [1, 2])?, &mut gradients)?;
        assert_eq!(gradients.of(&x).map(Tensor::to_vec::<f32>), Some(Ok(vec![0.0, 3.0, 4.0, 0.0])));
        Ok(())
    }
}
