//! Concatenation of tensors along an axis.
//!
//! **Forward.** y has the positions of the first part along the axis, then those of the second, and so on;
//! all other extents are equal.
//!
//! **Backward.** Each element of a part is copied to one element of y, so the gradient of a part is its range of dy.
//! Only the ranges are saved.
//!
//! Parts must be contiguous; f32 or f64 (on a GPU also bf16), all of the same type. Errors: [`tensor::Error::Argument`]
//! if there are no parts, or if the size of y overflows, [`tensor::Error::Axis`], [`tensor::Error::Shape`],
//! [`tensor::Error::NotContiguous`], [`tensor::Error::DType`].

pub mod cases;
mod cpu;
pub mod reference;

use crate::axis_range::AxisRange;
use crate::give::give;
use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use tensor::cuda::Module;
use tensor::{Device, Error, Tensor, match_float};

pub(crate) const MODULE: Option<&Module> = None;
pub(crate) const SUMMARY: &str = "tensors concatenated along an axis";

/// Concatenates the parts, at least one, along `axis`; their other extents must agree.
/// Operands and errors: those of the [module](mod@crate::concat).
pub fn concat<'t>(parts: &[&Var<'t>], axis: usize) -> Result<Var<'t>> {
    let Some(first) = parts.first() else {
        return Err(Error::argument("concat", "needs at least one part").into());
    };
    first.shape().ensure_axis("concat", axis)?;
    for part in parts {
        if part.shape().len() != first.shape().len() || part.shape().with(axis, 0) != first.shape().with(axis, 0) {
            let expected = format!("the extents of the first part {} except along axis {axis}", first.shape());
            return Err(Error::shape("concat", expected, part.shape()).into());
        }
    }
    let extent = parts.iter().try_fold(0, |sum: usize, part| sum.checked_add(part.shape()[axis]));
    let extent =
        extent.ok_or_else(|| Error::argument("concat", "the parts' extents add up to more than can be counted"))?;
    let whole = first.shape().with(axis, extent).countable("concat")?;
    let places = || {
        let place = |start: &mut usize, part: &&Var<'t>| {
            let range = *start..*start + part.shape()[axis];
            *start = range.end;
            Some(AxisRange::new(&whole, axis, range))
        };
        parts.iter().scan(0, place).collect::<Vec<_>>()
    };
    let device = first.value().device();
    let mut y = Tensor::empty_on(&device, whole.clone(), first.dtype())?;
    match device {
        Device::Cpu => match_float!(first.dtype(), "concat", T => {
            let rows = parts.iter().map(|part| {
                let width = part.shape()[axis..].iter().product();
                part.value().as_slice("concat").map(|elements| (elements, width))
            });
            cpu::forward::<T>(&rows.collect::<tensor::Result<Vec<_>>>()?, y.as_mut_slice("concat")?);
        }),
        Device::Cuda(_) => {
            for (part, place) in parts.iter().zip(places()) {
                place.fill_on_gpu(part.value(), y.as_out("concat", false)?)?;
            }
        }
    }
    first.tape().record("concat", parts, y, || Concat { places: places() })
}

struct Concat {
    /// Where each part lies in y.
    places: Vec<AxisRange>,
}

impl Rule for Concat {
    rule_fields!("concat");

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        for (input, place) in self.places.iter().enumerate() {
            give!(grads, input, dy, "concat", out => {
                Cpu<T>: place.extract(dy.as_slice("concat")?, out),
                Cuda: place.extract_on_gpu(&dy, out)?,
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use autograd::Tape;
    use tensor::DType;

    #[test]
    fn parts_that_do_not_fit_are_refused() {
        let tape = Tape::new();
        let zeros = |shape: &[usize]| tape.constant(Tensor::zeros(shape, DType::F32));
        let message = |parts: &[&Var<'_>], axis| concat(parts, axis).unwrap_err().to_string();
        let (a, b) = (zeros(&[2, 3]), zeros(&[2, 4]));
        assert!(concat(&[&a, &b], 1).is_ok());
        assert_eq!(
            message(&[&a, &b], 0),
            "concat: expected the extents of the first part (2, 3) except along axis 0, got shape (2, 4)"
        );
        assert_eq!(message(&[&a], 2), "concat: a tensor with 2 axes has no axis 2 (axes count from 0)");
        assert_eq!(message(&[], 0), "concat: needs at least one part");
    }
}
