//! The definition of [`mul`](super::mul).

use autograd::exact::{Array, Scalar};

/// a·b element by element, with broadcasting.
pub fn mul<S: Scalar>(a: &Array<S>, b: &Array<S>) -> Array<S> {
    crate::reference::broadcast(a, b, |a, b| a * b)
}
