//! The definition of [`mlp`](super::mlp).

use super::Mlp;
use crate::{gelu, layer_norm, linear};
use autograd::exact::{Array, Scalar};

/// Of x, γ, β, W₁, b₁, W₂ and b₂: the definitions of its parts, one after the other.
pub fn mlp<S: Scalar>(x: &[Array<S>], attributes: Mlp) -> Array<S> {
    let normed = layer_norm::reference::layer_norm(&x[0], &x[1], &x[2], attributes.epsilon);
    let hidden = gelu::reference::gelu(&linear::reference::linear(&normed, &x[3], Some(&x[4]), None));
    linear::reference::linear(&hidden, &x[5], Some(&x[6]), attributes.residual.then_some(&x[0]))
}
