//! The mean token of a map: global average pooling.
//!
//! **Forward.** y (N, C) from x (N, H, W, C): y\[n, c\] = 1/(H·W) · Σ x\[n, h, w, c\] over h and w.
//!
//! **Backward.** Each token has the weight 1/(H·W), so dx\[n, h, w, c\] = dy\[n, c\] / (H·W). Nothing is
//! saved.
//!
//! x may be a view whose channels lie side by side; f32 or f64, and bf16 on a GPU. Errors: [`tensor::Error::Shape`] if
//! x does not have four axes or the map is empty, [`tensor::Error::NotContiguous`], [`tensor::Error::DType`]. Source:
//! the head of BiFormer (`x.flatten(2).mean(-1)` on channels-first maps).

pub mod cases;
pub mod reference;

use crate::region_pool::geometry::Geometry;
use crate::region_pool::pooled;
use autograd::{Result, Var};
use tensor::cuda::Module;

pub(crate) const MODULE: Option<&Module> = None;
pub(crate) const SUMMARY: &str = "mean over height and width, (N, H, W, C) -> (N, C)";

/// The mean of x (N, H, W, C) over its tokens: (N, C).
/// Operands and errors: those of the [module](mod@crate::mean_pool).
pub fn mean_pool<'t>(x: &Var<'t>) -> Result<Var<'t>> {
    let map = Geometry::new("mean_pool", x.value(), [1, 1])?;
    pooled("mean_pool", x, map, [map.images, map.channels])
}
