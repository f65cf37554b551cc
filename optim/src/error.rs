//! What can go wrong in an optimiser step.

use autograd::Layout;
use std::sync::Arc;
use tensor::{DType, Tensor};

/// A failure of an optimiser step or of its configuration. A step that fails has changed neither the weights
/// nor the moments.
#[derive(Debug, thiserror::Error, Clone, PartialEq)]
pub enum Error {
    /// A setting outside its range.
    #[error("{what} is {value:?}, but must be {expected}")]
    Setting {
        /// Its name in the configuration.
        what: &'static str,
        /// What it was set to.
        value: f64,
        /// What would have been right.
        expected: &'static str,
    },
    /// Parameters, gradients or saved state of another model or element type.
    #[error("the {what} are laid out for another model: {actual}, but this one has {expected}")]
    Layout {
        /// What does not fit.
        what: &'static str,
        /// The flat buffer that was expected.
        expected: String,
        /// The one that came.
        actual: String,
    },
    /// Saved moments, or a saved average, from which no step can continue.
    #[error("the {what} hold {number}: no step can go on from there")]
    Unusable {
        /// Which of them.
        what: &'static str,
        /// The first such number.
        number: f64,
    },
    /// Gradients that were made without parameters.
    #[error("these gradients have no room for parameters: make them with Gradients::new")]
    NoParameters,
    /// Gradients that hold a NaN or an infinity, or whose squares would be infinite in their type. Their step has
    /// [ended](autograd::Gradients::end_step).
    #[error("the norm of the gradients is {norm:.3e}: a step along them would destroy the weights")]
    NonFinite {
        /// Their norm. A GPU's is also infinite if only the square of the clipped norm would be.
        norm: f64,
    },
    /// What the gradients are refused for: parameters that were not reached, say, or no backward pass at all.
    #[error(transparent)]
    Autograd(autograd::Error),
    /// A tensor that could not be read or written: one that a tape or a saved state still sees, for instance.
    #[error(transparent)]
    Tensor(#[from] tensor::Error),
}

impl From<autograd::Error> for Error {
    fn from(error: autograd::Error) -> Self {
        match error {
            autograd::Error::Tensor(error) => Error::Tensor(error),
            other => Error::Autograd(other),
        }
    }
}

/// The result of an optimiser step.
pub type Result<T> = std::result::Result<T, Error>;

/// [`Error::Setting`] unless `fits`.
pub(crate) fn ensure(what: &'static str, value: f64, expected: &'static str, fits: bool) -> Result<()> {
    if fits { Ok(()) } else { Err(Error::Setting { what, value, expected }) }
}

/// [`Error::Layout`] unless `other`, the layout of `what`, equals `layout`.
pub(crate) fn ensure_layout(layout: &Arc<Layout>, what: &'static str, other: &Arc<Layout>) -> Result<()> {
    // The same Arc is the usual case; it equals itself without a comparison of a few hundred names.
    if layout == other {
        return Ok(());
    }
    let show = |layout: &Layout| {
        let (tensors, numbers) = (layout.ids().len(), layout.count());
        let frozen = layout.ids().filter(|&id| layout.is_frozen(id)).count();
        format!("{tensors} parameters ({frozen} frozen) of {numbers} {} numbers", layout.dtype())
    };
    Err(Error::Layout { what, expected: show(layout), actual: show(other) })
}

/// [`Error::Layout`] unless `flat` is a flat buffer of the layout's length and type.
pub(crate) fn ensure_flat(layout: &Layout, what: &'static str, flat: &Tensor) -> Result<()> {
    if *flat.shape() == [layout.len()] && flat.dtype() == layout.dtype() {
        return Ok(());
    }
    let show = |dtype: DType, shape: &[usize]| format!("a flat buffer of {dtype} {shape:?}");
    let (expected, actual) = (show(layout.dtype(), &[layout.len()]), show(flat.dtype(), flat.shape()));
    Err(Error::Layout { what, expected, actual })
}
