//! Full multi-head self-attention over all tokens of a map.
//!
//! **Forward.** From qkv (N, H, W, 3C), for each image, head and query q: o = Σⱼ softmaxⱼ(s·q·kⱼ) vⱼ over all
//! tokens j. Heads are consecutive groups of channels; out (N, H, W, C).
//!
//! **Backward.** With A = softmax(s·q·kᵀ) and dO the gradient of o: dV = Aᵀ·dO, dA = dO·vᵀ, dS = A∘(dA − Σⱼ A∘dA), dQ =
//! s·dS·k, dK = s·dSᵀ·q. Saved: qkv, the routes, the log-sum-exp of each query's scores, on a GPU sometimes out; A is
//! recomputed.
//!
//! It is bi-level routing attention with the whole map as the one region, routed to itself, and computed by
//! [`bra`](mod@crate::bra), which also says how large scores may be. Operands must be contiguous; f32 or f64, and bf16
//! on a GPU. Errors: [`tensor::Error::Argument`], [`tensor::Error::Shape`], [`tensor::Error::DType`],
//! [`tensor::Error::NotContiguous`]. Source: Vaswani et al., "Attention is all you need", 2017; here stage 4 of
//! BiFormer, with s = (C/heads)^(−1/2).

pub mod cases;
pub mod reference;

use crate::Regions;
use crate::bra;
use crate::bra::geometry::{Geometry, ensure_scale};
use autograd::{Result, Var};
use tensor::cuda::Module;
use tensor::{DType, Error, Tensor};

pub(crate) const MODULE: Option<&Module> = None;
pub(crate) const SUMMARY: &str = "multi-head self-attention over all tokens";

/// Multi-head self-attention of qkv (N, H, W, 3C) with scores scaled by `scale`: (N, H, W, C).
/// Operands and errors: those of the [module](mod@crate::attention).
pub fn attention<'t>(qkv: &Var<'t>, heads: usize, scale: f64) -> Result<Var<'t>> {
    let [images, height, width, channels] = qkv.value().dims("attention", "qkv (N, H, W, 3C)")?;
    if !channels.is_multiple_of(3) {
        return Err(Error::shape("attention", "qkv (N, H, W, 3C)", qkv.shape()).into());
    }
    let (qk_dim, v_dim) = (channels / 3, channels / 3);
    let regions = Regions::cut("attention", [height, width], [1, 1])?;
    let g = Geometry { images, regions, heads, qk_dim, v_dim, topk: 1 };
    let g = g.check("attention")?;
    ensure_scale("attention", scale)?;
    // The one region of each image is routed to itself, which needs no multiply-adds.
    let routes = Tensor::zeros_on(&qkv.value().device(), [images, 1, 1], DType::Index)?;
    bra::attend("attention", g, qkv, None, &routes, scale, 0)
}
