//! The same elements under another shape.
//!
//! **Forward.** y has the elements of x in the same order; y is a view, nothing is copied.
//!
//! **Backward.** Each element goes to one element, so dx is dy under the shape of x. Nothing is saved but
//! that shape.
//!
//! x must be contiguous, of any type. Errors: [`tensor::Error::Shape`] when the numbers of elements
//! differ, [`tensor::Error::NotContiguous`].

pub mod cases;
pub mod reference;

use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use tensor::cuda::Module;
use tensor::{Shape, Tensor};

pub(crate) const MODULE: Option<&Module> = None;
pub(crate) const SUMMARY: &str = "the same elements under another shape, as a view";

/// The elements of x in order, under another shape of as many elements.
/// Operands and errors: those of the [module](mod@crate::reshape).
pub fn reshape<'t>(x: &Var<'t>, shape: impl Into<Shape>) -> Result<Var<'t>> {
    let y = x.value().reshape(shape)?;
    x.tape().record("reshape", &[x], y, || Reshape { shape: x.shape().clone() })
}

struct Reshape {
    /// The shape of x.
    shape: Shape,
}

impl Rule for Reshape {
    rule_fields!("reshape");

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        grads.give(0, dy.reshape(self.shape)?)
    }
}
