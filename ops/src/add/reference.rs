//! The definition of [`add`](super::add).

use autograd::exact::{Array, Scalar};

/// a + b, with broadcasting.
pub fn add<S: Scalar>(a: &Array<S>, b: &Array<S>) -> Array<S> {
    crate::reference::broadcast(a, b, |a, b| a + b)
}
