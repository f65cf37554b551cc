//! The definition of [`soft_cross_entropy`](super::soft_cross_entropy).

use autograd::exact::{Array, Scalar};

/// The mean over the rows of −Σₖ tₖ·ln softmax(x)ₖ.
pub fn soft_cross_entropy<S: Scalar>(logits: &Array<S>, targets: &Array<f64>) -> Array<S> {
    let constant = targets.data.iter().map(|&t| S::of(t)).collect();
    crate::cross_entropy::reference::mean_of_rows(logits, &Array { shape: targets.shape.clone(), data: constant })
}
