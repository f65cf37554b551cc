//! The axes in another order.
//!
//! **Forward.** Axis i of y is axis `order[i]` of x; y is a view, nothing is copied.
//!
//! **Backward.** Each element goes to one element, so dx is dy with its axes put back: axis `order[i]` of
//! dx is axis i of dy, copied so that it is contiguous. Nothing is saved but the order.
//!
//! x may be a view, of any type. Errors: [`tensor::Error::Axis`], [`tensor::Error::Argument`] when `order`
//! does not name each axis once.

pub mod cases;
pub mod reference;

use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use smallvec::SmallVec;
use tensor::Tensor;
use tensor::cuda::Module;

pub(crate) const MODULE: Option<&Module> = None;
pub(crate) const SUMMARY: &str = "the axes in another order, as a view";

/// A view of x whose axis `i` is axis `order[i]` of x.
/// Operands and errors: those of the [module](mod@crate::permute).
pub fn permute<'t>(x: &Var<'t>, order: &[usize]) -> Result<Var<'t>> {
    let y = x.value().permute(order)?;
    x.tape().record("permute", &[x], y, || Permute { order: order.into() })
}

struct Permute {
    order: SmallVec<[usize; 6]>,
}

impl Rule for Permute {
    rule_fields!("permute");

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        let mut inverse = self.order.clone();
        for (place, &axis) in self.order.iter().enumerate() {
            inverse[axis] = place;
        }
        grads.give(0, dy.permute(&inverse)?)
    }
}
