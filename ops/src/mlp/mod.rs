//! The MLP of a block, with the normalisation before it and the residual.
//!
//! **Forward.** n = layer_norm(x) with γ, β (C) and ε, h = n·W₁ᵀ + b₁, y = gelu(h)·W₂ᵀ + b₂, and plus x if there is a
//! residual; x, n, y (..., C), W₁ (H, C), b₁ and h (..., H), W₂ (C, H), b₂ (C).
//!
//! **Backward.** That of the parts: [`linear`](mod@crate::linear), [`gelu`](mod@crate::gelu), linear,
//! [`layer_norm`](mod@crate::layer_norm), and dy itself for a residual. Saved by the kernel: x, its rows' moments, h,
//! W₁, W₂, γ and β; n and gelu(h) are computed again.
//!
//! The hidden maps are the widest of a block, and most of its memory traffic. On a GPU, in bf16, with 64 or 96
//! channels, one kernel computes all of it and keeps them in registers: where the parts read and write the equivalent
//! of 17 maps of C channels, it moves two, and three more if a backward pass follows. In all other cases the parts are
//! recorded instead.
//!
//! Operands and errors are those of the parts. Source: the block of Zhu et al., "BiFormer", 2023, section 3.3.

pub mod cases;
mod cuda;
pub mod reference;

use crate::epsilon::ensure_epsilon;
use crate::gelu::gelu_of;
use crate::{layer_norm, linear, linear_residual};
use autograd::{Result, Var};
use tensor::cuda::Module;

pub(crate) const MODULE: Option<&Module> = Some(&cuda::KERNELS);
pub(crate) const SUMMARY: &str = "layer normalisation, then two linear layers with GELU between them";

/// The parameters of an MLP.
#[derive(Clone, Copy, Debug)]
pub struct MlpLayers<'v, 't> {
    /// γ (C) and β (C)
    pub norm: [&'v Var<'t>; 2],
    /// W₁ (H, C), and b₁ (H) if there is one.
    pub first: (&'v Var<'t>, Option<&'v Var<'t>>),
    /// W₂ (C, H), and b₂ (C) if there is one.
    pub second: (&'v Var<'t>, Option<&'v Var<'t>>),
}

/// How an MLP is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mlp {
    /// ε of the normalisation, above 0.
    pub epsilon: f64,
    /// Whether x is added to the result.
    pub residual: bool,
}

/// gelu(layer_norm(x)·W₁ᵀ + b₁)·W₂ᵀ + b₂, and plus x if there is a residual; x (..., C) to (..., C).
/// Operands and errors: those of the [module](mod@crate::mlp).
pub fn mlp<'t>(x: &Var<'t>, layers: MlpLayers<'_, 't>, attributes: Mlp) -> Result<Var<'t>> {
    ensure_epsilon("mlp", attributes.epsilon, x.dtype())?;
    if let Some(fused) = cuda::FusedMlp::of(x, layers) {
        return fused.run(attributes);
    }
    let MlpLayers { norm, first, second } = layers;
    let hidden = linear(&layer_norm(x, norm[0], norm[1], attributes.epsilon)?, first.0, first.1)?;
    let hidden = gelu_of(hidden)?;
    linear_residual(&hidden, second.0, second.1, attributes.residual.then_some(x))
}
