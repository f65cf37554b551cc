//! A contiguous copy of a view, for operations that need contiguous operands.
//!
//! **Forward.** y = x, contiguous. A tensor that is contiguous already is not copied.
//!
//! **Backward.** dx = dy. Nothing is saved.
//!
//! x may be a view, of any type. Errors, on a GPU alone: [`tensor::Error::OutOfMemory`]; [`tensor::Error::Argument`]
//! for a view whose axes cannot be merged into few enough for a kernel.

pub mod cases;
pub mod reference;

use autograd::{InputGrads, Result, Rule, Var, rule_fields};
use tensor::Tensor;
use tensor::cuda::Module;

pub(crate) const MODULE: Option<&Module> = None;
pub(crate) const SUMMARY: &str = "a contiguous copy of a view";

/// x as a contiguous tensor.
/// Operands and errors: those of the [module](mod@crate::contiguous).
pub fn contiguous<'t>(x: &Var<'t>) -> Result<Var<'t>> {
    x.tape().record("contiguous", &[x], x.value().contiguous()?, || Contiguous)
}

struct Contiguous;

impl Rule for Contiguous {
    rule_fields!("contiguous");

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        grads.give(0, dy)
    }
}
