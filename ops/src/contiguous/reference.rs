//! The definition of [`contiguous`](super::contiguous).

use autograd::exact::{Array, Scalar};

/// x: a reference array is contiguous as it is.
pub fn contiguous<S: Scalar>(x: &Array<S>) -> Array<S> {
    x.clone()
}
