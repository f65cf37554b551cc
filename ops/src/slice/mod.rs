//! A range of positions along one axis.
//!
//! **Forward.** y[.., i, ..] = x[.., start + i, ..] for start + i < end; y is a view, nothing is copied.
//!
//! **Backward.** What was cut away has no influence, so dx is dy in the slice and 0 outside of it. Nothing
//! is saved but the place of the slice.
//!
//! x may be a view, of any type; for the gradient f32 or f64, and bf16 on a GPU. Errors: [`tensor::Error::Axis`],
//! [`tensor::Error::OutOfRange`], [`tensor::Error::Argument`] for a range that ends before it starts.

pub mod cases;
pub mod reference;

use crate::axis_range::AxisRange;
use crate::give::give;
use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use std::ops::Range;
use tensor::Tensor;
use tensor::cuda::Module;

pub(crate) const MODULE: Option<&Module> = None;
pub(crate) const SUMMARY: &str = "a range of positions along an axis, as a view";

/// A view of the positions `range` of x along `axis`.
/// Operands and errors: those of the [module](mod@crate::slice).
pub fn slice<'t>(x: &Var<'t>, axis: usize, range: Range<usize>) -> Result<Var<'t>> {
    let y = x.value().slice(axis, range.clone())?;
    x.tape().record("slice", &[x], y, || Slice { place: AxisRange::new(x.shape(), axis, range) })
}

struct Slice {
    place: AxisRange,
}

impl Rule for Slice {
    rule_fields!("slice");

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        give!(grads, 0, dy, "slice", out => {
            Cpu<T>: self.place.insert(dy.as_slice("slice")?, out),
            Cuda: self.place.insert_on_gpu(&dy, out)?,
        });
        Ok(())
    }
}
